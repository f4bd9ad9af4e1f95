/* Downloads: blocks and their memory, copies behind a stream, tickets, threads, forks, and every call that
 * may fail. The link is slow, so that a byte that is looked at too early is the old one. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "stagehand/download.h"
#include "support/check.h"

static const uint64_t KIB = 1 << 10, MIB = 1 << 20;
enum { OLD = 0x5A };

static sth_device *open_sim(bool virtual_time, uint64_t link, uint64_t pin_limit) {
    sth_sim_options o;
    sth_device *d;
    sthi_sim_options_init(&o);
    o.virtual_time = virtual_time;
    o.link_bytes_per_s = link;
    o.pin_limit_bytes = pin_limit;
    assert_ok(sthi_device_open("sim", &o, &d));
    return d;
}

static sth_download *make(sth_device *d, uint64_t region, uint64_t chunk) {
    sth_download_options o;
    sth_download *down;
    sth_download_options_init(&o);
    o.region_bytes = region;
    o.chunk_bytes = chunk;
    assert_ok(sth_download_create(d, &o, &down));
    return down;
}

static sth_download_stats stats(sth_download *down) {
    sth_download_stats s;
    assert_ok(sth_download_stats_get(down, &s));
    return s;
}

static sth_block *take(sth_download *down, uint64_t bytes) {
    sth_block *b;
    assert_ok(sth_download_take(down, bytes, &b));
    assert_int_equal((uintptr_t)sth_block_address(b) % STHI_ALIGN, 0);
    assert_true(sth_block_bytes(b) >= bytes);
    return b;
}

static void fill(uint8_t *p, uint64_t bytes, unsigned seed) {
    for (uint64_t i = 0; i < bytes; i++) p[i] = (uint8_t)(i * 7 + (i >> 9) + seed * 31);
}

/* ---- blocks */

static void a_block_is_the_smallest_that_fits_and_comes_back(void **state) {
    (void)state;
    sth_device *d = open_sim(true, 0, 0);
    sth_download *down = make(d, 4 * MIB, MIB);
    sth_block *a = take(down, 100 * KIB), *b = take(down, 300 * KIB), *c = take(down, 200 * KIB);
    sth_block *e = take(down, 1);
    assert_int_equal(stats(down).regions, 1);
    assert_int_equal(stats(down).blocks_in_use, 4);
    assert_int_equal(stats(down).bytes_in_use, 600 * KIB + 512);
    assert_int_equal(stats(down).pinned_bytes, MIB);
    assert_true(sth_block_is_pinned(a));
    void *at_a = sth_block_address(a), *at_c = sth_block_address(c);
    assert_ptr_equal((uint8_t *)at_a + 100 * KIB, sth_block_address(b));
    sth_block_release(a);
    sth_block_release(c);
    c = take(down, 150 * KIB); /* not in a's place, which is too small, nor in the larger rest */
    assert_ptr_equal(sth_block_address(c), at_c);
    a = take(down, 100 * KIB);
    assert_ptr_equal(sth_block_address(a), at_a);
    sth_block_retain(a);
    sth_block_release(a);
    assert_int_equal(stats(down).blocks_in_use, 4); /* one reference is left */
    sth_block_release(a);
    sth_block_release(b);
    sth_block_release(c);
    sth_block_release(e);
    a = take(down, MIB); /* all of them have joined again */
    assert_int_equal(stats(down).regions, 1);
    b = take(down, 9 * MIB); /* larger than a region: its own */
    assert_int_equal(stats(down).regions, 2);
    assert_int_equal(stats(down).pinned_bytes, 10 * MIB);
    sth_block_release(b);
    sth_block_release(a);
    sth_block_release(NULL);
    assert_int_equal(stats(down).blocks_in_use, 0);
    sth_download_destroy(down);
    sthi_device_release(d);
}

