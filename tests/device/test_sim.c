/* What only the simulated device promises: exact virtual times, links that are shared, bytes that arrive
 * no earlier than their time, poison, and the same run from the same calls. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "device/device.h"
#include "support/check.h"

#define MS ((int64_t)1000000)
enum { ROOM = 4 << 20 };

static sth_device *d;
static const sth_backend_ops *o;
static unsigned char *host;

static int open_sim(bool virtual_time, uint64_t rate, int64_t latency) {
    sth_sim_options options;
    sth_sim_options_init(&options);
    options.virtual_time = virtual_time;
    options.link_bytes_per_s = rate;
    options.copy_latency_ns = latency;
    options.memory_bytes = 64 << 20;
    host = sthi_pages_map(ROOM, 0);
    for (int i = 0; i < ROOM; i++) host[i] = (unsigned char)(1 + i % 250);
    if (sth_device_open("sim", &options, &d) != STH_OK) return -1;
    o = d->ops;
    return 0;
}

/* One byte a nanosecond. */
static int virtual_world(void **state) {
    (void)state;
    return open_sim(true, 1000000000, 500);
}
static int real_world(void **state) {
    (void)state;
    return open_sim(false, 1000000000, 2000);
}

static int leave(void **state) {
    (void)state;
    sth_device_close(d);
    sthi_pages_unmap(host, ROOM);
    return 0;
}

static sth_stream new_stream(void) {
    sth_stream s;
    assert_ok(o->stream_create(d->self, 0, &s));
    return s;
}
static sth_event *recorded(sth_stream s) {
    sth_event *e;
    assert_ok(o->event_create(d->self, true, &e));
    assert_ok(o->event_record(d->self, e, s));
    return e;
}
static sth_devptr new_memory(uint64_t bytes) {
    sth_devptr p;
    assert_ok(o->alloc(d->self, bytes, &p));
    return p;
}
static int64_t between(sth_event *a, sth_event *b) {
    int64_t ns;
    assert_ok(o->event_elapsed_ns(d->self, a, b, &ns));
    return ns;
}
/* Reads device memory while copies into it may be under way; the thread sanitizer need not know. */
__attribute__((no_sanitize("thread"))) static unsigned char peek(sth_devptr p, uint64_t i) {
    return ((volatile unsigned char *)(uintptr_t)p)[i];
}
__attribute__((no_sanitize("thread"))) static void fill(unsigned char *p, unsigned char c, size_t n) {
    for (size_t i = 0; i < n; i++) ((volatile unsigned char *)p)[i] = c;
}

/* ---- virtual time */

static void a_copy_takes_its_bytes_and_the_latency(void **state) {
    (void)state;
    sth_stream s = new_stream();
    sth_devptr p = new_memory(ROOM);
    sth_event *a = recorded(s);
    assert_ok(o->copy_h2d(d->self, p, host, 1000000, s));
    sth_event *b = recorded(s);
    assert_ok(o->copy_h2d(d->self, p, host, 1, s));
    assert_ok(o->copy_d2h(d->self, host, p, 77, s));
    sth_event *c = recorded(s);
    assert_int_equal(sth_device_now_ns(d), 0);
    assert_ok(o->stream_synchronize(d->self, s));
    assert_int_equal(between(a, b), 1000500);
    assert_int_equal(between(b, c), 501 + 577);
    assert_int_equal(sth_device_now_ns(d), 1000500 + 501 + 577);
    o->event_destroy(d->self, a);
    o->event_destroy(d->self, b);
    o->event_destroy(d->self, c);
}

