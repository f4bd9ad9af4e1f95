/* One runtime under several threads: uses on their own streams, leases that end on other threads, steps,
 * statistics and budgets meanwhile, and the end of the runtime while a thread waits. Real time, readers at
 * work. What each stream saw is copied out and compared. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"
#include "stream/world.h"
#include "support/check.h"

enum { UNITS = 6, USERS = 3, ROUNDS = 60, HANDED = 8 };
static const uint64_t BYTES[UNITS] = {9000, 3000, 20000, 5000, 12288, 700};

/* Leases on their way to the thread that ends them. */
typedef struct crowd {
    world w;
    sthi_mutex lock;
    sth_lease handed[HANDED];
    uint32_t handed_count;
    atomic_int users, wrong, failed;
} crowd;

typedef struct user {
    crowd *c;
    uint32_t number;
    sth_stream stream; /* lives until the last lease on it has been handled */
    sthi_thread thread;
} user;

/* Hands a lease over and takes somebody's in exchange, if there is one. */
static bool exchange(crowd *c, const sth_lease *mine, sth_lease *out) {
    sthi_lock(&c->lock);
    bool got = c->handed_count > 0;
    if (got) *out = c->handed[--c->handed_count];
    if (mine) c->handed[c->handed_count++] = *mine;
    sthi_unlock(&c->lock);
    return got;
}

static bool use(crowd *c, uint32_t unit, sth_stream stream, uint8_t *seen) {
    sth_device *d = c->w.device;
    sth_lease mine, other;
    sth_status rc = sthi_unit_acquire(c->w.runtime, unit, stream, &mine);
    /* The others hold it all; or they use what was just written. */
    if (rc == STH_BUDGET_TOO_SMALL || (rc == STH_INVALID_STATE && unit == 5)) return true;
    if (rc != STH_OK) return false;
    bool fine = d->ops->copy_d2h(d->self, seen, mine.address, BYTES[unit], stream) == STH_OK;
    fine = fine && d->ops->sim_compute(d->self, stream, 30000) == STH_OK;
    if (exchange(c, &mine, &other)) sthi_lease_release(c->w.runtime, &other);
    fine = fine && d->ops->stream_synchronize(d->self, stream) == STH_OK;
    if (fine && !world_shows(&c->w, unit, 0, seen)) atomic_fetch_add(&c->wrong, 1);
    return fine && sthi_runtime_poll(c->w.runtime) == STH_OK;
}

static void *user_main(void *arg) {
    user *u = arg;
    crowd *c = u->c;
    uint8_t *seen = sthi_alloc(20000);
    bool fine = seen != NULL;
    for (uint32_t i = 0; fine && i < ROUNDS; i++) {
        /* The same order for all, with an odd one in between. */
        fine = use(c, i % 7 == 6 ? (i * u->number) % UNITS : i % UNITS, u->stream, seen);
        if (i % 16 == 3 && fine) fine = sthi_unit_mark_written(c->w.runtime, 5) == STH_OK;
    }
    if (!fine) {
        fprintf(stderr, "user %u: %s\n", u->number, sth_last_error()->message);
        atomic_fetch_add(&c->failed, 1);
    }
    sth_lease other;
    while (exchange(c, NULL, &other)) sthi_lease_release(c->w.runtime, &other);
    (void)sthi_runtime_poll(c->w.runtime);
    sthi_free(seen);
    atomic_fetch_sub(&c->users, 1);
    return NULL;
}

static void assert_sound(crowd *c) {
    const char *why;
    if (!sthi_runtime_check(c->w.runtime, &why)) fail_msg("%s", why);
}

static bool may(sth_status rc) { return rc == STH_OK || rc == STH_BUDGET_TOO_SMALL; }

/* What a training loop and its display do while the users work. */
static void look_on(crowd *c, uint64_t budget, int i) {
    sth_runtime *rt = c->w.runtime;
    sth_runtime_stats stats;
    sth_unit_stats unit;
    sth_prediction prediction;
    sth_step_metrics metrics;
    assert_ok(sthi_step_begin(rt));
    sthi_runtime_stats(rt, &stats);
    assert_true(stats.device_bytes <= stats.budget);
    sthi_unit_stats(rt, (uint32_t)i % UNITS, &unit);
    sthi_sleep_ns(1500000);
    (void)sthi_runtime_prediction(rt, &prediction);
    (void)sthi_runtime_step_metrics(rt, 0, &metrics);
    assert_true(may(sthi_step_end(rt)));
    if (i % 3 == 1) assert_ok(sthi_runtime_synchronize(rt));
    sth_status rc = i % 4 == 2 ? sthi_runtime_set_budget(rt, budget - 2048 * (uint64_t)(i % 5)) : STH_OK;
    if (!may(rc)) fail_msg("set budget: %s: %s", sth_status_name(rc), sth_last_error()->message);
    assert_sound(c);
}

