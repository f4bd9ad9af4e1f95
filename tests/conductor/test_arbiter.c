/* Lanes on a simulated device in virtual time: who waits for whom, pieces, what may begin later, measured rates.
 * The link moves 1 MiB in 1 ms each way. */
#include "conductor/arbiter.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/fault.h"
#include "conductor/conductor.h"
#include "activation/rig.h"
#include "host/download.h"
#include "support/check.h"

enum { MIB = 1 << 20, MS = 1000000, ROOM = 64 * MIB };

static sth_device *device;
static sth_conductor *conductor;
static sth_stream compute, one, two, out;
static sth_event *gate;
static sth_devptr memory;
static uint8_t *host;
static int first_runtime, second_runtime; /* their addresses tell them apart */
static sthi_lane *first, *second, *down;

static int set_up(void **state) {
    (void)state;
    sth_sim_options sim;
    sth_conductor_options options;
    sth_sim_options_init(&sim);
    sim.virtual_time = true;
    sim.link_bytes_per_s = UINT64_C(1000) * MIB;
    sim.copy_latency_ns = 0;
    sth_conductor_options_init(&options);
    options.piece_bytes = MIB;
    options.event_trace = true;
    assert_ok(sth_device_open("sim", &sim, &device));
    assert_ok(sth_conductor_create(&options, &conductor));
    const sth_backend_ops *ops = device->ops;
    sth_stream *streams[] = {&compute, &one, &two, &out};
    for (int i = 0; i < 4; i++) assert_ok(ops->stream_create(device->self, 0, streams[i]));
    assert_ok(ops->event_create(device->self, false, &gate));
    assert_ok(ops->alloc(device->self, ROOM, &memory));
    host = calloc(1, ROOM);
    assert_ok(sthi_lane_open(conductor, device, one, STH_DIRECTION_H2D, &first_runtime, &first));
    assert_ok(sthi_lane_open(conductor, device, two, STH_DIRECTION_H2D, &second_runtime, &second));
    assert_ok(sthi_lane_open(conductor, device, out, STH_DIRECTION_D2H, &second_runtime, &down));
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    sthi_lane_close(first);
    sthi_lane_close(second);
    sthi_lane_close(down);
    sth_conductor_destroy(conductor);
    sth_stream streams[] = {compute, one, two, out};
    for (int i = 0; i < 4; i++) device->ops->stream_destroy(device->self, streams[i]);
    device->ops->event_destroy(device->self, gate);
    device->ops->free(device->self, memory, ROOM);
    sth_device_close(device);
    free(host);
    return 0;
}

static sthi_way copies(sthi_lane *lane, sth_stream stream, uint64_t bytes, int64_t due) {
    sthi_way way = sthi_lane_begin(lane, bytes, due, 32 * MIB);
    for (uint64_t at = 0; at < bytes; at += way.piece) {
        uint64_t n = sthi_min_u64(way.piece, bytes - at);
        if (stream == out) assert_ok(device->ops->copy_d2h(device->self, host + at, memory + at, n, stream));
        else assert_ok(device->ops->copy_h2d(device->self, memory + at, host + at, n, stream));
    }
    sthi_lane_end(lane, way.flight);
    return way;
}

static int64_t now(void) { return device->ops->now_ns(device->self); }

static void pass(int64_t ns) { assert_ok(sth_sim_compute(device, 0, ns)); }

static int64_t ends_at(sth_stream stream) {
    assert_ok(device->ops->stream_synchronize(device->self, stream));
    return now();
}

static void a_lane_alone_is_left_alone(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        sthi_way way = copies(first, one, 4 * MIB, now() + MS);
        assert_true(way.piece == 32 * MIB && !way.waits);
    }
}

static void large_copies_are_split_only_while_others_have_some_under_way(void **state) {
    (void)state;
    assert_int_equal(copies(down, out, 4 * MIB, STHI_DUE_LAST).piece, 32 * MIB);
    assert_int_equal(copies(first, one, 4 * MIB, now()).piece, MIB);
    (void)ends_at(out);
    (void)ends_at(one);
    assert_int_equal(copies(first, one, 4 * MIB, now()).piece, 32 * MIB);
    sth_conductor_stats stats;
    assert_ok(sth_conductor_stats_get(conductor, &stats));
    assert_int_equal(stats.split, 1);
}

