/* Reservations: each mode against its cap, who gives way to whom, floors, ceilings, scopes. Sizes are small numbers:
 * the soft cap is 100, the hard one 120. */
#include "conductor/budget.h"

#include "support/check.h"

enum { A, B, C };
static sthi_budget budget;

static int fresh(void **state) {
    (void)state;
    sthi_budget_init(&budget, 100, 120, 50);
    return 0;
}

static sth_grant ask(uint32_t owner, uint64_t bytes, sth_reserve_mode mode, sth_priority priority) {
    return sthi_budget_reserve(&budget, owner, STH_RESOURCE_VRAM, bytes, mode, priority, STH_PHASE_NONE);
}

#define assert_grant(grant, want_status, want_bytes, want_reason)      \
    do {                                                               \
        sth_grant grant_ = (grant);                                    \
        assert_int_equal(grant_.status, want_status);                  \
        assert_int_equal(grant_.granted_bytes, want_bytes);            \
        assert_int_equal(grant_.reason, want_reason);                  \
    } while (0)

static void hard_is_all_or_nothing_below_the_soft_cap(void **state) {
    (void)state;
    assert_grant(ask(A, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 60, STH_DENIAL_NONE);
    assert_grant(ask(B, 41, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_grant(ask(B, 40, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 40, STH_DENIAL_NONE);
    assert_int_equal(sthi_budget_headroom(&budget, STH_RESOURCE_VRAM, false), 0);
    assert_int_equal(sthi_budget_headroom(&budget, STH_RESOURCE_VRAM, true), 20);
}

static void soft_takes_what_there_is(void **state) {
    (void)state;
    ask(A, 70, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    assert_grant(ask(B, 50, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED), STH_GRANT_PARTIAL, 30, STH_DENIAL_VRAM_SOFT_CAP);
    sth_grant none = ask(B, 1, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED);
    assert_grant(none, STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_equal(none.id, 0);
}

static void burst_and_critical_reach_the_hard_cap_and_no_further(void **state) {
    (void)state;
    ask(A, 100, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    assert_grant(ask(B, 21, STH_RESERVE_BURST, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_HARD_CAP);
    assert_grant(ask(B, 10, STH_RESERVE_BURST, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 10, STH_DENIAL_NONE);
    assert_grant(ask(C, 10, STH_RESERVE_HARD, STH_PRIORITY_CRITICAL), STH_GRANT_GRANTED, 10, STH_DENIAL_NONE);
    assert_grant(ask(C, 1, STH_RESERVE_SOFT, STH_PRIORITY_CRITICAL), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_HARD_CAP);
}

static void speculative_grants_shrink_first_the_weakest_and_newest(void **state) {
    (void)state;
    uint64_t kept = ask(A, 30, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED).id;
    uint64_t old = ask(A, 30, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    uint64_t new = ask(B, 20, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    uint64_t weak = ask(B, 20, STH_RESERVE_SOFT, STH_PRIORITY_BACKGROUND).id;
    assert_grant(ask(C, 45, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 45, STH_DENIAL_NONE);
    assert_int_equal(sthi_budget_granted(&budget, weak), 0);
    assert_int_equal(sthi_budget_granted(&budget, new), 0);
    assert_int_equal(sthi_budget_granted(&budget, old), 25);
    assert_int_equal(sthi_budget_granted(&budget, kept), 30);
    uint64_t id, left;
    int told = 0;
    while (sthi_budget_changed(&budget, &id, &left)) {
        assert_int_equal(left, sthi_budget_granted(&budget, id));
        told++;
    }
    assert_int_equal(told, 3);
}

static void nothing_shrinks_for_a_request_that_is_denied_all_the_same(void **state) {
    (void)state;
    ask(A, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    uint64_t soft = ask(B, 40, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_grant(ask(C, 41, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_equal(sthi_budget_granted(&budget, soft), 40);
}

static void equals_do_not_shrink_each_other(void **state) {
    (void)state;
    uint64_t first = ask(A, 100, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_grant(ask(B, 10, STH_RESERVE_HARD, STH_PRIORITY_SPECULATIVE), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_equal(sthi_budget_granted(&budget, first), 100);
}

static void a_floor_is_used_up_by_its_owner_and_by_nobody_else(void **state) {
    (void)state;
    ask(A, 40, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED);
    assert_grant(ask(B, 61, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_grant(ask(B, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 60, STH_DENIAL_NONE);
    assert_grant(ask(A, 40, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 40, STH_DENIAL_NONE);
    assert_int_equal(sthi_budget_committed(&budget, STH_RESOURCE_VRAM), 100);
}

static void an_owner_does_not_shrink_below_its_floor(void **state) {
    (void)state;
    ask(A, 30, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED);
    uint64_t soft = ask(A, 100, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_grant(ask(B, 71, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_grant(ask(B, 70, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 70, STH_DENIAL_NONE);
    assert_int_equal(sthi_budget_granted(&budget, soft), 30);
}

static void a_floor_that_was_denied_keeps_speculation_out_and_is_granted_when_there_is_room(void **state) {
    (void)state;
    uint64_t held = ask(A, 70, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    sth_grant wanted = ask(B, 50, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED);
    assert_grant(wanted, STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_not_equal(wanted.id, 0);
    assert_grant(ask(C, 10, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_grant(ask(C, 10, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 10, STH_DENIAL_NONE);
    sthi_budget_release(&budget, held);
    sthi_budget_grow_back(&budget);
    assert_int_equal(sthi_budget_granted(&budget, wanted.id), 50);
}

static void a_ceiling_clips_soft_requests_and_denies_others(void **state) {
    (void)state;
    assert_grant(ask(A, 25, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 25, STH_DENIAL_NONE);
    assert_int_equal(sthi_budget_committed(&budget, STH_RESOURCE_VRAM), 0);
    assert_grant(ask(A, 26, STH_RESERVE_HARD, STH_PRIORITY_CRITICAL), STH_GRANT_DENIED, 0, STH_DENIAL_OWNER_CEILING);
    assert_grant(ask(A, 20, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 20, STH_DENIAL_NONE);
    assert_grant(ask(A, 20, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED), STH_GRANT_PARTIAL, 5, STH_DENIAL_OWNER_CEILING);
    assert_grant(ask(B, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 60, STH_DENIAL_NONE);
}

static void what_nobody_reserved_pushes_speculation_out(void **state) {
    (void)state;
    ask(A, 50, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    uint64_t soft = ask(B, 50, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    sthi_budget_set_unmanaged(&budget, 30);
    assert_int_equal(sthi_budget_granted(&budget, soft), 20);
    sthi_budget_set_unmanaged(&budget, 200);
    assert_int_equal(sthi_budget_granted(&budget, soft), 0);
    sthi_budget_set_unmanaged(&budget, 10);
    assert_int_equal(sthi_budget_granted(&budget, soft), 0); /* not within a step */
    sthi_budget_grow_back(&budget);
    assert_int_equal(sthi_budget_granted(&budget, soft), 40);
}

static void a_scope_ends_with_its_phase(void **state) {
    (void)state;
    uint64_t scoped = sthi_budget_reserve(&budget, A, STH_RESOURCE_VRAM, 90, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED,
                                          STH_PHASE_OPTIMIZER).id;
    sthi_budget_phase_ended(&budget, STH_PHASE_BACKWARD);
    assert_int_equal(sthi_budget_granted(&budget, scoped), 90);
    sthi_budget_phase_ended(&budget, STH_PHASE_OPTIMIZER);
    assert_int_equal(sthi_budget_granted(&budget, scoped), 0);
    uint64_t id, left;
    assert_true(sthi_budget_changed(&budget, &id, &left));
    assert_true(id == scoped && left == 0);
    assert_int_equal(sthi_budget_release(&budget, scoped), 0);
}

static void pinned_memory_has_a_cap_of_its_own(void **state) {
    (void)state;
    ask(A, 100, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    assert_grant(sthi_budget_reserve(&budget, A, STH_RESOURCE_PINNED, 51, STH_RESERVE_BURST, STH_PRIORITY_CRITICAL,
                                     STH_PHASE_NONE),
                 STH_GRANT_DENIED, 0, STH_DENIAL_PINNED_CAP);
    assert_grant(sthi_budget_reserve(&budget, A, STH_RESOURCE_PINNED, 50, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED,
                                     STH_PHASE_NONE),
                 STH_GRANT_GRANTED, 50, STH_DENIAL_NONE);
    sthi_budget_init(&budget, 100, 120, 0); /* none */
    assert_int_equal(sthi_budget_reserve(&budget, A, STH_RESOURCE_PINNED, UINT64_C(1) << 40, STH_RESERVE_HARD,
                                         STH_PRIORITY_BACKGROUND, STH_PHASE_NONE).status, STH_GRANT_GRANTED);
}

static void a_full_table_is_a_reason(void **state) {
    (void)state;
    for (int i = 0; i < STHI_RESERVATIONS; i++)
        assert_int_equal(ask(A, 1, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED).status, STH_GRANT_GRANTED);
    assert_grant(ask(B, 1, STH_RESERVE_HARD, STH_PRIORITY_CRITICAL), STH_GRANT_DENIED, 0, STH_DENIAL_TABLE_FULL);
    sthi_budget_release_owner(&budget, A);
    assert_grant(ask(B, 1, STH_RESERVE_HARD, STH_PRIORITY_CRITICAL), STH_GRANT_GRANTED, 1, STH_DENIAL_NONE);
}

#define CASE(name) cmocka_unit_test_setup(name, fresh)
int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(hard_is_all_or_nothing_below_the_soft_cap),
        CASE(soft_takes_what_there_is),
        CASE(burst_and_critical_reach_the_hard_cap_and_no_further),
        CASE(speculative_grants_shrink_first_the_weakest_and_newest),
        CASE(nothing_shrinks_for_a_request_that_is_denied_all_the_same),
        CASE(equals_do_not_shrink_each_other),
        CASE(a_floor_is_used_up_by_its_owner_and_by_nobody_else),
        CASE(an_owner_does_not_shrink_below_its_floor),
        CASE(a_floor_that_was_denied_keeps_speculation_out_and_is_granted_when_there_is_room),
        CASE(a_ceiling_clips_soft_requests_and_denies_others),
        CASE(what_nobody_reserved_pushes_speculation_out),
        CASE(a_scope_ends_with_its_phase),
        CASE(pinned_memory_has_a_cap_of_its_own),
        CASE(a_full_table_is_a_reason),
    };
    return cmocka_run_group_tests_name("conductor/budget", tests, NULL, NULL);
}
