/* The pool of slabs: sizes, handles, waiting in turn, shutdown, and what happens when pinning fails. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "store/pool.h"

#define KIB ((uint64_t)1024)
#define MS 1000000

static sth_pool *make(uint64_t slabs) {
    sth_pool *pool;
    assert_ok(sth_pool_create(NULL, slabs * 4 * KIB, 4 * KIB, 512, &pool));
    return pool;
}

static sth_pool_stats stats(sth_pool *pool) {
    sth_pool_stats s;
    assert_ok(sth_pool_stats_get(pool, &s));
    return s;
}

static void take(sth_pool *pool, uint32_t slabs, sth_slab *out) {
    uint32_t count = 0;
    assert_ok(sth_pool_acquire(pool, slabs * 4 * KIB, out, slabs, &count));
    assert_int_equal(count, slabs);
}

static void refuses_bad_sizes(void **state) {
    (void)state;
    sth_pool *pool = NULL;
    assert_status(sth_pool_create(NULL, 0, 4096, 512, &pool), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_create(NULL, 4096, 0, 512, &pool), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_create(NULL, 10000, 4096, 512, &pool), STH_INVALID_ARGUMENT);
    assert_non_null(strstr(sth_last_error()->message, "evenly divisible"));
    assert_status(sth_pool_create(NULL, 8192, 4096, 0, &pool), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_create(NULL, 8192, 4096, 768, &pool), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_create(NULL, UINT64_MAX, UINT64_MAX, 512, &pool), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_create(NULL, (uint64_t)1 << 40, 1, 512, &pool), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_create(NULL, 8192, 4096, 512, NULL), STH_INVALID_ARGUMENT);
    assert_null(pool);
    sth_pool_destroy(NULL);
}

static void slabs_are_aligned_and_apart(void **state) {
    (void)state;
    static const uint64_t alignments[] = {1, 512, 4096, 2 * 1024 * KIB};
    for (size_t a = 0; a < 4; a++) {
        sth_pool *pool;
        uint64_t want = alignments[a] < 512 ? 512 : alignments[a];
        assert_ok(sth_pool_create(NULL, 3000, 1000, alignments[a], &pool));
        assert_int_equal(sth_pool_slab_bytes(pool), want < 1000 ? 1024 : want);
        sth_slab slabs[3];
        uint32_t count;
        assert_ok(sth_pool_acquire(pool, 3 * sth_pool_slab_bytes(pool), slabs, 3, &count));
        for (unsigned i = 0; i < 3; i++) {
            unsigned char *p = sth_pool_slab_address(pool, slabs[i]);
            assert_non_null(p);
            assert_int_equal((uintptr_t)p % want, 0);
            memset(p, (int)i + 1, sth_pool_slab_bytes(pool));
        }
        for (unsigned i = 0; i < 3; i++) {
            unsigned char *p = sth_pool_slab_address(pool, slabs[i]);
            assert_int_equal(p[0], i + 1);
            assert_int_equal(p[sth_pool_slab_bytes(pool) - 1], i + 1);
        }
        sth_pool_destroy(pool);
    }
}

static void counts_slabs(void **state) {
    (void)state;
    sth_pool *pool = make(4);
    assert_int_equal(sth_pool_slabs_for(pool, 1), 1);
    assert_int_equal(sth_pool_slabs_for(pool, 4 * KIB), 1);
    assert_int_equal(sth_pool_slabs_for(pool, 4 * KIB + 1), 2);
    assert_int_equal(sth_pool_slabs_for(pool, UINT64_MAX), UINT32_MAX);
    sth_slab a[3], b;
    take(pool, 3, a);
    take(pool, 1, &b);
    assert_ok(sth_pool_release(pool, a, 3));
    sth_pool_stats s = stats(pool);
    assert_int_equal(s.total, 4);
    assert_int_equal(s.free, 3);
    assert_int_equal(s.in_use, 1);
    assert_int_equal(s.peak_in_use, 4);
    assert_int_equal(s.wait_count, 0);
    assert_int_equal(s.total_wait_ns, 0);
    assert_false(sth_pool_is_pinned(pool));
    assert_string_equal(sth_pool_warning(pool), "");
    sth_pool_destroy(pool);
}

static void refuses_what_can_never_be(void **state) {
    (void)state;
    sth_pool *pool = make(2);
    sth_slab slabs[4] = {0};
    uint32_t count = 77;
    assert_status(sth_pool_acquire(pool, 0, slabs, 4, &count), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_acquire(pool, 9 * KIB, slabs, 4, &count), STH_OUT_OF_PINNED_MEMORY);
    assert_status(sth_pool_acquire(pool, UINT64_MAX, slabs, 4, &count), STH_OUT_OF_PINNED_MEMORY);
    assert_status(sth_pool_acquire(pool, 8 * KIB, slabs, 1, &count), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_try_acquire(pool, 9 * KIB, slabs, 4, &count), STH_OUT_OF_PINNED_MEMORY);
    assert_status(sth_pool_acquire(NULL, 1, slabs, 4, &count), STH_INVALID_ARGUMENT);
    assert_int_equal(count, 77);
    assert_int_equal(slabs[0], 0);
    assert_int_equal(stats(pool).free, 2);
    sth_pool_destroy(pool);
}

static void a_bad_release_changes_nothing(void **state) {
    (void)state;
    sth_pool *pool = make(3), *other = make(3);
    sth_slab mine[2], theirs;
    take(pool, 2, mine);
    take(other, 1, &theirs);
    sth_slab foreign[] = {mine[0], theirs}, twice[] = {mine[0], mine[1], mine[0]}, none[] = {mine[0], 0};
    assert_status(sth_pool_release(pool, foreign, 2), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_release(pool, twice, 3), STH_INVALID_ARGUMENT);
    assert_status(sth_pool_release(pool, none, 2), STH_INVALID_ARGUMENT);
    assert_null(sth_pool_slab_address(pool, theirs));
    assert_int_equal(stats(pool).in_use, 2);
    assert_int_equal(stats(other).in_use, 1);

    assert_ok(sth_pool_release(pool, mine, 1));
    assert_status(sth_pool_release(pool, mine, 2), STH_STALE);
    assert_null(sth_pool_slab_address(pool, mine[0]));
    assert_non_null(sth_pool_slab_address(pool, mine[1]));
    assert_int_equal(stats(pool).in_use, 1);

    /* The same place under a new owner: the old handle must not reach it. */
    sth_slab again[2];
    take(pool, 2, again);
    assert_status(sth_pool_release(pool, mine, 1), STH_STALE);
    assert_int_equal(stats(pool).in_use, 3);
    assert_ok(sth_pool_release(pool, NULL, 0));
    sth_pool_destroy(pool);
    sth_pool_destroy(other);
}