static void steady_use_takes_no_more_memory(void **state) {
    (void)state;
    sth_device *d = open_sim(true, 0, 0);
    sth_download *down = make(d, 2 * MIB, MIB);
    uint64_t regions = 0;
    long live = 0;
    for (unsigned step = 0; step < 300; step++) {
        sth_block *held[40];
        unsigned seed = 9;
        for (int i = 0; i < 40; i++) {
            seed = seed * 1103515245 + 12345;
            held[i] = take(down, 1 + (seed >> 8) % (400 * KIB));
            memset(sth_block_address(held[i]), i, sth_block_bytes(held[i]));
        }
        for (int i = 0; i < 40; i++) {
            uint8_t *p = sth_block_address(held[i]);
            assert_int_equal(p[0], i);
            assert_int_equal(p[sth_block_bytes(held[i]) - 1], i); /* no two of them overlap */
        }
        for (int i = 0; i < 40; i++) sth_block_release(held[(i * 7 + (int)step) % 40]);
        assert_int_equal(stats(down).blocks_in_use, 0);
        if (step == 0) regions = stats(down).regions;
        if (step == 1) live = sthi_alloc_live();
    }
    assert_int_equal(stats(down).regions, regions);
    assert_int_equal(sthi_alloc_live(), live);
    sth_download_destroy(down);
    sthi_device_release(d);
}

static void past_the_pinning_limit_blocks_are_pageable(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        sth_device *d = open_sim(false, 0, own ? 0 : 3 * MIB);
        sth_download_options o;
        sth_download *down;
        sth_download_options_init(&o);
        if (own) o.pinned_limit = 3 * MIB;
        assert_ok(sth_download_create(d, &o, &down));
        sth_block *held[8];
        int pinned = 0;
        for (int i = 0; i < 8; i++) {
            held[i] = take(down, MIB);
            pinned += sth_block_is_pinned(held[i]);
        }
        assert_true(pinned >= 1 && pinned <= 3);
        assert_true(stats(down).pinned_bytes <= 3 * MIB);
        assert_true(stats(down).pageable_bytes >= 5 * MIB);
        uint8_t *source = sthi_alloc(MIB);
        fill(source, MIB, 1);
        for (int i = 0; i < 8; i++) {
            sth_ticket t;
            assert_ok(sth_download_copy(down, held[i], 0, (uintptr_t)source, MIB, 0, &t));
            assert_ok(sth_download_wait(down, t));
            assert_memory_equal(sth_block_address(held[i]), source, MIB);
        }
        assert_int_equal(stats(down).pageable_copies, 8 - pinned);
        for (int i = 0; i < 8; i++) sth_block_release(held[i]);
        sthi_free(source);
        sth_download_destroy(down);
        sthi_device_release(d);
    }
}

static void memory_that_is_reserved_is_there_without_waiting(void **state) {
    (void)state;
    sth_device *d = open_sim(true, 0, 0);
    sth_download *down = make(d, 4 * MIB, MIB);
    assert_ok(sth_download_reserve(down, 10 * MIB));
    assert_ok(sth_download_reserve(down, 5 * MIB)); /* less than is asked for already */
    while (stats(down).pinned_bytes < 10 * MIB) sthi_sleep_ns(1000000);
    assert_int_equal(stats(down).pinned_bytes, 10 * MIB);
    uint64_t regions = stats(down).regions;
    sth_block *held[9];
    for (int i = 0; i < 9; i++) held[i] = take(down, MIB);
    assert_int_equal(stats(down).regions, regions);
    assert_int_equal(stats(down).waits, 0);
    assert_ok(sth_download_reserve(down, 12 * MIB)); /* what is in use counts */
    while (stats(down).pinned_bytes < 12 * MIB) sthi_sleep_ns(1000000);
    assert_int_equal(stats(down).pinned_bytes, 12 * MIB);
    for (int i = 0; i < 9; i++) sth_block_release(held[i]);
    assert_ok(sth_download_reserve(down, 400 * MIB)); /* ended while it is under way */
    sth_download_destroy(down);
    sthi_device_release(d);
}

