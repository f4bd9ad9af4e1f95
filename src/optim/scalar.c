/* The kernels in plain C: the reference, and the tails of the vector variants. Contraction of a * b + c
 * would change bits: -std=c17 switches it off for GCC, the pragma for clang. */
#include <math.h>

#include "base/half.h"
#include "optim/kernels.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

static inline void update(float *p, float *m, float *v, float g, const sthi_adamw_f32 *k) {
    float grad = g * k->grad_scale, weight = *p * k->decay;
    float mean = fmaf(k->lerp, grad - *m, k->lerp_from_grad ? grad : *m);
    float variance = fmaf(k->one_minus_beta2 * grad, grad, *v * k->beta2);
    float denominator = sqrtf(variance) / k->correction + k->eps;
    float step = k->minus_step_size * mean / denominator;
    *m = mean;
    *v = variance;
    *p = weight + step;
}

static void adamw(float *p, float *m, float *v, const float *g, size_t n, const sthi_adamw_f32 *k) {
    for (size_t i = 0; i < n; i++) update(p + i, m + i, v + i, g[i], k);
}

static void adamw_bf16(uint16_t *p, uint16_t *m, uint16_t *v, const uint16_t *g, const uint16_t *random, size_t n,
                       const sthi_adamw_f32 *k) {
    for (size_t i = 0; i < n; i++) {
        float weight = sthi_from_bf16(p[i]), mean = sthi_from_bf16(m[i]), variance = sthi_from_bf16(v[i]);
        update(&weight, &mean, &variance, sthi_from_bf16(g[i]), k);
        p[i] = random ? sthi_to_bf16_at_random(weight, random[i]) : sthi_to_bf16(weight);
        m[i] = sthi_to_bf16(mean);
        v[i] = sthi_to_bf16(variance);
    }
}

static void widen_bf16(float *out, const uint16_t *in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = sthi_from_bf16(in[i]);
}
static void widen_f16(float *out, const uint16_t *in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = sthi_from_f16(in[i]);
}
static void narrow_bf16(uint16_t *out, const float *in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = sthi_to_bf16(in[i]);
}
static void narrow_f16(uint16_t *out, const float *in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = sthi_to_f16(in[i]);
}

static void narrow_bf16_at_random(uint16_t *out, const float *in, const uint16_t *random, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = sthi_to_bf16_at_random(in[i], random[i]);
}

static void squares(double lanes[STHI_LANES], const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double square = (double)x[i] * (double)x[i];
        lanes[i % STHI_LANES] += square;
    }
}

static void scale(float *x, size_t n, float factor) {
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

const sthi_kernels sthi_kernels_scalar = {
    "scalar", adamw, adamw_bf16, widen_bf16, widen_f16, narrow_bf16, narrow_f16, narrow_bf16_at_random, squares, scale,
};
