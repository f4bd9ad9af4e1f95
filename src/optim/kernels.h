/* The loops over elements, in three variants that give the same bits: plain C, AVX2, AVX-512.
 *
 * Arithmetic is float32, each operation rounded once, in the order of torch.optim.AdamW (one tensor, not
 * capturable). Multiply-adds are fused where PyTorch's builds for AVX2 fuse them, lerp and addcmul, in every
 * variant. NaN stays NaN; which of its bit patterns is not promised.
 * Other dtypes are widened exactly before and rounded after. Pure: no state, no locks, no allocation. */
#ifndef STHI_OPTIM_KERNELS_H
#define STHI_OPTIM_KERNELS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/processor.h"
#include "stagehand/checkpoint.h" /* sth_dtype */

/* Sums of squares go into this many partial sums, element i into i % STHI_LANES: a fixed order of additions.
 */
#define STHI_LANES 16

/* What one step multiplies by; rounded to float32 as PyTorch rounds its scalars. */
typedef struct sthi_adamw_f32 {
    float grad_scale; /* negative to maximise */
    float decay;      /* 1 - lr * weight_decay */
    float lerp;       /* 1 - beta1, or -beta1 where the other end of lerp is the nearer one */
    bool lerp_from_grad;
    float beta2, one_minus_beta2;
    float correction; /* sqrt(1 - beta2^step) */
    float eps;
    float minus_step_size; /* -lr / (1 - beta1^step) */
} sthi_adamw_f32;

typedef struct sthi_kernels {
    const char *name;
    /* p, m, v are updated in place; g is read. */
    void (*adamw)(float *p, float *m, float *v, const float *g, size_t n, const sthi_adamw_f32 *k);
    /* As all four widened, adamw, and three of them narrowed to nearest; p at random where `random` is not NULL. */
    void (*adamw_bf16)(uint16_t *p, uint16_t *m, uint16_t *v, const uint16_t *g, const uint16_t *random, size_t n,
                       const sthi_adamw_f32 *k);
    void (*widen_bf16)(float *out, const uint16_t *in, size_t n);
    void (*widen_f16)(float *out, const uint16_t *in, size_t n);
    void (*narrow_bf16)(uint16_t *out, const float *in, size_t n); /* to nearest, ties to even */
    void (*narrow_f16)(uint16_t *out, const float *in, size_t n);
    /* Up where the bits that fall off and random[i] together carry over. */
    void (*narrow_bf16_at_random)(uint16_t *out, const float *in, const uint16_t *random, size_t n);
    /* lanes[i % STHI_LANES] += x[i] * x[i]; the square of a float32 is exact in a double. */
    void (*squares)(double lanes[STHI_LANES], const float *x, size_t n);
    void (*scale)(float *x, size_t n, float factor);
} sthi_kernels;

/* NULL where this build or this processor does not have the variant. STHI_SCALAR is always there. */
const sthi_kernels *sthi_kernels_of(sthi_variant variant);
/* The widest that this processor has. */
const sthi_kernels *sthi_kernels_best(void);

extern const sthi_kernels sthi_kernels_scalar;
#if defined(__x86_64__)
extern const sthi_kernels sthi_kernels_avx2, sthi_kernels_avx512;
#endif
#endif
