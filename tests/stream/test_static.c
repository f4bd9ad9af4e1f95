/* Static policy: what its watermarks keep on the device, and how many loads ahead are under way. Every use checks its
 * bytes (world_use). */
#include "support/check.h"

#include "stream/world.h"
#include "load/lanes.h"
#include "load/slots.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/step_calls.h"

enum { UNITS = 8, EACH = 16384, USES = 64 };

static uint64_t on_device(const world *w) {
    uint64_t bytes = 0;
    sthi_lock(&w->runtime->lock);
    for (uint32_t i = 0; i < w->units; i++)
        if (w->runtime->units[i].slot != STHI_NO_SLOT) bytes += w->bytes[i];
    sthi_unlock(&w->runtime->lock);
    return bytes;
}

static uint64_t evictions(const world *w) {
    sth_runtime_stats s;
    sthi_runtime_stats(w->runtime, &s);
    return s.evictions;
}

typedef struct seen {
    uint64_t least, most; /* bytes on the device behind a use */
} seen;

/* From the second lap on. */
static seen laps(world *w, uint32_t units, uint32_t count) {
    seen s = {UINT64_MAX, 0};
    for (uint32_t lap = 0; lap < count; lap++) {
        assert_ok(sthi_step_begin(w->runtime));
        for (uint32_t i = 0; i < units; i++) {
            assert_ok(world_use(w, i, 100000));
            uint64_t now = on_device(w);
            if (lap && now < s.least) s.least = now;
            if (lap && now > s.most) s.most = now;
        }
        assert_ok(sthi_step_end(w->runtime));
    }
    return s;
}

static world_spec even(uint64_t budget, uint64_t high, uint64_t low) {
    static uint64_t bytes[UNITS];
    for (int i = 0; i < UNITS; i++) bytes[i] = EACH;
    world_spec spec = world_default(UNITS, bytes, budget * EACH);
    spec.policy = STH_POLICY_STATIC;
    spec.high_watermark = high * EACH;
    spec.low_watermark = low * EACH;
    return spec;
}

static seen run_even(uint64_t budget, uint64_t high, uint64_t low, uint64_t *out_evictions) {
    world w;
    world_spec spec = even(budget, high, low);
    assert_ok(world_open(&w, &spec));
    assert_ok(sthi_runtime_set_prefetch_window(w.runtime, 1));
    seen s = laps(&w, UNITS, 6);
    *out_evictions = evictions(&w);
    world_close(&w);
    return s;
}

static void a_low_watermark_acts_where_the_high_one_is_the_budget(void **state) {
    (void)state;
    uint64_t none, low, high_only, below;
    seen s = run_even(6, 0, 0, &none);
    assert_int_equal(s.least, 6 * EACH); /* units leave only as places are needed */
    s = run_even(6, 6, 3, &low);
    assert_true(s.most <= 6 * EACH && s.least >= 3 * EACH && s.least <= 4 * EACH); /* one comes at once */
    s = run_even(6, 0, 3, &below);
    assert_true(s.least <= 4 * EACH);
    assert_int_equal(below, low);
    s = run_even(6, 6, 0, &high_only); /* 3/4 of six are four and a half */
    assert_true(s.least >= 4 * EACH && s.least <= 5 * EACH);
    assert_true(none < high_only && high_only < low);
}

static void a_high_watermark_below_the_budget_holds(void **state) {
    (void)state;
    uint64_t count;
    seen s = run_even(7, 4, 2, &count);
    assert_true(s.most <= 5 * EACH && s.least <= 3 * EACH);
    s = run_even(8, 8, 2, &count); /* all of it fits: nothing is missing */
    assert_int_equal(s.least, 8 * EACH);
    assert_int_equal(count, 0);
}

/* What the caller fills itself counts, as it does for the budget. */
static void watermarks_count_what_is_reserved(void **state) {
    (void)state;
    for (uint64_t reserved = 0; reserved < 3; reserved++) {
        world w;
        world_spec spec = even(7 + reserved, 6 + reserved, 3 + reserved);
        spec.reserved = reserved * EACH;
        assert_ok(world_open(&w, &spec));
        assert_ok(sthi_runtime_set_prefetch_window(w.runtime, 1));
        seen s = laps(&w, UNITS, 6);
        assert_true(s.most <= 7 * EACH && s.least >= 3 * EACH && s.least <= 4 * EACH);
        world_close(&w);
    }
}

