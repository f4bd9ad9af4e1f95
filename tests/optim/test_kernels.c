/* The kernels: every variant of this processor gives the bits of the plain ones, for all lengths and for
 * special values; the 16-bit formats are exact and round to nearest; random rounding is right on average. */
#include "support/check.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "optim/kernels.h"
#include "base/random.h"
#include "optim/update.h"

#define MOST 300

static const float specials[] = {
    0.0f,
    -0.0f,
    1.0f,
    -1.0f,
    INFINITY,
    -INFINITY,
    NAN,
    0x1p-149f,
    -0x1p-149f,
    0x1p-126f,
    0x1.fffffep-127f,
    3.4028234e38f,
    -3.4028234e38f,
    0x1p-25f,
    0x1.000002p-25f,
    0x1p-24f,
    0x1.8p-24f,
    65504.0f,
    65519.996f,
    65520.0f,
    6.1e-5f,
    6.103515625e-05f,
    1e-8f,
    0x1.01p0f,
    0x1.03p0f,
    0x1.00ffp0f,
    1e-20f,
    1e20f,
};
#define SPECIALS (sizeof specials / sizeof *specials)

static float random_value(uint64_t *counter) {
    uint64_t r = sthi_random64(42, (*counter)++);
    if (r % 8 == 0) return specials[(r >> 8) % SPECIALS];
    if (r % 8 == 1) return sthi_of_bits((uint32_t)(r >> 32)); /* any bits */
    return (float)((double)(r >> 11) * 0x1p-52 - 1);
}

static bool same(float a, float b) { return sthi_bits_of(a) == sthi_bits_of(b) || (isnan(a) && isnan(b)); }

static void all_same(const float *a, const float *b, size_t n, const char *what, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (!same(a[i], b[i]))
            fail_msg("%s of %s: element %zu of %zu is %a, not %a", what, name, i, n, b[i], a[i]);
}

static void all_same_bf16(const uint16_t *a, const uint16_t *b, size_t n, const char *what, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (!same(sthi_from_bf16(a[i]), sthi_from_bf16(b[i])))
            fail_msg("%s of %s: element %zu of %zu is %x, not %x", what, name, i, n, b[i], a[i]);
}

typedef struct world {
    float p[MOST + 1], m[MOST + 1], v[MOST + 1], g[MOST + 1], x[MOST + 1];
    uint16_t h[MOST + 1], b[MOST + 1], r[MOST + 1], random[MOST + 1];
    uint16_t hp[MOST + 1], hm[MOST + 1], hv[MOST + 1], hg[MOST + 1]; /* bf16 */
    double lanes[STHI_LANES];
} world;

static void fill(world *w, uint64_t seed) {
    uint64_t counter = seed * 100000;
    memset(w, 0, sizeof *w);
    for (size_t i = 0; i <= MOST; i++) {
        w->p[i] = random_value(&counter), w->m[i] = random_value(&counter), w->g[i] = random_value(&counter);
        w->v[i] = fabsf(random_value(&counter)), w->x[i] = random_value(&counter);
        w->random[i] = (uint16_t)sthi_random16(seed, i);
        w->hp[i] = sthi_to_bf16(w->p[i]), w->hm[i] = sthi_to_bf16(w->m[i]);
        w->hv[i] = sthi_to_bf16(w->v[i]), w->hg[i] = sthi_to_bf16(w->g[i]);
    }
}

static void run_all(const sthi_kernels *k, world *w, size_t n, size_t skip, const sthi_adamw_f32 *numbers) {
    k->adamw_bf16(w->hp + skip, w->hm + skip, w->hv + skip, w->hg + skip, n % 3 ? NULL : w->random + skip, n,
                  numbers);
    k->adamw(w->p + skip, w->m + skip, w->v + skip, w->g + skip, n, numbers);
    k->narrow_bf16(w->b + skip, w->x + skip, n);
    k->narrow_f16(w->h + skip, w->x + skip, n);
    k->narrow_bf16_at_random(w->r + skip, w->x + skip, w->random + skip, n);
    k->squares(w->lanes, w->g + skip, n);
    k->scale(w->g + skip, n, 0.3f);
}

