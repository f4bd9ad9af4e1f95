/* Units that the caller uses by other means for a while (runtime/aside.c). */
#include "runtime/aside.h"

#include "runtime/budget.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/step_calls.h"
#include "stream/world.h"
#include "support/check.h"

enum { UNITS = 6, SMALL = 4096, LARGE = 20480, BUDGET = 2 * LARGE + 2 * SMALL };
static const uint64_t BYTES[UNITS] = {SMALL, LARGE, SMALL, SMALL, LARGE, SMALL};
static const uint32_t LARGE_ONES[] = {1, 4}, SMALL_ONES[] = {0, 2, 3, 5}, ALL[] = {0, 1, 2, 3, 4, 5};

static void begin(world *w, uint64_t budget) {
    world_spec spec = world_default(UNITS, BYTES, budget);
    spec.capacity = BUDGET + LARGE;
    assert_ok(world_open(w, &spec));
}

static void steps(world *w, const uint32_t *order, uint32_t count, int n) {
    const char *why;
    while (n--) assert_ok(world_step(w, order, count, 1000));
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
}

static uint64_t copies(world *w, uint32_t unit) {
    sth_unit_stats stats;
    sthi_unit_stats(w->runtime, unit, &stats);
    return stats.copies;
}

static void no_plan_counts_units_that_are_aside(void **state) {
    (void)state;
    world w;
    begin(&w, BUDGET);
    steps(&w, ALL, UNITS, 3);
    assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, true));
    steps(&w, SMALL_ONES, 4, STHI_PEAK_STEPS); /* of which the largest lease counts */
    assert_true(sthi_smallest_budget(w.runtime) < LARGE);
    assert_ok(sthi_runtime_set_budget(w.runtime, 3 * SMALL));
    uint64_t before = copies(&w, 1) + copies(&w, 4);
    steps(&w, SMALL_ONES, 4, 5);
    assert_int_equal(copies(&w, 1) + copies(&w, 4), before);
    sth_runtime_stats stats;
    sthi_runtime_stats(w.runtime, &stats);
    assert_true(stats.device_bytes <= 3 * SMALL);
    world_close(&w);
}

static void units_that_are_back_have_their_places_again(void **state) {
    (void)state;
    world w;
    begin(&w, BUDGET);
    steps(&w, ALL, UNITS, 3);
    for (int round = 0; round < 3; round++) {
        assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, true));
        steps(&w, SMALL_ONES, 4, 3);
        uint64_t before = 0, after = 0;
        for (int i = 0; i < 4; i++) before += copies(&w, SMALL_ONES[i]);
        steps(&w, SMALL_ONES, 4, 3);
        for (int i = 0; i < 4; i++) after += copies(&w, SMALL_ONES[i]);
        assert_int_equal(after, before); /* all that is left is resident */
        assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, false));
        steps(&w, ALL, UNITS, 3);
    }
    world_close(&w);
}

static void a_unit_that_is_aside_may_be_acquired_where_there_is_room(void **state) {
    (void)state;
    world w;
    sth_lease lease;
    begin(&w, BUDGET);
    assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, true));
    steps(&w, SMALL_ONES, 4, 2);
    assert_ok(sthi_step_begin(w.runtime));
    assert_ok(sthi_unit_acquire(w.runtime, 1, 0, &lease));
    assert_true(world_right(&w, &lease));
    sthi_lease_release(w.runtime, &lease);
    assert_ok(sthi_step_end(w.runtime));
    steps(&w, SMALL_ONES, 4, 2);
    world_close(&w);
}

static void a_lease_keeps_its_place_and_the_plan_comes_later(void **state) {
    (void)state;
    world w;
    sth_lease lease;
    begin(&w, BUDGET);
    steps(&w, ALL, UNITS, 3);
    assert_ok(sthi_unit_acquire(w.runtime, 4, 0, &lease));
    assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, true));
    assert_true(world_right(&w, &lease));
    steps(&w, SMALL_ONES, 4, 2);
    assert_true(world_right(&w, &lease));
    sthi_lease_release(w.runtime, &lease);
    steps(&w, SMALL_ONES, 4, 3);
    assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, false));
    steps(&w, ALL, UNITS, 3);
    world_close(&w);
}

static void what_cannot_be_is_refused(void **state) {
    (void)state;
    world w;
    const uint32_t beyond[] = {0, UNITS};
    begin(&w, BUDGET);
    assert_status(sthi_runtime_set_aside(w.runtime, beyond, 2, true), STH_INVALID_ARGUMENT);
    assert_ok(sthi_step_begin(w.runtime));
    assert_status(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, true), STH_INVALID_STATE);
    assert_ok(world_use(&w, 0, 1000));
    assert_ok(sthi_step_pause(w.runtime)); /* which ends it */
    assert_ok(sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, true));
    steps(&w, SMALL_ONES, 4, 2);
    assert_ok(sthi_runtime_set_budget(w.runtime, 3 * SMALL));
    sth_status rc = sthi_runtime_set_aside(w.runtime, LARGE_ONES, 2, false); /* the budget does not hold one of them */
    assert_true(rc == STH_OK || rc == STH_BUDGET_TOO_SMALL);
    assert_status(world_step(&w, ALL, UNITS, 1000), STH_BUDGET_TOO_SMALL);
    if (w.runtime->step.open) (void)sthi_step_end(w.runtime);
    assert_ok(sthi_runtime_set_budget(w.runtime, BUDGET));
    steps(&w, ALL, UNITS, 3);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_plan_counts_units_that_are_aside),
        cmocka_unit_test(units_that_are_back_have_their_places_again),
        cmocka_unit_test(a_unit_that_is_aside_may_be_acquired_where_there_is_room),
        cmocka_unit_test(a_lease_keeps_its_place_and_the_plan_comes_later),
        cmocka_unit_test(what_cannot_be_is_refused),
    };
    return cmocka_run_group_tests_name("stream/aside", tests, NULL, NULL);
}