static void streams_share_a_link_but_not_both_directions(void **state) {
    (void)state;
    sth_stream s[3] = {new_stream(), new_stream(), new_stream()};
    sth_devptr p = new_memory(ROOM), q = new_memory(ROOM);
    sth_event *begin = recorded(s[0]);
    assert_ok(o->copy_h2d(d->self, p, host, 1000000, s[0]));
    assert_ok(o->copy_h2d(d->self, p + 2000000, host, 2000000, s[1]));
    assert_ok(o->copy_d2h(d->self, host, q, 300000, s[2]));
    sth_event *e[3];
    for (int i = 0; i < 3; i++) e[i] = recorded(s[i]);
    for (int i = 0; i < 3; i++) assert_ok(o->event_synchronize(d->self, e[i]));
    assert_int_equal(between(begin, e[0]), 1000500);
    assert_int_equal(between(begin, e[1]), 3000500);
    assert_int_equal(between(begin, e[2]), 300500);
    for (int i = 0; i < 3; i++) o->event_destroy(d->self, e[i]);
    o->event_destroy(d->self, begin);
}

/* A copy that is enqueued first and must wait does not hold the link up for one that need not. */
static void the_link_serves_who_is_ready(void **state) {
    (void)state;
    sth_stream waits = new_stream(), goes = new_stream(), busy = new_stream();
    sth_devptr p = new_memory(ROOM);
    assert_ok(sth_sim_compute(d, busy, 100000));
    sth_event *later = recorded(busy), *begin = recorded(goes);
    assert_ok(o->stream_wait(d->self, waits, later));
    assert_ok(o->copy_h2d(d->self, p, host, 1000, waits));
    sth_event *second = recorded(waits);
    assert_ok(o->copy_h2d(d->self, p + 4096, host, 1000, goes));
    sth_event *first = recorded(goes);
    assert_ok(o->event_synchronize(d->self, second));
    assert_int_equal(between(begin, first), 1500);
    assert_int_equal(between(begin, second), 101500);
    sth_event *all[] = {later, begin, first, second};
    for (int i = 0; i < 4; i++) o->event_destroy(d->self, all[i]);
}

static void the_caller_moves_the_clock_no_further_than_it_waits(void **state) {
    (void)state;
    sth_stream s = new_stream();
    sth_devptr p = new_memory(ROOM);
    assert_ok(o->copy_h2d(d->self, p, host, 1000, s));
    sth_event *half = recorded(s);
    assert_ok(o->copy_h2d(d->self, p, host, 1000000, s));
    sth_event *all = recorded(s);
    bool done = true;
    assert_ok(o->stream_wait(d->self, 0, half));
    assert_int_equal(sth_device_now_ns(d), 1500);
    assert_ok(o->event_query(d->self, all, &done));
    assert_false(done);
    assert_ok(sth_sim_compute(d, 0, 1000499));
    assert_ok(o->event_query(d->self, all, &done));
    assert_false(done);
    assert_ok(sth_sim_compute(d, 0, 1));
    assert_ok(o->event_query(d->self, all, &done));
    assert_true(done);
    assert_int_equal(sth_device_now_ns(d), 1500 + 1000500);
    o->event_destroy(d->self, half);
    o->event_destroy(d->self, all);
}

static void bytes_move_at_the_end_of_their_time(void **state) {
    (void)state;
    sth_stream s = new_stream();
    sth_devptr p = new_memory(4096);
    assert_ok(o->copy_h2d(d->self, p, host, 4096, s));
    assert_ok(sth_sim_compute(d, 0, 4000));
    assert_int_equal(peek(p, 0), 0xFF);
    memset(host, 9, 4096); /* too early: a source may change only once the copy is done */
    assert_ok(sth_sim_compute(d, 0, 596));
    assert_int_equal(peek(p, 0), 9);
    assert_int_equal(peek(p, 4095), 9);
}

static void compute_overlaps_copies(void **state) {
    (void)state;
    sth_stream copy = new_stream(), compute = new_stream();
    sth_devptr p = new_memory(ROOM);
    sth_event *begin = recorded(copy);
    assert_ok(sth_sim_compute(d, compute, 2000000));
    assert_ok(o->copy_h2d(d->self, p, host, 1500000, copy));
    sth_event *copied = recorded(copy);
    assert_ok(o->stream_wait(d->self, compute, copied));
    assert_ok(sth_sim_compute(d, compute, 10));
    sth_event *end = recorded(compute);
    assert_ok(o->event_synchronize(d->self, end));
    assert_int_equal(between(begin, end), 2000010);
    o->event_destroy(d->self, begin);
    o->event_destroy(d->self, copied);
    o->event_destroy(d->self, end);
}

