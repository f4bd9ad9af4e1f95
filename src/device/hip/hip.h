/* AMD's part of a GPU back end (device/gpu): names, devices by number, and the compiler. */
#ifndef STHI_HIP_H
#define STHI_HIP_H
#include "device/gpu/gpu.h"

extern const gpu_vendor sthi_hip_vendor;

/* compile.c */
extern const char sthi_hip_prelude[];
sth_status sthi_hip_compile(const gpu_device *d, const char *source, char **out);
#endif
