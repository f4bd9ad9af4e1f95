/* Fault loops: the n-th allocation, registration, thread, device allocation or device call fails, once or
 * from then on, for n = 1, 2, 3, ... until the scenario passes without. Whatever happens is an error with a
 * status that fits; nothing hangs, leaks or shows wrong bytes; and when the fault is over the next step is
 * right. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/step_calls.h"
#include "stream/world.h"
#include "support/check.h"

enum { UNITS = 3, MANY = 4, SECONDS = 100 };
static bool ever_packed;
static const uint64_t BYTES[UNITS] = {9000, 3000, 20000};
typedef enum turn { FORWARD, OTHER } turn; /* OTHER: the last one first */

static sth_status step_of(world *w, turn which) {
    uint32_t order[MANY];
    for (uint32_t i = 0; i < w->units; i++) order[i] = which == FORWARD ? i : (i + w->units - 1) % w->units;
    return world_step(w, order, w->units, 20000);
}

typedef struct scenario {
    sthi_fault_kind kind;
    bool forever;
    world_spec spec;
    uint64_t n;
} scenario;

static bool fits(sthi_fault_kind kind, sth_status rc) {
    switch (kind) {
    case STHI_FAULT_ALLOC: return rc == STH_OUT_OF_HOST_MEMORY;
    case STHI_FAULT_PIN: return false; /* pageable memory serves */
    case STHI_FAULT_THREAD: return rc == STH_OUT_OF_HOST_MEMORY; /* the simulated device's own */
    case STHI_FAULT_DEVICE_ALLOC: return rc == STH_OUT_OF_DEVICE_MEMORY || rc == STH_BUDGET_TOO_SMALL;
    default: /* uses whose end is not known keep their places */
        return rc == STH_DEVICE_ERROR || rc == STH_BUDGET_TOO_SMALL;
    }
}

static void expect(const scenario *s, sth_status rc, const char *what) {
    if (rc == STH_OK || fits(s->kind, rc)) return;
    fail_msg("kind %d, n = %llu%s: %s: %s: %s", (int)s->kind, (unsigned long long)s->n,
             s->forever ? " and on" : "", what, sth_status_name(rc), sth_last_error()->message);
}

static void assert_sound(const scenario *s, world *w) {
    const char *why;
    if (!sthi_runtime_check(w->runtime, &why))
        fail_msg("kind %d, n = %llu%s: %s", (int)s->kind, (unsigned long long)s->n,
                 s->forever ? " and on" : "", why);
}

static void try_step(const scenario *s, world *w, turn which) {
    expect(s, step_of(w, which), "step");
    assert_sound(s, w);
    if (w->runtime->step.open) expect(s, sthi_step_end(w->runtime), "end");
    assert_sound(s, w);
}

static void write_one(const scenario *s, world *w) {
    if (!s->spec.writable) return;
    sth_status rc = sthi_runtime_synchronize(w->runtime);
    expect(s, rc, "synchronize");
    if (rc != STH_OK) return;
    world_fill(w, 1, (uint8_t)(w->version[1] + 1));
    assert_ok(sthi_unit_mark_written(w->runtime, 1));
}

/* True when the fault was met. */
static bool play(const scenario *s) {
    world w;
    long live = sthi_alloc_live();
    sthi_fault_arm(s->kind, s->n, s->forever);
    sth_status rc = world_open(&w, &s->spec);
    expect(s, rc, "open");
    if (rc == STH_OK) {
        try_step(s, &w, FORWARD);
        write_one(s, &w);
        try_step(s, &w, FORWARD);
        ever_packed = ever_packed || w.runtime->expand.packed;
        try_step(s, &w, OTHER);
        expect(s, sthi_runtime_set_budget(w.runtime, s->spec.budget - 4096), "budget");
        assert_sound(s, &w);
    }
    bool met = sthi_fault_seen(s->kind) >= s->n;
    if (rc == STH_OK && s->n % 3) { /* else it ends while calls still fail */
        sthi_fault_disarm_all();
        for (int i = 0; i < 3; i++) {
            assert_ok(step_of(&w, i == 1 ? OTHER : FORWARD));
            assert_sound(s, &w);
        }
    }
    if (rc == STH_OK) world_close(&w);
    sthi_fault_disarm_all();
    if (sthi_alloc_live() != live)
        fail_msg("kind %d, n = %llu%s: %ld blocks leaked", (int)s->kind, (unsigned long long)s->n,
                 s->forever ? " and on" : "", sthi_alloc_live() - live);
    return met;
}

