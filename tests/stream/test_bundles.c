/* Neighbouring small units: loaded by one copy, and all that holds for a unit by itself holds for each of them.
 *
 * The link is scaled so that what an H200 sees with units of half a megabyte, 55 GB/s and 3 us for each copy, is seen
 * with 4 KiB: one copy for each unit takes 1.32 times the bound. */
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "load/lanes.h"
#include "load/together.h"
#include "runtime/check.h"
#include "runtime/graph.h"
#include "runtime/image.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/step_calls.h"
#include "runtime/timing.h"
#include "stagehand/conductor.h"
#include "stream/recorder.h"
#include "stream/world.h"
#include "support/check.h"

enum { MANY = 2000, UNIT = 4096, COPY_NS = 3000, COMPUTE_NS = 4000, HOST_NS = 45000 };
static const uint64_t LINK = 431000000;
/* And a few tiny ones behind a fast link, that go seven at a time. */
enum { SOME = 192, TINY = 1024, SOME_BUDGET = 120000 };
static const uint64_t FAST_LINK = 4000000000;

static uint64_t bytes_of[MANY];
static uint32_t forward[MANY], sawtooth[2 * MANY], mixed[2 * MANY];

static void fill_orders(uint32_t units, uint64_t bytes) {
    for (uint32_t i = 0; i < units; i++) {
        bytes_of[i] = bytes;
        forward[i] = sawtooth[i] = sawtooth[2 * units - 1 - i] = i;
        /* In half of the order two units take turns: they go together nowhere. */
        mixed[i] = i;
        mixed[units + i] = i < units / 2 ? i : i ^ 1;
    }
}

static void open_recorder(world *w, world_spec *spec) {
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = 4 * spec->budget;
    sim.link_bytes_per_s = spec->link;
    sim.virtual_time = true;
    sim.copy_latency_ns = spec->latency_ns;
    assert_ok(recorder_open(&sim, &spec->device));
    assert_ok(world_open(w, spec));
    sthi_device_release(spec->device); /* the world's now */
}

static world_spec many_units(uint64_t budget) {
    fill_orders(MANY, UNIT);
    world_spec spec = world_default(MANY, bytes_of, budget);
    spec.link = LINK;
    spec.latency_ns = COPY_NS;
    spec.chunk = 0;
    return spec;
}

static world_spec tiny_units(uint32_t units, uint64_t budget) {
    fill_orders(units, TINY);
    world_spec spec = world_default(units, bytes_of, budget);
    spec.link = FAST_LINK;
    spec.latency_ns = COPY_NS;
    return spec;
}

static void sound(world *w) {
    const char *why;
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
    if (recorder_refusals(&why)) fail_msg("a driver would have refused: %s", why);
}

static void steps(world *w, const uint32_t *order, uint32_t count, int64_t compute_ns, int n) {
    for (int i = 0; i < n; i++) {
        assert_ok(world_step(w, order, count, compute_ns));
        sound(w);
    }
}

static sth_runtime_stats stats_of(world *w) {
    sth_runtime_stats s;
    sthi_runtime_stats(w->runtime, &s);
    return s;
}

static int64_t now(const world *w) { return w->device->ops->now_ns(w->device->self); }

/* max(C, (B - V + u) / W) */
static double bound_ns(uint32_t units, uint64_t budget, double compute_ns) {
    double copies = (double)((uint64_t)units * UNIT - budget + UNIT) * 1e9 / (double)LINK;
    return copies > compute_ns ? copies : compute_ns;
}

