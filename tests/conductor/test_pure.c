/* Phases, tokens, hints, the ring of events: each rule alone. */
#include "conductor/phases.h"
#include "conductor/policy.h"
#include "conductor/tokens.h"
#include "conductor/trace.h"
#include <math.h>
#include <string.h>

#include "support/check.h"

/* Not cmocka's own, which takes infinity and NaN for anything. */
static void assert_near(double got, double wanted) {
    if (!(fabs(got - wanted) <= 1e-9 * fabs(wanted))) fail_msg("%g instead of %g", got, wanted);
}

static const sth_hints open_hints = {.max_inflight_h2d = 9, .max_inflight_d2h = 9, .prefetch_window_cap = 5};

static void phases_go_forward_and_back_only_to_accumulate(void **state) {
    (void)state;
    sthi_phases p;
    sthi_phases_init(&p);
    for (int phase = 0; phase < STH_PHASES; phase++) assert_false(sthi_phases_may(&p, phase)); /* no step is open */
    static const char *const may[STH_PHASES] = {
        [STH_PHASE_STEP_BEGIN] = "FBOE", [STH_PHASE_FORWARD] = "FBOE", [STH_PHASE_BACKWARD] = "FBOE",
        [STH_PHASE_OPTIMIZER] = "OE", [STH_PHASE_STEP_END] = ""};
    static const char letters[] = "SFBOE";
    for (int from = 0; from < STH_PHASES; from++)
        for (int to = 0; to < STH_PHASES; to++) {
            sthi_phases_begin(&p, 1, 0);
            if (from) sthi_phases_enter(&p, from, 0);
            assert_int_equal(sthi_phases_may(&p, to), strchr(may[from], letters[to]) != NULL);
            assert_false(sthi_phases_may(&p, STH_PHASES)); /* which is none */
        }
    assert_string_equal(sthi_phase_name(STH_PHASES), "NONE");
}

static void time_is_added_up_for_each_phase(void **state) {
    (void)state;
    sthi_phases p;
    sthi_phases_init(&p);
    sthi_phases_begin(&p, 7, 100);
    static const sth_phase order[] = {STH_PHASE_FORWARD, STH_PHASE_BACKWARD, STH_PHASE_FORWARD, STH_PHASE_BACKWARD,
                                      STH_PHASE_OPTIMIZER, STH_PHASE_STEP_END};
    static const int64_t at[] = {110, 130, 170, 190, 290, 291};
    for (int i = 0; i < 6; i++) sthi_phases_enter(&p, order[i], at[i]);
    assert_int_equal(p.spent_ns[STH_PHASE_FORWARD], 20 + 20);
    assert_int_equal(p.spent_ns[STH_PHASE_BACKWARD], 40 + 100);
    assert_int_equal(p.spent_ns[STH_PHASE_OPTIMIZER], 1);
    assert_int_equal(p.step, 7);
}

static sth_denial take(sthi_tokens *t, sth_direction d, sth_priority priority, sth_token *out) {
    return sthi_tokens_acquire(t, &open_hints, 3, d, priority, out);
}

static void directions_have_slots_of_their_own(void **state) {
    (void)state;
    sthi_tokens t;
    sth_token a, b, c;
    sthi_tokens_init(&t, 2, 1);
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_SPECULATIVE, &a), STH_DENIAL_NONE);
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, &b), STH_DENIAL_NONE);
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_CRITICAL, &c), STH_DENIAL_H2D_SLOTS_EXHAUSTED);
    assert_int_equal(c, 0);
    assert_false(sthi_tokens_busy(&t));
    assert_int_equal(take(&t, STH_DIRECTION_D2H, STH_PRIORITY_REQUIRED, &c), STH_DENIAL_NONE);
    assert_true(sthi_tokens_busy(&t));
    assert_int_equal(take(&t, STH_DIRECTION_D2H, STH_PRIORITY_REQUIRED, &c), STH_DENIAL_D2H_SLOTS_EXHAUSTED);
    assert_true(sthi_tokens_release(&t, a));
    assert_false(sthi_tokens_release(&t, a)); /* again is nothing */
    assert_int_equal(t.used[STH_DIRECTION_H2D], 1);
    sth_token again;
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, &again), STH_DENIAL_NONE);
    assert_true(again != a && !sthi_tokens_release(&t, a)); /* an old token is not the new one */
    sthi_tokens_release_owner(&t, 3);
    assert_int_equal(t.used[STH_DIRECTION_H2D] + t.used[STH_DIRECTION_D2H], 0);
}