static uint64_t mix(uint64_t h, uint64_t x) {
    h ^= x + 0x9E3779B97F4A7C15u + (h << 6) + (h >> 2);
    return h * 0xBF58476D1CE4E5B9u;
}

/* A random program over three streams; returns a digest of all its times and bytes. */
static uint64_t random_program(uint64_t seed) {
    enum { OPS = 400, PLACES = 4, N = 8192 };
    uint64_t digest = seed, r = seed;
    sth_stream s[3] = {new_stream(), new_stream(), new_stream()};
    sth_devptr p = new_memory(PLACES * N);
    sth_event *e[3] = {recorded(s[0]), recorded(s[1]), recorded(s[2])};
    unsigned char *out = host + ROOM / 2;
    for (int i = 0; i < OPS; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        unsigned a = (unsigned)(r >> 33) % 3, b = (unsigned)(r >> 37) % 3,
                 place = (unsigned)(r >> 41) % PLACES;
        uint64_t n = 1 + (r >> 45) % N;
        switch ((r >> 60) % 6) {
        case 0: assert_ok(o->copy_h2d(d->self, p + place * N, host + i * 16, n, s[a])); break;
        case 1: assert_ok(o->copy_d2h(d->self, out + i * 16, p + place * N, n, s[a])); break;
        case 2: assert_ok(o->event_record(d->self, e[a], s[b])); break;
        case 3: assert_ok(o->stream_wait(d->self, s[a], e[b])); break;
        case 4: assert_ok(sth_sim_compute(d, s[a], (int64_t)n)); break;
        default: assert_ok(sth_sim_compute(d, 0, (int64_t)n / 4)); break;
        }
        digest = mix(digest, (uint64_t)sth_device_now_ns(d));
    }
    for (int i = 0; i < 3; i++) assert_ok(o->stream_synchronize(d->self, s[i]));
    for (int i = 0; i < 3; i++) digest = mix(digest, (uint64_t)between(e[0], e[i]));
    for (int i = 0; i < OPS * 16 + N; i++) digest = mix(digest, out[i]);
    for (int i = 0; i < PLACES * N; i++) digest = mix(digest, peek(p, (uint64_t)i));
    for (int i = 0; i < 3; i++) o->event_destroy(d->self, e[i]);
    return mix(digest, (uint64_t)sth_device_now_ns(d));
}

static void the_same_calls_give_the_same_run(void **state) {
    (void)state;
    sth_device_close(d);
    sthi_pages_unmap(host, ROOM);
    uint64_t digests[4];
    for (int i = 0; i < 4; i++) { /* two seeds, twice each */
        assert_int_equal(virtual_world(NULL), 0);
        digests[i] = random_program(1 + (uint64_t)(i % 2));
        sth_device_close(d);
        sthi_pages_unmap(host, ROOM);
    }
    assert_true(digests[0] == digests[2] && digests[1] == digests[3]);
    assert_true(digests[0] != digests[1]);
    assert_int_equal(virtual_world(NULL), 0);
}

/* ---- both worlds */

static void poison_keeps_its_place_in_the_stream(void **state) {
    (void)state;
    enum { N = 8192 };
    sth_stream s = new_stream();
    sth_devptr p = new_memory(N);
    unsigned char *before = host + N, *after = host + 2 * N, *last = host + 3 * N;
    assert_ok(o->copy_h2d(d->self, p, host, N, s));
    assert_ok(o->copy_d2h(d->self, before, p, N, s));
    o->poison(d->self, p + 16, N - 32, s);
    assert_ok(o->copy_d2h(d->self, after, p, N, s));
    assert_ok(o->copy_h2d(d->self, p, host, N, s));
    assert_ok(o->copy_d2h(d->self, last, p, N, s));
    assert_ok(o->stream_synchronize(d->self, s));
    assert_memory_equal(before, host, N);
    assert_memory_equal(last, host, N);
    assert_memory_equal(after, host, 16);
    assert_memory_equal(after + N - 16, host + N - 16, 16);
    for (int i = 16; i < N - 16; i++) assert_int_equal(after[i], 0xFF);
}