static void run_crowd(world_spec spec) {
    static crowd c;
    c = (crowd){0};
    assert_ok(world_open(&c.w, &spec));
    sthi_mutex_init(&c.lock);
    user users[USERS];
    atomic_store(&c.users, USERS);
    for (uint32_t i = 0; i < USERS; i++) {
        users[i] = (user){.c = &c, .number = i};
        assert_ok(c.w.device->ops->stream_create(c.w.device->self, 0, &users[i].stream));
        assert_ok(sthi_thread_start(&users[i].thread, "user", user_main, &users[i]));
    }
    for (int i = 0; atomic_load(&c.users); i++) look_on(&c, spec.budget, i);
    for (uint32_t i = 0; i < USERS; i++) sthi_thread_join(users[i].thread);
    assert_int_equal(atomic_load(&c.failed), 0);
    assert_int_equal(atomic_load(&c.wrong), 0);
    sth_lease last;
    while (exchange(&c, NULL, &last)) sthi_lease_release(c.w.runtime, &last);
    assert_ok(sthi_runtime_poll(c.w.runtime));
    assert_int_equal(c.w.runtime->leases.bytes, 0);
    for (uint32_t i = 0; i < USERS; i++) c.w.device->ops->stream_destroy(c.w.device->self, users[i].stream);
    assert_sound(&c);
    world_close(&c.w);
    sthi_mutex_fini(&c.lock);
}

static world_spec real_time(uint64_t budget) {
    world_spec spec = world_default(UNITS, BYTES, budget);
    spec.virtual_time = false;
    spec.readers = 2;
    return spec;
}

static void threads_share_pinned_units(void **state) {
    (void)state;
    run_crowd(real_time(60000));
    run_crowd(real_time(45000));
}

static void threads_share_staged_units(void **state) {
    (void)state;
    for (uint32_t readers = 0; readers < 3; readers++) {
        world_spec spec = real_time(52000);
        spec.pin_limit = 16384;
        spec.readers = readers;
        run_crowd(spec);
    }
}

static void threads_follow_the_lookahead(void **state) {
    (void)state;
    world_spec spec = real_time(60000);
    spec.policy = STH_POLICY_STATIC;
    run_crowd(spec);
    spec.pin_limit = 16384;
    run_crowd(spec);
}

/* ---- loads that take long: pageable units through a small pool, over a slow link */

enum { SLOW_BYTES = 20000 };

typedef struct slow {
    sth_device *device;
    sth_runtime *runtime;
    sth_pool *pool;
    uint8_t image[3][SLOW_BYTES];
    atomic_bool inside;
    sth_status rc;
    sth_lease lease;
} slow;

static void slow_open(slow *x, uint32_t units, uint64_t budget, uint32_t slabs) {
    sth_sim_options sim;
    sth_runtime_options o;
    uint32_t id;
    *x = (slow){.rc = STH_OK};
    sth_sim_options_init(&sim);
    sim.memory_bytes = budget;
    sim.link_bytes_per_s = 400000;
    assert_ok(sthi_device_open("sim", &sim, &x->device));
    sthi_runtime_options_init(&o);
    o.budget = budget;
    o.chunk_bytes = 4096;
    o.link_bytes_per_s = 400000;
    assert_ok(sthi_pool_create(NULL, 4096 * (uint64_t)slabs, 4096, 512, &x->pool));
    o.pool = x->pool;
    assert_ok(sthi_runtime_create(x->device, &o, &x->runtime));
    for (uint32_t u = 0; u < units; u++) {
        memset(x->image[u], (int)u + 1, SLOW_BYTES);
        sth_unit_desc d = {.name = "slow", .bytes = SLOW_BYTES, .host = x->image[u],
                           .flags = STH_UNIT_ON_DEMAND};
        assert_ok(sthi_runtime_add_unit(x->runtime, &d, &id));
    }
    assert_ok(sthi_runtime_seal(x->runtime));
}

static void slow_close(slow *x) {
    sthi_runtime_destroy(x->runtime);
    sthi_pool_destroy(x->pool);
    sthi_device_release(x->device);
}

static void *take_first(void *arg) {
    slow *x = arg;
    atomic_store(&x->inside, true);
    x->rc = sthi_unit_acquire(x->runtime, 0, 0, &x->lease);
    return NULL;
}