static void the_last_slot_of_several_is_not_for_background(void **state) {
    (void)state;
    sthi_tokens t;
    sth_token token;
    sthi_tokens_init(&t, 2, 1);
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_BACKGROUND, &token), STH_DENIAL_NONE);
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_BACKGROUND, &token), STH_DENIAL_PRIORITY_TOO_LOW);
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_SPECULATIVE, &token), STH_DENIAL_NONE);
    assert_int_equal(take(&t, STH_DIRECTION_D2H, STH_PRIORITY_BACKGROUND, &token), STH_DENIAL_NONE);
}

static void hints_narrow_the_slots(void **state) {
    (void)state;
    sthi_tokens t;
    sth_token token;
    sth_hints hints = {.max_inflight_h2d = 1, .max_inflight_d2h = 0, .suppress_speculative = true};
    sthi_tokens_init(&t, 4, 4);
    assert_int_equal(sthi_tokens_acquire(&t, &hints, 0, STH_DIRECTION_H2D, STH_PRIORITY_SPECULATIVE, &token),
                     STH_DENIAL_PHASE_RULE_SUPPRESSED_SPECULATIVE);
    assert_int_equal(sthi_tokens_acquire(&t, &hints, 0, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, &token),
                     STH_DENIAL_NONE);
    assert_int_equal(sthi_tokens_acquire(&t, &hints, 0, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, &token),
                     STH_DENIAL_H2D_SLOTS_EXHAUSTED);
    assert_int_equal(sthi_tokens_acquire(&t, &hints, 0, STH_DIRECTION_D2H, STH_PRIORITY_REQUIRED, &token),
                     STH_DENIAL_D2H_SLOTS_EXHAUSTED);
}

static void every_token_of_the_table_is_one_of_its_own(void **state) {
    (void)state;
    enum { ALL = 2 * STHI_TOKENS };
    static const sth_hints wide = {.max_inflight_h2d = ALL, .max_inflight_d2h = ALL};
    static sth_token held[ALL];
    sthi_tokens *t = malloc(sizeof *t); /* on the heap, where a step beyond it is seen */
    sth_direction way;
    assert_non_null(t);
    sthi_tokens_init(t, ALL, ALL);
    for (uint32_t i = 0; i < ALL; i++) {
        way = i % 2 ? STH_DIRECTION_D2H : STH_DIRECTION_H2D;
        assert_int_equal(sthi_tokens_acquire(t, &wide, i % 3, way, STH_PRIORITY_REQUIRED, &held[i]), STH_DENIAL_NONE);
        assert_true(held[i] >> 32 != 0); /* 0 is no token */
    }
    sth_token more = 7;
    assert_int_equal(sthi_tokens_acquire(t, &wide, 0, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, &more),
                     STH_DENIAL_TABLE_FULL);
    assert_int_equal(more, 0);
    sthi_tokens_release_owner(t, 1);
    for (uint32_t i = 0; i < ALL; i++) {
        way = STH_DIRECTIONS;
        assert_int_equal(sthi_tokens_alive(t, held[i], &way), i % 3 != 1);
        assert_int_equal(way, i % 3 == 1 ? STH_DIRECTIONS : i % 2 ? STH_DIRECTION_D2H : STH_DIRECTION_H2D);
    }
    assert_false(sthi_tokens_release(t, (uint64_t)1 << 32 | ALL)); /* beyond the table */
    for (uint32_t i = 0; i < ALL; i++) assert_int_equal(sthi_tokens_release(t, held[i]), i % 3 != 1);
    assert_int_equal(t->used[STH_DIRECTION_H2D] + t->used[STH_DIRECTION_D2H], 0);
    free(t);
}

static void a_generation_never_becomes_0(void **state) {
    (void)state;
    sthi_tokens t;
    sth_token token;
    sthi_tokens_init(&t, 1, 1);
    t.table[0].generation = UINT32_MAX;
    assert_int_equal(take(&t, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, &token), STH_DENIAL_NONE);
    assert_true(sthi_tokens_release(&t, token));
    assert_true(t.table[0].generation != 0 && t.table[0].generation != UINT32_MAX);
}

