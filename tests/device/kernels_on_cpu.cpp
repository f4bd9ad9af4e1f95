/* The kernels' text, compiled for the CPU: what CUDA has is here a plain function. A launch is a loop over blocks, and
 * over threads where those do not meet; where they do, each thread of a block is one of the CPU, so that a barrier that
 * is missing shows: as wrong bits, and under the thread sanitizer. Results must have the bits of src/quant. */
#include <pthread.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/half.h"
#include "kernels_on_cpu.h"

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
struct dim3_ {
    unsigned x;
};
static thread_local dim3_ blockIdx, blockDim, threadIdx, gridDim;
static pthread_barrier_t block_barrier;
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
static void __syncthreads() { pthread_barrier_wait(&block_barrier); }
static float __uint_as_float(unsigned bits) { return sthi_of_bits(bits); }
static unsigned __float_as_uint(float x) { return sthi_bits_of(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
static float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
static float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
static float __fdiv_rn(float a, float b) { volatile float r = a / b; return r; }
static double __dadd_rn(double a, double b) { volatile double r = a + b; return r; }
static double __dsub_rn(double a, double b) { volatile double r = a - b; return r; }
static double __dmul_rn(double a, double b) { volatile double r = a * b; return r; }
static double __ddiv_rn(double a, double b) { volatile double r = a / b; return r; }

#define STHI_KERNELS(...) __VA_ARGS__
#define STHI_KERNELS_HALF(...) __VA_ARGS__
#include "device/gpu/kernels.h"

static const struct {
    const char *name;
    void (*run)(sthi_launch);
    bool meets; /* its threads wait for each other */
} kernels[] = {{"sthi_expand_int8", sthi_expand_int8, false},
               {"sthi_expand_fp8", sthi_expand_fp8, false},
               {"sthi_expand_int4", sthi_expand_int4, false},
               {"sthi_expand_lossless", sthi_expand_lossless, false},
               {"sthi_expand_four_bits", sthi_expand_four_bits, true}};

unsigned half_on_cpu(float x) { return sthi_f16(x); }

int kernel_of_name(const char *name) {
    for (int i = 0; i < (int)(sizeof kernels / sizeof *kernels); i++)
        if (!strcmp(kernels[i].name, name)) return i;
    return -1;
}

struct card_thread {
    pthread_t thread;
    int kernel;
    unsigned grid, block, index;
    sthi_launch launch;
};

/* All blocks, one after the other: those of a launch share nothing, but here they share what is static. */
static void *card_main(void *arg) {
    const card_thread *t = static_cast<card_thread *>(arg);
    blockDim.x = t->block;
    gridDim.x = t->grid;
    threadIdx.x = t->index;
    for (blockIdx.x = 0; blockIdx.x < t->grid; blockIdx.x++) {
        kernels[t->kernel].run(t->launch);
        __syncthreads();
    }
    return nullptr;
}

static void run_together(int kernel, unsigned grid, unsigned block, const sthi_launch *l) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    auto *threads = static_cast<card_thread *>(calloc(block, sizeof(card_thread)));
    pthread_attr_t small;
    pthread_mutex_lock(&one);
    pthread_barrier_init(&block_barrier, nullptr, block);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    for (unsigned i = 0; i < block; i++) {
        threads[i] = {0, kernel, grid, block, i, *l};
        if (pthread_create(&threads[i].thread, &small, card_main, &threads[i])) abort();
    }
    for (unsigned i = 0; i < block; i++) pthread_join(threads[i].thread, nullptr);
    pthread_attr_destroy(&small);
    pthread_barrier_destroy(&block_barrier);
    pthread_mutex_unlock(&one);
    free(threads);
}

void kernel_on_cpu(int kernel, unsigned grid, unsigned block, const sthi_launch *l) {
    if (kernels[kernel].meets) {
        run_together(kernel, grid, block, l);
        return;
    }
    blockDim.x = block;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) kernels[kernel].run(*l);
}