/* Without the order the pieces of both would take turns, and the first would end after 7 ms. */
static void what_is_due_later_waits_for_what_is_on_the_link(void **state) {
    (void)state;
    (void)copies(second, two, MIB / 2, now() + 100 * MS);
    sthi_way way = copies(first, one, 4 * MIB, now() + 5 * MS); /* in pieces */
    assert_true(way.piece == MIB && !way.waits);
    pass(MS); /* it has begun */
    assert_true(copies(second, two, 3 * MIB, now() + 50 * MS).waits);
    assert_true(ends_at(one) <= 4 * MS + MS / 2 + MS / 100);
    assert_true(ends_at(two) >= 7 * MS);
}

static void what_is_due_earlier_does_not_wait(void **state) {
    (void)state;
    (void)copies(first, one, 4 * MIB, now() + 50 * MS);
    pass(MS);
    assert_false(copies(second, two, MIB, now() + 2 * MS).waits);
}

static void the_link_is_not_kept_idle_for_a_copy_whose_place_is_in_use(void **state) {
    (void)state;
    assert_ok(sth_sim_compute(device, compute, 20 * MS));
    assert_ok(device->ops->event_record(device->self, gate, compute));
    assert_ok(device->ops->stream_wait(device->self, one, gate));
    (void)copies(first, one, 4 * MIB, now() + MS);
    pass(MS);
    assert_false(copies(second, two, 3 * MIB, now() + 50 * MS).waits);
    assert_true(ends_at(two) < 5 * MS);
}

static void a_spill_gives_way_to_a_load_that_is_due_soon(void **state) {
    (void)state;
    assert_true(sthi_lane_may(down, 8 * MIB)); /* nothing of its own is under way */
    (void)copies(down, out, 4 * MIB, STHI_DUE_LAST);
    assert_true(sthi_lane_may(down, 8 * MIB)); /* nothing is loaded */
    (void)copies(first, one, 4 * MIB, now() + 2 * MS);
    pass(MS / 10);
    assert_false(sthi_lane_may(down, 8 * MIB));
    (void)ends_at(one);
    assert_true(sthi_lane_may(down, 8 * MIB));
    sth_conductor_stats stats;
    sth_conductor_event event;
    assert_ok(sth_conductor_stats_get(conductor, &stats));
    assert_int_equal(stats.deferred, 1);
    assert_ok(sth_conductor_event_next(conductor, &event));
    assert_true(event.kind == STH_CONDUCTOR_DEFERRED && event.a == 8 * MIB && event.b == STH_DIRECTION_D2H);
}

static void a_load_that_is_due_late_does_not_stop_spills(void **state) {
    (void)state;
    (void)copies(first, one, MIB, now()); /* so that the rate is known */
    (void)ends_at(one);
    (void)copies(down, out, 4 * MIB, STHI_DUE_LAST);
    (void)copies(first, one, 4 * MIB, now() + 100 * MS);
    pass(MS);
    assert_true(sthi_lane_may(down, 8 * MIB));
}

static void rates_are_measured_from_the_copies_themselves(void **state) {
    (void)state;
    (void)copies(first, one, 4 * MIB, now());
    (void)ends_at(one);
    (void)copies(first, one, MIB, now()); /* looks at what has ended */
    sth_conductor_stats stats;
    assert_ok(sth_conductor_stats_get(conductor, &stats));
    assert_true(stats.bytes_per_s[STH_DIRECTION_H2D] > 990.0 * MIB &&
                stats.bytes_per_s[STH_DIRECTION_H2D] < 1010.0 * MIB);
    assert_true(stats.bytes_per_s[STH_DIRECTION_D2H] == 0);
    assert_int_equal(stats.flight_bytes[STH_DIRECTION_H2D], 5 * MIB);
}

static void more_flights_than_there_is_room_for_pass_all_the_same(void **state) {
    (void)state;
    uint64_t without = 0;
    for (int i = 0; i < 100; i++) without += copies(first, one, MIB / 8, now()).flight == STHI_NO_FLIGHT;
    assert_int_equal(without, 68);
    (void)ends_at(one);
    assert_true(copies(first, one, MIB, now()).flight != STHI_NO_FLIGHT);
}

static void a_conductor_that_was_shut_down_says_nothing(void **state) {
    (void)state;
    assert_ok(sth_conductor_shutdown(conductor));
    (void)copies(down, out, 4 * MIB, STHI_DUE_LAST);
    sthi_way way = copies(first, one, 4 * MIB, now());
    assert_true(way.piece == 32 * MIB && !way.waits && way.flight == STHI_NO_FLIGHT);
    assert_true(sthi_lane_may(down, 64 * MIB));
}