static void take_first_elsewhere(slow *x, sthi_thread *t) {
    assert_ok(sthi_thread_start(t, "taker", take_first, x));
    while (!atomic_load(&x->inside)) sthi_sleep_ns(100000);
    sthi_sleep_ns(20000000); /* some of it is copied now; all of it takes 50 ms */
}

static void assert_place(const sth_lease *l, int value) {
    const uint8_t *p = (const uint8_t *)(uintptr_t)l->address;
    for (int i = 0; i < SLOW_BYTES; i++) assert_int_equal(p[i], value);
}

static void a_write_during_a_load_is_seen(void **state) {
    (void)state;
    if (UNDER_TSAN) skip_because("the write and the read under way are meant to meet");
    static slow x;
    sthi_thread t;
    slow_open(&x, 1, 21000, 1);
    take_first_elsewhere(&x, &t);
    memset(x.image[0], 99, SLOW_BYTES);
    assert_ok(sthi_unit_mark_written(x.runtime, 0));
    sthi_thread_join(t);
    assert_int_equal(x.rc, STH_OK);
    assert_place(&x.lease, 99);
    sthi_lease_release(x.runtime, &x.lease);
    slow_close(&x);
}

/* The place that is being filled stays where it is, whatever the others need. */
static void a_load_keeps_its_memory(void **state) {
    (void)state;
    for (int how = 0; how < 3; how++) {
        static slow x;
        sthi_thread t;
        sth_lease second;
        slow_open(&x, 3, 45000, 2);
        take_first_elsewhere(&x, &t);
        if (how == 0) assert_ok(sthi_step_end(x.runtime));
        if (how == 1) assert_int_equal(sthi_runtime_set_budget(x.runtime, 41000), STH_OK);
        sth_status rc = sthi_unit_acquire(x.runtime, 1, 0, &second);
        if (rc == STH_OK) assert_place(&second, 2);
        else assert_int_equal(rc, STH_BUDGET_TOO_SMALL);
        sthi_thread_join(t);
        assert_int_equal(x.rc, STH_OK);
        assert_place(&x.lease, 1);
        if (rc == STH_OK) sthi_lease_release(x.runtime, &second);
        sthi_lease_release(x.runtime, &x.lease);
        slow_close(&x);
    }
}

/* The use that waits belongs to the next step. */
static void a_step_may_end_while_a_written_unit_is_read(void **state) {
    (void)state;
    for (int begun = 0; begun < 2; begun++) {
        static slow x;
        sthi_thread t;
        sth_lease before;
        sth_runtime_stats stats;
        slow_open(&x, 1, 45000, 2);
        if (begun) assert_ok(sthi_step_begin(x.runtime));
        assert_ok(sthi_unit_acquire(x.runtime, 0, 0, &before));
        sthi_lease_release(x.runtime, &before);
        memset(x.image[0], 77, SLOW_BYTES);
        assert_ok(sthi_unit_mark_written(x.runtime, 0));
        take_first_elsewhere(&x, &t);
        assert_ok(sthi_step_end(x.runtime));
        sthi_thread_join(t);
        assert_int_equal(x.rc, STH_OK);
        assert_place(&x.lease, 77);
        sthi_lease_release(x.runtime, &x.lease);
        assert_ok(sthi_step_end(x.runtime));
        sthi_runtime_stats(x.runtime, &stats);
        assert_int_equal(stats.steps, begun ? 2 : 3); /* an implicit one ends where it begins again */
        slow_close(&x);
    }
}

static void two_threads_load_one_unit_once(void **state) {
    (void)state;
    static slow x;
    sthi_thread t;
    sth_lease mine;
    slow_open(&x, 2, 45000, 1);
    take_first_elsewhere(&x, &t);
    assert_ok(sthi_unit_acquire(x.runtime, 0, 0, &mine));
    sthi_thread_join(t);
    assert_int_equal(x.rc, STH_OK);
    assert_int_equal(mine.address, x.lease.address);
    sth_runtime_stats stats;
    sthi_runtime_stats(x.runtime, &stats);
    assert_int_equal(stats.copies, 1);
    sthi_lease_release(x.runtime, &mine);
    sthi_lease_release(x.runtime, &x.lease);
    slow_close(&x);
}

/* ---- the end of a runtime */