static void the_rate_follows_measurements(void **state) {
    (void)state;
    sthi_tokens t;
    sthi_tokens_init(&t, 1, 1);
    sthi_tokens_measured(&t, STH_DIRECTION_H2D, 1000, 1e9);
    assert_near(t.rate[STH_DIRECTION_H2D], 1000);
    sthi_tokens_measured(&t, STH_DIRECTION_H2D, 2000, 1e9);
    assert_near(t.rate[STH_DIRECTION_H2D], 1200);
    sthi_tokens_measured(&t, STH_DIRECTION_H2D, 5, 0); /* a clock that stood still says nothing */
    assert_near(t.rate[STH_DIRECTION_H2D], 1200);
    assert_near(t.rate[STH_DIRECTION_D2H], 0);
    sthi_tokens_measured(&t, STH_DIRECTION_H2D, 0, 1e9); /* nor do no bytes */
    assert_near(t.rate[STH_DIRECTION_H2D], 1200);
    sthi_tokens_init(&t, 1, 1);
    sthi_tokens_measured(&t, STH_DIRECTION_D2H, 1, 1); /* the shortest time there is */
    assert_near(t.rate[STH_DIRECTION_D2H], 1e9);
    sthi_tokens_init(&t, 1, 1);
    sthi_tokens_measured(&t, STH_DIRECTION_D2H, 1, 2e9); /* half a byte a second is a rate like any other */
    sthi_tokens_measured(&t, STH_DIRECTION_D2H, 3, 2e9);
    assert_near(t.rate[STH_DIRECTION_D2H], 0.7);
}

static void rule_1_backward_above_80_percent(void **state) {
    (void)state;
    sthi_policy p;
    sthi_policy_init(&p, open_hints);
    sthi_policy_phase(&p, STH_PHASE_BACKWARD, 80, 100);
    assert_false(p.now.suppress_speculative);
    sthi_policy_phase(&p, STH_PHASE_FORWARD, 100, 100);
    assert_false(p.now.suppress_speculative);
    sthi_policy_phase(&p, STH_PHASE_BACKWARD, 81, 100);
    assert_true(p.now.suppress_speculative);
    assert_int_equal(p.now.prefetch_window_cap, 1);
    assert_int_equal(p.now.max_inflight_h2d, 9);
}

static void rule_2_optimizer(void **state) {
    (void)state;
    sthi_policy p;
    sthi_policy_init(&p, open_hints);
    sthi_policy_phase(&p, STH_PHASE_OPTIMIZER, 0, 100);
    assert_true(p.now.suppress_speculative);
    assert_int_equal(p.now.max_inflight_h2d, 1);
    assert_int_equal(p.now.prefetch_window_cap, 5);
    sthi_policy_phase(&p, STH_PHASE_STEP_END, 0, 100);
    assert_true(p.now.suppress_speculative); /* until the next step */
    sthi_policy_step(&p);
    assert_false(p.now.suppress_speculative);
    assert_int_equal(p.now.max_inflight_h2d, 9);
}

static void rule_3_slots_that_stay_busy(void **state) {
    (void)state;
    sthi_policy p;
    sthi_policy_init(&p, open_hints);
    for (int i = 0; i < 3; i++) sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 5);
    sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 4);
    sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 3);
    sthi_policy_check(&p, false); /* one free slot: counted anew, nothing grows */
    for (int i = 0; i < 3; i++) sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 3);
    for (int i = 0; i < 9; i++) sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 1);
    sthi_policy_step(&p); /* counts anew */
    for (int i = 0; i < 3; i++) sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 5);
    sthi_policy_check(&p, true);
    assert_int_equal(p.now.prefetch_window_cap, 4);
}

static void the_ring_keeps_the_newest(void **state) {
    (void)state;
    static sthi_trace_ring ring;
    sth_conductor_event event;
    assert_false(sthi_trace_take(&ring, &event));
    for (uint64_t i = 0; i < STHI_EVENTS + 3; i++) sthi_trace_put(&ring, (sth_conductor_event){.a = i});
    for (uint64_t i = 3; i < STHI_EVENTS + 3; i++) {
        assert_true(sthi_trace_take(&ring, &event));
        assert_int_equal(event.a, i);
    }
    assert_false(sthi_trace_take(&ring, &event));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(phases_go_forward_and_back_only_to_accumulate),
        cmocka_unit_test(time_is_added_up_for_each_phase),
        cmocka_unit_test(directions_have_slots_of_their_own),
        cmocka_unit_test(the_last_slot_of_several_is_not_for_background),
        cmocka_unit_test(hints_narrow_the_slots),
        cmocka_unit_test(every_token_of_the_table_is_one_of_its_own),
        cmocka_unit_test(a_generation_never_becomes_0),
        cmocka_unit_test(the_rate_follows_measurements),
        cmocka_unit_test(rule_1_backward_above_80_percent),
        cmocka_unit_test(rule_2_optimizer),
        cmocka_unit_test(rule_3_slots_that_stay_busy),
        cmocka_unit_test(the_ring_keeps_the_newest),
    };
    return cmocka_run_group_tests_name("conductor/pure", tests, NULL, NULL);
}