static void a_device_that_refuses_events_moves_bytes_all_the_same(void **state) {
    (void)state;
    for (uint64_t n = 1; n < 12; n++) {
        sthi_fault_arm(STHI_FAULT_DEVICE_CALL, n, false);
        sthi_way way = sthi_lane_begin(first, MIB, now(), 32 * MIB);
        sthi_lane_end(first, way.flight);
        sthi_fault_disarm_all();
        (void)copies(second, two, MIB, now() + MS);
        (void)ends_at(two);
    }
    for (int i = 0; i < 40; i++) { /* no flight that nobody can see the end of is left */
        assert_true(copies(first, one, MIB, now()).flight != STHI_NO_FLIGHT);
        (void)ends_at(one);
    }
}

/* ---- whole runtimes */

/* The store with a conductor and somebody who loads: every byte comes back right. */
static void spilled_bytes_come_back_right_beside_loads(void **state) {
    (void)state;
    rig g;
    sthi_lane *loads;
    sth_stream stream;
    sth_activation_options options;
    sth_activation_options_init(&options);
    options.high = 6 * LARGEST;
    options.low = 3 * LARGEST;
    options.max_d2h = 2;
    options.max_h2d = 2;
    rig_init(&g, true, UINT64_C(2000) * MIB, &options, false);
    assert_ok(sth_activation_set_conductor(g.store, conductor));
    assert_ok(g.device->ops->stream_create(g.device->self, 0, &stream));
    assert_ok(sthi_lane_open(conductor, g.device, stream, STH_DIRECTION_H2D, &first_runtime, &loads));
    sth_devptr target;
    assert_ok(g.device->ops->alloc(g.device->self, 4 * MIB, &target));
    for (unsigned round = 0; round < 4; round++) {
        assert_ok(sth_activation_pass(g.store, round));
        for (int i = 0; i < 20; i++) {
            sthi_way way = sthi_lane_begin(loads, 4 * MIB, g.device->ops->now_ns(g.device->self) + MS, 4 * MIB);
            assert_ok(g.device->ops->copy_h2d(g.device->self, target, host, 4 * MIB, stream));
            sthi_lane_end(loads, way.flight);
            assert_ok(rig_save(&g, i, LARGEST - 512 * (i % 3), round * 100 + i, false));
            rig_rest(&g);
        }
        for (int i = 20; i-- > 0;) {
            assert_ok(rig_ask(&g, i));
            assert_ok(rig_ahead(&g));
            assert_ok(rig_release(&g, i));
        }
    }
    sth_conductor_stats stats;
    assert_ok(sth_conductor_stats_get(conductor, &stats));
    assert_true(rig_stats(&g).spilled > 0 && stats.flights > 80 && stats.flight_bytes[STH_DIRECTION_D2H] > 0);
    assert_ok(sth_activation_set_conductor(g.store, NULL));
    sthi_lane_close(loads);
    g.device->ops->free(g.device->self, target, 4 * MIB);
    g.device->ops->stream_destroy(g.device->self, stream);
    rig_fini(&g);
}

/* One copy out at a time, each begun when the last one is over: beside loads that are late no more goes than its share,
 * and all of it when there are none, or when they have time. */
