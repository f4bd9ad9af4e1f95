/* The rolling window: order, bound, and the means over it. */
#include "telemetry/telemetry.h"

#include "base/fault.h"
#include "base/memory.h"
#include "support/check.h"

static sthi_telemetry *make(void) {
    sthi_telemetry *t = NULL;
    assert_ok(sthi_telemetry_create(NULL, 0, &t));
    return t;
}

static void push_steps(sthi_telemetry *t, int count) {
    for (int i = 0; i < count; i++)
        assert_ok(sthi_telemetry_push(t, &(sth_step_metrics){.step = i, .stall_time_ms = i}));
}

static void starts_empty(void **state) {
    (void)state;
    sthi_telemetry *t = make();
    sth_step_metrics m;
    assert_int_equal(sthi_telemetry_count(t), 0);
    assert_status(sthi_telemetry_get(t, 0, &m), STH_NOT_FOUND);
    sthi_telemetry_destroy(t, true);
}

static void newest_comes_first(void **state) {
    (void)state;
    sthi_telemetry *t = make();
    push_steps(t, 3);
    sth_step_metrics m;
    for (uint32_t i = 0; i < 3; i++) {
        assert_ok(sthi_telemetry_get(t, i, &m));
        assert_true(m.step == 2 - i);
    }
    assert_status(sthi_telemetry_get(t, 3, &m), STH_NOT_FOUND);
    sthi_telemetry_destroy(t, true);
}

static void keeps_the_newest_hundred(void **state) {
    (void)state;
    sthi_telemetry *t = make();
    push_steps(t, 257);
    sth_step_metrics m;
    assert_int_equal(sthi_telemetry_count(t), 100);
    assert_ok(sthi_telemetry_get(t, 0, &m));
    assert_true(m.step == 256);
    assert_ok(sthi_telemetry_get(t, 99, &m));
    assert_true(m.step == 157);
    assert_status(sthi_telemetry_get(t, 100, &m), STH_NOT_FOUND);
    sthi_telemetry_destroy(t, true);
}

static void running_out_of_memory_is_an_error(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    for (uint64_t n = 1; n <= 3; n++) {
        sthi_telemetry *t = NULL;
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        assert_status(sthi_telemetry_create("/never/opened", 1 << 20, &t), STH_OUT_OF_HOST_MEMORY);
        sthi_fault_disarm_all();
        assert_null(t);
        assert_int_equal(sthi_alloc_live(), live);
    }
    sthi_telemetry_destroy(NULL, true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starts_empty),
        cmocka_unit_test(newest_comes_first),
        cmocka_unit_test(keeps_the_newest_hundred),
        cmocka_unit_test(running_out_of_memory_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
