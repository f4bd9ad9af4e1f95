/* When memory is read for a model whose budget is found. */
#include "core/pace.h"
#include "support/check.h"

#include "base/random.h"

#define MS INT64_C(1000000)

static bool due(sth_budget_pace *p, int64_t now, bool turn) {
    double growth;
    bool is_due = sthi_pace_due(p, now, turn, &growth);
    if (is_due) sthi_pace_looked(p, now);
    return is_due;
}

static sth_budget_pace steady(int64_t now) {
    sth_budget_pace p = {0};
    while (due(&p, now, false)) continue;
    return p;
}

static void the_first_steps_begin_with_a_reading_each(void **state) {
    (void)state;
    sth_budget_pace p = {0};
    for (int step = 0; step <= 8; step++) assert_true(due(&p, 0, false));
    assert_false(due(&p, 0, false));
    assert_int_equal(p.steps, 9);
}

static void later_steps_look_every_50_ms(void **state) {
    (void)state;
    sth_budget_pace p = steady(1000 * MS);
    assert_false(due(&p, 1050 * MS - 1, false));
    assert_true(due(&p, 1050 * MS, false));
    assert_false(due(&p, 1099 * MS, false));
    assert_true(due(&p, 1100 * MS, false));
}

static void a_turn_begins_with_a_reading(void **state) {
    (void)state;
    sth_budget_pace p = steady(0);
    assert_true(due(&p, 1, true));
    assert_false(due(&p, 2, false));
}

static void larger_inputs_are_announced_once(void **state) {
    (void)state;
    sth_budget_pace p = {0};
    double growth;
    sthi_pace_inputs(&p, 100, false);
    assert_true(sthi_pace_due(&p, 0, false, &growth));
    assert_true(growth == 0); /* nothing to compare with */
    p = (sth_budget_pace){.steps = 20, .largest = 100};
    sthi_pace_inputs(&p, 100, false);
    assert_false(sthi_pace_due(&p, 0, false, &growth));
    assert_true(growth == 1);
    sthi_pace_inputs(&p, 250, false);
    assert_true(sthi_pace_due(&p, 0, false, &growth));
    assert_true(growth == 2.5);
    sthi_pace_inputs(&p, 250, false);
    assert_false(sthi_pace_due(&p, 0, false, &growth));
    assert_false(sthi_pace_due(&p, 0, false, &growth)); /* a step that announces nothing */
    assert_true(growth == 0);
}

static void inputs_inside_a_step_are_learned_and_announce_nothing(void **state) {
    (void)state;
    sth_budget_pace p = {.steps = 20, .largest = 100};
    double growth;
    sthi_pace_inputs(&p, 300, true);
    assert_false(sthi_pace_due(&p, 0, false, &growth));
    sthi_pace_inputs(&p, 300, false);
    assert_false(sthi_pace_due(&p, 0, false, &growth));
    assert_true(growth == 1);
}

static void a_refused_lease_ends_the_first_steps_and_brings_a_reading(void **state) {
    (void)state;
    sth_budget_pace p = {0};
    assert_true(due(&p, 0, false));
    sthi_pace_hurry(&p);
    assert_true(p.steps >= 2); /* the finder's early steps are over */
    assert_true(due(&p, 0, false));
    assert_false(due(&p, 0, false));
}

static void what_was_seen_is_forgotten(void **state) {
    (void)state;
    sth_budget_pace p = steady(0);
    double growth;
    p.largest = 100;
    sthi_pace_renew(&p);
    sthi_pace_inputs(&p, 500, false);
    assert_true(sthi_pace_due(&p, 0, false, &growth));
    assert_true(growth == 0 && p.steps == 0 && p.largest == 500);
}

/* A step that has to begin with a reading does so whatever came before; one with larger inputs is never left out. */
static void random_steps_miss_no_reason(void **state) {
    (void)state;
    sth_budget_pace p = {0};
    uint64_t most = 0;
    int64_t now = 0, looked = 0;
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t bytes = 1 + sthi_random64(i, 0) % (1 + i);
        bool inside = sthi_random64(i, 1) % 4 == 0, turn = sthi_random64(i, 2) % 16 == 0;
        now += (int64_t)(sthi_random64(i, 3) % (uint64_t)(20 * MS));
        sthi_pace_inputs(&p, bytes, inside);
        bool grows = !inside && most && bytes > most, first = p.steps <= 8, late = now - looked >= 50 * MS;
        if (bytes > most) most = bytes;
        bool is_due = due(&p, now, turn);
        assert_true(is_due == (grows || first || late || turn));
        assert_int_equal(p.largest, most);
        if (is_due) looked = now;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_steps_begin_with_a_reading_each),
        cmocka_unit_test(later_steps_look_every_50_ms),
        cmocka_unit_test(a_turn_begins_with_a_reading),
        cmocka_unit_test(larger_inputs_are_announced_once),
        cmocka_unit_test(inputs_inside_a_step_are_learned_and_announce_nothing),
        cmocka_unit_test(a_refused_lease_ends_the_first_steps_and_brings_a_reading),
        cmocka_unit_test(what_was_seen_is_forgotten),
        cmocka_unit_test(random_steps_miss_no_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
