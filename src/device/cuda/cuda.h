/* NVIDIA's part of a GPU back end (device/gpu): names, contexts and the compiler. */
#ifndef STHI_CUDA_H
#define STHI_CUDA_H
#include "device/gpu/gpu.h"

extern const gpu_vendor sthi_cuda_vendor;

/* compile.c */
extern const char sthi_cuda_prelude[];
sth_status sthi_cuda_compile(const gpu_device *d, const char *source, char **out);
#endif
