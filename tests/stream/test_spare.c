/* Units in no order: which of them stay in what a plan leaves of the budget (runtime/spare.c). */
#include "load/room.h"
#include "runtime/budget.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/spare.h"
#include "runtime/step_calls.h"
#include "stream/world.h"
#include "support/check.h"

enum { LAYERS = 4, EXPERTS = 16, PICKED = 2, UNIT = 4096, UNITS = LAYERS * (1 + EXPERTS), BYTES = UNITS * UNIT };

typedef struct rig {
    world w;
    uint64_t random;
    uint32_t hot; /* experts of a layer that seven of eight picks choose from */
} rig;

static void open_rig(rig *r, uint32_t slots, uint64_t capacity) {
    static uint64_t bytes[UNITS];
    for (int i = 0; i < UNITS; i++) bytes[i] = UNIT;
    world_spec spec = world_default(UNITS, bytes, (uint64_t)(LAYERS + 1 + slots) * UNIT); /* one is on demand */
    spec.capacity = capacity;
    spec.least_room = UNIT;
    *r = (rig){.random = 1, .hot = EXPERTS};
    assert_ok(world_open(&r->w, &spec));
}

static void sound(rig *r) {
    const char *why;
    if (!sthi_runtime_check(r->w.runtime, &why)) fail_msg("%s", why);
}

static uint32_t random_below(rig *r, uint32_t n) {
    r->random = r->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(r->random >> 33) % n;
}

/* An expert of the layer that is not in `picked`. */
static uint32_t pick(rig *r, uint32_t layer, const uint32_t *picked, uint32_t count) {
    for (;;) {
        uint32_t expert = random_below(r, random_below(r, 8) ? r->hot : EXPERTS);
        uint32_t unit = LAYERS + layer * EXPERTS + expert;
        uint32_t i = 0;
        while (i < count && picked[i] != unit) i++;
        if (i == count) return unit;
    }
}

/* Loads of experts in so many steps. */
static uint64_t steps(rig *r, uint32_t count) {
    sth_runtime_stats before, after;
    sthi_runtime_stats(r->w.runtime, &before);
    for (uint32_t n = 0; n < count; n++) {
        uint32_t order[LAYERS * (1 + PICKED)], uses = 0;
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            order[uses++] = layer;
            uint32_t first = uses;
            for (uint32_t i = 0; i < PICKED; i++, uses++) order[uses] = pick(r, layer, order + first, i);
        }
        assert_ok(world_step(&r->w, order, uses, 1000));
        sound(r);
    }
    sthi_runtime_stats(r->w.runtime, &after);
    return after.demand_loads - before.demand_loads;
}

static uint64_t spare_bytes(const rig *r) { return sthi_spare_fitting(r->w.runtime, UINT64_MAX); }

enum { LONG = 200, PICKS = LONG * LAYERS * PICKED };

static void the_budget_fills_with_what_is_used_most(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 24, 0);
    steps(&r, 60); /* all have been on demand */
    uint64_t uniform = steps(&r, LONG);
    assert_true(spare_bytes(&r) == 24 * UNIT);
    assert_true(uniform < PICKS * 0.70); /* 24 of 64 stay: 0.625 miss */
    r.hot = 5; /* 20 of 64, which seven of eight picks are of, and then some */
    steps(&r, LONG); /* those of before cool down */
    uint64_t skewed = steps(&r, LONG);
    assert_true(skewed < PICKS * 0.16); /* an eighth of the picks are any: 0.11 miss if the hot ones all stay */
    world_close(&r.w);
}

/* As of a vision tower that no input needs, or a part of the model that is never called. */
static void nothing_is_taken_for_units_that_are_never_used(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 24, 0);
    static const uint32_t order[] = {0, 1, 2, 3, 5, 9};
    for (int n = 0; n < 20; n++) assert_ok(world_step(&r.w, order, 6, 1000));
    assert_true(spare_bytes(&r) == 0);
    sound(&r);
    world_close(&r.w);
}

static void a_smaller_budget_takes_it_back(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 24, 0);
    steps(&r, 60);
    assert_true(spare_bytes(&r) == 24 * UNIT);
    uint64_t least = sthi_smallest_budget(r.w.runtime);
    for (uint64_t budget = (LAYERS + 24) * UNIT; budget > least; budget -= 3 * UNIT) {
        assert_ok(sthi_runtime_set_budget(r.w.runtime, budget));
        sound(&r);
        steps(&r, 2);
    }
    assert_ok(sthi_runtime_set_budget(r.w.runtime, (LAYERS + 1 + 24) * UNIT));
    steps(&r, 20);
    assert_true(spare_bytes(&r) > 20 * UNIT);
    world_close(&r.w);
}

/* The device has less than the budget promises. */
static void memory_that_is_refused_is_not_asked_for_again_and_again(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 24, (LAYERS + 1 + 8) * UNIT);
    steps(&r, 60);
    uint64_t loads = steps(&r, LONG);
    assert_true(spare_bytes(&r) >= 4 * UNIT && spare_bytes(&r) <= 8 * UNIT);
    assert_true(loads < PICKS * 0.97);
    world_close(&r.w);
}

static void leased_ones_stay_where_they_are(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 8, 0);
    steps(&r, 60);
    sth_lease held[4];
    assert_ok(sthi_step_begin(r.w.runtime));
    for (uint32_t i = 0; i < 4; i++) assert_ok(sthi_unit_acquire(r.w.runtime, LAYERS + i * EXPERTS, 0, &held[i]));
    assert_ok(sthi_step_end(r.w.runtime));
    steps(&r, 40);
    for (uint32_t i = 0; i < 4; i++) {
        assert_true(world_right(&r.w, &held[i]));
        sthi_lease_release(r.w.runtime, &held[i]);
    }
    steps(&r, 10);
    world_close(&r.w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_budget_fills_with_what_is_used_most),
        cmocka_unit_test(nothing_is_taken_for_units_that_are_never_used),
        cmocka_unit_test(a_smaller_budget_takes_it_back),
        cmocka_unit_test(memory_that_is_refused_is_not_asked_for_again_and_again),
        cmocka_unit_test(leased_ones_stay_where_they_are),
    };
    return cmocka_run_group_tests_name("spare", tests, NULL, NULL);
}