static void test_steps_come_near_their_bound(void **state) {
    (void)state;
    enum { BUDGET = 2400000, STEPS = 4 };
    static const int64_t compute[] = {COMPUTE_NS, HOST_NS}; /* as in a graph, and as calls from the host come */
    for (size_t i = 0; i < sizeof compute / sizeof *compute; i++) {
        world w;
        world_spec spec = many_units(BUDGET);
        open_recorder(&w, &spec);
        steps(&w, forward, MANY, compute[i], 5);
        sth_runtime_stats before = stats_of(&w);
        uint64_t calls = recorder_copies();
        int64_t begin = now(&w);
        steps(&w, forward, MANY, compute[i], STEPS);
        double step_ns = (double)(now(&w) - begin) / STEPS, bound = bound_ns(MANY, BUDGET, (double)compute[i] * MANY);
        sth_runtime_stats after = stats_of(&w);
        sth_prediction p;
        assert_ok(sthi_runtime_prediction(w.runtime, &p));
        if (step_ns > 1.05 * bound) fail_msg("%.3f ms, %.3f times the bound", step_ns / 1e6, step_ns / bound);
        assert_true((double)p.step_ns > 0.97 * step_ns && (double)p.step_ns < 1.03 * step_ns);
        assert_int_equal(after.demand_loads, before.demand_loads);
        assert_int_equal(after.host_waits, before.host_waits);
        assert_true(after.device_peak <= BUDGET);
        uint64_t loads = after.copies - before.copies, joined = after.joined_copies - before.joined_copies;
        assert_int_equal(after.h2d_bytes - before.h2d_bytes, loads * UNIT);
        assert_int_equal(recorder_copies() - calls, loads - joined);
        assert_true(10 * (recorder_copies() - calls) < loads);
        world_close(&w);
    }
}

/* The uses read `bytes` of each place. */
static recording *capture(world *w, const uint32_t *order, uint32_t count, uint64_t bytes, sth_stream stream,
                          sth_graph_info *out) {
    assert_ok(sthi_graph_prepare(w->runtime));
    recorder_begin(stream);
    assert_ok(sthi_graph_fork(w->runtime, stream));
    for (uint32_t i = 0; i < count; i++) {
        sth_lease lease;
        assert_ok(sthi_unit_acquire(w->runtime, order[i], stream, &lease));
        recorder_use(lease.address, bytes, COMPUTE_NS);
        sthi_lease_release(w->runtime, &lease);
    }
    assert_ok(sthi_graph_join(w->runtime, stream));
    recording *g = recorder_end();
    assert_ok(sthi_graph_settle(w->runtime, out));
    sound(w);
    return g;
}

static void replay(world *w, recording *g, const sth_graph_info *info, sth_stream stream) {
    bool current = false;
    assert_ok(sthi_graph_replay_begin(w->runtime, info->edition, stream, &current));
    assert_true(current);
    recording_launch(g, w->device, stream);
    assert_ok(sthi_graph_replay_end(w->runtime, stream));
    assert_ok(w->device->ops->stream_synchronize(w->device->self, stream));
    sound(w);
}

static void test_a_graph_comes_near_its_bound(void **state) {
    (void)state;
    enum { BUDGET = 2400000 };
    world w;
    world_spec spec = many_units(BUDGET);
    sth_graph_info info;
    sth_stream stream;
    open_recorder(&w, &spec);
    steps(&w, forward, MANY, HOST_NS, 5); /* the plan is that of calls which wait for the host */
    assert_ok(w.device->ops->stream_create(w.device->self, 0, &stream));
    uint64_t calls = recorder_copies();
    recording *g = capture(&w, forward, MANY, 0, stream, &info);
    uint64_t copies = recorder_copies() - calls;
    assert_true(10 * copies < MANY);
    assert_true(recording_waits(g) < 2 * copies + 10); /* each copy for uses, a use of each copy */
    int64_t begin = now(&w);
    replay(&w, g, &info, stream);
    double ns = (double)(now(&w) - begin), bound = bound_ns(MANY, BUDGET, (double)COMPUTE_NS * MANY);
    if (ns > 1.06 * bound) fail_msg("%.3f ms, %.3f times the bound", ns / 1e6, ns / bound);
    recording_free(g);
    w.device->ops->stream_destroy(w.device->self, stream);
    world_close(&w);
}

typedef struct setting {
    const uint32_t *order;
    uint32_t count;
    bool writable;
} setting;

static const setting SETTINGS[] = {
    {forward, SOME, false},
    {sawtooth, 2 * SOME, false},
    {forward, SOME, true},
    {sawtooth, 2 * SOME, true},
    {mixed, 2 * SOME, false},
};

