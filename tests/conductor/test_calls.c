/* The calls of stagehand/conductor.h: what they refuse and in which words, owners, phases and reservations together,
 * shutting down, a fork. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stagehand/conductor.h"
#include "support/check.h"

static sth_conductor *c;
static uint32_t weights, activations;

static int set_up(void **state) {
    (void)state;
    sth_conductor_options o;
    sth_conductor_options_init(&o);
    o.soft_cap = 100, o.hard_cap = 120;
    o.event_trace = true;
    assert_ok(sth_conductor_create(&o, &c));
    assert_ok(sth_conductor_register(c, "weights", &weights));
    assert_ok(sth_conductor_register(c, "activations", &activations));
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    sth_conductor_destroy(c);
    return 0;
}

static sth_grant ask(uint32_t owner, uint64_t bytes, sth_reserve_mode mode, sth_priority priority, sth_phase scope) {
    sth_grant g;
    assert_ok(sth_conductor_reserve(c, owner, STH_RESOURCE_VRAM, bytes, mode, priority, scope, &g));
    return g;
}

static void bad_options_are_named(void **state) {
    (void)state;
    static const struct {
        const char *name;
        sth_conductor_options o;
    } cases[] = {
        {"soft_cap", {.hard_cap = 1, .h2d_slots = 1, .d2h_slots = 1, .piece_bytes = 1 << 20}},
        {"hard_cap", {.soft_cap = 2, .hard_cap = 1, .h2d_slots = 1, .d2h_slots = 1, .piece_bytes = 1 << 20}},
        {"h2d_slots", {.soft_cap = 2, .hard_cap = 2, .d2h_slots = 1, .piece_bytes = 1 << 20}},
        {"d2h_slots", {.soft_cap = 2, .hard_cap = 2, .h2d_slots = 1, .d2h_slots = 257, .piece_bytes = 1 << 20}},
        {"piece_bytes", {.soft_cap = 2, .hard_cap = 2, .h2d_slots = 1, .d2h_slots = 1, .piece_bytes = 100}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sth_conductor *none;
        sth_conductor_options o = cases[i].o;
        o.size = sizeof o;
        assert_status(sth_conductor_create(&o, &none), STH_INVALID_ARGUMENT);
        assert_string_equal(sth_last_error()->object, cases[i].name);
    }
}

static void names_of_owners_are_their_own(void **state) {
    (void)state;
    uint32_t again;
    assert_status(sth_conductor_register(c, "weights", &again), STH_INVALID_STATE);
    assert_non_null(strstr(sth_last_error()->message, "weights"));
    assert_ok(sth_conductor_unregister(c, weights));
    assert_ok(sth_conductor_unregister(c, weights));
    assert_ok(sth_conductor_register(c, "weights", &again));
    assert_int_equal(ask(63, 10, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, STH_PHASE_NONE).reason,
                     STH_DENIAL_NOT_REGISTERED);
    for (int i = 2; i < 64; i++) {
        char name[16] = {(char)('a' + i / 26), (char)('a' + i % 26), 0};
        assert_ok(sth_conductor_register(c, name, &again));
    }
    assert_status(sth_conductor_register(c, "one more", &again), STH_OUT_OF_HOST_MEMORY);
}

static void an_owner_that_leaves_leaves_nothing(void **state) {
    (void)state;
    sth_token token;
    sth_denial why;
    sth_conductor_stats stats;
    ask(weights, 100, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, STH_PHASE_NONE);
    assert_ok(sth_conductor_acquire(c, weights, STH_DIRECTION_H2D, 1, STH_PRIORITY_REQUIRED, 0, &token, &why));
    assert_int_not_equal(token, 0);
    assert_ok(sth_conductor_unregister(c, weights));
    assert_ok(sth_conductor_stats_get(c, &stats));
    assert_true(stats.vram_granted == 0 && stats.h2d_inflight == 0);
    assert_ok(sth_conductor_release_token(c, token));
    assert_status(sth_conductor_complete(c, token, 1, 1.0), STH_STALE);
}

static void phases_say_what_is_wrong(void **state) {
    (void)state;
    bool changed = true;
    assert_status(sth_conductor_enter(c, STH_PHASE_FORWARD, &changed), STH_INVALID_STATE);
    assert_non_null(strstr(sth_last_error()->message, "no step is open"));
    assert_status(sth_conductor_end_step(c), STH_INVALID_STATE);
    assert_ok(sth_conductor_begin_step(c, 3));
    assert_ok(sth_conductor_enter(c, STH_PHASE_OPTIMIZER, &changed));
    assert_true(changed);
    assert_ok(sth_conductor_enter(c, STH_PHASE_OPTIMIZER, &changed));
    assert_false(changed);
    assert_status(sth_conductor_enter(c, STH_PHASE_BACKWARD, NULL), STH_INVALID_STATE);
    assert_non_null(strstr(sth_last_error()->message, "OPTIMIZER cannot enter BACKWARD"));
    assert_status(sth_conductor_enter(c, STH_PHASE_STEP_END, NULL), STH_INVALID_ARGUMENT);
    assert_ok(sth_conductor_begin_step(c, 4)); /* the one before was left open */
    assert_int_equal(sth_conductor_phase(c), STH_PHASE_STEP_BEGIN);
    assert_ok(sth_conductor_end_step(c));
    assert_int_equal(sth_conductor_phase(c), STH_PHASE_STEP_END);
}

