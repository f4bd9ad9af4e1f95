/* The kernels of src/device/gpu/kernels.h on the CPU. One launch at a time. */
#ifndef TESTS_KERNELS_ON_CPU_H
#define TESTS_KERNELS_ON_CPU_H
#ifdef __cplusplus
extern "C" {
#endif
#define STHI_LAUNCH(...) __VA_ARGS__
#include "device/gpu/launch.h"

unsigned half_on_cpu(float x); /* the text's conversion to float16 */
int kernel_of_name(const char *name); /* -1: there is none */
void kernel_on_cpu(int kernel, unsigned grid, unsigned block, const sthi_launch *launch);
#ifdef __cplusplus
}
#endif
#endif