static void poison_wraps_with_a_ring(void **state) {
    (void)state;
    uint64_t n = o->ring_granularity(d->self);
    sth_devptr p;
    assert_ok(o->ring_alloc(d->self, n, &p));
    assert_ok(o->copy_h2d(d->self, p, host, n, 0));
    o->poison(d->self, p + n - 10, 30, 0);
    assert_ok(o->stream_synchronize(d->self, 0));
    for (uint64_t i = 0; i < n; i++) assert_int_equal(peek(p, i), i < 20 || i >= n - 10 ? 0xFF : host[i]);
    o->ring_free(d->self, p, n);
}

static void fresh_and_freed_memory_reads_as_nan(void **state) {
    (void)state;
    sth_devptr p = new_memory(10000);
    for (uint64_t i = 0; i < 10000; i++) assert_int_equal(peek(p, i), 0xFF);
    assert_ok(o->copy_h2d(d->self, p, host, 10000, 0));
    assert_int_equal(peek(p, 5), host[5]);
    o->free(d->self, p, 10000);
    for (uint64_t i = 0; i < 10000; i++) assert_int_equal(peek(p, i), 0xFF);
}

static void wrong_addresses_are_named(void **state) {
    (void)state;
    sth_devptr p = new_memory(4096), ring;
    uint64_t n = o->ring_granularity(d->self);
    assert_status(o->copy_h2d(d->self, p - 1, host, 1, 0), STH_INVALID_ARGUMENT); /* nothing else is live yet */
    assert_ok(o->ring_alloc(d->self, n, &ring));
    assert_status(o->copy_h2d(d->self, p + 4000, host, 97, 0), STH_INVALID_ARGUMENT);
    assert_int_equal(strtoull(sth_last_error()->object, NULL, 16), p + 4000);
    assert_ok(o->copy_h2d(d->self, p + 4000, host, 96, 0));
    assert_status(o->copy_d2h(d->self, host, p + 4096, 1, 0), STH_INVALID_ARGUMENT);
    assert_status(o->copy_d2h(d->self, host, p, UINT64_MAX, 0), STH_INVALID_ARGUMENT);
    assert_status(o->copy_d2h(d->self, NULL, p, 1, 0), STH_INVALID_ARGUMENT);
    assert_ok(o->copy_h2d(d->self, ring + 1, host, n, 0));
    assert_status(o->copy_h2d(d->self, ring + n, host, n + 1, 0), STH_INVALID_ARGUMENT);
    assert_status(o->copy_h2d(d->self, ring + n + 1, host, n, 0), STH_INVALID_ARGUMENT);
    assert_status(o->copy_h2d(d->self, p, host, 1, 4711), STH_INVALID_ARGUMENT);
    o->free(d->self, p, 4095);
    assert_int_equal(sth_last_error()->status, STH_INVALID_ARGUMENT);
    assert_ok(o->copy_h2d(d->self, p, host, 4096, 0)); /* it is still there */
    o->free(d->self, p, 4096);
    assert_status(o->copy_h2d(d->self, p, host, 1, 0), STH_INVALID_ARGUMENT);
    o->ring_free(d->self, ring, n);
}

