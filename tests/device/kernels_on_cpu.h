/* The kernels of src/device/gpu/kernels.h as a loop over blocks and threads. kernel: 3 x (int8, fp8, int4) + (f32, bf16,
 * f16); the rest as in the launch. One thread at a time. */
#ifndef TESTS_KERNELS_ON_CPU_H
#define TESTS_KERNELS_ON_CPU_H
#ifdef __cplusplus
extern "C" {
#endif
unsigned half_on_cpu(float x); /* the text's conversion to float16 */
void kernel_on_cpu(int kernel, unsigned grid, unsigned block, unsigned count, unsigned row_steps, unsigned by_eight,
                   unsigned cols, unsigned long long stride, const void *codes, const void *scales, const void *zeros,
                   void *place);
#ifdef __cplusplus
}
#endif
#endif