static void destroy_ends_waiting(void **state) {
    (void)state;
    static slow x;
    sth_slab slabs[2];
    uint32_t count;
    sthi_thread t;
    slow_open(&x, 2, 45000, 2);
    assert_ok(sthi_pool_acquire(x.pool, 8192, slabs, 2, &count)); /* nothing can be read */
    take_first_elsewhere(&x, &t);
    sthi_runtime_destroy(x.runtime);
    sthi_thread_join(t);
    assert_int_equal(x.rc, STH_SHUT_DOWN);
    assert_ok(sthi_pool_release(x.pool, slabs, 2));
    x.runtime = NULL;
    slow_close(&x);
}

typedef struct letter {
    sth_runtime *runtime;
    sth_lease lease;
} letter;

static void *end_lease(void *arg) {
    letter *l = arg;
    sthi_lease_release(l->runtime, &l->lease);
    return NULL;
}

static void leases_may_end_while_the_runtime_ends(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    for (int i = 0; i < 20; i++) {
        world w;
        world_spec spec = real_time(60000);
        assert_ok(world_open(&w, &spec));
        letter letters[3];
        sthi_thread threads[3];
        for (uint32_t u = 0; u < 3; u++) {
            letters[u].runtime = w.runtime;
            assert_ok(sthi_unit_acquire(w.runtime, u, 0, &letters[u].lease));
        }
        for (int k = 0; k < 3; k++)
            assert_ok(sthi_thread_start(&threads[k], "letter", end_lease, &letters[k]));
        sthi_runtime_destroy(w.runtime);
        for (int k = 0; k < 3; k++) sthi_thread_join(threads[k]);
        w.runtime = NULL;
        world_close(&w);
        assert_int_equal(sthi_alloc_live(), live);
    }
}

/* ---- forks */

/* Every call comes back, though its lock is held by a thread that the child does not have. */
static bool refuses_all(world *w, sth_pool *pool, const sth_lease *lease) {
    sth_runtime *rt = w->runtime;
    sth_runtime_stats stats;
    sth_step_metrics metrics;
    sth_pool_stats slabs;
    sth_slab slab;
    sth_lease other;
    uint32_t count;
    void *address;
    const sth_status all[] = {
        sth_step_begin(rt), sth_step_pause(rt), sth_step_end(rt), sth_runtime_poll(rt), sth_runtime_fence(rt),
        sth_runtime_synchronize(rt), sth_runtime_set_budget(rt, 1), sth_unit_acquire(rt, 0, 0, &other),
        sth_runtime_stats_get(rt, &stats), sth_runtime_step_metrics(rt, 0, &metrics), sth_unit_mark_written(rt, 0),
        sth_runtime_guest_begin(rt), sth_arena_reserve(w->arena, 1, &address), sth_arena_finish(w->arena),
        sth_pool_acquire(pool, 1, &slab, 1, &count), sth_pool_try_acquire(pool, 1, &slab, 1, &count),
        sth_pool_stats_get(pool, &slabs)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != STH_INVALID_STATE) return false;
    sth_runtime_count_d2h(rt, 1);
    sth_lease_release(rt, lease);
    sth_runtime_destroy(rt);
    sth_arena_release(w->arena);
    sth_pool_shutdown(pool);
    sth_pool_destroy(pool);
    return true;
}

static void a_forked_child_touches_nothing(void **state) {
    (void)state;
    world w;
    world_spec spec = real_time(60000);
    sth_pool *pool;
    sth_lease lease;
    spec.pin_limit = 16384;
    assert_ok(world_open(&w, &spec));
    assert_ok(sth_pool_create(NULL, 1 << 20, 1 << 16, 512, &pool));
    assert_ok(sth_step_begin(w.runtime));
    assert_ok(sth_unit_acquire(w.runtime, 1, 0, &lease));
    sthi_lock(&w.runtime->lock);
    pid_t child = fork();
    if (!child) {
        alarm(240);
        _exit(refuses_all(&w, pool, &lease) ? 0 : 1);
    }
    sthi_unlock(&w.runtime->lock);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_true(world_right(&w, &lease));
    sth_lease_release(w.runtime, &lease);
    assert_ok(sth_step_end(w.runtime));
    sth_pool_destroy(pool);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_share_pinned_units),
        cmocka_unit_test(threads_share_staged_units),
        cmocka_unit_test(threads_follow_the_lookahead),
        cmocka_unit_test(a_write_during_a_load_is_seen),
        cmocka_unit_test(a_load_keeps_its_memory),
        cmocka_unit_test(a_step_may_end_while_a_written_unit_is_read),
        cmocka_unit_test(two_threads_load_one_unit_once),
        cmocka_unit_test(destroy_ends_waiting),
        cmocka_unit_test(leases_may_end_while_the_runtime_ends),
        cmocka_unit_test(a_forked_child_touches_nothing),
    };
    return cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
