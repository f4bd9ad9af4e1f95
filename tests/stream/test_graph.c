/* Steps inside graphs, on a device that records: what a replay's kernels read, whatever came between
 * replays. */
#include <string.h>

#include "base/random.h"
#include "load/lanes.h"
#include "runtime/check.h"
#include "runtime/graph.h"
#include "runtime/image.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/share/give.h"
#include "runtime/step_calls.h"
#include "stagehand/conductor.h"
#include "stream/recorder.h"
#include "stream/world.h"
#include "support/check.h"

enum { UNITS = 8, LONGEST = 16, COMPUTE_NS = 20000, TOTAL = 252928 };
static const uint64_t EIGHT[UNITS] = {40000, 12288, 65536, 8192, 40000, 12288, 65536, 8192};
static const uint32_t FORWARD[UNITS] = {0, 1, 2, 3, 4, 5, 6, 7};
static const uint32_t SAWTOOTH[LONGEST] = {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0};

typedef struct graph {
    recording *recorded;
    sth_graph_info info;
    const uint32_t *order;
    uint32_t count;
} graph;

static void nothing_refused(void) {
    const char *first;
    uint32_t n = recorder_refusals(&first);
    if (n) fail_msg("a driver would have refused %u calls, the first: %s", n, first);
}

static void sound(world *w) {
    const char *why;
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
    nothing_refused();
}

static void open_world(world *w, world_spec *spec) {
    if (!spec->device) {
        sth_sim_options sim;
        sth_sim_options_init(&sim);
        sim.memory_bytes = 4 * spec->budget;
        sim.link_bytes_per_s = spec->link;
        sim.virtual_time = true;
        sim.copy_latency_ns = spec->latency_ns ? spec->latency_ns : 500;
        assert_ok(recorder_open(&sim, &spec->device));
        assert_ok(world_open(w, spec));
        sthi_device_release(spec->device); /* the world's now */
        return;
    }
    assert_ok(world_open(w, spec));
}

static void steps(world *w, const uint32_t *order, uint32_t count, int n) {
    for (int i = 0; i < n; i++) {
        assert_ok(world_step(w, order, count, COMPUTE_NS));
        sound(w);
    }
}

static sth_stream new_stream(world *w) {
    sth_stream stream;
    assert_ok(w->device->ops->stream_create(w->device->self, 0, &stream));
    return stream;
}

static sth_status use(world *w, uint32_t unit, sth_stream stream) {
    sth_lease lease;
    STHI_TRY(sthi_unit_acquire(w->runtime, unit, stream, &lease));
    recorder_use(lease.address, w->bytes[unit], COMPUTE_NS);
    sthi_lease_release(w->runtime, &lease);
    return sthi_runtime_poll(w->runtime);
}

/* A capture of these uses; the statuses of join and settle. */
static sth_status capture(world *w, graph *g, const uint32_t *order, uint32_t count, sth_stream stream) {
    *g = (graph){.order = order, .count = count};
    STHI_TRY(sthi_graph_prepare(w->runtime));
    recorder_begin(stream);
    sth_status used = sthi_graph_fork(w->runtime, stream);
    for (uint32_t t = 0; t < count && used == STH_OK; t++) used = use(w, order[t], stream);
    sth_status joined = sthi_graph_join(w->runtime, stream);
    g->recorded = recorder_end();
    sth_status rc = sthi_graph_settle(w->runtime, &g->info);
    assert_int_equal(rc, used != STH_OK ? STH_INVALID_STATE : joined);
    sound(w);
    return rc;
}

static void check(world *w, const graph *g) {
    for (uint32_t t = 0; t < g->count; t++)
        for (int when = 0; when < 2; when++) {
            uint32_t unit = g->order[t];
            if (!world_shows(w, unit, w->version[unit], recording_saw(g->recorded, t, when)))
                fail_msg("use %u, of unit %u, saw wrong bytes %s its work", t, unit, when ? "behind" : "before");
        }
}

/* False: it is stale. */
static bool replay(world *w, graph *g, sth_stream stream) {
    bool current = false;
    assert_ok(sthi_graph_replay_begin(w->runtime, g->info.edition, stream, &current));
    if (!current) return false;
    recording_launch(g->recorded, w->device, stream);
    assert_ok(sthi_graph_replay_end(w->runtime, stream));
    assert_ok(w->device->ops->stream_synchronize(w->device->self, stream));
    check(w, g);
    sound(w);
    return true;
}