static void variants_give_the_bits_of_plain_c(void **state) {
    (void)state;
    sthi_adamw_f32 numbers = {-0.7f, 0.999f, 0.1f, false, 0.999f, 0.001f, 0.0316f, 1e-8f, -1e-3f};
    int variants = 0;
    for (int variant = STHI_SCALAR + 1; variant < STHI_VARIANTS; variant++) {
        const sthi_kernels *k = sthi_kernels_of((sthi_variant)variant);
        if (!k) continue;
        variants++;
        for (size_t n = 0; n < MOST; n++) {
            world a, b;
            fill(&a, n);
            fill(&b, n);
            numbers.lerp_from_grad = n % 3 == 0;
            run_all(&sthi_kernels_scalar, &a, n, n % 2, &numbers);
            run_all(k, &b, n, n % 2, &numbers);
            /* one element more than n: what lies behind is left alone */
            all_same(a.p, b.p, MOST + 1, "p", k->name);
            all_same(a.m, b.m, MOST + 1, "m", k->name);
            all_same(a.v, b.v, MOST + 1, "v", k->name);
            all_same(a.g, b.g, MOST + 1, "g", k->name);
            all_same_bf16(a.hp, b.hp, MOST + 1, "p in bf16", k->name);
            all_same_bf16(a.hm, b.hm, MOST + 1, "m in bf16", k->name);
            all_same_bf16(a.hv, b.hv, MOST + 1, "v in bf16", k->name);
            assert_memory_equal(a.b, b.b, sizeof a.b);
            assert_memory_equal(a.h, b.h, sizeof a.h);
            assert_memory_equal(a.r, b.r, sizeof a.r);
            for (int l = 0; l < STHI_LANES; l++)
                assert_true(a.lanes[l] == b.lanes[l] || (isnan(a.lanes[l]) && isnan(b.lanes[l])));
        }
    }
    if (!variants) skip_because("this processor has neither AVX2 nor AVX-512");
}

static void bf16_is_float32_widened_and_narrowed(void **state) {
    (void)state;
    const sthi_adamw_f32 numbers = {-0.7f, 0.999f, 0.1f, false, 0.999f, 0.001f, 0.0316f, 1e-8f, -1e-3f};
    const sthi_kernels *k = &sthi_kernels_scalar;
    static world w;
    uint16_t p[MOST], m[MOST], v[MOST];
    fill(&w, 3);
    k->widen_bf16(w.p, w.hp, MOST), k->widen_bf16(w.m, w.hm, MOST);
    k->widen_bf16(w.v, w.hv, MOST), k->widen_bf16(w.g, w.hg, MOST);
    k->adamw(w.p, w.m, w.v, w.g, MOST, &numbers);
    k->narrow_bf16(p, w.p, MOST), k->narrow_bf16(m, w.m, MOST), k->narrow_bf16(v, w.v, MOST);
    k->adamw_bf16(w.hp, w.hm, w.hv, w.hg, NULL, MOST, &numbers);
    all_same_bf16(p, w.hp, MOST, "p", "bf16");
    all_same_bf16(m, w.hm, MOST, "m", "bf16");
    all_same_bf16(v, w.hv, MOST, "v", "bf16");
}

static void avx512_gives_the_bits_of_plain_c(void **state) {
    if (!sthi_kernels_of(STHI_AVX512)) skip_because("this processor has no AVX-512");
    variants_give_the_bits_of_plain_c(state);
}

