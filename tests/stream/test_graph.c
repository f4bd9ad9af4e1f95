/* Steps inside graphs, on a device that records: what a replay's kernels read, whatever came between replays. */
#include <string.h>

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
        sim.copy_latency_ns = 500;
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

static void close_world(world *w, graph *g, sth_stream stream) {
    if (g->recorded) recording_free(g->recorded);
    w->device->ops->stream_destroy(w->device->self, stream);
    world_close(w);
}

typedef struct setting {
    const uint32_t *order;
    uint32_t count;
    sth_transfer packed;
    bool writable;
} setting;

static const setting SETTINGS[] = {
    {FORWARD, UNITS, 0, false},
    {SAWTOOTH, LONGEST, 0, false},
    {FORWARD, UNITS, 0, true},
    {FORWARD, UNITS, STH_TRANSFER_INT8, false},
    {SAWTOOTH, LONGEST, STH_TRANSFER_INT4, true},
};

static void open_setting(world *w, world_spec *spec, const setting *s, uint64_t budget) {
    *spec = world_default(UNITS, EIGHT, budget);
    spec->packed = s->packed;
    spec->writable = s->writable;
    spec->read_only = !s->writable;
    open_world(w, spec);
    steps(w, s->order, s->count, 4);
}

static void test_a_replay_reads_what_the_step_reads(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof SETTINGS / sizeof *SETTINGS; k++)
        for (uint64_t budget = 130000; budget <= 360000; budget += 23000) {
            const setting *s = &SETTINGS[k];
            world w;
            world_spec spec;
            graph g;
            open_setting(&w, &spec, s, budget);
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
        world_spec spec;
        graph g;
        sth_runtime_stats first, before, after;
        open_setting(&w, &spec, s, 200000);
        sthi_runtime_stats(w.runtime, &first);
        sth_stream stream = new_stream(&w);
        assert_ok(capture(&w, &g, s->order, s->count, stream));
        for (int i = 0; i < 6; i++) {
            if (!replay(&w, &g, stream)) { /* better times have made another plan */
                recording_free(g.recorded);
                assert_ok(capture(&w, &g, s->order, s->count, stream));
                assert_true(replay(&w, &g, stream));
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
        world_spec spec;
        graph g;
        open_setting(&w, &spec, s, 250000); /* some stay, some stream */
        sth_stream stream = new_stream(&w);
        assert_ok(capture(&w, &g, s->order, s->count, stream));
        for (uint8_t version = 1; version < 4; version++) {
            for (uint32_t i = 0; i < UNITS; i++) {
                world_fill(&w, i, version);
                if (!s->writable || version % 2) assert_ok(sthi_unit_mark_written(w.runtime, i)); /* else it is noticed */
            }
            assert_true(replay(&w, &g, stream));
        }
        close_world(&w, &g, stream);
    }
}

static void test_a_graph_is_stale_when_its_places_have_gone(void **state) {
    (void)state;
    world w;
    world_spec spec;
    graph g;
    open_setting(&w, &spec, &SETTINGS[0], 250000);
    sth_stream stream = new_stream(&w);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_true(replay(&w, &g, stream));
    assert_ok(sthi_runtime_set_budget(w.runtime, 150000));
    assert_false(replay(&w, &g, stream));
    steps(&w, FORWARD, UNITS, 2);
    recording_free(g.recorded);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_true(replay(&w, &g, stream));
    sthi_lock(&w.runtime->lock);
    assert_true(sthi_give_way(w.runtime, 1 << 20)); /* another runtime has asked for all of it */
    sthi_unlock(&w.runtime->lock);
    assert_true(w.runtime->parked);
    assert_false(replay(&w, &g, stream));
    recording_free(g.recorded);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_true(replay(&w, &g, stream));
    close_world(&w, &g, stream);
}

static void test_a_graph_is_stale_when_an_image_has_moved(void **state) {
    (void)state;
    world w;
    world_spec spec;
    graph g;
    open_setting(&w, &spec, &SETTINGS[0], 250000);
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
    world_spec spec;
    graph g;
    open_setting(&w, &spec, &SETTINGS[0], 150000);
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
    world_spec spec;
    graph g;
    open_setting(&w, &spec, &SETTINGS[0], 150000);
    sth_stream stream = new_stream(&w);
    assert_status(capture(&w, &g, other, UNITS, stream), STH_INVALID_STATE);
    recording_free(g.recorded);
    assert_status(capture(&w, &g, FORWARD, UNITS - 2, stream), STH_INVALID_STATE);
    recording_free(g.recorded);
    steps(&w, FORWARD, UNITS, 2);
    assert_ok(capture(&w, &g, FORWARD, UNITS, stream));
    assert_true(replay(&w, &g, stream));
    close_world(&w, &g, stream);
}

/* What a capture has loaded is not there: nothing was copied. */
static void test_a_place_that_a_capture_leaves_leased_is_loaded_again(void **state) {
    (void)state;
    world w;
    world_spec spec;
    sth_graph_info info;
    open_setting(&w, &spec, &SETTINGS[0], 150000);
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
    world_spec spec;
    sth_graph_info info;
    bool flag;
    open_setting(&w, &spec, &SETTINGS[0], 150000);
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
        cmocka_unit_test(test_a_graph_is_stale_when_its_places_have_gone),
        cmocka_unit_test(test_a_graph_is_stale_when_an_image_has_moved),
        cmocka_unit_test(test_a_place_that_is_held_is_not_overwritten),
        cmocka_unit_test(test_a_capture_that_leaves_the_order_is_refused),
        cmocka_unit_test(test_a_place_that_a_capture_leaves_leased_is_loaded_again),
        cmocka_unit_test(test_what_cannot_be_captured_says_why),
        cmocka_unit_test(test_other_calls_keep_out_of_a_capture),
    };
    return cmocka_run_group_tests_name("stream/graph", tests, NULL, NULL);
}
