/* The kernels for AVX2, FMA and F16C; what is left over at the end is done by the scalar ones. The same
 * operations in the same order as in scalar.c: a change there is a change here. */
#include "optim/kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))

typedef struct constants {
    __m256 scale, decay, lerp, beta2, rest2, correction, eps, step_size;
    bool lerp_from_grad;
} constants;

INLINE constants constants_of(const sthi_adamw_f32 *k) {
    return (constants){
        .scale = _mm256_set1_ps(k->grad_scale),
        .decay = _mm256_set1_ps(k->decay),
        .lerp = _mm256_set1_ps(k->lerp),
        .beta2 = _mm256_set1_ps(k->beta2),
        .rest2 = _mm256_set1_ps(k->one_minus_beta2),
        .correction = _mm256_set1_ps(k->correction),
        .eps = _mm256_set1_ps(k->eps),
        .step_size = _mm256_set1_ps(k->minus_step_size),
        .lerp_from_grad = k->lerp_from_grad,
    };
}

INLINE void update(__m256 *p, __m256 *m, __m256 *v, __m256 g, const constants *c) {
    __m256 grad = _mm256_mul_ps(g, c->scale), weight = _mm256_mul_ps(*p, c->decay);
    __m256 base = c->lerp_from_grad ? grad : *m;
    *m = _mm256_fmadd_ps(c->lerp, _mm256_sub_ps(grad, *m), base);
    *v = _mm256_fmadd_ps(_mm256_mul_ps(c->rest2, grad), grad, _mm256_mul_ps(*v, c->beta2));
    __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(*v), c->correction), c->eps);
    *p = _mm256_add_ps(weight, _mm256_div_ps(_mm256_mul_ps(c->step_size, *m), denominator));
}

TARGET static void adamw(float *p, float *m, float *v, const float *g, size_t n, const sthi_adamw_f32 *k) {
    const constants c = constants_of(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 weight = _mm256_loadu_ps(p + i), mean = _mm256_loadu_ps(m + i), variance = _mm256_loadu_ps(v + i);
        update(&weight, &mean, &variance, _mm256_loadu_ps(g + i), &c);
        _mm256_storeu_ps(m + i, mean);
        _mm256_storeu_ps(v + i, variance);
        _mm256_storeu_ps(p + i, weight);
    }
    sthi_kernels_scalar.adamw(p + i, m + i, v + i, g + i, n - i, k);
}

INLINE __m256 load_bf16(const uint16_t *in) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)in));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

INLINE void store_bf16(uint16_t *out, __m256 x) {
    const __m256i half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1), quiet = _mm256_set1_epi32(0x40);
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, one);
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(half, odd)), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, quiet), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(packed));
}

INLINE void store_bf16_at_random(uint16_t *out, __m256 x, const uint16_t *random) {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000), quiet = _mm256_set1_epi32(0x40);
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i more = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)random));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, more), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i odd = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent); /* Inf and NaN stay */
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_and_si256(nan, quiet)), odd);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(packed));
}

TARGET static void adamw_bf16(uint16_t *p, uint16_t *m, uint16_t *v, const uint16_t *g, const uint16_t *random,
                              size_t n, const sthi_adamw_f32 *k) {
    const constants c = constants_of(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 weight = load_bf16(p + i), mean = load_bf16(m + i), variance = load_bf16(v + i);
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
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, load_bf16(in + i));
    sthi_kernels_scalar.widen_bf16(out + i, in + i, n - i);
}

TARGET static void widen_f16(float *out, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
    sthi_kernels_scalar.widen_f16(out + i, in + i, n - i);
}

TARGET static void narrow_bf16(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) store_bf16(out + i, _mm256_loadu_ps(in + i));
    sthi_kernels_scalar.narrow_bf16(out + i, in + i, n - i);
}

TARGET static void narrow_f16(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(
            (__m128i *)(out + i),
            _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    sthi_kernels_scalar.narrow_f16(out + i, in + i, n - i);
}

TARGET static void narrow_bf16_at_random(uint16_t *out, const float *in, const uint16_t *random, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) store_bf16_at_random(out + i, _mm256_loadu_ps(in + i), random + i);
    sthi_kernels_scalar.narrow_bf16_at_random(out + i, in + i, random + i, n - i);
}

TARGET static void squares(double lanes[STHI_LANES], const float *x, size_t n) {
    __m256d sums[4];
    for (int l = 0; l < 4; l++) sums[l] = _mm256_loadu_pd(lanes + 4 * l);
    size_t i = 0;
    for (; i + STHI_LANES <= n; i += STHI_LANES)
        for (int l = 0; l < 4; l++) {
            __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * l));
            sums[l] = _mm256_fmadd_pd(wide, wide, sums[l]); /* as mul and add: the square is exact */
        }
    for (int l = 0; l < 4; l++) _mm256_storeu_pd(lanes + 4 * l, sums[l]);
    sthi_kernels_scalar.squares(lanes, x + i, n - i);
}

TARGET static void scale(float *x, size_t n, float factor) {
    const __m256 by = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), by));
    sthi_kernels_scalar.scale(x + i, n - i, factor);
}

const sthi_kernels sthi_kernels_avx2 = {
    "avx2", adamw, adamw_bf16, widen_bf16, widen_f16, narrow_bf16, narrow_f16, narrow_bf16_at_random, squares, scale,
};
#else
typedef int sthi_no_avx2; /* a file of C is never empty */
#endif
