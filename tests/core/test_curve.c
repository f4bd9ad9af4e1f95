/* Curves: budgets from the smallest to all, the one in force among them, and steps that never get longer. */
#include "core/curve.h"

#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "core/plan.h"
#include "support/check.h"
#include "telemetry/curve_form.h"

enum { UNITS = 40, POINTS = 12 };

static sth_plan_unit units[UNITS];
static sth_plan_use uses[2 * UNITS];

static sth_plan_input input(uint32_t seed, uint64_t budget, bool training) {
    sth_plan_input in;
    sthi_plan_input_init(&in);
    for (uint32_t i = 0; i < UNITS; i++) {
        seed = seed * 1664525 + 1013904223;
        units[i] = (sth_plan_unit){.bytes = 512 * (1 + seed % 4000)};
        uses[i] = (sth_plan_use){.unit = i, .compute_ns = 20000 + seed % 50000};
        uses[2 * UNITS - 1 - i] = uses[i];
    }
    in.units = units;
    in.unit_count = UNITS;
    in.uses = uses;
    in.use_count = training ? 2 * UNITS : UNITS;
    in.budget = budget;
    in.link_bytes_per_s = 1e10;
    return in;
}

static uint64_t all_of(void) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < UNITS; i++) all += units[i].bytes;
    return all;
}

static void budgets_go_from_the_smallest_to_all(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed < 4; seed++) {
        sth_plan_input in = input(seed, 0, seed % 2);
        sth_curve_point p[POINTS + 1];
        uint32_t n = 0;
        uint64_t least = 0;
        assert_int_equal(sthi_plan_curve(&in, POINTS, sthi_plan_create, p, &n), STH_OK);
        assert_int_equal(sthi_plan_smallest(&in, &least), STH_OK);
        assert_int_equal(n, POINTS);
        assert_int_equal(p[0].budget, least);
        assert_int_equal(p[n - 1].budget, all_of());
        assert_int_equal(p[n - 1].prediction.step_ns, p[n - 1].prediction.compute_ns);
        for (uint32_t i = 1; i < n; i++) {
            assert_true(p[i].budget > p[i - 1].budget);
            assert_true(p[i].prediction.step_ns <= p[i - 1].prediction.step_ns);
        }
    }
}

/* Each point is the plan that the planner makes for its budget, or better. */
static void points_are_what_plans_promise(void **state) {
    (void)state;
    sth_plan_input in = input(3, 0, true);
    sth_curve_point p[POINTS + 1];
    uint32_t n = 0;
    assert_int_equal(sthi_plan_curve(&in, POINTS, sthi_plan_create, p, &n), STH_OK);
    for (uint32_t i = 0; i < n; i++) {
        sth_plan *plan;
        in.budget = p[i].budget;
        assert_int_equal(sthi_plan_create(&in, &plan), STH_OK);
        assert_true(p[i].prediction.step_ns <= plan->prediction.step_ns);
        assert_true((double)p[i].prediction.step_ns >= 0.98 * (double)plan->prediction.step_ns);
        sthi_plan_destroy(plan);
    }
}

static void the_budget_in_force_is_a_point(void **state) {
    (void)state;
    sth_plan_input in = input(5, 0, false);
    sth_curve_point p[POINTS + 1];
    uint32_t n = 0, found = 0;
    in.budget = all_of() / 3 + 7;
    assert_int_equal(sthi_plan_curve(&in, POINTS, sthi_plan_create, p, &n), STH_OK);
    for (uint32_t i = 0; i < n; i++) found += p[i].budget == in.budget;
    assert_int_equal(n, POINTS + 1);
    assert_int_equal(found, 1);
    in.budget = 2 * all_of(); /* nothing streams: no point of its own */
    assert_int_equal(sthi_plan_curve(&in, POINTS, sthi_plan_create, p, &n), STH_OK);
    assert_int_equal(n, POINTS);
}

static void a_model_of_one_unit_has_one_point(void **state) {
    (void)state;
    sth_plan_input in = input(5, 0, false);
    sth_curve_point p[POINTS + 1];
    uint32_t n = 0;
    in.unit_count = in.use_count = 1;
    assert_int_equal(sthi_plan_curve(&in, POINTS, sthi_plan_create, p, &n), STH_OK);
    assert_int_equal(n, 1);
    char *text = NULL;
    assert_int_equal(sthi_curve_write(p, n, 0, STH_CURVE_SVG, &text), STH_OK);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    sthi_free(text);
}

static void wrong_input_is_refused(void **state) {
    (void)state;
    sth_plan_input in = input(5, 0, false);
    sth_curve_point p[4];
    uint32_t n = 99;
    char *text = NULL;
    assert_int_equal(sthi_plan_curve(&in, 1, sthi_plan_create, p, &n), STH_INVALID_ARGUMENT);
    in.link_bytes_per_s = 0;
    assert_int_equal(sthi_plan_curve(&in, 3, sthi_plan_create, p, &n), STH_INVALID_ARGUMENT);
    assert_int_equal(n, 99);
    assert_int_equal(sthi_curve_write(p, 0, 0, STH_CURVE_TEXT, &text), STH_INVALID_ARGUMENT);
    assert_null(text);
}

static void every_failing_allocation_leaves_nothing(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    sth_plan_input in = input(2, 0, false);
    sth_curve_point p[4];
    uint32_t n = 0;
    sth_status rc = STH_OUT_OF_HOST_MEMORY;
    for (uint64_t k = 1; rc != STH_OK; k += 7) {
        sthi_fault_arm(STHI_FAULT_ALLOC, k, false);
        rc = sthi_plan_curve(&in, 3, sthi_plan_create, p, &n);
        sthi_fault_disarm_all();
        assert_true(rc == STH_OK || rc == STH_OUT_OF_HOST_MEMORY);
        assert_int_equal(sthi_alloc_live(), live);
    }
    char *text = NULL;
    rc = STH_OUT_OF_HOST_MEMORY;
    for (uint64_t k = 1; rc != STH_OK; k++) {
        sthi_fault_arm(STHI_FAULT_ALLOC, k, false);
        rc = sthi_curve_write(p, n, p[1].budget, STH_CURVE_SVG, &text);
        sthi_fault_disarm_all();
    }
    assert_non_null(strstr(text, "now: "));
    sthi_free(text);
    assert_int_equal(sthi_alloc_live(), live);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(budgets_go_from_the_smallest_to_all),
        cmocka_unit_test(points_are_what_plans_promise),
        cmocka_unit_test(the_budget_in_force_is_a_point),
        cmocka_unit_test(a_model_of_one_unit_has_one_point),
        cmocka_unit_test(wrong_input_is_refused),
        cmocka_unit_test(every_failing_allocation_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
