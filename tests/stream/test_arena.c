/* The host arena: windows and their pinning, the limit, the device's alias, threads, failures. The windows
 * are 256 MiB of address space; only what a test writes is ever touched. */
#define _DEFAULT_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "host/arena.h"
#include "support/check.h"

static const uint64_t MIB = 1 << 20, WINDOW = 256 << 20;

static sth_device *open_sim(uint64_t pin_limit) {
    sth_sim_options o;
    sth_device *d;
    sth_sim_options_init(&o);
    o.virtual_time = true;
    o.pin_limit_bytes = pin_limit;
    assert_ok(sthi_device_open("sim", &o, &d));
    return d;
}

static uint8_t *reserve(sth_arena *a, uint64_t bytes) {
    void *p;
    assert_ok(sthi_arena_reserve(a, bytes, &p));
    assert_int_equal((uintptr_t)p % STHI_ALIGN, 0);
    return p;
}

static void all_is_pinned_and_seen_by_the_device(void **state) {
    (void)state;
    sth_device *d = open_sim(0);
    sth_arena *a;
    assert_ok(sthi_arena_create(d, 700 * MIB, &a));
    uint8_t *p[7];
    for (int i = 0; i < 7; i++) p[i] = reserve(a, 100 * MIB - 3);
    assert_int_equal(sthi_arena_bytes(a), 700 * MIB);
    assert_ok(sthi_arena_finish(a));
    assert_int_equal(sthi_arena_pinned_bytes(a), 700 * MIB);
    assert_string_equal(sthi_arena_pin_error(a), "");
    for (int i = 0; i < 7; i++) {
        assert_true(sthi_arena_is_pinned(a, p[i], 100 * MIB));
        /* The simulated device sees host memory at the host's address. */
        assert_int_equal(sthi_arena_device_alias(a, p[i] + 5), (uintptr_t)p[i] + 5);
    }
    /* Two units share the first window, the third begins another on a page of its own. */
    assert_ptr_equal(p[1], p[0] + 100 * MIB);
    assert_int_equal((uintptr_t)p[2] % sthi_page_size(), 0);
    assert_false(sthi_arena_is_pinned(a, p[0], 300 * MIB));
    assert_false(sthi_arena_is_pinned(a, &a, 1));
    assert_int_equal(sthi_arena_device_alias(a, &a), 0);
    sthi_arena_release(a);
    sthi_device_release(d);
}

static void a_unit_larger_than_a_window_has_its_own(void **state) {
    (void)state;
    sth_device *d = open_sim(0);
    sth_arena *a;
    assert_ok(sthi_arena_create(d, 3 * WINDOW + 2 * MIB, &a));
    uint8_t *small = reserve(a, MIB), *large = reserve(a, 3 * WINDOW), *next = reserve(a, MIB);
    assert_ok(sthi_arena_finish(a));
    assert_true(sthi_arena_is_pinned(a, small, MIB));
    assert_true(sthi_arena_is_pinned(a, large, 3 * WINDOW));
    assert_true(sthi_arena_is_pinned(a, next, MIB));
    assert_false(sthi_arena_is_pinned(a, large, 3 * WINDOW + MIB));
    sthi_arena_release(a);
    sthi_device_release(d);
}

/* With 100 MiB left a window is given back, for the slabs; 150 MiB are room for them. */
static void past_the_pinning_limit_memory_is_pageable(void **state) {
    (void)state;
    for (int left = 100; left <= 150; left += 50) {
        sth_device *d = open_sim((uint64_t)(200 + left) * MIB);
        sth_arena *a;
        assert_ok(sthi_arena_create(d, 600 * MIB, &a));
        uint8_t *p[3];
        for (int i = 0; i < 3; i++) p[i] = reserve(a, 200 * MIB);
        assert_ok(sthi_arena_finish(a));
        int pinned = 0;
        for (int i = 0; i < 3; i++) {
            bool is = sthi_arena_is_pinned(a, p[i], 200 * MIB);
            pinned += is;
            assert_int_equal(sthi_arena_device_alias(a, p[i]) != 0, is);
            memset(p[i], 7, 4096); /* usable all the same */
        }
        assert_int_equal(pinned, left == 150);
        assert_int_equal(sthi_arena_pinned_bytes(a), pinned * 200 * MIB);
        assert_non_null(strstr(sthi_arena_pin_error(a), "pin"));
        sthi_arena_release(a);
        sthi_device_release(d);
    }
}