static world_spec direct(void) { return world_default(UNITS, BYTES, 30000); }

static world_spec staged(void) {
    world_spec spec = direct();
    spec.pin_limit = 16384; /* less than the arena, enough for slabs */
    return spec;
}

static world_spec writable(void) {
    world_spec spec = direct();
    spec.writable = true;
    spec.read_only = false;
    return spec;
}

static world_spec follows_the_lookahead(void) {
    world_spec spec = direct();
    spec.policy = STH_POLICY_STATIC;
    return spec;
}

static world_spec packed(bool staged_too) {
    world_spec spec = staged_too ? staged() : direct();
    spec.packed = STH_TRANSFER_INT8;
    spec.budget = 50000; /* with the stages */
    return spec;
}

/* Of it some stays on the device packed. */
static world_spec stays(void) {
    static uint64_t bytes[MANY];
    for (uint32_t i = 0; i < MANY; i++) bytes[i] = i % 2 ? 512 : 16384;
    world_spec spec = world_default(MANY, bytes, 43000);
    spec.packed = STH_TRANSFER_LOSSLESS;
    spec.link = UINT64_C(10000000);
    return spec;
}

/* Of it some cross packed where the link is the bound, and as they are where it is not. */
static world_spec either(void) {
    world_spec spec = direct();
    spec.packed = STH_TRANSFER_LOSSLESS;
    spec.either = true;
    spec.budget = 50000;
    return spec;
}

static void loop(sthi_fault_kind kind, world_spec spec) {
    for (int forever = 0; forever < 2; forever++) {
        scenario s = {kind, forever, spec, 1};
        alarm(SECONDS);
        while (play(&s)) s.n += 1 + (s.n > 100) * s.n / 50;
        alarm(0);
        assert_true(s.n > 1);
    }
}

static void any_allocation(void **state) {
    (void)state;
    loop(STHI_FAULT_ALLOC, direct());
    loop(STHI_FAULT_ALLOC, staged());
    loop(STHI_FAULT_ALLOC, writable());
    loop(STHI_FAULT_ALLOC, follows_the_lookahead());
    loop(STHI_FAULT_ALLOC, packed(false));
    ever_packed = false;
    loop(STHI_FAULT_ALLOC, stays());
    assert_true(ever_packed);
}

static void any_registration(void **state) {
    (void)state;
    loop(STHI_FAULT_PIN, direct());
    loop(STHI_FAULT_PIN, writable());
}

static void any_thread(void **state) {
    (void)state;
    world_spec spec = staged();
    spec.readers = 2;
    loop(STHI_FAULT_THREAD, spec);
    spec.virtual_time = false;
    loop(STHI_FAULT_THREAD, spec);
}

static void any_device_allocation(void **state) {
    (void)state;
    loop(STHI_FAULT_DEVICE_ALLOC, direct());
    loop(STHI_FAULT_DEVICE_ALLOC, staged());
    loop(STHI_FAULT_DEVICE_ALLOC, follows_the_lookahead());
    loop(STHI_FAULT_DEVICE_ALLOC, packed(false));
    loop(STHI_FAULT_DEVICE_ALLOC, stays());
}

static void any_device_call(void **state) {
    (void)state;
    loop(STHI_FAULT_DEVICE_CALL, direct());
    loop(STHI_FAULT_DEVICE_CALL, staged());
    loop(STHI_FAULT_DEVICE_CALL, writable());
    loop(STHI_FAULT_DEVICE_CALL, follows_the_lookahead());
    loop(STHI_FAULT_DEVICE_CALL, packed(false));
    loop(STHI_FAULT_DEVICE_CALL, packed(true));
    loop(STHI_FAULT_DEVICE_CALL, stays());
    loop(STHI_FAULT_DEVICE_CALL, either());
}

/* With readers at work the n-th call is another one each time. */
static void any_device_call_beside_readers(void **state) {
    (void)state;
    for (int virtual_time = 0; virtual_time < 2; virtual_time++)
        for (int forever = 0; forever < 2; forever++) {
            scenario s = {STHI_FAULT_DEVICE_CALL, forever, staged(), 1};
            s.spec.readers = 2;
            s.spec.virtual_time = virtual_time;
            alarm(SECONDS);
            while (play(&s) && s.n < 1000) s.n += 1 + s.n / 12;
            alarm(0);
        }
}