static void every_half_widens_alike_and_comes_back(void **state) {
    (void)state;
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    for (uint32_t i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    for (int variant = 0; variant < STHI_VARIANTS; variant++) {
        const sthi_kernels *k = sthi_kernels_of((sthi_variant)variant);
        if (!k) continue;
        k->widen_bf16(wide, all, 65536);
        k->narrow_bf16(back, wide, 65536);
        for (uint32_t i = 0; i < 65536; i++) {
            assert_true(same(wide[i], sthi_of_bits(i << 16)));
            assert_true(back[i] == i || (isnan(wide[i]) && isnan(sthi_from_bf16(back[i]))));
        }
        k->widen_f16(wide, all, 65536);
        k->narrow_f16(back, wide, 65536);
        for (uint32_t i = 0; i < 65536; i++) {
            int exponent = (i >> 10) & 31;
            float magnitude = exponent ? ldexpf((float)(0x400 + (i & 0x3ff)), exponent - 25)
                                       : ldexpf((float)(i & 0x3ff), -24);
            if (exponent < 31) assert_true(wide[i] == (i & 0x8000 ? -magnitude : magnitude));
            assert_true(back[i] == i || (isnan(wide[i]) && isnan(sthi_from_f16(back[i]))));
        }
    }
}

/* The nearest of all halves, ties to the even one, found by search. */
static void halves_round_to_nearest_even(void **state) {
    (void)state;
    for (uint64_t counter = 0; counter < 20000; counter++) {
        uint64_t r = sthi_random64(7, counter);
        uint16_t below = (uint16_t)(r % 0x7bff); /* finite, and so is the next */
        double low = sthi_from_f16(below), high = sthi_from_f16((uint16_t)(below + 1));
        double part[] = {0.25, 0.5, 0.75, 0};
        float x = (float)(low + (high - low) * part[(r >> 20) % 4]);
        uint16_t want = part[(r >> 20) % 4] == 0.75  ? below + 1
                        : part[(r >> 20) % 4] == 0.5 ? below + (below & 1)
                                                     : below;
        assert_int_equal(sthi_to_f16(x), want);
        assert_int_equal(sthi_to_f16(-x), want | 0x8000);
    }
    assert_int_equal(sthi_to_bf16(0x1.01p0f), 0x3f80);     /* a tie, to even */
    assert_int_equal(sthi_to_bf16(0x1.03p0f), 0x3f82);     /* a tie, to even */
    assert_int_equal(sthi_to_bf16(0x1.010002p0f), 0x3f81); /* above the tie */
    assert_int_equal(sthi_to_bf16(3.4028234e38f), 0x7f80); /* to Inf */
}

static void random_rounding_is_right_on_average(void **state) {
    (void)state;
    const float values[] = {1.0f + 0x1p-10f, 1.0f + 0x1p-7f * 0.9f, -3.14159f, 1e-30f, 0x1.234568p-130f};
    enum { DRAWS = 200000 };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        double sum = 0, low = INFINITY, high = -INFINITY;
        for (uint64_t d = 0; d < DRAWS; d++) {
            double got = sthi_from_bf16(sthi_to_bf16_at_random(values[i], sthi_random16(i, d)));
            sum += got, low = fmin(low, got), high = fmax(high, got);
        }
        /* only the two neighbours; the mean within 5 standard errors of at most half their distance */
        assert_true(low <= (double)values[i] && (double)values[i] <= high);
        assert_true(high - low <= fabs((double)values[i]) * 0x1p-7 + 0x1p-133);
        assert_true(fabs(sum / DRAWS - (double)values[i]) <= 5 * (high - low) / 2 / sqrt(DRAWS));
    }
    uint16_t some[12];
    sthi_random16_fill(some, 9, 8, 12);
    for (uint64_t i = 0; i < 12; i++) assert_int_equal(some[i], sthi_random16(9, 8 + i));
    assert_int_equal(sthi_to_bf16_at_random(INFINITY, 0xffff), 0x7f80);
    assert_true(isnan(sthi_from_bf16(sthi_to_bf16_at_random(NAN, 0xffff))));
    assert_int_equal(sthi_to_bf16_at_random(1.5f, 0xffff), 0x3fc0); /* exact values never move */
}

static void sums_do_not_depend_on_the_dtype_of_exact_values(void **state) {
    (void)state;
    enum { N = 5000 };
    static float f[N];
    static double d[N];
    static uint16_t b[N], h[N];
    double want = 0;
    for (int i = 0; i < N; i++) {
        f[i] = (float)(i % 64 - 31), d[i] = f[i], b[i] = sthi_to_bf16(f[i]), h[i] = sthi_to_f16(f[i]);
        want += d[i] * d[i];
    }
    const sthi_kernels *k = sthi_kernels_best();
    assert_true(sthi_optim_squares(k, f, STH_DTYPE_F32, N) == want);
    assert_true(sthi_optim_squares(k, d, STH_DTYPE_F64, N) == want);
    assert_true(sthi_optim_squares(k, b, STH_DTYPE_BF16, N) == want);
    assert_true(sthi_optim_squares(k, h, STH_DTYPE_F16, N) == want);
    f[N - 1] = INFINITY;
    assert_false(isfinite(sthi_optim_squares(k, f, STH_DTYPE_F32, N)));
    f[N - 1] = NAN;
    assert_false(isfinite(sthi_optim_squares(k, f, STH_DTYPE_F32, N)));
    sthi_optim_scale(k, b, STH_DTYPE_BF16, N, 2);
    sthi_optim_scale(k, d, STH_DTYPE_F64, N, 2);
    for (int i = 0; i < N; i++) assert_true((double)sthi_from_bf16(b[i]) == d[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variants_give_the_bits_of_plain_c),
        cmocka_unit_test(bf16_is_float32_widened_and_narrowed),
        cmocka_unit_test(avx512_gives_the_bits_of_plain_c),
        cmocka_unit_test(every_half_widens_alike_and_comes_back),
        cmocka_unit_test(halves_round_to_nearest_even),
        cmocka_unit_test(random_rounding_is_right_on_average),
        cmocka_unit_test(sums_do_not_depend_on_the_dtype_of_exact_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