static void memory_of_others_can_be_copied_from(void **state) {
    (void)state;
    static uint8_t theirs[3000], back[3000];
    for (int i = 0; i < 3000; i++) theirs[i] = (uint8_t)(i * 3);
    sth_stream s = new_stream();
    assert_status(o->copy_d2h(d->self, back, (uintptr_t)theirs, 3000, s), STH_INVALID_ARGUMENT);
    assert_ok(o->copy_d2h_foreign(d->self, back, (uintptr_t)theirs, 3000, s));
    assert_ok(o->stream_synchronize(d->self, s));
    assert_memory_equal(back, theirs, 3000);
    assert_status(o->copy_d2h_foreign(d->self, back, 0, 1, s), STH_INVALID_ARGUMENT);
    assert_status(o->copy_d2h_foreign(d->self, back, (uintptr_t)theirs, 1, 4711), STH_INVALID_ARGUMENT);
}

static void a_destroyed_stream_is_unknown(void **state) {
    (void)state;
    sth_stream s = new_stream();
    o->stream_destroy(d->self, s);
    assert_status(o->stream_synchronize(d->self, s), STH_INVALID_ARGUMENT);
    assert_int_not_equal(new_stream(), s);
}

static void lap(sth_stream s, sth_devptr p, sth_event *e) {
    for (int i = 0; i < 5; i++) assert_ok(o->copy_h2d(d->self, p, host, 4096, s));
    assert_ok(o->event_record(d->self, e, s));
    assert_ok(o->stream_wait(d->self, s, e));
    assert_ok(o->stream_wait(d->self, 0, e));
    assert_ok(o->stream_synchronize(d->self, s));
}

/* Once a lap has been queued up as a whole, later ones take what they need from pools. */
static void laps_allocate_nothing(void **state) {
    (void)state;
    sth_stream s = new_stream();
    sth_devptr p = new_memory(4096);
    sth_event *e = recorded(s);
    assert_ok(sth_sim_compute(d, s, 100 * MS));
    assert_ok(o->event_record(d->self, e, s));
    lap(s, p, e);
    long live = sthi_alloc_live();
    for (int i = 0; i < 20; i++) lap(s, p, e);
    assert_int_equal(sthi_alloc_live(), live);
    o->event_destroy(d->self, e);
}

/* ---- real time */

static void a_missing_wait_shows(void **state) {
    (void)state;
    sth_stream s = new_stream();
    sth_devptr p = new_memory(ROOM);
    assert_ok(sth_sim_compute(d, s, 100 * MS)); /* a busy machine may keep this thread waiting for some */
    assert_ok(o->copy_h2d(d->self, p, host, ROOM, s));
    assert_int_equal(peek(p, 0), 0xFF);
    assert_int_equal(peek(p, ROOM - 1), 0xFF);
    sth_event *e = recorded(s);
    assert_ok(o->stream_wait(d->self, 0, e));
    assert_int_equal(peek(p, 0), host[0]);
    assert_int_equal(peek(p, ROOM - 1), host[ROOM - 1]);
    o->event_destroy(d->self, e);
}

static void a_source_reused_too_early_shows(void **state) {
    (void)state;
    enum { N = 65536 };
    sth_stream s = new_stream();
    sth_devptr p = new_memory(N);
    assert_ok(sth_sim_compute(d, s, 100 * MS));
    assert_ok(o->copy_h2d(d->self, p, host, N, s));
    fill(host, 0x77, N);
    assert_ok(o->stream_synchronize(d->self, s));
    for (uint64_t i = 0; i < N; i++) assert_int_equal(peek(p, i), 0x77);
}

/* Times of work that the host is to be ahead of. A busy machine may hold the host up for longer than the first: a call
 * that waits is behind the last of them, too. */
#define HOLDS(hold) (int64_t hold = 50 * MS; hold <= 6400 * MS; hold *= 2)

static void enqueueing_does_not_wait(void **state) {
    (void)state;
    sth_stream s = new_stream();
    sth_devptr p = new_memory(ROOM);
    bool done = true;
    for HOLDS(hold) {
        int64_t begin = sthi_now_ns();
        assert_ok(sth_sim_compute(d, s, hold));
        for (int i = 0; i < 20; i++) assert_ok(o->copy_h2d(d->self, p, host, 4096, s));
        sth_event *e = recorded(s);
        assert_ok(o->event_query(d->self, e, &done));
        assert_ok(o->event_synchronize(d->self, e));
        assert_true(sthi_now_ns() - begin >= hold);
        o->event_destroy(d->self, e);
        if (!done) break;
    }
    assert_false(done);
}

