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
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 30);
    assert_int_equal(sthi_budget_granted(&budget, soft), 20);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 200);
    assert_int_equal(sthi_budget_granted(&budget, soft), 0);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 10);
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

static void pinned_memory_in_use_counts_against_its_cap(void **state) {
    (void)state;
    sth_grant soft = sthi_budget_reserve(&budget, A, STH_RESOURCE_PINNED, 40, STH_RESERVE_SOFT,
                                         STH_PRIORITY_SPECULATIVE, STH_PHASE_NONE);
    uint64_t vram = sthi_budget_headroom(&budget, STH_RESOURCE_VRAM, false);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_PINNED, 20);
    assert_int_equal(sthi_budget_granted(&budget, soft.id), 30); /* speculation gives way: the cap is 50 */
    assert_int_equal(sthi_budget_headroom(&budget, STH_RESOURCE_PINNED, true), 0);
    assert_int_equal(sthi_budget_headroom(&budget, STH_RESOURCE_VRAM, false), vram);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_PINNED, 97);
    assert_int_equal(sthi_budget_granted(&budget, soft.id), 0);
    assert_grant(sthi_budget_reserve(&budget, B, STH_RESOURCE_PINNED, 1, STH_RESERVE_BURST, STH_PRIORITY_CRITICAL,
                                     STH_PHASE_NONE),
                 STH_GRANT_DENIED, 0, STH_DENIAL_PINNED_CAP);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_PINNED, 0);
    sthi_budget_grow_back(&budget);
    assert_int_equal(sthi_budget_granted(&budget, soft.id), 40);
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

static uint64_t granted(uint64_t id) { return sthi_budget_granted(&budget, id); }

/* How many reservations have news; asks until there are none. */
static int news(void) {
    uint64_t id = 7, left = 7;
    int told = 0;
    for (; sthi_budget_changed(&budget, &id, &left); told++) assert_int_equal(left, granted(id));
    assert_true(id == 0 && left == 0);
    return told;
}

