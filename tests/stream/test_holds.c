/* Units that a step holds together: autograd and checkpointing let one go only behind later uses of others. */
#include "base/error.h"
#include "base/random.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/step_calls.h"
#include "stream/world.h"
#include "support/check.h"

enum { UNITS = 12, USES = 30, STEPS = 6, WALKS = 40, ALIGN = 512, LONGEST = 5 };

typedef struct walk {
    uint64_t seed, rolls, bytes[UNITS];
    uint32_t units, uses;
    uint32_t order[USES], until[USES]; /* the use behind which each is let go */
} walk;

static uint32_t below(walk *k, uint32_t n) {
    return (uint32_t)(sthi_random64(k->seed, k->rolls++) % n);
}

/* Few large units, some small ones; uses in another order than that of registration, every fourth held. */
static void draw(walk *k, uint64_t seed) {
    *k = (walk){.seed = seed};
    k->units = 5 + below(k, UNITS - 4);
    k->uses = k->units + below(k, USES - UNITS);
    for (uint32_t i = 0; i < k->units; i++) k->bytes[i] = (below(k, 2) ? 40 + below(k, 20) : 1 + below(k, 8)) * ALIGN;
    for (uint32_t t = 0; t < k->uses; t++) {
        k->order[t] = below(k, k->units);
        k->until[t] = t + (below(k, 4) ? 0 : 1 + below(k, LONGEST));
        if (k->until[t] >= k->uses) k->until[t] = k->uses - 1;
    }
}

static uint64_t most_held(const walk *k) {
    uint64_t most = 0;
    for (uint32_t t = 0; t < k->uses; t++) {
        bool held[UNITS] = {false};
        uint64_t sum = 0;
        for (uint32_t i = 0; i <= t; i++)
            if (k->until[i] >= t) held[k->order[i]] = true;
        for (uint32_t i = 0; i < k->units; i++) sum += held[i] ? k->bytes[i] : 0;
        if (sum > most) most = sum;
    }
    return most;
}

/* STH_OK, or the error of the use that had no place. */
static sth_status step(world *w, const walk *k) {
    sth_lease lease[USES];
    bool has[USES] = {false};
    sth_status rc = STH_OK;
    assert_ok(sthi_step_begin(w->runtime));
    for (uint32_t t = 0; t < k->uses && rc == STH_OK; t++) {
        rc = sthi_unit_acquire(w->runtime, k->order[t], 0, &lease[t]);
        has[t] = rc == STH_OK;
        if (has[t]) {
            assert_true(world_right(w, &lease[t]));
            assert_ok(w->device->ops->sim_compute(w->device->self, 0, 2000));
        }
        for (uint32_t i = 0; i <= t; i++) {
            if (!has[i] || k->until[i] > t) continue;
            sthi_lease_release(w->runtime, &lease[i]);
            has[i] = false;
        }
    }
    for (uint32_t i = 0; i < k->uses; i++)
        if (has[i]) sthi_lease_release(w->runtime, &lease[i]);
    const char *why;
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
    assert_ok(sthi_step_end(w->runtime));
    return rc;
}

/* Whoever got through a step gets through all that are like it: the plan knows by then what is held together. */
static void a_step_that_had_room_has_it_again(void **state) {
    (void)state;
    uint32_t followed = 0, walks = cases_to_try(few_under_sanitizers(WALKS / 4, WALKS));
    for (uint64_t seed = 0; seed < walks; seed++) {
        walk k;
        world w;
        draw(&k, seed);
        uint64_t budget = most_held(&k) * (8 + below(&k, 8)) / 8;
        world_spec spec = world_default(k.units, k.bytes, (budget / ALIGN + 1) * ALIGN);
        if (world_open(&w, &spec) != STH_OK) continue; /* less than the largest unit */
        if (step(&w, &k) == STH_OK) {
            followed++;
            for (int s = 0; s < STEPS; s++)
                if (step(&w, &k) != STH_OK)
                    fail_msg("seed %u, step %d: %s", (unsigned)seed, s, sthi_error_last()->message);
        }
        world_close(&w);
    }
    assert_true(followed > walks / 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_step_that_had_room_has_it_again)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