static void acquire_and_release_allocate_nothing(void **state) {
    (void)state;
    sth_pool *pool = make(4);
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, true);
    for (int i = 0; i < 100; i++) {
        sth_slab slabs[3];
        take(pool, 3, slabs);
        assert_ok(sth_pool_release(pool, slabs, 3));
    }
    assert_int_equal(sthi_fault_seen(STHI_FAULT_ALLOC), 0);
    sthi_fault_disarm_all();
    sth_pool_destroy(pool);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    sth_status status = STH_OUT_OF_HOST_MEMORY;
    uint64_t n = 0;
    while (status != STH_OK) {
        sth_pool *pool = NULL;
        sthi_fault_arm(STHI_FAULT_ALLOC, ++n, false);
        status = sth_pool_create(NULL, 8 * KIB, 4 * KIB, 512, &pool);
        sthi_fault_disarm_all();
        if (status != STH_OK) assert_int_equal(status, STH_OUT_OF_HOST_MEMORY);
        sth_pool_destroy(pool);
        assert_int_equal(sthi_alloc_live(), live);
    }
    assert_true(n > 3);
}

/* ---- waiting ---- */

typedef struct waiter {
    sth_pool *pool;
    uint32_t want;
    atomic_uint *order; /* counts those that were served */
    uint32_t served_as;
    sth_status status;
    sth_slab slabs[8];
    sthi_thread thread;
} waiter;