/* ---- copies */

/* The gradient is made by a copy on a stream that has other work to do first. */
static void a_copy_is_behind_the_stream_that_makes_the_bytes(void **state) {
    (void)state;
    for (int virtual = 0; virtual < 2; virtual ++) {
        sth_device *d = open_sim(virtual, 400 * MIB, 0);
        sth_download *down = make(d, 8 * MIB, 64 * KIB);
        const uint64_t n = MIB + 12;
        uint8_t *made = sthi_alloc(n), *other = sthi_alloc(n);
        fill(made, n, 3);
        memset(other, 0x11, n);
        sth_devptr p;
        sth_stream s;
        assert_ok(d->ops->alloc(d->self, n, &p));
        assert_ok(d->ops->stream_create(d->self, 0, &s));
        assert_ok(d->ops->copy_h2d(d->self, p, other, n, 0));
        sth_block *b = take(down, 512 + n);
        memset(sth_block_address(b), OLD, 512 + n);
        uint8_t *to = (uint8_t *)sth_block_address(b) + 512;
        assert_ok(d->ops->sim_compute(d->self, s, 3000000));
        assert_ok(d->ops->copy_h2d(d->self, p, made, n, s));
        sth_ticket t;
        bool done = true;
        assert_ok(sth_download_copy(down, b, 512, p, n, s, &t));
        assert_ok(sth_download_done(down, t, &done));
        assert_false(done);
        assert_int_equal(to[n - 1], OLD); /* nothing has been waited for */
        assert_int_equal(stats(down).tickets, 1);
        assert_ok(sth_download_wait(down, t));
        assert_memory_equal(to, made, n);
        assert_int_equal(((uint8_t *)sth_block_address(b))[511], OLD);
        assert_status(sth_download_wait(down, t), STH_STALE);
        assert_status(sth_download_done(down, t, &done), STH_STALE);
        assert_int_equal(stats(down).d2h_bytes, n);
        assert_int_equal(stats(down).copies, 1);
        assert_int_equal(stats(down).tickets, 0);
        sth_block_release(b);
        sth_download_destroy(down);
        d->ops->stream_destroy(d->self, s);
        d->ops->free(d->self, p, n);
        sthi_device_release(d);
        sthi_free(made);
        sthi_free(other);
    }
}

static void a_block_that_is_let_go_of_is_nobodys_until_its_copy_is_done(void **state) {
    (void)state;
    sth_device *d = open_sim(false, 50 * MIB, 0);
    sth_download *down = make(d, MIB, MIB);
    uint8_t *source = sthi_alloc(MIB);
    fill(source, MIB, 5);
    sth_block *b = take(down, MIB);
    void *at = sth_block_address(b);
    sth_ticket t;
    assert_ok(sth_download_copy(down, b, 0, (uintptr_t)source, MIB, 0, &t));
    sth_block_release(b);
    assert_int_equal(stats(down).blocks_in_use, 1);
    sth_block *other = take(down, MIB);
    assert_ptr_not_equal(sth_block_address(other), at);
    sth_download_forget(down, t);
    assert_memory_equal(at, source, MIB); /* it waited: the source may go */
    assert_int_equal(stats(down).blocks_in_use, 1);
    sth_block *again = take(down, MIB);
    assert_ptr_equal(sth_block_address(again), at);
    sth_download_forget(down, t); /* stale: nothing */
    sth_block_release(again);
    sth_block_release(other);
    sth_download_destroy(down);
    sthi_device_release(d);
    sthi_free(source);
}

