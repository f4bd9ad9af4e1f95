/* What stands behind a product on CUDA, its text compiled for the CPU, has the bits of the reference; NaN and
 * infinities, too. */
#include "support/check.h"

#include <math.h>
#include <string.h>

#include "device/dense.h"
#include "runner/dense_on_cpu.h"
#include "runner/rig.h"

enum { ROWS = 7, COLS = 37, COUNT = ROWS * COLS };
static const sth_dtype DTYPES[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};

static void fill(sth_dtype dtype, void *p, uint64_t n, uint32_t seed) {
    static const float odd[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 1e-8f, 70000, -1e-30f, 6e-5f, 3e38f};
    for (uint64_t i = 0; i < n; i++) {
        uint64_t which = (i * 7 + seed) % 40;
        rig_store(dtype, p, i, which < 10 ? odd[which] : rig_value(seed, i) * 6);
    }
}

static void the_kernels_text_has_the_bits_of_the_reference(void **state) {
    (void)state;
    sth_device *sim;
    sthi_dense *dense;
    assert_ok(sth_device_open("sim", NULL, &sim));
    assert_ok(sthi_dense_cpu_create(0, &dense));
    for (int world = 0; world < 3 * STH_NONLINEARITY_COUNT * 4; world++) {
        int dtype = world % 3, f = world / 3 % STH_NONLINEARITY_COUNT, with = world / 3 / STH_NONLINEARITY_COUNT;
        float y[COUNT], other[COUNT], bias[COLS], residual[COUNT];
        memset(y, 0, sizeof y);
        fill(DTYPES[dtype], y, COUNT, 1);
        fill(DTYPES[dtype], bias, COLS, 2);
        fill(DTYPES[dtype], residual, COUNT, 3);
        memcpy(other, y, sizeof y);
        sthi_finish call = {DTYPES[dtype], ROWS, COLS, (uintptr_t)y, with % 2 ? (uintptr_t)bias : 0,
                            with / 2 ? (uintptr_t)residual : 0, 0.75, (sth_nonlinearity)f};
        assert_ok(dense->finish(dense, sim, &call, 0));
        finish_on_cpu(dtype, 3, 16, COUNT, COLS, other, with % 2 ? bias : NULL, 0.75f, with / 2 ? residual : NULL, f);
        for (int i = 0; i < COUNT; i++) {
            float a = rig_load(DTYPES[dtype], y, (uint64_t)i), b = rig_load(DTYPES[dtype], other, (uint64_t)i);
            if (!(isnan(a) && isnan(b))) assert_memory_equal(&a, &b, sizeof a);
        }
    }
    dense->close(dense);
    sth_device_close(sim);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_kernels_text_has_the_bits_of_the_reference)};
    return cmocka_run_group_tests_name("dense", tests, NULL, NULL);
}