static void *wait_for_slabs(void *arg) {
    waiter *w = arg;
    uint32_t count;
    w->status = sth_pool_acquire(w->pool, w->want * 4 * KIB, w->slabs, 8, &count);
    w->served_as = atomic_fetch_add(w->order, 1);
    if (w->status == STH_OK && sth_pool_release(w->pool, w->slabs, count) != STH_OK) w->status = STH_INTERNAL;
    return NULL;
}

static void until_waiting(sth_pool *pool, uint64_t waits) {
    while (stats(pool).wait_count < waits) sthi_sleep_ns(MS);
}

static void start(waiter *w, sth_pool *pool, uint32_t want, atomic_uint *order) {
    *w = (waiter){.pool = pool, .want = want, .order = order};
    uint64_t waits = stats(pool).wait_count;
    assert_ok(sthi_thread_start(&w->thread, "pool-waiter", wait_for_slabs, w));
    until_waiting(pool, waits + 1);
}

static void callers_are_served_in_turn(void **state) {
    (void)state;
    sth_pool *pool = make(4);
    sth_slab held[4];
    atomic_uint order = 0;
    take(pool, 4, held);
    waiter large, small;
    start(&large, pool, 3, &order);
    start(&small, pool, 1, &order);
    /* One free slab would do for the small request, but the large one came first. */
    assert_ok(sth_pool_release(pool, held, 1));
    sth_slab extra;
    uint32_t count = 9;
    assert_ok(sth_pool_try_acquire(pool, 1, &extra, 1, &count));
    assert_int_equal(count, 0);
    sthi_sleep_ns(20 * MS);
    assert_int_equal(atomic_load(&order), 0);
    assert_ok(sth_pool_release(pool, held + 1, 2));
    sthi_thread_join(large.thread);
    sthi_thread_join(small.thread);
    assert_int_equal(large.status, STH_OK);
    assert_int_equal(small.status, STH_OK);
    assert_int_equal(large.served_as, 0);
    assert_int_equal(small.served_as, 1);
    sth_pool_stats s = stats(pool);
    assert_int_equal(s.wait_count, 2);
    assert_true(s.total_wait_ns >= 20 * MS);
    assert_int_equal(s.in_use, 1);
    sth_pool_destroy(pool);
}

typedef struct warned {
    sth_pool *pool;
    atomic_uint calls;
    uint32_t wanted, free;
} warned;

static void note_wait(void *arg, uint32_t wanted, uint32_t free) {
    warned *w = arg;
    w->wanted = wanted;
    w->free = free;
    (void)stats(w->pool); /* no lock is held: this must not hang */
    atomic_fetch_add(&w->calls, 1);
}

static void a_long_wait_is_told_once(void **state) {
    (void)state;
    sth_pool *pool = make(2);
    warned w = {.pool = pool};
    sth_pool_set_wait_handler(pool, note_wait, &w);
    sth_slab held;
    atomic_uint order = 0;
    take(pool, 1, &held);
    waiter waiting;
    int64_t begin = sthi_now_ns();
    start(&waiting, pool, 2, &order);
    while (!atomic_load(&w.calls)) sthi_sleep_ns(MS);
    assert_true(sthi_now_ns() - begin >= 100 * MS);
    sthi_sleep_ns(150 * MS);
    assert_int_equal(atomic_load(&w.calls), 1);
    assert_int_equal(w.wanted, 2);
    assert_int_equal(w.free, 1);
    assert_ok(sth_pool_release(pool, &held, 1));
    sthi_thread_join(waiting.thread);
    assert_int_equal(waiting.status, STH_OK);
    sth_pool_destroy(pool);
}