static void blocks_and_tickets_outlive_the_owner(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    sth_device *d = open_sim(false, 100 * MIB, 0);
    sth_download *down = make(d, MIB, MIB);
    uint8_t *source = sthi_alloc(MIB);
    fill(source, MIB, 8);
    sth_block *kept = take(down, 1000), *b = take(down, MIB);
    memset(sth_block_address(kept), 77, 1000);
    sth_ticket t, u;
    bool done = false;
    assert_ok(sth_download_copy(down, b, 0, (uintptr_t)source, MIB, 0, &t));
    assert_ok(sth_download_copy(down, b, 0, (uintptr_t)source, MIB, 0, &u));
    sth_download_destroy(down);
    sthi_device_release(d);
    assert_memory_equal(sth_block_address(b), source, MIB); /* destroy waited */
    sth_block_release(b);
    assert_ok(sth_download_done(down, t, &done));
    assert_true(done);
    assert_ok(sth_download_wait(down, t));
    sth_download_forget(down, u); /* the last one: the download is gone */
    for (int i = 0; i < 1000; i++) assert_int_equal(((uint8_t *)sth_block_address(kept))[i], 77);
    sth_block_release(kept);
    sthi_free(source);
    assert_int_equal(sthi_alloc_live(), live);
}

static void what_cannot_be_is_refused(void **state) {
    (void)state;
    sth_device *d = open_sim(true, 0, 0);
    sth_download *down = make(d, MIB, MIB);
    sth_download_options o;
    sth_download *none = NULL;
    sth_block *b;
    sth_ticket t = 0;
    bool done;
    sth_download_options_init(&o);
    o.chunk_bytes = 0;
    assert_status(sth_download_create(d, &o, &none), STH_INVALID_ARGUMENT);
    o.size = 3;
    assert_status(sth_download_create(d, &o, &none), STH_INVALID_ARGUMENT);
    assert_status(sth_download_create(NULL, NULL, &none), STH_INVALID_ARGUMENT);
    assert_status(sth_download_take(down, 0, &b), STH_INVALID_ARGUMENT);
    assert_status(sth_download_take(down, UINT64_MAX, &b), STH_INVALID_ARGUMENT);
    assert_status(sth_download_take(down, UINT64_C(1) << 62, &b), STH_OUT_OF_HOST_MEMORY);
    b = take(down, 1000);
    assert_status(sth_download_copy(down, b, 0, (uintptr_t)&o, 1025, 0, &t), STH_INVALID_ARGUMENT);
    assert_status(sth_download_copy(down, b, 1024, (uintptr_t)&o, 1, 0, &t), STH_INVALID_ARGUMENT);
    assert_status(sth_download_copy(down, b, UINT64_MAX, (uintptr_t)&o, 2, 0, &t), STH_INVALID_ARGUMENT);
    assert_status(sth_download_copy(down, b, 0, (uintptr_t)&o, 0, 0, &t), STH_INVALID_ARGUMENT);
    assert_status(sth_download_copy(down, b, 0, 0, 8, 0, &t), STH_INVALID_ARGUMENT);
    assert_status(sth_download_copy(down, b, 0, (uintptr_t)&o, 8, 999, &t), STH_INVALID_ARGUMENT);
    assert_int_equal(t, 0);
    assert_status(sth_download_wait(down, 0), STH_STALE);
    assert_status(sth_download_done(down, UINT64_MAX, &done), STH_STALE);
    assert_int_equal(stats(down).tickets, 0);
    sth_block_release(b);
    assert_int_equal(stats(down).blocks_in_use, 0);
    sth_download_destroy(down);
    sth_download_destroy(NULL);
    sthi_device_release(d);
}

/* ---- threads, forks, failures */

typedef struct player {
    sth_download *down;
    unsigned seed;
    bool wrong;
} player;