/* Another graph in the place of that one. */
static void capture_again(world *w, graph *g, const uint32_t *order, uint32_t count, sth_stream stream) {
    recording_free(g->recorded);
    assert_ok(capture(w, g, order, count, stream));
    assert_true(replay(w, g, stream));
}

static void close_world(world *w, graph *g, sth_stream stream) {
    if (g->recorded) recording_free(g->recorded);
    w->device->ops->stream_destroy(w->device->self, stream);
    world_close(w);
}

typedef struct setting {
    const uint32_t *order;
    uint32_t count;
    sth_transfer packed;
    bool writable, either;
} setting;

static const setting SETTINGS[] = {
    {FORWARD, UNITS, 0, false, false},
    {SAWTOOTH, LONGEST, 0, false, false},
    {FORWARD, UNITS, 0, true, false},
    {FORWARD, UNITS, STH_TRANSFER_INT8, false, false},
    {SAWTOOTH, LONGEST, STH_TRANSFER_INT4, true, false},
    {FORWARD, UNITS, STH_TRANSFER_LOSSLESS, false, false},
    {FORWARD, UNITS, STH_TRANSFER_LOSSLESS, false, true},
};

static void open_setting(world *w, const setting *s, uint64_t budget) {
    world_spec spec = world_default(UNITS, EIGHT, budget);
    spec.packed = s->packed;
    spec.writable = s->writable;
    spec.read_only = !s->writable;
    spec.either = s->either;
    open_world(w, &spec);
    steps(w, s->order, s->count, 4);
}

static void test_a_replay_reads_what_the_step_reads(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof SETTINGS / sizeof *SETTINGS; k++)
        for (uint64_t budget = 130000; budget <= 360000; budget += few_under_tsan(115000, 23000)) {
            const setting *s = &SETTINGS[k];
            world w;
            graph g;
            open_setting(&w, s, budget);
            sth_stream stream = new_stream(&w);
            assert_ok(capture(&w, &g, s->order, s->count, stream));
            sth_runtime_stats stats;
            sthi_runtime_stats(w.runtime, &stats);
            assert_true(stats.device_peak <= budget);
            if (k == 0) assert_int_equal(g.info.h2d_bytes + stats.resident_bytes, TOTAL); /* and nothing for later */
            for (int i = 0; i < 3; i++) assert_true(replay(&w, &g, stream));
            close_world(&w, &g, stream);
        }
}

static void test_replays_and_steps_take_turns(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof SETTINGS / sizeof *SETTINGS; k++) {
        const setting *s = &SETTINGS[k];
        world w;
        graph g;
        sth_runtime_stats first, before, after;
        open_setting(&w, s, 200000);
        sthi_runtime_stats(w.runtime, &first);
        sth_stream stream = new_stream(&w);
        assert_ok(capture(&w, &g, s->order, s->count, stream));
        for (int i = 0; i < 6; i++) {
            if (!replay(&w, &g, stream)) { /* better times have made another plan */
                capture_again(&w, &g, s->order, s->count, stream);
            }
            steps(&w, s->order, s->count, i % 3);
        }
        sthi_runtime_stats(w.runtime, &before);
        steps(&w, s->order, s->count, 3);
        sthi_runtime_stats(w.runtime, &after);
        assert_int_equal(after.deviations, first.deviations); /* the order is what it was */
        assert_int_equal(after.demand_loads, before.demand_loads);
        close_world(&w, &g, stream);
    }
}

static void test_a_replay_reads_what_was_written_before_it(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof SETTINGS / sizeof *SETTINGS; k++) {
        const setting *s = &SETTINGS[k];
        world w;
        graph g;
        open_setting(&w, s, 250000); /* some stay, some stream */
        sth_stream stream = new_stream(&w);
        assert_ok(capture(&w, &g, s->order, s->count, stream));
        for (uint8_t version = 1; version < 4; version++) {
            for (uint32_t i = 0; i < UNITS; i++) {
                world_fill(&w, i, version);
                bool told = !s->writable || version % 2; /* else it is noticed */
                if (told) assert_ok(sthi_unit_mark_written(w.runtime, i));
            }
            bool current = replay(&w, &g, stream);
            assert_true(current || w.runtime->expand.packed); /* what stays packed is brought again */
            if (!current) capture_again(&w, &g, s->order, s->count, stream);
        }
        close_world(&w, &g, stream);
    }
}