static void shutdown_wakes_everybody(void **state) {
    (void)state;
    sth_pool *pool = make(2);
    sth_slab held[2], slab;
    atomic_uint order = 0;
    take(pool, 2, held);
    waiter w[3];
    for (int i = 0; i < 3; i++) start(&w[i], pool, 1, &order);
    sth_pool_shutdown(pool);
    sth_pool_shutdown(pool);
    for (int i = 0; i < 3; i++) {
        sthi_thread_join(w[i].thread);
        assert_int_equal(w[i].status, STH_SHUT_DOWN);
    }
    uint32_t count;
    assert_status(sth_pool_acquire(pool, 1, &slab, 1, &count), STH_SHUT_DOWN);
    assert_status(sth_pool_try_acquire(pool, 1, &slab, 1, &count), STH_SHUT_DOWN);
    assert_non_null(sth_pool_slab_address(pool, held[0]));
    assert_ok(sth_pool_release(pool, held, 2));
    sth_pool_destroy(pool);
}

static void slabs_that_can_not_come_back_are_not_waited_for(void **state) {
    (void)state;
    sth_pool *pool = make(2);
    sth_slab held[2], slab;
    uint32_t count = 9;
    atomic_uint order = 0;
    take(pool, 2, held);
    waiter both, one;
    start(&both, pool, 2, &order);
    start(&one, pool, 1, &order);
    sthi_pool_lose(pool, 1); /* one may still come */
    sthi_thread_join(both.thread);
    assert_int_equal(both.status, STH_DEVICE_ERROR);
    assert_status(sth_pool_acquire(pool, 8 * KIB, both.slabs, 8, &count), STH_DEVICE_ERROR);
    sthi_pool_lose(pool, 1);
    sthi_thread_join(one.thread);
    assert_int_equal(one.status, STH_DEVICE_ERROR);
    assert_status(sth_pool_try_acquire(pool, 1, &slab, 1, &count), STH_DEVICE_ERROR);
    assert_non_null(strstr(sth_last_error()->message, "2 of the pool's 2 slabs"));
    assert_int_equal(count, 9);
    sthi_pool_lose(pool, -2); /* the device has said it after all */
    assert_ok(sth_pool_release(pool, held, 2));
    take(pool, 2, held);
    assert_ok(sth_pool_release(pool, held, 2));
    sth_pool_destroy(pool);
}

enum { WORKERS = 4, ROUNDS = 300 };

/* Takes 1 to 3 slabs, marks them as its own, and finds its mark again. */
static void *hammer(void *arg) {
    waiter *w = arg;
    for (uint32_t i = 0; i < ROUNDS && w->status == STH_OK; i++) {
        uint32_t count = 0, want = 1 + (i + w->want) % 3;
        w->status = sth_pool_acquire(w->pool, want * 4 * KIB, w->slabs, 8, &count);
        if (w->status != STH_OK) break;
        for (uint32_t k = 0; k < count; k++)
            memset(sth_pool_slab_address(w->pool, w->slabs[k]), (int)w->want, 4 * KIB);
        for (uint32_t k = 0; k < count; k++) {
            const unsigned char *p = sth_pool_slab_address(w->pool, w->slabs[k]);
            if (count != want || p[0] != w->want || p[4 * KIB - 1] != w->want) w->status = STH_INTERNAL;
        }
        if (sth_pool_release(w->pool, w->slabs, count) != STH_OK) w->status = STH_INTERNAL;
    }
    return NULL;
}

static void a_slab_has_one_owner(void **state) {
    (void)state;
    sth_pool *pool = make(5);
    waiter w[WORKERS];
    for (uint32_t i = 0; i < WORKERS; i++) {
        w[i] = (waiter){.pool = pool, .want = i + 1};
        assert_ok(sthi_thread_start(&w[i].thread, "pool-hammer", hammer, &w[i]));
    }
    for (int i = 0; i < WORKERS; i++) {
        sthi_thread_join(w[i].thread);
        assert_int_equal(w[i].status, STH_OK);
    }
    sth_pool_stats s = stats(pool);
    assert_int_equal(s.free, 5);
    assert_true(s.peak_in_use <= 5);
    sth_pool_destroy(pool);
}

/* ---- pinning ---- */

typedef struct fake_device {
    struct sth_device base;
    bool refuse;
    void *registered;
    uint64_t bytes;
} fake_device;

