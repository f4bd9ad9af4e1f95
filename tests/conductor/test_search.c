/* The pure part searched: every sequence of a few calls on small caps, and long random ones from seeds. After each
 * call: nothing over-granted, no token lost, hints only tighter within a step, and a way on from every state.
 * STH_SEARCH_SEED=n replays one random schedule. */
#include <stdlib.h>
#include <string.h>

#include "conductor/budget.h"
#include "conductor/phases.h"
#include "conductor/policy.h"
#include "conductor/tokens.h"
#include "support/check.h"

enum { SOFT = 6, HARD = 8, HELD = 6, DEPTH = 4, SCHEDULES = 1500, LENGTH = 200 };

typedef struct world {
    sthi_budget budget;
    sthi_tokens tokens;
    sthi_phases phases;
    sthi_policy policy;
    sth_hints before;    /* the hints when the step began, tightened as far as seen */
    sth_token held[HELD]; /* 0: none */
    uint64_t ids[HELD];
    int next_id;
} world;

typedef struct deed {
    int what; /* 0 reserve, 1 release, 2 acquire, 3 free token, 4 begin, 5 enter, 6 end, 7 unmanaged, 8 owner ends */
    uint32_t owner;
    uint64_t bytes;
    int a, b, c;
} deed;

static void world_init(world *w) {
    memset(w, 0, sizeof *w);
    sthi_budget_init(&w->budget, SOFT, HARD, 4);
    sthi_tokens_init(&w->tokens, 2, 1);
    sthi_phases_init(&w->phases);
    sthi_policy_init(&w->policy,
                     (sth_hints){.max_inflight_h2d = 2, .max_inflight_d2h = 1, .prefetch_window_cap = 3});
    w->before = w->policy.now;
}

/* ---- what must hold */

static bool speculation_left(const sthi_budget *b) {
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        const sthi_reservation *r = &b->table[i];
        if (!r->id || r->resource != STH_RESOURCE_VRAM || r->mode != STH_RESERVE_SOFT || !r->granted ||
            r->priority < STH_PRIORITY_SPECULATIVE)
            continue;
        uint64_t floors = 0, others = 0;
        for (int k = 0; k < STHI_RESERVATIONS; k++) {
            const sthi_reservation *s = &b->table[k];
            if (!s->id || s->owner != r->owner || s->resource != r->resource || s->mode == STH_RESERVE_CEILING)
                continue;
            *(s->mode == STH_RESERVE_FLOOR ? &floors : &others) += s->granted;
        }
        if (others > floors) return true;
    }
    return false;
}

static void check(world *w, uint64_t use_before, bool unmanaged_grew) {
    uint64_t use = sthi_budget_committed(&w->budget, STH_RESOURCE_VRAM) + w->budget.unmanaged[STH_RESOURCE_VRAM];
    if (use > HARD) assert_true(use <= use_before || (unmanaged_grew && !speculation_left(&w->budget)));
    assert_true(sthi_budget_committed(&w->budget, STH_RESOURCE_PINNED) <= 4);
    uint32_t live[2] = {0, 0};
    for (int i = 0; i < 2 * STHI_TOKENS; i++)
        if (w->tokens.table[i].live) live[w->tokens.table[i].direction]++;
    assert_true(live[0] == w->tokens.used[0] && live[1] == w->tokens.used[1]);
    uint32_t ours = 0;
    for (int i = 0; i < HELD; i++) {
        sth_direction d;
        ours += w->held[i] && sthi_tokens_alive(&w->tokens, w->held[i], &d);
    }
    assert_int_equal(ours, live[0] + live[1]); /* each is held by somebody who can release it */
    assert_true(live[0] <= 2 && live[1] <= 1);
    const sth_hints *now = &w->policy.now, *then = &w->before;
    assert_true(now->max_inflight_h2d <= then->max_inflight_h2d && now->max_inflight_d2h <= then->max_inflight_d2h &&
                now->prefetch_window_cap <= then->prefetch_window_cap && now->prefetch_window_cap >= 1 &&
                now->max_inflight_h2d >= 1 && now->max_inflight_d2h >= 1 &&
                (now->suppress_speculative || !then->suppress_speculative));
    w->before = *now;
}

