/* Asked of the processor once. No locks: whoever asks at the same time finds the same. */
#include "base/processor.h"

#include <stdatomic.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Asked of the processor itself: not every compiler's __builtin_cpu_supports knows "f16c". */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static sthi_variant find_widest(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("fma") ||
        !has_f16c())
        return STHI_SCALAR;
    return __builtin_cpu_supports("avx512f") ? STHI_AVX512 : STHI_AVX2;
}
#else
static sthi_variant find_widest(void) { return STHI_SCALAR; }
#endif

static atomic_int found = -1, limit = STHI_VARIANTS;

bool sthi_processor_has(sthi_variant variant) {
    int widest = atomic_load_explicit(&found, memory_order_relaxed);
    if (widest < 0) atomic_store_explicit(&found, widest = (int)find_widest(), memory_order_relaxed);
    return (int)variant <= widest;
}

sthi_variant sthi_processor_variant(sthi_variant most) {
    int widest = atomic_load_explicit(&limit, memory_order_relaxed);
    sthi_variant variant = widest < (int)most ? (sthi_variant)widest : most;
    while (!sthi_processor_has(variant)) variant--;
    return variant;
}

bool sthi_processor_limit(sthi_variant widest) {
    atomic_store(&limit, (int)widest);
    return sthi_processor_has(widest);
}