/* ---- the device does not say any more when work ends */

enum { LARGE = 60000, POOL_SLABS = 4 };

/* Two units of more chunks than there are slabs, and room for one. */
static sth_status open_two(world *w, world_spec spec) {
    static const uint64_t bytes[2] = {LARGE, LARGE};
    spec.units = 2;
    spec.bytes = bytes;
    spec.budget = LARGE + 10000;
    spec.capacity = 4 * LARGE;
    spec.readers = 2;
    spec.virtual_time = false;
    return world_open(w, &spec);
}

/* The second unit is asked for when slabs fly whose end nobody is told. */
static void lose_all_slabs(world *w) {
    sth_lease lease;
    assert_ok(sthi_unit_acquire(w->runtime, 0, 0, &lease));
    sthi_fault_arm(STHI_FAULT_DEVICE_WAIT, 1, true);
    sthi_lease_release(w->runtime, &lease);
    assert_status(sthi_unit_acquire(w->runtime, 1, 0, &lease), STH_DEVICE_ERROR);
    assert_status(sthi_unit_acquire(w->runtime, 1, 0, &lease), STH_DEVICE_ERROR);
}

static void a_caller_beside_readers_hears_of_failed_waits(void **state) {
    (void)state;
    static const uint32_t order[2] = {0, 1};
    for (int step = 0; step < 3; step++) { /* before the order is known, and by plan */
        world w;
        alarm(SECONDS);
        sthi_fault_disarm_all();
        assert_ok(open_two(&w, staged()));
        for (int i = 0; i < step; i++) assert_ok(world_step(&w, order, 2, 1000));
        lose_all_slabs(&w);
        sthi_fault_disarm_all();
        if (w.runtime->step.open) assert_ok(sthi_step_end(w.runtime));
        for (int i = 0; i < 2; i++) assert_ok(world_step(&w, order, 2, 1000));
        world_close(&w);
        alarm(0);
    }
}

/* It waits for slabs that another runtime can not give back. */
static void a_caller_hears_of_failed_waits_of_another_runtime(void **state) {
    (void)state;
    world_spec spec = staged();
    world w, other;
    sth_slab slab, held[POOL_SLABS];
    uint32_t count, held_count = 0;
    alarm(SECONDS);
    sthi_fault_disarm_all();
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = 8 * LARGE;
    sim.pin_limit_bytes = 4096 * POOL_SLABS; /* none for the images */
    assert_ok(sthi_device_open("sim", &sim, &spec.device));
    assert_ok(sthi_pool_create(spec.device, 4096 * POOL_SLABS, 4096, 4096, &spec.pool));
    spec.chunk = 0;
    assert_ok(open_two(&w, spec));
    spec.flags = STH_UNIT_ON_DEMAND; /* it keeps no slab filled ahead of need */
    assert_ok(open_two(&other, spec));
    lose_all_slabs(&w);
    /* A read that was given up may have left a slab: a third party loses it. */
    while (sthi_pool_reachable(spec.pool) == STH_OK) {
        sth_status rc = sthi_pool_try_acquire(spec.pool, 1, &held[held_count], 1, &count);
        if (rc == STH_OK && count) sthi_pool_lose(spec.pool, 1), held_count++;
        else sthi_sleep_ns(1000000);
    }
    assert_status(sthi_pool_acquire(spec.pool, 1, &slab, 1, &count), STH_DEVICE_ERROR);
    sth_lease lease;
    assert_status(sthi_unit_acquire(other.runtime, 1, 0, &lease), STH_DEVICE_ERROR);
    sthi_fault_disarm_all();
    sthi_pool_lose(spec.pool, -(int)held_count);
    assert_ok(sthi_pool_release(spec.pool, held, held_count));
    assert_ok(world_use(&w, 1, 1000));
    assert_ok(world_use(&other, 1, 1000));
    world_close(&other);
    world_close(&w);
    sthi_pool_destroy(spec.pool);
    sthi_device_release(spec.device);
    alarm(0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_allocation),        cmocka_unit_test(any_registration),
        cmocka_unit_test(any_thread),            cmocka_unit_test(any_device_allocation),
        cmocka_unit_test(any_device_call),       cmocka_unit_test(any_device_call_beside_readers),
        cmocka_unit_test(a_caller_beside_readers_hears_of_failed_waits),
        cmocka_unit_test(a_caller_hears_of_failed_waits_of_another_runtime),
    };
    return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