static void what_the_optimizer_needs_comes_from_speculation_and_goes_back(void **state) {
    (void)state;
    assert_ok(sth_conductor_begin_step(c, 1));
    ask(weights, 50, STH_RESERVE_HARD, STH_PRIORITY_CRITICAL, STH_PHASE_NONE);
    uint64_t soft = ask(activations, 70, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE, STH_PHASE_NONE).id;
    assert_int_equal(sth_conductor_granted(c, soft), 50);
    assert_ok(sth_conductor_enter(c, STH_PHASE_OPTIMIZER, NULL));
    sth_grant optimizer = ask(weights, 30, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, STH_PHASE_OPTIMIZER);
    assert_int_equal(optimizer.status, STH_GRANT_GRANTED);
    uint64_t id, left;
    assert_ok(sth_conductor_changed(c, &id, &left));
    assert_true(id == soft && left == 20);
    assert_ok(sth_conductor_end_step(c));
    assert_int_equal(sth_conductor_granted(c, optimizer.id), 0);
    assert_int_equal(sth_conductor_granted(c, soft), 20);
    assert_ok(sth_conductor_begin_step(c, 2));
    assert_int_equal(sth_conductor_granted(c, soft), 50);
    sth_conductor_stats stats;
    assert_ok(sth_conductor_stats_get(c, &stats));
    assert_true(stats.step == 2 && stats.grants == 0 && stats.vram_granted == 100 && stats.vram_headroom == 0);
}

static void pressure_in_backward_gives_hints(void **state) {
    (void)state;
    sth_hints hints;
    assert_ok(sth_conductor_set_window(c, 6));
    assert_ok(sth_conductor_set_allocated(c, 90));
    assert_ok(sth_conductor_begin_step(c, 1));
    assert_ok(sth_conductor_enter(c, STH_PHASE_FORWARD, NULL));
    assert_ok(sth_conductor_hints_get(c, &hints));
    assert_true(hints.prefetch_window_cap == 6 && !hints.suppress_speculative);
    assert_ok(sth_conductor_enter(c, STH_PHASE_BACKWARD, NULL));
    assert_ok(sth_conductor_set_window(c, 9)); /* from the next step on */
    assert_ok(sth_conductor_hints_get(c, &hints));
    assert_true(hints.prefetch_window_cap == 1 && hints.suppress_speculative);
    assert_ok(sth_conductor_begin_step(c, 2));
    assert_ok(sth_conductor_hints_get(c, &hints));
    assert_true(hints.prefetch_window_cap == 9 && !hints.suppress_speculative);
}

static void everything_is_denied_after_the_end(void **state) {
    (void)state;
    sth_token token;
    sth_denial why;
    assert_ok(sth_conductor_shutdown(c));
    assert_ok(sth_conductor_shutdown(c));
    assert_int_equal(ask(weights, 1, STH_RESERVE_SOFT, STH_PRIORITY_CRITICAL, STH_PHASE_NONE).reason,
                     STH_DENIAL_SHUT_DOWN);
    assert_ok(sth_conductor_acquire(c, weights, STH_DIRECTION_D2H, 1, STH_PRIORITY_CRITICAL, 0, &token, &why));
    assert_true(token == 0 && why == STH_DENIAL_SHUT_DOWN);
    assert_status(sth_conductor_begin_step(c, 1), STH_SHUT_DOWN);
    assert_int_equal(sth_conductor_headroom(c, STH_RESOURCE_VRAM, true), 0);
}

static void events_tell_the_story(void **state) {
    (void)state;
    sth_conductor_event e;
    ask(weights, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, STH_PHASE_NONE);
    ask(weights, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, STH_PHASE_NONE);
    assert_ok(sth_conductor_begin_step(c, 8));
    assert_ok(sth_conductor_event_next(c, &e));
    assert_true(e.kind == STH_CONDUCTOR_GRANT && e.b == 60 && e.c == weights && e.ns > 0);
    assert_ok(sth_conductor_event_next(c, &e));
    assert_true(e.kind == STH_CONDUCTOR_DENY && e.a == STH_DENIAL_VRAM_SOFT_CAP);
    assert_ok(sth_conductor_event_next(c, &e));
    assert_true(e.kind == STH_CONDUCTOR_PHASE && e.a == STH_PHASE_STEP_BEGIN && e.b == 8);
    assert_status(sth_conductor_event_next(c, &e), STH_NOT_FOUND);
}

static void a_forked_child_is_refused(void **state) {
    (void)state;
    pid_t child = fork();
    if (child == 0) _exit(sth_conductor_begin_step(c, 1) == STH_INVALID_STATE ? 0 : 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void no_conductor_grants_all(void **state) {
    (void)state;
    sth_grant g;
    assert_ok(sth_conductor_reserve(NULL, 0, STH_RESOURCE_VRAM, UINT64_C(1) << 50, STH_RESERVE_HARD,
                                    STH_PRIORITY_BACKGROUND, STH_PHASE_NONE, &g));
    assert_true(g.status == STH_GRANT_GRANTED && g.granted_bytes == UINT64_C(1) << 50);
    assert_status(sth_conductor_reserve(c, weights, STH_RESOURCE_VRAM, 0, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED,
                                        STH_PHASE_NONE, &g), STH_INVALID_ARGUMENT);
    assert_status(sth_runtime_set_conductor(NULL, c), STH_INVALID_ARGUMENT);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(bad_options_are_named),
        CASE(names_of_owners_are_their_own),
        CASE(an_owner_that_leaves_leaves_nothing),
        CASE(phases_say_what_is_wrong),
        CASE(what_the_optimizer_needs_comes_from_speculation_and_goes_back),
        CASE(pressure_in_backward_gives_hints),
        CASE(everything_is_denied_after_the_end),
        CASE(events_tell_the_story),
        CASE(a_forked_child_is_refused),
        CASE(no_conductor_grants_all),
    };
    return cmocka_run_group_tests_name("conductor/calls", tests, NULL, NULL);
}
