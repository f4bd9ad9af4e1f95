/* The kernels for AVX2, FMA and F16C; what is left over at the end is done by the scalar ones. The same
 * operations in the same order as in scalar.c: a change there is a change here. */
#include "optim/kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))

TARGET static void adamw(float *p, float *m, float *v, const float *g, size_t n, const sthi_adamw_f32 *k) {
    const __m256 scale = _mm256_set1_ps(k->grad_scale), decay = _mm256_set1_ps(k->decay);
    const __m256 lerp = _mm256_set1_ps(k->lerp), beta2 = _mm256_set1_ps(k->beta2);
    const __m256 rest2 = _mm256_set1_ps(k->one_minus_beta2), correction = _mm256_set1_ps(k->correction);
    const __m256 eps = _mm256_set1_ps(k->eps), step_size = _mm256_set1_ps(k->minus_step_size);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 grad = _mm256_mul_ps(_mm256_loadu_ps(g + i), scale);
        __m256 weight = _mm256_mul_ps(_mm256_loadu_ps(p + i), decay);
        __m256 mean = _mm256_loadu_ps(m + i), variance = _mm256_loadu_ps(v + i);
        __m256 base = k->lerp_from_grad ? grad : mean;
        mean = _mm256_fmadd_ps(lerp, _mm256_sub_ps(grad, mean), base);
        variance = _mm256_fmadd_ps(_mm256_mul_ps(rest2, grad), grad, _mm256_mul_ps(variance, beta2));
        __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(variance), correction), eps);
        __m256 step = _mm256_div_ps(_mm256_mul_ps(step_size, mean), denominator);
        _mm256_storeu_ps(m + i, mean);
        _mm256_storeu_ps(v + i, variance);
        _mm256_storeu_ps(p + i, _mm256_add_ps(weight, step));
    }
    sthi_kernels_scalar.adamw(p + i, m + i, v + i, g + i, n - i, k);
}

TARGET static void widen_bf16(float *out, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(in + i)));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    sthi_kernels_scalar.widen_bf16(out + i, in + i, n - i);
}

TARGET static void widen_f16(float *out, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
    sthi_kernels_scalar.widen_f16(out + i, in + i, n - i);
}

TARGET static void narrow_bf16(uint16_t *out, const float *in, size_t n) {
    const __m256i half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1),
                  quiet = _mm256_set1_epi32(0x40);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_loadu_ps(in + i);
        __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
        __m256i odd = _mm256_and_si256(high, one);
        __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(half, odd)), 16);
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, quiet), nan);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
        _mm_storeu_si128((__m128i *)(out + i), _mm256_castsi256_si128(packed));
    }
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
    "avx2", adamw, widen_bf16, widen_f16, narrow_bf16, narrow_f16, squares, scale,
};
#else
typedef int sthi_no_avx2; /* a file of C is never empty */
#endif