static void real_rates_are_those_asked_for(void **state) {
    (void)state;
    enum { COPIES = 8 };
    sth_stream s[2] = {new_stream(), new_stream()};
    sth_devptr p = new_memory(ROOM);
    int64_t want = (int64_t)COPIES * ROOM / 2, took = 0;
    for HOLDS(hold) {
        assert_ok(sth_sim_compute(d, s[0], hold)); /* meanwhile all of it is enqueued */
        sth_event *begin = recorded(s[0]);
        assert_ok(o->stream_wait(d->self, s[1], begin));
        int64_t wall = sthi_now_ns();
        for (int i = 0; i < COPIES; i++) {
            int half = i % 2 * (ROOM / 2);
            assert_ok(o->copy_h2d(d->self, p + (uint64_t)half, host + half, ROOM / 2, s[i % 2]));
        }
        sth_event *end[2] = {recorded(s[0]), recorded(s[1])};
        for (int i = 0; i < 2; i++) assert_ok(o->event_synchronize(d->self, end[i]));
        wall = sthi_now_ns() - wall;
        int64_t a = between(begin, end[0]), b = between(begin, end[1]);
        took = a > b ? a : b;
        assert_true(took >= want && wall >= want);
        o->event_destroy(d->self, begin);
        for (int i = 0; i < 2; i++) o->event_destroy(d->self, end[i]);
        if (UNDER_ASAN || UNDER_TSAN || took <= want + want / 50) return;
    }
    fail_msg("%lld ns for copies of %lld ns", (long long)took, (long long)want);
}

static void compute_on_the_default_stream_spends_time(void **state) {
    (void)state;
    int64_t begin = sthi_now_ns();
    assert_ok(sth_sim_compute(d, 0, 3 * MS));
    assert_true(sthi_now_ns() - begin >= 3 * MS);
}

#define VIRTUAL(f)                                                                                           \
    { "virtual time: " #f, f, virtual_world, leave, NULL }
#define REAL(f)                                                                                              \
    { "real time: " #f, f, real_world, leave, NULL }

int main(void) {
    const struct CMUnitTest tests[] = {
        VIRTUAL(a_copy_takes_its_bytes_and_the_latency),
        VIRTUAL(streams_share_a_link_but_not_both_directions),
        VIRTUAL(the_link_serves_who_is_ready),
        VIRTUAL(the_caller_moves_the_clock_no_further_than_it_waits),
        VIRTUAL(bytes_move_at_the_end_of_their_time),
        VIRTUAL(compute_overlaps_copies),
        VIRTUAL(the_same_calls_give_the_same_run),
        VIRTUAL(poison_keeps_its_place_in_the_stream),
        VIRTUAL(poison_wraps_with_a_ring),
        VIRTUAL(fresh_and_freed_memory_reads_as_nan),
        VIRTUAL(wrong_addresses_are_named),
        VIRTUAL(memory_of_others_can_be_copied_from),
        VIRTUAL(a_destroyed_stream_is_unknown),
        VIRTUAL(laps_allocate_nothing),
        REAL(poison_keeps_its_place_in_the_stream),
        REAL(poison_wraps_with_a_ring),
        REAL(fresh_and_freed_memory_reads_as_nan),
        REAL(wrong_addresses_are_named),
        REAL(memory_of_others_can_be_copied_from),
        REAL(a_destroyed_stream_is_unknown),
        REAL(laps_allocate_nothing),
        REAL(a_missing_wait_shows),
        REAL(a_source_reused_too_early_shows),
        REAL(enqueueing_does_not_wait),
        REAL(real_rates_are_those_asked_for),
        REAL(compute_on_the_default_stream_spends_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