/* From every state: a step can end and begin, and who needs something gets it when the others let go. */
static void check_way_on(const world *w) {
    world v = *w;
    assert_true(v.phases.now == STH_PHASE_STEP_END || sthi_phases_may(&v.phases, STH_PHASE_STEP_END));
    for (int i = 0; i < HELD; i++) (void)sthi_tokens_release(&v.tokens, v.held[i]);
    sth_token token;
    for (int d = 0; d < STH_DIRECTIONS; d++)
        assert_int_equal(sthi_tokens_acquire(&v.tokens, &v.policy.now, 0, d, STH_PRIORITY_REQUIRED, &token),
                         STH_DENIAL_NONE);
    for (uint32_t owner = 0; owner < 4; owner++) sthi_budget_release_owner(&v.budget, owner);
    sthi_budget_set_unmanaged(&v.budget, STH_RESOURCE_VRAM, 0);
    sth_grant g = sthi_budget_reserve(&v.budget, 0, STH_RESOURCE_VRAM, HARD, STH_RESERVE_BURST, STH_PRIORITY_REQUIRED,
                                      STH_PHASE_NONE);
    assert_int_equal(g.status, STH_GRANT_GRANTED);
}

/* ---- deeds */

static void reserve(world *w, const deed *d) {
    sth_grant g = sthi_budget_reserve(&w->budget, d->owner, d->c & 1, d->bytes, d->a, d->b,
                                      d->c & 2 ? STH_PHASE_BACKWARD : STH_PHASE_NONE);
    assert_true(g.granted_bytes <= d->bytes);
    assert_true((g.status == STH_GRANT_GRANTED) == (g.reason == STH_DENIAL_NONE));
    assert_true((g.status == STH_GRANT_DENIED) == (g.granted_bytes == 0));
    if (d->a != STH_RESERVE_SOFT) assert_int_not_equal(g.status, STH_GRANT_PARTIAL);
    if (g.id) w->ids[w->next_id++ % HELD] = g.id;
}

static void acquire(world *w, const deed *d) {
    int place = 0;
    sth_direction direction;
    while (place < HELD && w->held[place] && sthi_tokens_alive(&w->tokens, w->held[place], &direction)) place++;
    sth_token token;
    sthi_policy_check(&w->policy, sthi_tokens_busy(&w->tokens));
    sth_denial why = sthi_tokens_acquire(&w->tokens, &w->policy.now, d->owner, d->a, d->b, &token);
    assert_true((why == STH_DENIAL_NONE) == (token != 0));
    if (token) {
        assert_true(place < HELD);
        w->held[place] = token;
    }
}

static void enter(world *w, sth_phase phase) {
    if (!sthi_phases_may(&w->phases, phase) || w->phases.now == phase) return;
    sth_phase left = w->phases.now;
    sthi_phases_enter(&w->phases, phase, 0);
    sthi_budget_phase_ended(&w->budget, left);
    uint64_t use = sthi_budget_committed(&w->budget, STH_RESOURCE_VRAM) + w->budget.unmanaged[STH_RESOURCE_VRAM];
    sthi_policy_phase(&w->policy, phase, use, SOFT);
}

static void begin(world *w) {
    sthi_phases_begin(&w->phases, 1, 0);
    sthi_policy_step(&w->policy);
    sthi_budget_grow_back(&w->budget);
    w->before = w->policy.base;
}

static void act(world *w, const deed *d) {
    uint64_t use = sthi_budget_committed(&w->budget, STH_RESOURCE_VRAM) + w->budget.unmanaged[STH_RESOURCE_VRAM];
    bool grew = d->what == 7 && d->bytes > w->budget.unmanaged[STH_RESOURCE_VRAM];
    if (d->what == 0) reserve(w, d);
    else if (d->what == 1) sthi_budget_release(&w->budget, w->ids[d->a % HELD]);
    else if (d->what == 2) acquire(w, d);
    else if (d->what == 3) (void)sthi_tokens_release(&w->tokens, w->held[d->a % HELD]);
    else if (d->what == 4) begin(w);
    else if (d->what == 5) enter(w, d->a);
    else if (d->what == 6) enter(w, STH_PHASE_STEP_END);
    else if (d->what == 7) sthi_budget_set_unmanaged(&w->budget, STH_RESOURCE_VRAM, d->bytes);
    else {
        sthi_budget_release_owner(&w->budget, d->owner);
        sthi_tokens_release_owner(&w->tokens, d->owner);
    }
    check(w, use, grew);
}