/* A write leaves the bytes on the device behind: the graph is stale, the next one brings them in each replay, and once
 * a step has brought them another one expands them again. */
static void test_units_that_stay_packed(void **state) {
    (void)state;
    enum { MANY = 24 };
    uint64_t bytes[MANY];
    uint32_t order[MANY];
    for (uint32_t i = 0; i < MANY; i++) bytes[i] = i % 2 ? 512 : 65536, order[i] = i;
    world w;
    graph g;
    world_spec spec = world_default(MANY, bytes, 614000);
    spec.packed = STH_TRANSFER_LOSSLESS;
    spec.link = UINT64_C(100000000);
    open_world(&w, &spec);
    steps(&w, order, MANY, 8);
    assert_true(w.runtime->expand.packed_bytes > 0);
    sth_stream stream = new_stream(&w);
    assert_ok(capture(&w, &g, order, MANY, stream));
    uint64_t packed = g.info.h2d_bytes;
    for (uint8_t version = 1; version < 4; version++) {
        for (int i = 0; i < 2; i++) assert_true(replay(&w, &g, stream));
        for (uint32_t i = 0; i < MANY; i++) {
            world_fill(&w, i, version);
            assert_ok(sthi_unit_mark_written(w.runtime, i));
        }
        assert_false(replay(&w, &g, stream));
        capture_again(&w, &g, order, MANY, stream);
        assert_true(g.info.h2d_bytes > packed);
        steps(&w, order, MANY, 2);
        assert_true(replay(&w, &g, stream)); /* it does not read what came since */
        capture_again(&w, &g, order, MANY, stream);
        assert_int_equal(g.info.h2d_bytes, packed);
    }
    close_world(&w, &g, stream);
}

/* Everything stays on the device, so that the graph itself copies nothing: what is read of the images is read
 * before the launch. In place of the launch a look at the places, which waits for nothing on the host. */
static void test_what_is_written_behind_a_replay_is_not_in_it(void **state) {
    (void)state;
    static uint8_t saw[UNITS][65536];
    const setting all = {FORWARD, UNITS, 0, true, false};
    world w;
    graph g;
    bool current = false;
    open_setting(&w, &all, 2 * TOTAL);
    sth_stream stream = new_stream(&w);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_int_equal(g.info.h2d_bytes, 0);
    for (uint32_t i = 0; i < UNITS; i++) {
        world_fill(&w, i, 1);
        assert_ok(sthi_unit_mark_written(w.runtime, i));
    }
    assert_ok(sthi_graph_replay_begin(w.runtime, g.info.edition, stream, &current));
    assert_true(current);
    for (uint32_t i = 0; i < UNITS; i++) {
        const sthi_slot *s = &w.runtime->places.slots[w.runtime->units[i].slot];
        sth_devptr at = w.runtime->places.extents[s->extent].base + s->offset;
        assert_ok(w.device->ops->copy_d2h(w.device->self, saw[i], at, EIGHT[i], stream));
    }
    assert_ok(sthi_graph_replay_end(w.runtime, stream));
    for (uint32_t i = 0; i < UNITS; i++) world_fill(&w, i, 2);
    assert_ok(w.device->ops->stream_synchronize(w.device->self, stream));
    for (uint32_t i = 0; i < UNITS; i++)
        if (!world_shows(&w, i, 1, saw[i])) fail_msg("unit %u was read when it was written again", i);
    sound(&w);
    close_world(&w, &g, stream);
}

/* The graph's own copies read images while it runs, which the host does not wait for. */
static void test_what_is_written_behind_a_replay_that_streams_is_not_in_it(void **state) {
    (void)state;
    const uint32_t flags[2] = {STH_UNIT_WATCHED, STH_UNIT_WRITABLE};
    for (int k = 0; k < 2; k++) {
        world w;
        graph g;
        bool current = false;
        world_spec spec = world_default(UNITS, EIGHT, 250000);
        spec.flags = flags[k];
        spec.read_only = false;
        open_world(&w, &spec);
        steps(&w, FORWARD, UNITS, 4);
        sth_stream stream = new_stream(&w);
        assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
        assert_true(g.info.h2d_bytes > 0);
        for (uint8_t version = 0; version < 3; version++) {
            assert_ok(sthi_graph_replay_begin(w.runtime, g.info.edition, stream, &current));
            assert_true(current);
            recording_launch(g.recorded, w.device, stream);
            assert_ok(sthi_graph_replay_end(w.runtime, stream));
            for (uint32_t i = 0; i < UNITS; i++) {
                world_fill(&w, i, version + 1);
                assert_ok(sthi_unit_mark_written(w.runtime, i));
            }
            assert_ok(w.device->ops->stream_synchronize(w.device->self, stream));
            for (uint32_t t = 0; t < UNITS; t++)
                if (!world_shows(&w, FORWARD[t], version, recording_saw(g.recorded, t, 1)))
                    fail_msg("replay %u saw another unit %u", version, FORWARD[t]);
        }
        close_world(&w, &g, stream);
    }
}