static void one_spill_at_a_time_gives_way_too(void **state) {
    (void)state;
    enum { SAVES = 24 };
    rig g;
    sthi_lane *loads;
    sth_stream stream;
    sth_devptr target;
    sth_conductor_stats stats;
    sth_activation_options options;
    sth_activation_options_init(&options);
    options.high = 2 * LARGEST;
    options.low = LARGEST;
    options.max_d2h = 1;
    rig_init(&g, true, UINT64_C(1000) * MIB, &options, false);
    assert_ok(sth_activation_set_conductor(g.store, conductor));
    assert_ok(g.device->ops->stream_create(g.device->self, 0, &stream));
    assert_ok(sthi_lane_open(conductor, g.device, stream, STH_DIRECTION_H2D, &first_runtime, &loads));
    assert_ok(g.device->ops->alloc(g.device->self, 2 * MIB, &target));
    uint64_t spilled[3], loaded = 0, deferred[3];
    for (unsigned round = 0; round < 3; round++) { /* nothing is loaded; loads are late; loads have time */
        assert_ok(sth_activation_pass(g.store, round));
        uint64_t before = rig_stats(&g).spill_bytes;
        if (round) assert_ok(sth_activation_set_marks(g.store, 64 * LARGEST, LARGEST)); /* nothing has to go at once */
        for (int i = 0; i < SAVES; i++) {
            if (round) {
                int64_t due = g.device->ops->now_ns(g.device->self) + (round == 2 ? 100 * MS : 0);
                sthi_way way = sthi_lane_begin(loads, MIB / 2, due, 4 * MIB);
                assert_ok(g.device->ops->copy_h2d(g.device->self, target, host, MIB / 2, stream));
                sthi_lane_end(loads, way.flight);
                if (round == 1) loaded += MIB / 2;
            }
            assert_ok(sth_sim_compute(g.device, 0, MS / 10)); /* it has begun */
            assert_ok(rig_save(&g, i, LARGEST, round * 100 + i, false));
            assert_ok(sth_sim_compute(g.device, 0, MS));
            rig_rest(&g);
        }
        spilled[round] = rig_stats(&g).spill_bytes - before;
        assert_ok(sth_conductor_stats_get(conductor, &stats));
        deferred[round] = stats.deferred;
        for (int i = 0; round == 1 && i < SAVES; i++) { /* what was put off goes when nothing is in its way */
            assert_ok(sth_sim_compute(g.device, 0, MS));
            assert_ok(rig_room(&g, 0));
        }
        if (round == 1) assert_true(rig_stats(&g).spill_bytes - before > spilled[0] - 4 * LARGEST);
        for (int i = SAVES; i-- > 0;) {
            assert_ok(rig_ask(&g, i));
            assert_ok(rig_release(&g, i));
        }
        assert_ok(sth_activation_set_marks(g.store, 2 * LARGEST, LARGEST));
    }
    assert_true(spilled[0] >= (SAVES - 3) * (uint64_t)LARGEST);
    assert_true(deferred[0] == 0 && deferred[1] > 0 && deferred[2] == deferred[1]);
    assert_true(spilled[1] <= 2 * MIB + loaded / 2);
    assert_true(spilled[1] >= loaded / 2); /* and they are not kept off altogether */
    assert_true(spilled[2] >= spilled[0] - 4 * LARGEST);
    assert_ok(sth_activation_set_conductor(g.store, NULL));
    sthi_lane_close(loads);
    g.device->ops->free(g.device->self, target, 2 * MIB);
    g.device->ops->stream_destroy(g.device->self, stream);
    rig_fini(&g);
}

static void downloads_pass_through_and_outlive_their_conductor(void **state) {
    (void)state;
    sth_download *d;
    sth_block *block;
    sth_ticket ticket;
    assert_ok(sth_download_create(device, NULL, &d));
    assert_ok(sth_download_set_conductor(d, conductor));
    assert_ok(sth_download_take(d, 4 * MIB, &block));
    for (int i = 0; i < 4 * MIB; i++) ((uint8_t *)(uintptr_t)memory)[i] = (uint8_t)(i * 7);
    (void)copies(first, one, MIB, now()); /* somebody competes: in pieces */
    assert_ok(device->ops->stream_synchronize(device->self, one));
    for (int i = 0; i < 4 * MIB; i++) ((uint8_t *)(uintptr_t)memory)[i] = (uint8_t)(i * 7);
    (void)copies(first, one, 512, now());
    ((uint8_t *)(uintptr_t)memory)[0] = 0;
    assert_ok(sth_download_copy(d, block, 0, memory + MIB, 3 * MIB, compute, &ticket));
    sth_conductor_stats stats;
    assert_ok(sth_conductor_stats_get(conductor, &stats));
    assert_true(stats.flight_bytes[STH_DIRECTION_D2H] == 3 * MIB && stats.split == 1);
    sth_conductor_destroy(conductor); /* the lanes keep what they need */
    assert_ok(sth_download_wait(d, ticket));
    for (int i = 0; i < 3 * MIB; i += 511)
        assert_int_equal(((uint8_t *)sth_block_address(block))[i], (uint8_t)((i + MIB) * 7));
    assert_ok(sth_download_copy(d, block, 0, memory + MIB, MIB, compute, &ticket));
    assert_ok(sth_download_wait(d, ticket));
    sth_block_release(block);
    sth_download_destroy(d);
    sth_conductor_options options;
    sth_conductor_options_init(&options);
    assert_ok(sth_conductor_create(&options, &conductor)); /* for tear_down */
}