static void *play(void *arg) {
    player *p = arg;
    enum { AT_ONCE = 6, N = 30000 };
    uint8_t *sources = sthi_alloc(AT_ONCE * N);
    for (unsigned round = 0; round < 60; round++) {
        sth_block *b[AT_ONCE];
        sth_ticket t[AT_ONCE];
        uint64_t n[AT_ONCE];
        for (unsigned i = 0; i < AT_ONCE; i++) {
            p->seed = p->seed * 1103515245 + 12345;
            n[i] = 1 + (p->seed >> 8) % N;
            fill(sources + i * N, n[i], p->seed);
            if (sth_download_take(p->down, n[i], &b[i]) ||
                sth_download_copy(p->down, b[i], 0, (uintptr_t)(sources + i * N), n[i], 0, &t[i]))
                return p->wrong = true, NULL;
        }
        for (unsigned i = 0; i < AT_ONCE; i++) {
            if ((round + i) % 5 == 0) {
                sth_block_release(b[i]); /* before its copy is done */
                sth_download_forget(p->down, t[i]);
                continue;
            }
            bool done;
            p->wrong |= sth_download_done(p->down, t[i], &done) || sth_download_wait(p->down, t[i]);
            p->wrong |= memcmp(sth_block_address(b[i]), sources + i * N, n[i]) != 0;
            sth_block_release(b[i]);
        }
    }
    sthi_free(sources);
    return NULL;
}

static void several_threads_at_once(void **state) {
    (void)state;
    sth_device *d = open_sim(false, 800 * MIB, 0);
    sth_download *down = make(d, MIB, 8 * KIB);
    player players[4];
    sthi_thread threads[4];
    assert_ok(sth_download_reserve(down, 3 * MIB));
    for (unsigned i = 0; i < 4; i++) {
        players[i] = (player){.down = down, .seed = i + 1};
        assert_ok(sthi_thread_start(&threads[i], "play", play, &players[i]));
    }
    for (int i = 0; i < 4; i++) {
        sthi_thread_join(threads[i]);
        assert_false(players[i].wrong);
    }
    assert_int_equal(stats(down).tickets, 0);
    assert_int_equal(stats(down).blocks_in_use, 0);
    assert_int_equal(stats(down).copies, 4 * 60 * 6);
    sth_download_destroy(down);
    sthi_device_release(d);
}