static void test_every_use_sees_its_bytes(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof SETTINGS / sizeof *SETTINGS; k++) {
        uint64_t joined = 0;
        for (uint64_t budget = 20000; budget <= 200000; budget += few_under_tsan(60000, 12000)) {
            const setting *s = &SETTINGS[k];
            world w;
            world_spec spec = tiny_units(SOME, budget);
            spec.writable = s->writable;
            spec.read_only = !s->writable;
            open_recorder(&w, &spec);
            steps(&w, s->order, s->count, 20000, 4);
            uint64_t on_demand = stats_of(&w).demand_loads;
            for (uint8_t version = 1; version < 4; version++) {
                for (uint32_t i = version; s->writable && i < SOME; i += 5) {
                    world_fill(&w, i, version);
                    assert_ok(sthi_unit_mark_written(w.runtime, i));
                }
                steps(&w, s->order, s->count, 20000, 2);
            }
            sth_runtime_stats stats = stats_of(&w);
            assert_true(stats.device_peak <= budget);
            if (!s->writable) assert_int_equal(stats.demand_loads, on_demand);
            if (!s->writable) assert_int_equal(stats.deviations, s->order == forward ? 0 : 1);
            bool bundled = budget > 40000 && budget < SOME * TINY;
            if (bundled && s->order != mixed) assert_non_null(w.runtime->planned.bundles);
            if (w.runtime->planned.bundles) joined += stats.joined_copies;
            world_close(&w);
        }
        assert_true(joined > 100);
    }
}

/* What a graph's uses read, before and behind their work, and what was written in between. */
static void test_a_graph_reads_what_the_step_reads(void **state) {
    (void)state;
    for (size_t k = 0; k < 4; k++)
        for (uint64_t budget = 50000; budget <= 190000; budget += 35000) {
            const setting *s = &SETTINGS[k];
            world w;
            world_spec spec = tiny_units(SOME, budget);
            spec.writable = s->writable;
            spec.read_only = !s->writable;
            open_recorder(&w, &spec);
            steps(&w, s->order, s->count, 20000, 4);
            sth_stream stream;
            sth_graph_info info;
            assert_ok(w.device->ops->stream_create(w.device->self, 0, &stream));
            uint64_t calls = recorder_copies();
            recording *g = capture(&w, s->order, s->count, TINY, stream, &info);
            assert_true(recorder_copies() - calls < info.copies);
            for (uint8_t version = 1; version < 4; version++) {
                replay(&w, g, &info, stream);
                for (uint32_t t = 0; t < s->count; t++)
                    for (int when = 0; when < 2; when++)
                        if (!world_shows(&w, s->order[t], w.version[s->order[t]], recording_saw(g, t, when)))
                            fail_msg("use %u saw wrong bytes", t);
                for (uint32_t i = version; s->writable && i < SOME; i += 5) {
                    world_fill(&w, i, version);
                    assert_ok(sthi_unit_mark_written(w.runtime, i));
                }
            }
            recording_free(g);
            w.device->ops->stream_destroy(w.device->self, stream);
            world_close(&w);
        }
}

/* Each has its share of the time of the copy that brought it. */
/* Bundles were made before the first write; what a step takes is priced with the writes. */
static void test_written_units_are_priced_as_such(void **state) {
    (void)state;
    static const double shares[] = {0.3, 0.6, 1.2};
    for (int k = 0; k < 3; k++) {
        world w;
        world_spec spec = tiny_units(SOME, (uint64_t)(shares[k] * SOME * TINY));
        spec.writable = true;
        spec.read_only = false;
        open_recorder(&w, &spec);
        int64_t begin = 0;
        double link = 0;
        for (int i = 0; i < 40; i++) {
            if (i == 10) link = stats_of(&w).link_bytes_per_s;
            if (i == 32) begin = now(&w);
            steps(&w, forward, SOME, 300, 1);
            for (uint32_t u = 0; i >= 10 && u < SOME; u++) assert_ok(sthi_unit_mark_written(w.runtime, u));
        }
        double took = (double)(now(&w) - begin) / 8;
        sth_prediction p;
        assert_ok(sthi_runtime_prediction(w.runtime, &p));
        if (took > 1.05 * (double)p.step_ns || took < 0.95 * (double)p.step_ns)
            fail_msg("share %.1f: predicted %lld ns, measured %.0f", shares[k], (long long)p.step_ns, took);
        assert_true(p.bytes_per_step == SOME * TINY);
        double off = stats_of(&w).link_bytes_per_s / link; /* steps with a write are not taken for a slower link */
        if (off < 0.88 || off > 1.12) fail_msg("share %.1f: the link's rate is %.2f of what it was", shares[k], off);
        world_close(&w);
    }
}