static void the_first_entry_of_the_table_is_one_like_any_other(void **state) {
    (void)state;
    uint64_t soft = ask(B, 100, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    uint64_t hard = ask(C, 10, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    assert_true(granted(soft) == 90 && granted(hard) == 10 && budget.shrinks == 1);
    assert_int_equal(news(), 1);
    sthi_budget_grow_back(&budget);
    assert_int_equal(news(), 0); /* there was no room */
    sthi_budget_release(&budget, hard);
    sthi_budget_grow_back(&budget);
    assert_int_equal(granted(soft), 100);
    assert_int_equal(news(), 1);
    ask(A, 5, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    sthi_budget_release_owner(&budget, B);
    assert_true(granted(soft) == 0 && sthi_budget_committed(&budget, STH_RESOURCE_VRAM) == 5); /* A's stays */
}

static void only_as_much_as_is_needed_gives_way(void **state) {
    (void)state;
    ask(A, 30, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    uint64_t soft = ask(B, 50, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_grant(ask(C, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_GRANTED, 60, STH_DENIAL_NONE);
    assert_int_equal(granted(soft), 10);
}

/* Entries that were given back are used again: the newest may stand first. */
static void of_equals_the_newest_gives_way_wherever_it_stands(void **state) {
    (void)state;
    uint64_t first = ask(A, 10, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    uint64_t old = ask(A, 40, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    sthi_budget_release(&budget, first);
    uint64_t new = ask(B, 40, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    ask(C, 40, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    assert_true(granted(new) == 20 && granted(old) == 40);
}

static void what_is_not_speculative_is_not_counted_on(void **state) {
    (void)state;
    ask(B, 30, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    uint64_t soft = ask(B, 30, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_grant(ask(C, 80, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_equal(granted(soft), 30);
}

static void a_soft_request_does_not_push_others_below_their_floor(void **state) {
    (void)state;
    ask(A, 30, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED);
    uint64_t soft = ask(A, 100, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_grant(ask(B, 90, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED), STH_GRANT_PARTIAL, 70, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_equal(granted(soft), 30);
    assert_grant(ask(C, 5, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    assert_int_equal(granted(soft), 30); /* which is all that its owner has of it */
}

static void speculation_leaves_out_what_floors_still_want_and_nothing_else(void **state) {
    (void)state;
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 70);
    ask(A, 50, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED); /* not granted; the first of the table */
    assert_grant(ask(C, 10, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE), STH_GRANT_DENIED, 0, STH_DENIAL_VRAM_SOFT_CAP);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 0);
    uint64_t soft = ask(C, 100, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    assert_int_equal(granted(soft), 50);
    sthi_budget_release(&budget, soft);
    sthi_budget_grow_back(&budget); /* now it is granted, and wants no more */
    assert_grant(ask(C, 100, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE), STH_GRANT_PARTIAL, 50,
                 STH_DENIAL_VRAM_SOFT_CAP);
    sthi_budget_init(&budget, 100, 120, 50);
    uint64_t held = ask(A, 60, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    ask(B, 60, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED); /* 20 less than it wants, and no floor */
    sthi_budget_release(&budget, held);
    assert_grant(ask(C, 60, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE), STH_GRANT_GRANTED, 60, STH_DENIAL_NONE);
}

static void a_ceiling_may_be_reached_and_the_reason_is_what_bound(void **state) {
    (void)state;
    ask(A, 25, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED);
    sth_grant all = ask(A, 25, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    assert_grant(all, STH_GRANT_GRANTED, 25, STH_DENIAL_NONE);
    sthi_budget_release(&budget, all.id);
    uint64_t held = ask(B, 75, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    sth_grant part = ask(A, 30, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED); /* the room is the ceiling's */
    assert_grant(part, STH_GRANT_PARTIAL, 25, STH_DENIAL_OWNER_CEILING);
    sthi_budget_release(&budget, part.id);
    sthi_budget_release(&budget, held);
    ask(B, 90, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    assert_grant(ask(A, 30, STH_RESERVE_SOFT, STH_PRIORITY_REQUIRED), STH_GRANT_PARTIAL, 10, STH_DENIAL_VRAM_SOFT_CAP);
}

static void what_shrank_grows_back_the_strongest_first_then_the_oldest(void **state) {
    (void)state;
    uint64_t first = ask(A, 5, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    uint64_t weak = ask(A, 30, STH_RESERVE_SOFT, STH_PRIORITY_BACKGROUND).id;
    uint64_t old = ask(A, 30, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id;
    sthi_budget_release(&budget, first);
    uint64_t new = ask(B, 30, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id; /* stands first */
    uint64_t newest = ask(B, 5, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE).id; /* stands last */
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 200);
    assert_int_equal(granted(weak) + granted(old) + granted(new) + granted(newest), 0);
    assert_int_equal(news(), 4);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 60);
    sthi_budget_grow_back(&budget);
    assert_true(granted(old) == 30 && granted(new) == 10 && granted(newest) == 0 && granted(weak) == 0);
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 59);
    assert_int_equal(news(), 2);
    sthi_budget_grow_back(&budget);
    assert_int_equal(granted(new), 11);
    assert_int_equal(news(), 1); /* of one byte, too */
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 0);
    sthi_budget_grow_back(&budget);
    assert_true(granted(old) == 30 && granted(new) == 30 && granted(newest) == 5 && granted(weak) == 30);
}

static void a_floor_comes_whole_or_not_at_all(void **state) {
    (void)state;
    ask(A, 50, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED);
    uint64_t held = ask(B, 70, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED).id;
    ask(A, 20, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED);
    uint64_t floor = ask(A, 50, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED).id;
    sthi_budget_grow_back(&budget);
    assert_true(granted(floor) == 0 && news() == 0);
    sthi_budget_release(&budget, held);
    /* it just fits, under its owner's ceiling and around what is reserved */
    sthi_budget_set_unmanaged(&budget, STH_RESOURCE_VRAM, 50);
    sthi_budget_grow_back(&budget);
    assert_true(granted(floor) == 50 && news() == 1);
}

static void a_full_table_ends_and_begins_again(void **state) {
    (void)state;
    uint64_t some = 0;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < STHI_RESERVATIONS; i++)
            some = sthi_budget_reserve(&budget, A, STH_RESOURCE_VRAM, 1, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED,
                                       STH_PHASE_FORWARD).id;
        assert_int_not_equal(some, 0);
        assert_int_equal(ask(B, 1, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED).reason, STH_DENIAL_TABLE_FULL);
        sthi_budget_release(&budget, some);
        sthi_budget_reserve(&budget, A, STH_RESOURCE_VRAM, 1, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED,
                            STH_PHASE_FORWARD);
        sthi_budget_phase_ended(&budget, STH_PHASE_FORWARD);
    }
    assert_int_equal(news(), STHI_RESERVATIONS); /* what nobody asks about is not told twice */
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
        CASE(pinned_memory_in_use_counts_against_its_cap),
        CASE(pinned_memory_has_a_cap_of_its_own),
        CASE(a_full_table_is_a_reason),
        CASE(the_first_entry_of_the_table_is_one_like_any_other),
        CASE(only_as_much_as_is_needed_gives_way),
        CASE(of_equals_the_newest_gives_way_wherever_it_stands),
        CASE(what_is_not_speculative_is_not_counted_on),
        CASE(a_soft_request_does_not_push_others_below_their_floor),
        CASE(speculation_leaves_out_what_floors_still_want_and_nothing_else),
        CASE(a_ceiling_may_be_reached_and_the_reason_is_what_bound),
        CASE(what_shrank_grows_back_the_strongest_first_then_the_oldest),
        CASE(a_floor_comes_whole_or_not_at_all),
        CASE(a_full_table_ends_and_begins_again),
    };
    return cmocka_run_group_tests_name("conductor/budget", tests, NULL, NULL);
}
