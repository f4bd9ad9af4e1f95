/* NVIDIA's part of a GPU back end (device/gpu): names, contexts and the compiler. */
#ifndef STHI_CUDA_H
#define STHI_CUDA_H
#include "device/gpu/gpu.h"

extern const gpu_vendor sthi_cuda_vendor;

/* compile.c */
extern const char sthi_cuda_prelude[];
extern const char *const sthi_cuda_packages[]; /* parts of paths of NVIDIA's libraries in Python packages; NULL ends */
sth_status sthi_cuda_compile(const gpu_device *d, const char *source, char **out);
#endif