static void test_units_share_the_time_of_their_copy(void **state) {
    (void)state;
    world w;
    world_spec spec = tiny_units(SOME, SOME_BUDGET);
    open_recorder(&w, &spec);
    steps(&w, forward, SOME, HOST_NS, 6);
    assert_ok(sthi_runtime_synchronize(w.runtime));
    sthi_runtime_settle_times(w.runtime);
    double alone_ms = (COPY_NS + TINY * 1e9 / (double)FAST_LINK) / 1e6;
    uint32_t shared = 0;
    for (uint32_t i = 0; i < SOME; i++) {
        sth_unit_stats u;
        sthi_unit_stats(w.runtime, i, &u);
        if (w.runtime->units[i].times.h2d_count == 0) continue;
        assert_true(u.h2d_ms > 0 && u.h2d_ms < 1.01 * alone_ms);
        shared += u.h2d_ms < 0.9 * alone_ms;
    }
    assert_true(shared > SOME / 3);
    world_close(&w);
}

/* A place that is held longer than planned parts a bundle, and nobody waits for it for ever. */
static void test_a_place_that_is_held_parts_a_bundle(void **state) {
    (void)state;
    for (uint32_t held = 0; held < SOME; held += few_under_tsan(31, 5)) {
        world w;
        world_spec spec = tiny_units(SOME, SOME_BUDGET);
        sth_lease lease;
        open_recorder(&w, &spec);
        steps(&w, forward, SOME, 20000, 3);
        assert_non_null(w.runtime->planned.bundles);
        assert_ok(sthi_step_begin(w.runtime));
        uint64_t before = stats_of(&w).demand_loads;
        for (uint32_t i = 0; i < SOME; i++) {
            if (i == held) assert_ok(sthi_unit_acquire(w.runtime, i, 0, &lease));
            else assert_ok(world_use(&w, i, 20000));
            sound(&w);
        }
        assert_true(world_right(&w, &lease));
        assert_true(stats_of(&w).demand_loads < before + 2 * 7); /* what has room goes by plan */
        sthi_lease_release(w.runtime, &lease);
        assert_ok(sthi_step_end(w.runtime));
        steps(&w, forward, SOME, 20000, 3);
        world_close(&w);
    }
}

/* An image that has moved is a neighbour of nobody. */
static void test_an_image_that_has_moved_parts_a_bundle(void **state) {
    (void)state;
    world w;
    world_spec spec = tiny_units(SOME, SOME_BUDGET);
    open_recorder(&w, &spec);
    steps(&w, forward, SOME, 20000, 3);
    sth_arena *arena;
    void *image;
    assert_ok(sthi_arena_create(w.device, 2 * UNIT, &arena));
    for (uint32_t unit = 3; unit < SOME; unit += SOME / 2) {
        assert_ok(sthi_arena_reserve(arena, UNIT, &image));
        memcpy(image, w.image[unit], UNIT);
        w.image[unit] = image;
    }
    assert_ok(sthi_arena_finish(arena));
    for (uint32_t unit = 3; unit < SOME; unit += SOME / 2) {
        assert_ok(sthi_unit_set_host(w.runtime, unit, w.image[unit], arena));
        world_fill(&w, unit, 7);
        assert_ok(sthi_unit_mark_written(w.runtime, unit));
    }
    steps(&w, forward, SOME, 20000, 4);
    assert_true(stats_of(&w).joined_copies > 0);
    world_close(&w);
    sthi_arena_release(arena);
}

/* What was registered apart is not copied at once: a driver takes a range of one registration. The first window ends
 * among the small units. */
