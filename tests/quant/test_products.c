/* Products of a wide matrix with a thin one: every width of vector and every number of threads gives the bits of the
 * plain sum in ascending order. */
#include "support/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/processor.h"
#include "base/random.h"
#include "quant/hadamard.h"
#include "quant/lowrank.h"
#include "quant/products.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define ROWS 597u /* more than a tile, and no multiple of anything */
#define COLUMNS_ 1051u
#define BLOCKS 3u

static double value(uint64_t key, uint64_t i) { return (double)(int64_t)sthi_random64(key, i) / 0x1p62; }

static void fill(sthi_thin *t, uint64_t key) {
    for (uint64_t i = 0; i < t->rows; i++)
        for (uint32_t c = 0; c < BLOCKS * STHI_THIN_LANES; c++)
            *sthi_thin_at(t, i, c) = value(key, i * BLOCKS * STHI_THIN_LANES + c);
}

static void compare(const float *w, const sthi_thin *z, const sthi_thin *y, const sthi_thin *got, bool transposed) {
    for (uint64_t i = 0; i < got->rows; i++)
        for (uint32_t c = 0; c < BLOCKS * STHI_THIN_LANES; c++) {
            double sum = 0;
            for (uint64_t k = 0; k < (transposed ? ROWS : COLUMNS_); k++) {
                double factor = (double)(transposed ? w[k * COLUMNS_ + i] : w[i * COLUMNS_ + k]);
                sum += *sthi_thin_at(transposed ? y : z, k, c) * factor;
            }
            if (memcmp(&sum, sthi_thin_at(got, i, c), sizeof sum) != 0)
                fail_msg("row %d, column %u: %a, not %a", (int)i, c, *sthi_thin_at(got, i, c), sum);
        }
}

static void every_width_and_thread_count_gives_the_plain_sums(void **state) {
    (void)state;
    static float w[ROWS * COLUMNS_];
    sthi_thin z, y, by_rows, by_columns;
    int widths = 0;
    for (uint64_t i = 0; i < ROWS * COLUMNS_; i++) w[i] = (float)value(1, i);
    assert_ok(sthi_thin_create(COLUMNS_, BLOCKS, &z));
    assert_ok(sthi_thin_create(ROWS, BLOCKS, &y));
    assert_ok(sthi_thin_create(ROWS, BLOCKS, &by_rows));
    assert_ok(sthi_thin_create(COLUMNS_, BLOCKS, &by_columns));
    fill(&z, 2);
    fill(&y, 3);
    for (sthi_variant v = STHI_SCALAR; v < STHI_VARIANTS; v++) {
        if (!sthi_processor_limit(v)) continue;
        widths++;
        for (uint32_t threads = few_under_tsan(3, 1); threads <= 3; threads++) {
            sthi_workers *workers;
            assert_ok(sthi_workers_create("test", "test", threads, 0, &workers));
            assert_ok(sthi_product(workers, w, ROWS, COLUMNS_, &z, &by_rows));
            assert_ok(sthi_product_transposed(workers, w, ROWS, COLUMNS_, &y, &by_columns));
            compare(w, &z, &y, &by_rows, false);
            compare(w, &z, &y, &by_columns, true);
            sthi_workers_destroy(workers);
        }
    }
    print_message("# %d widths\n", widths);
    sthi_processor_limit(STHI_VARIANTS);
    sthi_thin_destroy(&z);
    sthi_thin_destroy(&y);
    sthi_thin_destroy(&by_rows);
    sthi_thin_destroy(&by_columns);
}

static void hadamard_is_its_own_inverse_and_sylvesters(void **state) {
    (void)state;
    double x[512] = {0};
    x[256 + 5] = 1;
    sthi_hadamard(x, 512, 256);
    for (unsigned k = 0; k < 256; k++) {
        assert_true(x[k] == 0);
        assert_true(x[256 + k] == (__builtin_popcount(k & 5) % 2 ? -1.0 / 16 : 1.0 / 16));
    }
    sthi_hadamard(x, 512, 256);
    for (unsigned k = 0; k < 512; k++) assert_true(x[k] == (k == 261));
}

static sth_status stop(void *context) {
    return --*(int *)context ? STH_OK : STH_SHUT_DOWN;
}

/* A matrix of rank 3 is its low-rank part, to the rounding of the factors; any pass may stop the work. */
static void low_rank_of_a_low_rank_matrix(void **state) {
    (void)state;
    enum { N = 64, RANK = 8 };
    static float w[N * N];
    static uint16_t up[N * RANK], down[N * RANK];
    double error = 0, norm = 0;
    sthi_workers *workers;
    assert_ok(sthi_workers_create("test", "test", 2, 0, &workers));
    for (unsigned i = 0; i < N; i++)
        for (unsigned k = 0; k < N; k++)
            for (unsigned r = 0; r < 3; r++) w[i * N + k] += (float)(value(10 + r, i) * value(20 + r, k));
    assert_ok(sthi_lowrank(workers, w, N, N, RANK, 7, NULL, NULL, up, down));
    for (unsigned i = 0; i < N; i++)
        for (unsigned k = 0; k < N; k++) {
            double sum = 0;
            for (unsigned r = 0; r < RANK; r++) {
                float a, b;
                uint32_t a_bits = (uint32_t)up[i * RANK + r] << 16, b_bits = (uint32_t)down[k * RANK + r] << 16;
                memcpy(&a, &a_bits, sizeof a), memcpy(&b, &b_bits, sizeof b);
                sum += (double)a * (double)b;
            }
            error += (sum - (double)w[i * N + k]) * (sum - (double)w[i * N + k]);
            norm += (double)w[i * N + k] * (double)w[i * N + k];
        }
    assert_true(sqrt(error / norm) < 5e-3);
    for (int pass = 1; pass <= (int)STHI_LOWRANK_PRODUCTS; pass++) {
        int left = pass;
        assert_status(sthi_lowrank(workers, w, N, N, RANK, 7, stop, &left, up, down), STH_SHUT_DOWN);
    }
    sthi_workers_destroy(workers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_width_and_thread_count_gives_the_plain_sums),
        cmocka_unit_test(hadamard_is_its_own_inverse_and_sylvesters),
        cmocka_unit_test(low_rank_of_a_low_rank_matrix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