static void test_a_graph_is_stale_when_its_places_have_gone(void **state) {
    (void)state;
    world w;
    graph g;
    open_setting(&w, &SETTINGS[0], 250000);
    sth_stream stream = new_stream(&w);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_true(replay(&w, &g, stream));
    assert_ok(sthi_runtime_set_budget(w.runtime, 150000));
    assert_false(replay(&w, &g, stream));
    steps(&w, FORWARD, UNITS, 2);
    capture_again(&w, &g, FORWARD, UNITS, stream);
    sthi_lock(&w.runtime->lock);
    assert_true(sthi_give_way(w.runtime, 1 << 20)); /* another runtime has asked for all of it */
    sthi_unlock(&w.runtime->lock);
    assert_true(w.runtime->share.parked);
    assert_false(replay(&w, &g, stream));
    capture_again(&w, &g, FORWARD, UNITS, stream);
    close_world(&w, &g, stream);
}

static void test_a_graph_is_stale_when_an_image_has_moved(void **state) {
    (void)state;
    world w;
    graph g;
    open_setting(&w, &SETTINGS[0], 250000);
    sth_stream stream = new_stream(&w);
    sth_arena *arena;
    void *image;
    assert_ok(sthi_arena_create(w.device, EIGHT[2], &arena));
    assert_ok(sthi_arena_reserve(arena, EIGHT[2], &image));
    memcpy(image, w.image[2], EIGHT[2]);
    assert_ok(sthi_arena_finish(arena));
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_ok(sthi_unit_set_host(w.runtime, 2, image, arena));
    assert_false(replay(&w, &g, stream));
    sthi_arena_release(arena);
    close_world(&w, &g, stream);
}

static void test_a_place_that_is_held_is_not_overwritten(void **state) {
    (void)state;
    world w;
    graph g;
    open_setting(&w, &SETTINGS[0], 150000);
    sth_stream stream = new_stream(&w);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_ok(sthi_step_begin(w.runtime));
    sth_lease held = {0};
    uint32_t unit = 0;
    while (unit < UNITS && w.runtime->units[unit].resident) unit++; /* one that streams */
    for (uint32_t i = 0; i <= unit; i++) {
        assert_ok(sthi_unit_acquire(w.runtime, i, 0, &held));
        if (i < unit) sthi_lease_release(w.runtime, &held);
    }
    assert_ok(sthi_step_end(w.runtime));
    bool current = true;
    assert_status(sthi_graph_replay_begin(w.runtime, g.info.edition, stream, &current), STH_INVALID_STATE);
    assert_non_null(strstr(sth_last_error()->message, "still in use"));
    assert_true(world_right(&w, &held));
    assert_status(sthi_graph_prepare(w.runtime), STH_INVALID_STATE);
    sthi_lease_release(w.runtime, &held);
    assert_true(replay(&w, &g, stream));
    steps(&w, FORWARD, UNITS, 2);
    close_world(&w, &g, stream);
}

static void test_a_capture_that_leaves_the_order_is_refused(void **state) {
    (void)state;
    static const uint32_t other[UNITS] = {0, 1, 2, 4, 3, 5, 6, 7};
    world w;
    graph g;
    open_setting(&w, &SETTINGS[0], 150000);
    sth_stream stream = new_stream(&w);
    assert_status(capture(&w, &g, other, UNITS, stream), STH_INVALID_STATE);
    recording_free(g.recorded);
    steps(&w, FORWARD, UNITS, 2);
    assert_ok(capture(&w, &g, FORWARD, UNITS - 2, stream)); /* it only ends early */
    assert_true(replay(&w, &g, stream));
    capture_again(&w, &g, FORWARD, UNITS, stream);
    close_world(&w, &g, stream);
}

