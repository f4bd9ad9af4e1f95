/* Which variant of the kernels this processor runs. Asked once for each optimiser, at run time. */
#include "optim/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Asked of the processor itself: not every compiler's __builtin_cpu_supports knows "f16c". */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const sthi_kernels *sthi_kernels_of(sthi_variant variant) {
#if defined(__x86_64__)
    bool vectors = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (variant == STHI_AVX2) return vectors ? &sthi_kernels_avx2 : NULL;
    if (variant == STHI_AVX512)
        return vectors && __builtin_cpu_supports("avx512f") ? &sthi_kernels_avx512 : NULL;
#endif
    return variant == STHI_SCALAR ? &sthi_kernels_scalar : NULL;
}

const sthi_kernels *sthi_kernels_best(void) {
    const sthi_kernels *best = NULL;
    for (int v = STHI_VARIANTS - 1; !best; v--) best = sthi_kernels_of((sthi_variant)v);
    return best;
}
