/* The text of the executor's kernel, compiled for the CPU: what CUDA has is here a plain function, and a launch is a
 * loop over blocks and threads. Results must have the bits of the reference. */
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "dense_on_cpu.h"

#define __device__
#define __global__
#define __launch_bounds__(threads)
static struct {
    unsigned x;
} blockIdx, blockDim, threadIdx, gridDim;
static float __uint_as_float(unsigned bits) { return sthi_of_bits(bits); }
static unsigned __float_as_uint(float x) { return sthi_bits_of(x); }
static unsigned sthi_f16(float x) { return sthi_to_f16(x); }
static float sthi_of_f16(unsigned short h) { return sthi_from_f16(h); }

#define STHI_KERNELS(...) __VA_ARGS__
#include "device/cuda/dense_kernels.h"

void finish_on_cpu(int dtype, unsigned grid, unsigned block, unsigned long long count, unsigned cols, void *y,
                   const void *bias, float scale, const void *residual, int f) {
    static void (*const kernels[])(u64, u32, u8 *, const u8 *, float, const u8 *, int) = {
        sthi_finish_f32, sthi_finish_bf16, sthi_finish_f16};
    blockDim.x = block;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
            kernels[dtype](count, cols, (u8 *)y, (const u8 *)bias, scale, (const u8 *)residual, f);
}