/* What a capture has loaded is not there: nothing was copied. */
static void test_a_place_that_a_capture_leaves_leased_is_loaded_again(void **state) {
    (void)state;
    world w;
    sth_graph_info info;
    open_setting(&w, &SETTINGS[0], 150000);
    sth_stream stream = new_stream(&w);
    sth_lease held[UNITS];
    assert_ok(sthi_graph_prepare(w.runtime));
    recorder_begin(stream);
    assert_ok(sthi_graph_fork(w.runtime, stream));
    for (uint32_t i = 0; i < UNITS; i++) {
        assert_ok(sthi_unit_acquire(w.runtime, i, stream, &held[i]));
        if (i + 1 < UNITS) sthi_lease_release(w.runtime, &held[i]);
    }
    assert_ok(sthi_graph_join(w.runtime, stream));
    recording_free(recorder_end());
    assert_status(sthi_graph_settle(w.runtime, &info), STH_INVALID_STATE);
    sthi_lease_release(w.runtime, &held[UNITS - 1]);
    steps(&w, FORWARD, UNITS, 2);
    w.device->ops->stream_destroy(w.device->self, stream);
    world_close(&w);
}

/* A pass in a graph may hold its weights for longer than a step does: plans are made for steps. */
static void test_what_a_capture_holds_teaches_the_plan_nothing(void **state) {
    (void)state;
    enum { TOGETHER = 3 };
    world w;
    graph g = {.order = FORWARD, .count = UNITS};
    open_setting(&w, &SETTINGS[0], 220000);
    sth_stream stream = new_stream(&w);
    sth_lease lease[UNITS];
    assert_ok(sthi_graph_prepare(w.runtime));
    recorder_begin(stream);
    assert_ok(sthi_graph_fork(w.runtime, stream));
    for (uint32_t i = 0; i < UNITS; i++) {
        assert_ok(sthi_unit_acquire(w.runtime, i, stream, &lease[i]));
        recorder_use(lease[i].address, EIGHT[i], COMPUTE_NS);
        if (i + 1 >= TOGETHER) sthi_lease_release(w.runtime, &lease[i + 1 - TOGETHER]);
        assert_ok(sthi_runtime_poll(w.runtime));
    }
    for (uint32_t i = UNITS + 1 - TOGETHER; i < UNITS; i++) sthi_lease_release(w.runtime, &lease[i]);
    assert_ok(sthi_graph_join(w.runtime, stream));
    g.recorded = recorder_end();
    assert_ok(sthi_graph_settle(w.runtime, &g.info));
    assert_true(replay(&w, &g, stream));
    for (uint32_t t = 0; t < UNITS; t++) assert_int_equal(w.runtime->order.held[t], 1);
    steps(&w, FORWARD, UNITS, 2);
    assert_true(replay(&w, &g, stream)); /* and the places are where they were */
    for (uint32_t t = 0; t < UNITS; t++) assert_int_equal(w.runtime->order.held[t], 1);
    close_world(&w, &g, stream);
}

/* Its events are those of one step, and a graph is launched again and again: copies inside do not ask. */
static void test_under_a_conductor_a_graph_copies_by_itself(void **state) {
    (void)state;
    world w;
    graph g;
    sth_conductor_options options;
    sth_conductor *conductor;
    sth_conductor_options_init(&options);
    assert_ok(sth_conductor_create(&options, &conductor));
    open_setting(&w, &SETTINGS[0], 150000);
    assert_ok(sthi_runtime_set_conductor(w.runtime, conductor));
    steps(&w, FORWARD, UNITS, 2);
    sth_stream stream = new_stream(&w);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    for (int i = 0; i < 3; i++) {
        assert_true(replay(&w, &g, stream));
        steps(&w, FORWARD, UNITS, 1);
    }
    close_world(&w, &g, stream);
    sth_conductor_destroy(conductor);
}

/* Whichever call inside the capture fails: there is no graph, or it is right without; and the model is as
 * before. */
