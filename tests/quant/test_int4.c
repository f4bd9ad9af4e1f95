/* The quantiser of v3, and sums of low-rank rows, against their definitions written out one number at a time. */
#include "support/check.h"

#include <math.h>
#include <string.h>

#include "base/half.h"
#include "base/random.h"
#include "quant/int4.h"
#include "quant/rank_row.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define COUNT 64u

static float plain_code(float x, float s) { return fminf(fmaxf(rintf(x / s), -8), 7); }

static uint16_t plain_group(const float *x, unsigned char *codes) {
    static const float shares[] = {0.85f, 0.88f, 0.91f, 0.94f, 0.97f, 1.0f};
    float max = 0, best = INFINITY;
    uint16_t chosen = 0x3f80;
    for (uint64_t i = 0; i < COUNT; i++) max = fmaxf(max, fabsf(x[i]));
    for (unsigned f = 0; f < 6; f++) {
        uint16_t bits = sthi_to_bf16(max * shares[f] / 7);
        if (!bits) bits = 0x3f80;
        float s = sthi_from_bf16(bits), sum = 0;
        for (uint64_t i = 0; i < COUNT; i++) {
            float error = plain_code(x[i], s) * s - x[i];
            sum += error * error;
        }
        if (sum >= best) continue;
        best = sum;
        chosen = bits;
    }
    for (uint64_t i = 0; i < COUNT; i += 2) {
        float s = sthi_from_bf16(chosen);
        codes[i / 2] = (unsigned char)(((int)plain_code(x[i], s) & 15) | ((int)plain_code(x[i + 1], s) & 15) << 4);
    }
    return chosen;
}

static float value(uint64_t key, uint64_t i) { return (float)((double)(int64_t)sthi_random64(key, i) / 0x1p63); }

static void groups_are_those_of_the_definition(void **state) {
    (void)state;
    for (uint64_t n = 0; n < 3000; n++) {
        float x[COUNT], size = ldexpf(1, (int)(sthi_random64(1, n) % 270) - 149);
        unsigned char got[COUNT / 2], wanted[COUNT / 2];
        for (uint64_t i = 0; i < COUNT; i++) {
            x[i] = n % 50 == 0 ? 0 : size * value(2, n * COUNT + i);
            if (n % 7 == 0) x[i] = rintf(x[i] * 9 / size) * size / 2; /* ties */
            if (n % 11 == 0 && i % 3) x[i] = -0.0f;
        }
        uint16_t scale = sthi_int4_encode_group(x, COUNT, got);
        assert_int_equal(scale, plain_group(x, wanted));
        assert_memory_equal(got, wanted, sizeof got);
    }
}

static void rows_are_summed_in_order(void **state) {
    (void)state;
    enum { IN = 37, RANK = 11 };
    float down[RANK * IN], got[IN];
    uint16_t up[RANK + 1];
    for (unsigned i = 0; i < RANK * IN; i++) down[i] = value(3, i) * ldexpf(1, (int)(i % 40) - 20);
    for (unsigned r = 0; r < RANK; r++) up[r] = sthi_to_bf16(value(4, r));
    for (uint64_t rank = 0; rank <= RANK; rank++)
        for (uint64_t in = 1; in <= IN; in += 6) {
            sthi_rank_row(up, down, rank, in, got);
            for (uint64_t k = 0; k < in; k++) {
                float sum = 0;
                for (uint64_t r = 0; r < rank; r++) sum += sthi_from_bf16(up[r]) * down[r * in + k];
                assert_memory_equal(&got[k], &sum, sizeof sum);
            }
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_are_those_of_the_definition),
        cmocka_unit_test(rows_are_summed_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