static void no_more_is_pinned_than_the_arena_was_made_with(void **state) {
    (void)state;
    const uint64_t page = sthi_page_size();
    /* bounds in pages, the sizes of reservations in pages, which of them are pinned */
    const struct {
        uint64_t bound, sizes[5];
        bool pinned[5];
    } cases[] = {
        {0, {1, 2, 1, 3, 1}, {false, false, false, false, false}},
        {3, {1, 2, 1, 3, 1}, {true, true, false, false, false}},
        {3, {5, 2, 4, 1, 1}, {false, true, false, true, false}}, /* what is small enough still fits */
        {8, {1, 2, 1, 3, 1}, {true, true, true, true, true}},
        {7, {1, 2, 1, 3, 1}, {true, true, true, true, false}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        sth_device *d = open_sim(0);
        sth_arena *a;
        uint64_t pages = 0, pinned = 0;
        uint8_t *p[5];
        assert_ok(sthi_arena_create_bounded(d, 12 * page, cases[c].bound * page, &a));
        for (int i = 0; i < 5; i++) p[i] = reserve(a, cases[c].sizes[i] * page);
        assert_ok(sthi_arena_finish(a));
        for (int i = 0; i < 5; i++) {
            uint64_t bytes = cases[c].sizes[i] * page;
            assert_int_equal(sthi_arena_is_pinned(a, p[i], bytes), cases[c].pinned[i]);
            memset(p[i], 7, bytes);
            pages += cases[c].sizes[i];
            pinned += cases[c].pinned[i] ? bytes : 0;
        }
        assert_int_equal(sthi_arena_pinned_bytes(a), pinned);
        assert_int_equal(sthi_arena_bytes(a), pages * page);
        assert_string_equal(sthi_arena_pin_error(a), ""); /* nothing failed */
        sthi_arena_release(a);
        sthi_device_release(d);
    }
}

/* Reservations of all sizes, in turns, that do not fill pages: the bound is one of pages, and none is refused. */
static void a_bound_is_kept_whatever_the_sizes(void **state) {
    (void)state;
    for (uint64_t bound = 0; bound < 40; bound += 3) {
        sth_device *d = open_sim(bound * sthi_page_size()); /* which counts pages, and refuses more */
        sth_arena *a;
        uint64_t sum = 0;
        for (uint64_t i = 0; i < 400; i++) sum += (i * 7919 % 37 + 1) * STHI_ALIGN;
        assert_ok(sthi_arena_create_bounded(d, sum, bound * sthi_page_size(), &a));
        for (uint64_t i = 0; i < 400; i++) (void)reserve(a, (i * 7919 % 37 + 1) * STHI_ALIGN);
        assert_ok(sthi_arena_finish(a));
        assert_int_equal(sthi_arena_bytes(a), sum);
        assert_in_range(sthi_arena_pinned_bytes(a), 0, bound * sthi_page_size());
        if (bound > 3) assert_in_range(sthi_arena_pinned_bytes(a), (bound - 3) * sthi_page_size(), UINT32_MAX);
        assert_string_equal(sthi_arena_pin_error(a), "");
        sthi_arena_release(a);
        sthi_device_release(d);
    }
}

static void pinning_ends_with_the_arena(void **state) {
    (void)state;
    sth_device *d = open_sim(MIB);
    for (int i = 0; i < 3; i++) { /* a registration that stayed would break the limit */
        sth_arena *a;
        assert_ok(sthi_arena_create(d, MIB, &a));
        uint8_t *p = reserve(a, MIB);
        assert_ok(sthi_arena_finish(a));
        sthi_arena_retain(a);
        sthi_arena_release(a);
        assert_true(sthi_arena_is_pinned(a, p, MIB));
        sthi_arena_release(a);
    }
    sthi_device_release(d);
}

static void the_end_is_said(void **state) {
    (void)state;
    sth_device *d = open_sim(0);
    sth_arena *a;
    void *p;
    assert_status(sthi_arena_create(d, UINT64_MAX, &a), STH_INVALID_ARGUMENT);
    assert_status(sthi_arena_create(d, UINT64_C(1) << 62, &a), STH_INVALID_ARGUMENT);
    /* No address space has this much; the table of its windows has 2^20 entries, which MALLOC_PERTURB_ fills. */
    assert_status(sthi_arena_create(d, UINT64_C(1) << 48, &a), STH_OUT_OF_HOST_MEMORY);
    assert_ok(sthi_arena_create(d, 3 * 512, &a));
    for (int i = 0; i < 3; i++) (void)reserve(a, 1);
    assert_status(sthi_arena_reserve(a, UINT64_MAX, &p), STH_INVALID_ARGUMENT);
    assert_status(sthi_arena_reserve(a, MIB, &p), STH_OUT_OF_HOST_MEMORY);
    assert_non_null(strstr(sth_last_error()->message, "full"));
    assert_ok(sthi_arena_finish(a));
    assert_status(sthi_arena_reserve(a, 1, &p), STH_INVALID_STATE);
    assert_ok(sthi_arena_finish(a)); /* again is fine */
    sthi_arena_release(a);
    sthi_arena_release(NULL);
    sthi_device_release(d);
}

static void writes_arrive_from_every_thread(void **state) {
    (void)state;
    sth_device *d = open_sim(0);
    sth_arena *a;
    uint64_t bytes = 21 * MIB + 77;
    uint8_t *source = sthi_alloc(bytes);
    assert_non_null(source);
    for (uint64_t i = 0; i < bytes; i++) source[i] = (uint8_t)(i * 13 + (i >> 12));
    assert_ok(sthi_arena_create(d, 2 * bytes + 1024, &a));
    uint8_t *first = reserve(a, bytes), *second = reserve(a, bytes);
    assert_ok(sthi_arena_write(a, first, source, bytes));
    sthi_fault_arm(STHI_FAULT_THREAD, 1, true); /* no helper: slower, not wrong */
    assert_ok(sthi_arena_write(a, second, source, bytes));
    sthi_fault_disarm_all();
    assert_memory_equal(first, source, bytes);
    assert_memory_equal(second, source, bytes);
    assert_status(sthi_arena_write(a, second + bytes, source, 1024), STH_INVALID_ARGUMENT);
    assert_status(sthi_arena_write(a, source, source, 1), STH_INVALID_ARGUMENT);
    assert_ok(sthi_arena_finish(a));
    sthi_arena_release(a);
    sthi_free(source);
    sthi_device_release(d);
}

static void *watch(void *arg) { /* reads what registrars change */
    sth_arena *a = arg;
    uint64_t last = 0;
    while (last < 8 * 200 * MIB) {
        uint64_t now = sthi_arena_pinned_bytes(a);
        if (now < last || now > sthi_arena_bytes(a)) return a;
        (void)sthi_arena_pin_error(a);
        last = now;
        sthi_sleep_ns(10000); /* otherwise it may hold its lock against registrars for minutes */
    }
    return NULL;
}

static void other_threads_may_look_on(void **state) {
    (void)state;
    sth_device *d = open_sim(0);
    sth_arena *a;
    assert_ok(sthi_arena_create(d, 8 * 200 * MIB, &a));
    sthi_thread t;
    assert_ok(sthi_thread_start(&t, "watch", watch, a));
    for (int i = 0; i < 8; i++) {
        uint8_t *p = reserve(a, 200 * MIB);
        memset(p, i, 4096);
        (void)sthi_arena_is_pinned(a, p, 1);
        (void)sthi_arena_device_alias(a, p);
    }
    assert_ok(sthi_arena_finish(a));
    sthi_thread_join(t);
    assert_int_equal(sthi_arena_pinned_bytes(a), 8 * 200 * MIB);
    sthi_arena_release(a);
    sthi_device_release(d);
}

/* Everything that may fail, one after the other: an error before there is an arena, pageable memory after. */
static void failures(sthi_fault_kind kind) {
    long live = sthi_alloc_live();
    for (uint64_t n = 1;; n++) {
        sth_device *d = open_sim(0);
        sth_arena *a = NULL;
        sthi_fault_arm(kind, n, false);
        sth_status rc = sthi_arena_create(d, 600 * MIB, &a);
        uint8_t *p[3];
        for (int i = 0; i < 3 && rc == STH_OK; i++) p[i] = reserve(a, 200 * MIB);
        if (rc == STH_OK) assert_ok(sthi_arena_finish(a));
        bool hit = sthi_fault_seen(kind) >= n;
        sthi_fault_disarm_all();
        if (rc == STH_OK) {
            uint64_t pinned = 0;
            for (int i = 0; i < 3; i++) pinned += sthi_arena_is_pinned(a, p[i], 200 * MIB) ? 200 * MIB : 0;
            assert_int_equal(pinned, sthi_arena_pinned_bytes(a));
            assert_int_equal(pinned == 600 * MIB, sthi_arena_pin_error(a)[0] == 0);
        } else {
            assert_int_equal(kind, STHI_FAULT_ALLOC);
            assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
        }
        sthi_arena_release(a);
        sthi_device_release(d);
        assert_int_equal(sthi_alloc_live(), live);
        if (!hit) return;
    }
}

static void any_call_may_fail(void **state) {
    (void)state;
    failures(STHI_FAULT_ALLOC);
    failures(STHI_FAULT_PIN);
    failures(STHI_FAULT_THREAD);
}

/* Whether the system holds memory for the page at `address`. */
static bool has_memory(const void *address) {
    unsigned char page = 0;
    void *begin = (void *)((uintptr_t)address & ~(uintptr_t)(sthi_page_size() - 1));
    return mincore(begin, sthi_page_size(), &page) == 0 && page & 1;
}

/* Whether the device pins so much more. */
static bool pins(sth_device *d, uint64_t bytes) {
    sth_arena *a;
    assert_ok(sthi_arena_create(d, bytes, &a));
    reserve(a, bytes);
    assert_ok(sthi_arena_finish(a));
    bool pinned = sthi_arena_pinned_bytes(a) == bytes;
    sthi_arena_release(a);
    return pinned;
}

static void windows_go_with_their_last_range_behind_the_last_owner(void **state) {
    (void)state;
    sth_device *d = open_sim(2 * WINDOW);
    sth_arena *a;
    assert_ok(sthi_arena_create(d, 600 * MIB, &a));
    uint8_t *first = reserve(a, 4 * MIB), *second = reserve(a, 4 * MIB), *large = reserve(a, WINDOW);
    uint8_t *unheld = reserve(a, 4 * MIB);
    uint8_t *all[] = {first, second, large, unheld};
    for (int i = 0; i < 4; i++) all[i][0] = (uint8_t)(i + 1);
    assert_ok(sthi_arena_finish(a));
    sthi_arena_retain(a);
    sthi_arena_retain_range(a, first + 5);
    sthi_arena_retain_range(a, second);
    sthi_arena_retain_range(a, second);
    sthi_arena_retain_range(a, large + WINDOW - 1);
    sthi_arena_release_range(a, second);
    sthi_arena_release(a);
    for (int i = 0; i < 4; i++) assert_true(has_memory(all[i])); /* an owner is left */
    sthi_arena_release(a);
    assert_true(has_memory(first) && has_memory(large) && !has_memory(unheld));
    assert_false(pins(d, WINDOW));
    sthi_arena_release_range(a, large);
    assert_true(has_memory(first) && !has_memory(large));
    assert_true(pins(d, WINDOW) && !pins(d, 2 * WINDOW));
    sthi_arena_release_range(a, first);
    assert_true(has_memory(first) && second[0] == 2); /* another range lies in the window */
    sthi_arena_release_range(a, second);
    assert_true(pins(d, 2 * WINDOW));
    sthi_device_release(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_is_pinned_and_seen_by_the_device),
        cmocka_unit_test(a_unit_larger_than_a_window_has_its_own),
        cmocka_unit_test(past_the_pinning_limit_memory_is_pageable),
        cmocka_unit_test(no_more_is_pinned_than_the_arena_was_made_with),
        cmocka_unit_test(a_bound_is_kept_whatever_the_sizes),
        cmocka_unit_test(pinning_ends_with_the_arena),
        cmocka_unit_test(the_end_is_said),
        cmocka_unit_test(writes_arrive_from_every_thread),
        cmocka_unit_test(other_threads_may_look_on),
        cmocka_unit_test(windows_go_with_their_last_range_behind_the_last_owner),
        cmocka_unit_test(any_call_may_fail),
    };
    return cmocka_run_group_tests_name("arena", tests, NULL, NULL);
}