static void nothing_in_use_is_evicted(void **state) {
    (void)state;
    world w;
    world_spec spec = even(6, 6, 1);
    assert_ok(world_open(&w, &spec));
    sth_lease held[2];
    for (uint32_t i = 0; i < 2; i++) assert_ok(sthi_unit_acquire(w.runtime, i, 0, &held[i]));
    for (int lap = 0; lap < 4; lap++) {
        for (uint32_t i = 2; i < UNITS; i++) assert_ok(world_use(&w, i, 100000));
        for (uint32_t i = 0; i < 2; i++) {
            assert_int_equal(w.runtime->units[i].slot, held[i].slot);
            assert_true(world_right(&w, &held[i]));
        }
    }
    assert_true(evictions(&w) > 0);
    for (uint32_t i = 0; i < 2; i++) sthi_lease_release(w.runtime, &held[i]);
    world_close(&w);
}

/* Loads that were asked for and whose bytes are not there. */
static uint32_t under_way(world *w) {
    uint32_t count = 0;
    sthi_lock(&w->runtime->lock);
    for (uint32_t i = 0; i < w->units; i++) {
        int32_t slot = w->runtime->units[i].slot;
        count += slot != STHI_NO_SLOT && !sthi_slot_arrived(w->runtime, slot);
    }
    sthi_unlock(&w->runtime->lock);
    return count;
}

static void no_more_loads_ahead_are_under_way_than_may(void **state) {
    (void)state;
    uint32_t most[3] = {0};
    for (uint32_t limit = 0; limit < 3; limit++) {
        world w;
        world_spec spec = even(6, 0, 0);
        spec.link = 1000000; /* a load takes 16 ms, a use 0.1 */
        assert_ok(world_open(&w, &spec));
        assert_ok(sthi_runtime_set_prefetch_window(w.runtime, 4));
        assert_ok(sthi_runtime_set_max_inflight(w.runtime, limit));
        for (uint32_t i = 0; i < 3 * UNITS; i++) {
            assert_ok(world_use(&w, i % UNITS, 100000));
            if (i >= UNITS && under_way(&w) > most[limit]) most[limit] = under_way(&w); /* seal loads some */
        }
        world_close(&w);
    }
    assert_true(most[1] == 1 && most[2] == 2 && most[0] > 2);
}

static uint64_t next(uint64_t *s) { return *s = *s * 6364136223846793005u + 1442695040888963407u; }

static uint64_t roll(uint64_t *s, uint64_t n) { return (next(s) >> 33) % n; }

static void any_watermarks_show_every_use_its_bytes(void **state) {
    (void)state;
    uint64_t s = 1;
    for (int trial = 0; trial < 200; trial++) {
        uint64_t bytes[UNITS], all = 0;
        for (int i = 0; i < UNITS; i++) all += bytes[i] = 4096 * (1 + roll(&s, 16));
        world w;
        world_spec spec = world_default(UNITS, bytes, 2 * 65536 + roll(&s, all));
        spec.policy = STH_POLICY_STATIC;
        spec.high_watermark = roll(&s, 3) ? 1 + roll(&s, 2 * spec.budget) : 0;
        spec.low_watermark = roll(&s, 3) ? roll(&s, spec.high_watermark ? spec.high_watermark : spec.budget) : 0;
        spec.reserved = roll(&s, 2) ? roll(&s, 65536) : 0;
        assert_ok(world_open(&w, &spec));
        assert_ok(sthi_runtime_set_prefetch_window(w.runtime, (uint32_t)roll(&s, 5)));
        assert_ok(sthi_runtime_set_max_inflight(w.runtime, (uint32_t)roll(&s, 4)));
        for (uint64_t use = 0; use < USES; use++)
            assert_ok(world_use(&w, (uint32_t)((roll(&s, 4) ? use : roll(&s, UNITS)) % UNITS), 1000));
        world_close(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_low_watermark_acts_where_the_high_one_is_the_budget),
        cmocka_unit_test(a_high_watermark_below_the_budget_holds),
        cmocka_unit_test(watermarks_count_what_is_reserved),
        cmocka_unit_test(nothing_in_use_is_evicted),
        cmocka_unit_test(no_more_loads_ahead_are_under_way_than_may),
        cmocka_unit_test(any_watermarks_show_every_use_its_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
