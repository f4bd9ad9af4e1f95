/* The kernels' text, compiled for the CPU: what CUDA has is here a plain function, and a launch is a loop over blocks and
 * threads. Results must have the bits of src/quant/segment.c. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/half.h"
#include "kernels_on_cpu.h"

#define __device__
#define __global__
#define __launch_bounds__(threads)
struct dim3_ {
    unsigned x;
};
static dim3_ blockIdx, blockDim, threadIdx, gridDim;
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static float __uint_as_float(unsigned bits) { return sthi_of_bits(bits); }
static unsigned __float_as_uint(float x) { return sthi_bits_of(x); }
static float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
static float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }

#define STHI_KERNELS(...) __VA_ARGS__
#define STHI_KERNELS_HALF(...) __VA_ARGS__
#include "device/gpu/kernels.h"

typedef void (*kernel)(u32, u32, u32, u32, u64, const u8 *, const u8 *, const u8 *, u8 *);
static const kernel kernels[3][3] = {{sthi_expand_int8_f32, sthi_expand_int8_bf16, sthi_expand_int8_f16},
                                     {sthi_expand_fp8_f32, sthi_expand_fp8_bf16, sthi_expand_fp8_f16},
                                     {sthi_expand_int4_f32, sthi_expand_int4_bf16, sthi_expand_int4_f16}};

unsigned half_on_cpu(float x) { return sthi_f16(x); }

void kernel_on_cpu(int kernel, unsigned grid, unsigned block, unsigned count, unsigned row_steps, unsigned by_eight,
                   unsigned cols, unsigned long long stride, const void *codes, const void *scales, const void *zeros,
                   void *place) {
    blockDim.x = block;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
            kernels[kernel / 3][kernel % 3](count, row_steps, by_eight, cols, stride, (const u8 *)codes, (const u8 *)scales,
                                            (const u8 *)zeros, (u8 *)place);
}