static void test_a_call_that_fails_inside_a_capture(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof SETTINGS / sizeof *SETTINGS; k++) {
        const setting *s = &SETTINGS[k];
        world w;
        graph g;
        const char *first;
        open_setting(&w, s, 200000);
        sth_stream stream = new_stream(&w);
        for (uint32_t n = 1;; n += few_under_tsan(7, 1)) {
            assert_ok(sthi_graph_prepare(w.runtime));
            recorder_begin(stream);
            recorder_fail(n);
            sth_status rc = sthi_graph_fork(w.runtime, stream);
            for (uint32_t t = 0; t < s->count && rc == STH_OK; t++) rc = use(&w, s->order[t], stream);
            if (sthi_graph_join(w.runtime, stream) != STH_OK) rc = STH_DEVICE_ERROR;
            bool failed = recorder_fail(0);
            g = (graph){.recorded = recorder_end(), .order = s->order, .count = s->count};
            sth_status settled = sthi_graph_settle(w.runtime, &g.info);
            /* A driver would end the capture with an error after a wait of the host, or without a join. */
            bool ended = recorder_refusals(&first) > 0;
            if (!failed) assert_ok(settled);
            if (settled == STH_OK && !ended) assert_true(replay(&w, &g, stream));
            recording_free(g.recorded);
            steps(&w, s->order, s->count, n % 4 == 0);
            if (!failed) break;
        }
        steps(&w, s->order, s->count, 2);
        assert_ok(capture(&w, &g, s->order, s->count, stream));
        assert_true(replay(&w, &g, stream));
        close_world(&w, &g, stream);
    }
}

/* ---- random worlds */

typedef struct player {
    world w;
    graph g;
    sth_stream stream;
    uint64_t bytes[UNITS], least;
    uint32_t order[LONGEST], count;
    uint64_t seed, rolls;
    bool captured;
    sth_lease held;
    bool holds;
    uint8_t version;
} player;

static uint32_t roll(player *p, uint32_t sides) { return (uint32_t)(sthi_random64(p->seed, p->rolls++) % sides); }

static void play_hold(player *p) {
    uint32_t unit = p->order[roll(p, p->count)];
    sth_status rc = sthi_unit_acquire(p->w.runtime, unit, 0, &p->held);
    if (rc != STH_OK) assert_int_equal(rc, STH_BUDGET_TOO_SMALL);
    p->holds = rc == STH_OK;
    if (p->w.runtime->step.open) assert_ok(sthi_step_end(p->w.runtime));
}

static void play_capture(player *p) {
    if (p->captured) recording_free(p->g.recorded);
    p->captured = false;
    sth_status rc = sthi_graph_prepare(p->w.runtime);
    if (rc != STH_OK) { /* something is leased, or deviations have left no plan in force, or none fits */
        assert_int_equal(rc, p->w.runtime->planned.refused != STH_OK ? STH_BUDGET_TOO_SMALL : STH_INVALID_STATE);
        return;
    }
    sth_graph_info info;
    assert_status(sthi_graph_settle(p->w.runtime, &info), STH_INVALID_STATE); /* given up */
    rc = capture(&p->w, &p->g, p->order, p->count, p->stream);
    p->captured = rc == STH_OK;
    if (!p->captured) recording_free(p->g.recorded);
}

static void play_replay(player *p) {
    if (!p->captured) return;
    bool current = false;
    sth_status rc = sthi_graph_replay_begin(p->w.runtime, p->g.info.edition, p->stream, &current);
    if (rc != STH_OK) {
        if (!p->holds) fail_msg("%s", sth_last_error()->message);
        assert_int_equal(rc, STH_INVALID_STATE);
    } else if (current) {
        recording_launch(p->g.recorded, p->w.device, p->stream);
        assert_ok(sthi_graph_replay_end(p->w.runtime, p->stream));
        assert_ok(p->w.device->ops->stream_synchronize(p->w.device->self, p->stream));
        check(&p->w, &p->g);
    }
    if (rc != STH_OK || !current) play_capture(p);
}