/* ---- threads */

enum { THREADS = 4, TURNS = 400 };

static void *copying(void *index) {
    sthi_lane *lane;
    sth_stream stream;
    sth_direction direction = (uintptr_t)index % 2 ? STH_DIRECTION_D2H : STH_DIRECTION_H2D;
    const sth_backend_ops *ops = device->ops;
    uint8_t *mine = host + (uintptr_t)index * 4 * MIB;
    sth_devptr there = memory + (uintptr_t)index * 4 * MIB;
    if (ops->stream_create(device->self, 0, &stream) != STH_OK) return "stream";
    if (sthi_lane_open(conductor, device, stream, direction, index, &lane) != STH_OK) return "lane";
    for (int i = 0; i < TURNS; i++) {
        sthi_way way = sthi_lane_begin(lane, 8192, ops->now_ns(device->self) + i % 7 * MS, 8192);
        sth_status rc = direction == STH_DIRECTION_D2H ? ops->copy_d2h(device->self, mine, there, 8192, stream)
                                                       : ops->copy_h2d(device->self, there, mine, 8192, stream);
        sthi_lane_end(lane, way.flight);
        if (rc != STH_OK) return "copy";
        (void)sthi_lane_may(lane, 8192);
        if (i % 50 == 49) { /* lanes come and go beside the others */
            sthi_lane_close(lane);
            if (sthi_lane_open(conductor, device, stream, direction, index, &lane) != STH_OK) return "lane again";
        }
    }
    sthi_lane_close(lane);
    ops->stream_destroy(device->self, stream);
    return NULL;
}

static void lanes_of_several_threads(void **state) {
    (void)state;
    sthi_thread threads[THREADS];
    sth_sim_options sim;
    sth_device *virtual = device;
    sth_devptr memory_before = memory;
    sth_sim_options_init(&sim);
    assert_ok(sth_device_open("sim", &sim, &device)); /* real time: streams have threads too */
    assert_ok(device->ops->alloc(device->self, ROOM, &memory));
    for (uintptr_t i = 0; i < THREADS; i++) assert_ok(sthi_thread_start(&threads[i], "copies", copying, (void *)i));
    uint32_t owner;
    assert_ok(sth_conductor_register(conductor, "owner", &owner));
    for (int i = 0; i < TURNS; i++) {
        sth_grant g;
        assert_ok(sth_conductor_begin_step(conductor, i));
        assert_ok(sth_conductor_reserve(conductor, owner, STH_RESOURCE_VRAM, MIB, STH_RESERVE_SOFT,
                                        STH_PRIORITY_SPECULATIVE, STH_PHASE_STEP_BEGIN, &g));
        assert_ok(sth_conductor_end_step(conductor));
    }
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        if (wrong) fail_msg("%s", (const char *)wrong);
    }
    sth_conductor_stats stats;
    assert_ok(sth_conductor_stats_get(conductor, &stats));
    assert_int_equal(stats.flight_bytes[0] + stats.flight_bytes[1], THREADS * TURNS * 8192);
    assert_int_equal(stats.vram_granted, 0);
    device->ops->free(device->self, memory, ROOM);
    sth_device_close(device);
    device = virtual;
    memory = memory_before;
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(a_lane_alone_is_left_alone),
        CASE(large_copies_are_split_only_while_others_have_some_under_way),
        CASE(what_is_due_later_waits_for_what_is_on_the_link),
        CASE(what_is_due_earlier_does_not_wait),
        CASE(the_link_is_not_kept_idle_for_a_copy_whose_place_is_in_use),
        CASE(a_spill_gives_way_to_a_load_that_is_due_soon),
        CASE(a_load_that_is_due_late_does_not_stop_spills),
        CASE(rates_are_measured_from_the_copies_themselves),
        CASE(more_flights_than_there_is_room_for_pass_all_the_same),
        CASE(a_conductor_that_was_shut_down_says_nothing),
        CASE(a_device_that_refuses_events_moves_bytes_all_the_same),
        CASE(spilled_bytes_come_back_right_beside_loads),
        CASE(one_spill_at_a_time_gives_way_too),
        CASE(downloads_pass_through_and_outlive_their_conductor),
        CASE(lanes_of_several_threads),
    };
    return cmocka_run_group_tests_name("conductor/arbiter", tests, NULL, NULL);
}
