/* Which variant of the kernels this processor runs. Asked once for each optimiser, at run time. */
#include "optim/kernels.h"

const sthi_kernels *sthi_kernels_of(sthi_variant variant) {
    static const sthi_kernels *const all[] = {
        &sthi_kernels_scalar,
#if defined(__x86_64__)
        &sthi_kernels_avx2,
        &sthi_kernels_avx512,
#endif
    };
    return (unsigned)variant < sizeof all / sizeof *all && sthi_processor_has(variant) ? all[variant] : NULL;
}

const sthi_kernels *sthi_kernels_best(void) { return sthi_kernels_of(sthi_processor_variant(STHI_AVX512)); }