static void a_forked_child_touches_nothing(void **state) {
    (void)state;
    sth_device *d = open_sim(false, 100 * MIB, 0);
    sth_download *down = make(d, MIB, MIB);
    uint8_t *source = sthi_alloc(MIB);
    fill(source, MIB, 2);
    sth_block *b = take(down, MIB), *c;
    sth_ticket t, u;
    assert_ok(sth_download_copy(down, b, 0, (uintptr_t)source, MIB, 0, &t));
    pid_t child = fork();
    if (!child) {
        bool right = sth_download_take(down, 1, &c) == STH_INVALID_STATE &&
                     sth_download_copy(down, b, 0, (uintptr_t)source, 1, 0, &u) == STH_INVALID_STATE &&
                     sth_download_wait(down, t) == STH_INVALID_STATE &&
                     sth_download_reserve(down, MIB) == STH_INVALID_STATE;
        sth_download_forget(down, t);
        sth_block_release(b);
        sth_download_destroy(down);
        _exit(right ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_ok(sth_download_wait(down, t));
    assert_memory_equal(sth_block_address(b), source, MIB);
    sth_block_release(b);
    sth_download_destroy(down);
    sthi_device_release(d);
    sthi_free(source);
}

static bool fits(sthi_fault_kind kind, sth_status rc) {
    switch (kind) {
    case STHI_FAULT_ALLOC:
    case STHI_FAULT_THREAD: return rc == STH_OUT_OF_HOST_MEMORY;
    case STHI_FAULT_DEVICE_CALL: return rc == STH_DEVICE_ERROR;
    default: return false; /* pageable memory serves */
    }
}

/* Three gradients while the n-th call fails. True when the fault was met. */
static bool fail_once(sthi_fault_kind kind, uint64_t n, bool forever, uint8_t *sources) {
    enum { COUNT = 3 };
    const uint64_t bytes = 700 * KIB;
    long live = sthi_alloc_live();
    sth_device *d = open_sim(false, 2000 * MIB, 0);
    sth_download *down = NULL;
    sth_download_options o;
    sth_download_options_init(&o);
    o.region_bytes = 2 * MIB;
    o.chunk_bytes = 256 * KIB;
    sthi_fault_arm(kind, n, forever);
    sth_status rc = sth_download_create(d, &o, &down);
    if (rc != STH_OK) assert_true(fits(kind, rc));
    for (int round = 0; rc == STH_OK && round < 2; round++) {
        sth_block *b[COUNT] = {0};
        sth_ticket t[COUNT] = {0};
        sth_status reserved = sth_download_reserve(down, 3 * MIB);
        assert_true(reserved == STH_OK || fits(kind, reserved));
        for (int i = 0; i < COUNT; i++) {
            sth_status one = sth_download_take(down, bytes, &b[i]);
            sth_devptr from = (uintptr_t)(sources + i * bytes);
            if (one == STH_OK) one = sth_download_copy(down, b[i], 0, from, bytes, 0, &t[i]);
            if (one != STH_OK && !fits(kind, one))
                fail_msg("%s: %s", sth_status_name(one), sth_last_error()->message);
        }
        if (round) sthi_fault_disarm_all();
        for (int i = 0; i < COUNT; i++) {
            if (t[i]) {
                sth_status one = sth_download_wait(down, t[i]);
                if (one == STH_OK) assert_memory_equal(sth_block_address(b[i]), sources + i * bytes, bytes);
                else assert_true(fits(kind, one));
                if (one != STH_OK) sth_download_forget(down, t[i]);
            }
            sth_block_release(b[i]);
        }
    }
    bool met = sthi_fault_seen(kind) >= n;
    sthi_fault_disarm_all();
    if (rc == STH_OK) { /* and afterwards all is well */
        sth_block *b = take(down, bytes);
        sth_ticket t;
        assert_ok(sth_download_copy(down, b, 0, (uintptr_t)sources, bytes, 0, &t));
        assert_ok(sth_download_wait(down, t));
        assert_memory_equal(sth_block_address(b), sources, bytes);
        sth_block_release(b);
    }
    sth_download_destroy(down);
    sthi_device_release(d);
    if (sthi_alloc_live() != live)
        fail_msg("kind %d, n = %llu%s: %ld records leaked", (int)kind, (unsigned long long)n,
                 forever ? " and on" : "", sthi_alloc_live() - live);
    return met;
}

static void any_call_may_fail(void **state) {
    (void)state;
    static const sthi_fault_kind kinds[] = {STHI_FAULT_ALLOC, STHI_FAULT_PIN, STHI_FAULT_THREAD,
                                            STHI_FAULT_DEVICE_CALL};
    uint8_t *sources = sthi_alloc(3 * 700 * KIB);
    fill(sources, 3 * 700 * KIB, 4);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int forever = 0; forever < 2; forever++)
            for (uint64_t n = 1; fail_once(kinds[k], n, forever, sources); n++) assert_true(n < 500);
    sthi_free(sources);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_is_the_smallest_that_fits_and_comes_back),
        cmocka_unit_test(steady_use_takes_no_more_memory),
        cmocka_unit_test(past_the_pinning_limit_blocks_are_pageable),
        cmocka_unit_test(memory_that_is_reserved_is_there_without_waiting),
        cmocka_unit_test(a_copy_is_behind_the_stream_that_makes_the_bytes),
        cmocka_unit_test(a_block_that_is_let_go_of_is_nobodys_until_its_copy_is_done),
        cmocka_unit_test(blocks_and_tickets_outlive_the_owner),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(several_threads_at_once),
        cmocka_unit_test(a_forked_child_touches_nothing),
        cmocka_unit_test(any_call_may_fail),
    };
    return cmocka_run_group_tests_name("download", tests, NULL, NULL);
}