static void images_of_two_windows(uint64_t small, uint64_t budget, bool stay) {
    enum { WINDOW = 256 << 20, TAIL = 16 };
    static uint64_t sizes[TAIL + 2];
    for (uint32_t i = 0; i < TAIL + 2; i++) sizes[i] = i < 2 ? WINDOW / 2 - 4 * small : small;
    world w;
    world_spec spec = tiny_units(TAIL + 2, budget + sizes[0]);
    spec.bytes = sizes;
    spec.link = UINT64_C(10000000000);
    open_recorder(&w, &spec);
    uint32_t apart = 0, staying = 0;
    for (uint32_t i = 2; i < TAIL + 2; i++) {
        const sthi_unit *a = &w.runtime->units[i], *b = a + 1;
        staying += a->resident;
        if (i + 1 == TAIL + 2 || sthi_one_window(w.runtime, a, a->host, a->bytes + b->bytes)) continue;
        apart++;
        assert_true(a->bundle == STH_NONE || a->bundle != b->bundle);
    }
    assert_int_equal(apart, 1);
    assert_true(stay ? staying > TAIL / 2 : !staying);
    steps(&w, forward, TAIL + 2, 20000, 2);
    assert_true(stats_of(&w).joined_copies > 0);
    world_close(&w);
}

static void test_images_of_two_windows_do_not_go_together(void **state) {
    (void)state;
    images_of_two_windows(16 << 10, 1 << 20, false);
    images_of_two_windows(768 << 10, 14 << 20, true);
}

static void test_under_a_conductor(void **state) {
    (void)state;
    world w;
    world_spec spec = tiny_units(SOME, SOME_BUDGET);
    sth_conductor_options o;
    sth_conductor *c;
    sth_conductor_options_init(&o);
    o.piece_bytes = 64 << 10;
    open_recorder(&w, &spec);
    assert_ok(sth_conductor_create(&o, &c));
    assert_ok(sthi_runtime_set_conductor(w.runtime, c));
    steps(&w, forward, SOME, 20000, 5);
    assert_true(stats_of(&w).joined_copies > 0);
    assert_ok(sthi_runtime_set_conductor(w.runtime, NULL));
    sth_conductor_destroy(c);
    world_close(&w);
}

/* The n-th call of the device fails, for each n: every unit of a run is there or is not, and the next step is right. */
static void test_any_call_may_fail(void **state) {
    (void)state;
    enum { FEW = 96 };
    uint32_t other[FEW];
    for (uint32_t i = 0; i < FEW; i++) other[i] = i ^ 1;
    uint64_t met_joined = 0;
    for (int forever = 0; forever < 2; forever++)
        for (int writable = 0; writable < 2; writable++) {
            bool met = true;
            for (uint64_t n = 1; met; n++) {
                world w;
                long live = sthi_alloc_live();
                world_spec spec = tiny_units(FEW, 64000);
                spec.writable = writable;
                spec.read_only = !writable;
                open_recorder(&w, &spec);
                steps(&w, forward, FEW, 20000, 2);
                assert_non_null(w.runtime->planned.bundles);
                sthi_fault_arm(STHI_FAULT_DEVICE_CALL, n, forever);
                for (int i = 0; i < 3; i++) {
                    sth_status rc = world_step(&w, i == 2 ? other : forward, FEW, 20000);
                    if (rc != STH_OK && w.runtime->step.open) (void)sthi_step_end(w.runtime);
                    sound(&w);
                }
                met = sthi_fault_seen(STHI_FAULT_DEVICE_CALL) >= n;
                sthi_fault_disarm_all();
                met_joined += stats_of(&w).joined_copies;
                if (n % 3) /* else it ends as it is */
                    steps(&w, forward, FEW, 20000, 3);
                world_close(&w);
                assert_int_equal(sthi_alloc_live(), live);
                if (n > 60) n += n / few_under_tsan(2, 12);
            }
        }
    assert_true(met_joined > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_come_near_their_bound),
        cmocka_unit_test(test_written_units_are_priced_as_such),
        cmocka_unit_test(test_a_graph_comes_near_its_bound),
        cmocka_unit_test(test_every_use_sees_its_bytes),
        cmocka_unit_test(test_a_graph_reads_what_the_step_reads),
        cmocka_unit_test(test_units_share_the_time_of_their_copy),
        cmocka_unit_test(test_a_place_that_is_held_parts_a_bundle),
        cmocka_unit_test(test_an_image_that_has_moved_parts_a_bundle),
        cmocka_unit_test(test_images_of_two_windows_do_not_go_together),
        cmocka_unit_test(test_under_a_conductor),
        cmocka_unit_test(test_any_call_may_fail),
    };
    return cmocka_run_group_tests_name("stream/bundles", tests, NULL, NULL);
}