/* ---- every sequence of a few */

static const deed deeds[] = {
    {0, 0, 4, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, 0},     {0, 0, 5, STH_RESERVE_SOFT, STH_PRIORITY_SPECULATIVE, 0},
    {0, 1, 5, STH_RESERVE_SOFT, STH_PRIORITY_BACKGROUND, 2},   {0, 1, 3, STH_RESERVE_FLOOR, STH_PRIORITY_REQUIRED, 0},
    {0, 0, 2, STH_RESERVE_FLOOR, STH_PRIORITY_SPECULATIVE, 0}, {0, 2, 7, STH_RESERVE_BURST, STH_PRIORITY_REQUIRED, 2},
    {0, 2, 3, STH_RESERVE_SOFT, STH_PRIORITY_CRITICAL, 0},     {0, 0, 3, STH_RESERVE_CEILING, STH_PRIORITY_REQUIRED, 0},
    {0, 1, 3, STH_RESERVE_HARD, STH_PRIORITY_REQUIRED, 1},     {1, 0, 0, 0, 0, 0},
    {2, 0, 1, STH_DIRECTION_H2D, STH_PRIORITY_BACKGROUND, 0},  {2, 1, 1, STH_DIRECTION_H2D, STH_PRIORITY_REQUIRED, 0},
    {2, 1, 1, STH_DIRECTION_D2H, STH_PRIORITY_SPECULATIVE, 0}, {3, 0, 0, 0, 0, 0},
    {4, 0, 0, 0, 0, 0},                                        {5, 0, 0, STH_PHASE_BACKWARD, 0, 0},
    {5, 0, 0, STH_PHASE_OPTIMIZER, 0, 0},                      {6, 0, 0, 0, 0, 0},
    {7, 0, 5, 0, 0, 0},                                        {7, 0, 0, 0, 0, 0},
    {8, 1, 0, 0, 0, 0},
};
enum { DEEDS = sizeof deeds / sizeof *deeds };
static world levels[DEPTH + 1];
static unsigned long visited;

static void search(int depth) {
    visited++;
    check_way_on(&levels[depth]);
    if (depth == DEPTH) return;
    for (int i = 0; i < DEEDS; i++) {
        levels[depth + 1] = levels[depth];
        act(&levels[depth + 1], &deeds[i]);
        search(depth + 1);
    }
}

static void every_short_sequence_keeps_the_rules(void **state) {
    (void)state;
    world_init(&levels[0]);
    begin(&levels[0]);
    search(0);
    assert_true(visited > 200000);
}

/* ---- long random ones */

static uint64_t next_random(uint64_t *s) {
    *s ^= *s << 13, *s ^= *s >> 7, *s ^= *s << 17;
    return *s;
}

static void play(uint64_t seed) {
    static world w;
    uint64_t s = seed * 2654435769u + 88172645463325252u;
    world_init(&w);
    for (int i = 0; i < LENGTH; i++) {
        static const int kinds[] = {0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 5, 5, 6, 7, 8};
        deed d = {.what = kinds[next_random(&s) % 16], .owner = (uint32_t)(next_random(&s) % 4),
                  .bytes = 1 + next_random(&s) % 9, .a = (int)(next_random(&s) % 5), .b = (int)(next_random(&s) % 4),
                  .c = (int)(next_random(&s) % 4)};
        if (d.what == 2) d.a %= 2;
        act(&w, &d);
    }
    check_way_on(&w);
}

static void random_schedules_keep_the_rules(void **state) {
    (void)state;
    const char *one = getenv("STH_SEARCH_SEED");
    for (uint64_t seed = one ? strtoull(one, NULL, 10) : 1; seed <= cases_to_try(SCHEDULES) || one; seed++) {
        play(seed);
        if (one) break;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_short_sequence_keeps_the_rules),
        cmocka_unit_test(random_schedules_keep_the_rules),
    };
    return cmocka_run_group_tests_name("conductor/search", tests, NULL, NULL);
}