static sth_status fake_register(sth_backend_device *device, void *p, uint64_t bytes, sth_devptr *out_alias) {
    fake_device *fake = (fake_device *)device;
    if (fake->refuse)
        return sthi_fail(STH_OUT_OF_PINNED_MEMORY, "test", 0, NULL, "the limit for locked memory is reached");
    fake->registered = p;
    fake->bytes = bytes;
    *out_alias = 0;
    return STH_OK;
}

static void fake_unregister(sth_backend_device *device, void *p, uint64_t bytes) {
    fake_device *fake = (fake_device *)device;
    if (fake->registered == p && fake->bytes == bytes) fake->registered = NULL;
}

static const sth_backend_ops fake_ops = {.host_register = fake_register, .host_unregister = fake_unregister};

static void memory_is_pinned_once(void **state) {
    (void)state;
    fake_device fake = {.base = {.ops = &fake_ops, .capabilities = STH_CAP_PINNED_HOST, .refs = 1}};
    fake.base.self = (sth_backend_device *)&fake;
    sth_pool *pool;
    assert_ok(sth_pool_create(&fake.base, 8 * KIB, 4 * KIB, 512, &pool));
    assert_true(sth_pool_is_pinned(pool));
    assert_non_null(fake.registered);
    assert_int_equal(fake.base.refs, 2);
    assert_true(fake.bytes >= 8 * KIB);
    sth_pool_destroy(pool);
    assert_null(fake.registered);
    assert_int_equal(fake.base.refs, 1);
}

static void without_pinning_the_pool_works_and_says_so(void **state) {
    (void)state;
    fake_device fake = {.base = {.ops = &fake_ops, .capabilities = STH_CAP_PINNED_HOST, .refs = 1},
                        .refuse = true};
    fake.base.self = (sth_backend_device *)&fake;
    sth_pool *pool;
    assert_ok(sth_pool_create(&fake.base, 8 * KIB, 4 * KIB, 512, &pool));
    assert_false(sth_pool_is_pinned(pool));
    assert_non_null(strstr(sth_pool_warning(pool), "limit for locked memory"));
    sth_slab slab;
    take(pool, 1, &slab);
    memset(sth_pool_slab_address(pool, slab), 1, 4 * KIB);
    sth_pool_destroy(pool);

    fake.base.capabilities = 0; /* a device that cannot pin is no reason for a warning */
    assert_ok(sth_pool_create(&fake.base, 8 * KIB, 4 * KIB, 512, &pool));
    assert_false(sth_pool_is_pinned(pool));
    assert_string_equal(sth_pool_warning(pool), "");
    sth_pool_destroy(pool);
}

static void more_pinned_memory_than_there_is_is_refused_before_it_is_asked_for(void **state) {
    (void)state;
    fake_device fake = {.base = {.ops = &fake_ops, .capabilities = STH_CAP_PINNED_HOST, .refs = 1}};
    fake.base.self = (sth_backend_device *)&fake;
    uint64_t slab = 1024 * KIB * KIB, slabs = sthi_memory_available() / slab + 2;
    sth_pool *pool;
    assert_int_equal(sth_pool_create(&fake.base, slabs * slab, slab, 512, &pool), STH_OUT_OF_HOST_MEMORY);
    assert_non_null(strstr(sthi_error_last()->message, "available"));
    assert_null(fake.registered);
    assert_int_equal(fake.base.refs, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_bad_sizes),
        cmocka_unit_test(slabs_are_aligned_and_apart),
        cmocka_unit_test(counts_slabs),
        cmocka_unit_test(refuses_what_can_never_be),
        cmocka_unit_test(a_bad_release_changes_nothing),
        cmocka_unit_test(acquire_and_release_allocate_nothing),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(callers_are_served_in_turn),
        cmocka_unit_test(a_long_wait_is_told_once),
        cmocka_unit_test(shutdown_wakes_everybody),
        cmocka_unit_test(slabs_that_can_not_come_back_are_not_waited_for),
        cmocka_unit_test(a_slab_has_one_owner),
        cmocka_unit_test(memory_is_pinned_once),
        cmocka_unit_test(without_pinning_the_pool_works_and_says_so),
        cmocka_unit_test(more_pinned_memory_than_there_is_is_refused_before_it_is_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