static void play(player *p) {
    switch (roll(p, 10)) {
    case 0: case 1: case 2: play_replay(p); break;
    case 3: case 4: {
        sth_status rc = world_step(&p->w, p->order, p->count, COMPUTE_NS);
        if (rc != STH_OK && !(p->holds && (rc == STH_BUDGET_TOO_SMALL || rc == STH_INVALID_STATE)))
            fail_msg("a step: %s", sth_last_error()->message);
        if (rc != STH_OK && p->w.runtime->step.open) assert_ok(sthi_step_end(p->w.runtime));
        break;
    }
    case 5: {
        uint32_t unit = roll(p, UNITS);
        if (p->holds && p->held.unit == unit) break;
        world_fill(&p->w, unit, ++p->version);
        assert_ok(sthi_unit_mark_written(p->w.runtime, unit));
        break;
    }
    case 6: {
        sth_status rc = sthi_runtime_set_budget(p->w.runtime, p->least + roll(p, 200000));
        if (rc != STH_OK && rc != STH_BUDGET_TOO_SMALL) fail_msg("a budget: %s", sth_last_error()->message);
        break;
    }
    case 7:
        if (p->holds) sthi_lease_release(p->w.runtime, &p->held), p->holds = false;
        else play_hold(p);
        break;
    case 8: {
        sthi_lock(&p->w.runtime->lock);
        (void)sthi_give_way(p->w.runtime, 1 + roll(p, 300000));
        sthi_unlock(&p->w.runtime->lock);
        break;
    }
    default: play_capture(p);
    }
    sound(&p->w);
}

static void play_world(uint64_t seed) {
    player p = {.seed = seed};
    for (uint32_t i = 0; i < UNITS; i++) {
        p.bytes[i] = 1000 + roll(&p, 60000);
        p.least += (p.bytes[i] + 511) / 512 * 512 / 2;
    }
    p.count = 2 + roll(&p, LONGEST - 2);
    for (uint32_t i = 0; i < p.count; i++) p.order[i] = roll(&p, UNITS);
    world_spec spec = world_default(UNITS, p.bytes, p.least + 70000 + roll(&p, 150000));
    if (roll(&p, 3) == 0) spec.packed = roll(&p, 2) ? STH_TRANSFER_INT8 : STH_TRANSFER_LOSSLESS;
    if (spec.packed) spec.budget += 100000;
    spec.writable = roll(&p, 3) == 0;
    spec.read_only = !spec.writable || roll(&p, 2);
    open_world(&p.w, &spec);
    p.stream = new_stream(&p.w);
    for (int i = 0; i < 3; i++) assert_ok(world_step(&p.w, p.order, p.count, COMPUTE_NS));
    for (int i = 0; i < 60; i++) play(&p);
    if (p.holds) sthi_lease_release(p.w.runtime, &p.held);
    p.holds = false;
    for (int i = 0; i < 3; i++) assert_ok(world_step(&p.w, p.order, p.count, COMPUTE_NS));
    sound(&p.w);
    if (p.captured) recording_free(p.g.recorded);
    p.w.device->ops->stream_destroy(p.w.device->self, p.stream);
    world_close(&p.w);
}

static void test_random_worlds(void **state) {
    (void)state;
    const char *one = getenv("STH_WORLD_SEED");
    uint64_t begin = one ? strtoull(one, NULL, 10) : 0, worlds = few_under_tsan(8, UNDER_ASAN ? 20 : 75);
    uint64_t end = one ? begin + 1 : cases_to_try((unsigned)worlds);
    for (uint64_t seed = begin; seed < end; seed++) {
        print_message("seed %llu\r", (unsigned long long)seed);
        play_world(seed);
    }
}

/* The largest two come and go, and so on demand; a plan wants room for one beside the other. */
static void test_a_model_that_no_plan_fits_is_told_of_its_budget(void **state) {
    (void)state;
    static const uint32_t odd[2][UNITS - 1] = {{0, 1, 2, 3, 4, 5, 7}, {0, 1, 3, 4, 5, 6, 7}};
    world w;
    world_spec spec = world_default(UNITS, EIGHT, 90000);
    spec.read_only = true;
    open_world(&w, &spec);
    sth_runtime *rt = w.runtime;
    assert_status(sthi_graph_prepare(rt), STH_INVALID_STATE);
    assert_non_null(strstr(sth_last_error()->message, "run it a few times"));
    steps(&w, FORWARD, UNITS, 2);
    for (int i = 0; i < 4; i++) steps(&w, odd[i % 2], UNITS - 1, 1);
    for (int i = 0; i < 2; i++) {
        assert_status(sthi_graph_prepare(rt), STH_BUDGET_TOO_SMALL);
        assert_non_null(strstr(sth_last_error()->message, "raise the budget"));
        steps(&w, odd[0], UNITS - 1, 1);
    }
    assert_ok(sthi_runtime_set_budget(rt, 200000));
    steps(&w, odd[0], UNITS - 1, 4);
    assert_ok(sthi_graph_prepare(rt));
    sth_graph_info info;
    (void)sthi_graph_settle(rt, &info);
    steps(&w, odd[0], UNITS - 1, 2);
    world_close(&w);
}

