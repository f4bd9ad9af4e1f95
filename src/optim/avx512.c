/* The kernels for AVX-512F; what is left over at the end is done by the scalar ones. The same operations in
 * the same order as in scalar.c: a change there is a change here. */
#include "optim/kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,fma,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))

typedef struct constants {
    __m512 scale, decay, lerp, beta2, rest2, correction, eps, step_size;
    bool lerp_from_grad;
} constants;

INLINE constants constants_of(const sthi_adamw_f32 *k) {
    return (constants){
        .scale = _mm512_set1_ps(k->grad_scale),
        .decay = _mm512_set1_ps(k->decay),
        .lerp = _mm512_set1_ps(k->lerp),
        .beta2 = _mm512_set1_ps(k->beta2),
        .rest2 = _mm512_set1_ps(k->one_minus_beta2),
        .correction = _mm512_set1_ps(k->correction),
        .eps = _mm512_set1_ps(k->eps),
        .step_size = _mm512_set1_ps(k->minus_step_size),
        .lerp_from_grad = k->lerp_from_grad,
    };
}

INLINE void update(__m512 *p, __m512 *m, __m512 *v, __m512 g, const constants *c) {
    __m512 grad = _mm512_mul_ps(g, c->scale), weight = _mm512_mul_ps(*p, c->decay);
    __m512 base = c->lerp_from_grad ? grad : *m;
    *m = _mm512_fmadd_ps(c->lerp, _mm512_sub_ps(grad, *m), base);
    *v = _mm512_fmadd_ps(_mm512_mul_ps(c->rest2, grad), grad, _mm512_mul_ps(*v, c->beta2));
    __m512 denominator = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(*v), c->correction), c->eps);
    *p = _mm512_add_ps(weight, _mm512_div_ps(_mm512_mul_ps(c->step_size, *m), denominator));
}

TARGET static void adamw(float *p, float *m, float *v, const float *g, size_t n, const sthi_adamw_f32 *k) {
    const constants c = constants_of(k);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 weight = _mm512_loadu_ps(p + i), mean = _mm512_loadu_ps(m + i), variance = _mm512_loadu_ps(v + i);
        update(&weight, &mean, &variance, _mm512_loadu_ps(g + i), &c);
        _mm512_storeu_ps(m + i, mean);
        _mm512_storeu_ps(v + i, variance);
        _mm512_storeu_ps(p + i, weight);
    }
    sthi_kernels_scalar.adamw(p + i, m + i, v + i, g + i, n - i, k);
}

INLINE __m512 load_bf16(const uint16_t *in) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)in));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE void store_bf16(uint16_t *out, __m512 x) {
    const __m512i half = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1), quiet = _mm512_set1_epi32(0x40);
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, one);
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(half, odd)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, high, quiet);
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(rounded));
}

INLINE void store_bf16_at_random(uint16_t *out, __m512 x, const uint16_t *random) {
    const __m512i exponent = _mm512_set1_epi32(0x7f800000), quiet = _mm512_set1_epi32(0x40);
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i more = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)random));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, more), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __mmask16 odd = _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
    high = _mm512_mask_or_epi32(high, nan, high, quiet);
    rounded = _mm512_mask_mov_epi32(rounded, odd, high); /* Inf and NaN stay */
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(rounded));
}

TARGET static void adamw_bf16(uint16_t *p, uint16_t *m, uint16_t *v, const uint16_t *g, const uint16_t *random,
                              size_t n, const sthi_adamw_f32 *k) {
    const constants c = constants_of(k);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 weight = load_bf16(p + i), mean = load_bf16(m + i), variance = load_bf16(v + i);
        update(&weight, &mean, &variance, load_bf16(g + i), &c);
        store_bf16(m + i, mean);
        store_bf16(v + i, variance);
        if (random) store_bf16_at_random(p + i, weight, random + i);
        else store_bf16(p + i, weight);
    }
    sthi_kernels_scalar.adamw_bf16(p + i, m + i, v + i, g + i, random ? random + i : NULL, n - i, k);
}

TARGET static void widen_bf16(float *out, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, load_bf16(in + i));
    sthi_kernels_scalar.widen_bf16(out + i, in + i, n - i);
}

TARGET static void widen_f16(float *out, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + i))));
    sthi_kernels_scalar.widen_f16(out + i, in + i, n - i);
}

TARGET static void narrow_bf16(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, _mm512_loadu_ps(in + i));
    sthi_kernels_scalar.narrow_bf16(out + i, in + i, n - i);
}

TARGET static void narrow_f16(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256(
            (__m256i *)(out + i),
            _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    sthi_kernels_scalar.narrow_f16(out + i, in + i, n - i);
}

TARGET static void narrow_bf16_at_random(uint16_t *out, const float *in, const uint16_t *random, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16_at_random(out + i, _mm512_loadu_ps(in + i), random + i);
    sthi_kernels_scalar.narrow_bf16_at_random(out + i, in + i, random + i, n - i);
}

TARGET static void squares(double lanes[STHI_LANES], const float *x, size_t n) {
    __m512d low = _mm512_loadu_pd(lanes), high = _mm512_loadu_pd(lanes + 8);
    size_t i = 0;
    for (; i + STHI_LANES <= n; i += STHI_LANES) {
        __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(x + i)), b = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8));
        low = _mm512_fmadd_pd(a, a, low); /* as mul and add: the square is exact */
        high = _mm512_fmadd_pd(b, b, high);
    }
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
    sthi_kernels_scalar.squares(lanes, x + i, n - i);
}

TARGET static void scale(float *x, size_t n, float factor) {
    const __m512 by = _mm512_set1_ps(factor);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), by));
    sthi_kernels_scalar.scale(x + i, n - i, factor);
}

const sthi_kernels sthi_kernels_avx512 = {
    "avx512", adamw, adamw_bf16, widen_bf16, widen_f16, narrow_bf16, narrow_f16, narrow_bf16_at_random, squares, scale,
};
#else
typedef int sthi_no_avx512; /* a file of C is never empty */
#endif