static void test_what_cannot_be_captured_says_why(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(UNITS, EIGHT, 150000);
    assert_ok(world_open(&w, &spec)); /* the simulated device itself */
    assert_status(sthi_graph_prepare(w.runtime), STH_UNSUPPORTED);
    assert_non_null(strstr(sth_last_error()->message, "has no graphs"));
    world_close(&w);
    spec = world_default(UNITS, EIGHT, 200000);
    spec.policy = STH_POLICY_STATIC;
    open_world(&w, &spec);
    steps(&w, FORWARD, UNITS, 2);
    assert_status(sthi_graph_prepare(w.runtime), STH_UNSUPPORTED);
    world_close(&w);
    spec = world_default(UNITS, EIGHT, 200000);
    spec.pin_limit = 4096;
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = 800000;
    sim.virtual_time = true;
    sim.pin_limit_bytes = 4096;
    assert_ok(recorder_open(&sim, &spec.device));
    assert_ok(world_open(&w, &spec));
    sthi_device_release(spec.device);
    assert_status(sthi_graph_prepare(w.runtime), STH_INVALID_STATE); /* no step yet */
    steps(&w, FORWARD, UNITS, 2);
    assert_status(sthi_graph_prepare(w.runtime), STH_UNSUPPORTED);
    assert_non_null(strstr(sth_last_error()->message, "pass through slabs"));
    steps(&w, FORWARD, UNITS, 1);
    world_close(&w);
}

static void test_other_calls_keep_out_of_a_capture(void **state) {
    (void)state;
    world w;
    sth_graph_info info;
    bool flag;
    open_setting(&w, &SETTINGS[0], 150000);
    assert_ok(sthi_graph_prepare(w.runtime));
    assert_status(sthi_step_begin(w.runtime), STH_INVALID_STATE);
    assert_status(sthi_step_end(w.runtime), STH_INVALID_STATE);
    assert_status(sthi_step_pause(w.runtime), STH_INVALID_STATE);
    assert_status(sthi_runtime_synchronize(w.runtime), STH_INVALID_STATE);
    assert_status(sthi_runtime_set_budget(w.runtime, 200000), STH_INVALID_STATE);
    assert_status(sthi_graph_prepare(w.runtime), STH_INVALID_STATE);
    assert_status(sthi_graph_replay_begin(w.runtime, 1, 0, &flag), STH_INVALID_STATE);
    assert_status(sthi_graph_settle(w.runtime, &info), STH_INVALID_STATE); /* and it is over */
    assert_status(sthi_graph_fork(w.runtime, 0), STH_INVALID_STATE);
    assert_status(sthi_graph_replay_end(w.runtime, 0), STH_INVALID_STATE);
    steps(&w, FORWARD, UNITS, 2);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_replay_reads_what_the_step_reads),
        cmocka_unit_test(test_replays_and_steps_take_turns),
        cmocka_unit_test(test_a_replay_reads_what_was_written_before_it),
        cmocka_unit_test(test_units_that_stay_packed),
        cmocka_unit_test(test_what_is_written_behind_a_replay_is_not_in_it),
        cmocka_unit_test(test_what_is_written_behind_a_replay_that_streams_is_not_in_it),
        cmocka_unit_test(test_a_graph_is_stale_when_its_places_have_gone),
        cmocka_unit_test(test_a_graph_is_stale_when_an_image_has_moved),
        cmocka_unit_test(test_a_place_that_is_held_is_not_overwritten),
        cmocka_unit_test(test_a_capture_that_leaves_the_order_is_refused),
        cmocka_unit_test(test_a_place_that_a_capture_leaves_leased_is_loaded_again),
        cmocka_unit_test(test_what_a_capture_holds_teaches_the_plan_nothing),
        cmocka_unit_test(test_under_a_conductor_a_graph_copies_by_itself),
        cmocka_unit_test(test_a_call_that_fails_inside_a_capture),
        cmocka_unit_test(test_random_worlds),
        cmocka_unit_test(test_a_model_that_no_plan_fits_is_told_of_its_budget),
        cmocka_unit_test(test_what_cannot_be_captured_says_why),
        cmocka_unit_test(test_other_calls_keep_out_of_a_capture),
    };
    return cmocka_run_group_tests_name("stream/graph", tests, NULL, NULL);
}
