/* The runtime on the simulated device: what a user relies on, one case each. */
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "core/plan.h"
#include "device/sim/sim.h"
#include "runtime/budget.h"
#include "runtime/check.h"
#include "runtime/image.h"
#include "runtime/lease.h"
#include "runtime/plan_input.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/share/reserved.h"
#include "runtime/step_calls.h"
#include "runtime/timing.h"
#include "runtime/verify.h"
#include "stream/world.h"
#include "support/check.h"

static const uint64_t EIGHT[8] = {40000, 12288, 65536, 8192, 40000, 12288, 65536, 8192};
static const uint32_t FORWARD[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static const uint32_t SAWTOOTH[16] = {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0};

static void ok(sth_status rc) {
    if (rc != STH_OK) fail_msg("%s: %s", sth_status_name(rc), sth_last_error()->message);
}

static sth_runtime_stats stats_of(world *w) {
    sth_runtime_stats s;
    sthi_runtime_stats(w->runtime, &s);
    return s;
}

static void steps(world *w, const uint32_t *order, uint32_t count, int n) {
    for (int i = 0; i < n; i++) {
        ok(world_step(w, order, count, 20000));
        const char *why;
        if (!sthi_runtime_check(w->runtime, &why))
            fail_msg("after step %d, budget %llu: %s", i, (unsigned long long)w->runtime->options.budget,
                     why);
    }
}

static void test_every_use_sees_its_bytes(void **state) {
    (void)state;
    for (uint64_t budget = 70000; budget <= 300000; budget += 11000) {
        world w;
        world_spec spec = world_default(8, EIGHT, budget);
        ok(world_open(&w, &spec));
        steps(&w, FORWARD, 8, 6);
        sth_runtime_stats s = stats_of(&w);
        assert_true(s.device_peak <= budget);
        assert_int_equal(s.steps, 6);
        assert_int_equal(s.deviations, 0);
        world_close(&w);
    }
}

static void test_planned_steps_never_load_on_demand(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 160000);
    ok(world_open(&w, &spec));
    steps(&w, FORWARD, 8, 5);
    uint64_t before = stats_of(&w).demand_loads;
    steps(&w, FORWARD, 8, 5);
    sth_runtime_stats s = stats_of(&w);
    assert_int_equal(s.demand_loads, before);
    assert_true(s.h2d_bytes > 0);
    assert_int_equal(s.host_waits, 0);
    world_close(&w);
}

/* Records of a step's times begin small: a longer step is timed as a whole once it has come a few times. */
static void test_a_long_step_is_timed_to_its_end(void **state) {
    (void)state;
    enum { USES = UNDER_TSAN ? 1200 : 3000, COMPUTE_NS = 20000 };
    static uint32_t order[USES];
    for (uint32_t i = 0; i < USES; i++) order[i] = i % 8;
    world w;
    world_spec spec = world_default(8, EIGHT, 300000);
    ok(world_open(&w, &spec));
    steps(&w, order, USES, 2);
    ok(sthi_runtime_synchronize(w.runtime));
    steps(&w, order, USES, 1);
    sth_step_metrics m;
    ok(sthi_telemetry_get(w.runtime->telemetry.file, 0, &m));
    assert_int_equal((int)(m.prefetch_hits + m.prefetch_misses), USES);
    assert_true(m.compute_time_ms > 0.999 * USES * COMPUTE_NS / 1e6);
    world_close(&w);
}

/* How many uses of the newest timed step waited for their bytes, as the device was told. */
static uint32_t uses_that_wait(const world *w) {
    const sth_runtime *rt = w->runtime;
    const sthi_timed_step *t = &rt->timing.steps[(rt->timing.tail - 1) % STHI_TIMED_STEPS];
    uint32_t waited = 0;
    assert_int_equal(t->uses, 8);
    for (uint32_t i = 0; i < t->uses; i++) waited += t->use[i].waited;
    return waited;
}

/* What is there needs no second event, and has no stall; what is not has both. */
static void test_only_uses_that_wait_are_timed_for_it(void **state) {
    (void)state;
    for (int tight = 0; tight < 2; tight++) {
        world w;
        world_spec spec = world_default(8, EIGHT, tight ? 100000 : 1000000);
        ok(world_open(&w, &spec));
        for (int i = 0; i < 6; i++) ok(world_step(&w, FORWARD, 8, 1000));
        ok(sthi_runtime_synchronize(w.runtime));
        ok(world_step(&w, FORWARD, 8, 1000));
        uint32_t waited = uses_that_wait(&w);
        ok(sthi_runtime_synchronize(w.runtime));
        sthi_runtime_settle_times(w.runtime);
        sth_step_metrics m;
        ok(sthi_telemetry_get(w.runtime->telemetry.file, 0, &m));
        assert_int_equal((int)(m.prefetch_hits + m.prefetch_misses), 8);
        assert_true(tight ? waited > 3 && m.stall_time_ms > 0.01 : !waited && m.stall_time_ms == 0);
        assert_true(m.compute_time_ms > 0.99 * 8 * 1000 / 1e6);
        world_close(&w);
    }
}

/* Calls of the device in a first step that copies everything once. */
static uint64_t calls_with_chunk(uint64_t chunk) {
    world w;
    world_spec spec = world_default(8, EIGHT, 1000000);
    spec.chunk = chunk;
    ok(world_open(&w, &spec));
    sthi_fault_arm(STHI_FAULT_DEVICE_CALL, UINT64_MAX, false);
    steps(&w, FORWARD, 8, 1);
    uint64_t seen = sthi_fault_seen(STHI_FAULT_DEVICE_CALL);
    sthi_fault_disarm_all();
    world_close(&w);
    return seen;
}

/* Places are taken piece by piece, but what waits for nothing is one copy. */
static void test_pieces_that_wait_for_nothing_are_one_copy(void **state) {
    (void)state;
    assert_int_equal(calls_with_chunk(512), calls_with_chunk(1 << 20));
}

static void test_bytes_per_step_are_the_plans(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 160000);
    ok(world_open(&w, &spec));
    steps(&w, FORWARD, 8, 8);
    uint64_t before = stats_of(&w).h2d_bytes;
    steps(&w, FORWARD, 8, 10);
    sth_prediction p;
    ok(sthi_runtime_prediction(w.runtime, &p));
    assert_int_equal((stats_of(&w).h2d_bytes - before) / 10, p.bytes_per_step);
    world_close(&w);
}

static void test_prediction_matches_measurement(void **state) {
    (void)state;
    for (int64_t compute = 2000; compute <= 200000; compute *= 10) {
        world w;
        world_spec spec = world_default(8, EIGHT, 160000);
        ok(world_open(&w, &spec));
        for (int i = 0; i < 12; i++) ok(world_step(&w, FORWARD, 8, compute));
        int64_t begin = w.device->ops->now_ns(w.device->self);
        for (int i = 0; i < 10; i++) ok(world_step(&w, FORWARD, 8, compute));
        double step = (double)(w.device->ops->now_ns(w.device->self) - begin) / 10;
        sth_prediction p;
        ok(sthi_runtime_prediction(w.runtime, &p));
        if (step > 1.05 * (double)p.step_ns || step < 0.95 * (double)p.step_ns)
            fail_msg("compute %lld: predicted %lld ns, measured %.0f ns", (long long)compute,
                     (long long)p.step_ns, step);
        world_close(&w);
    }
}

/* Blocks as of a transformer, in training: forward, backward with twice the compute, then weights are written. */
enum { TRAINED = 24, TRAINED_USES = 2 * TRAINED, SQUARE = 8192, BLOCK_BYTES = 12 * SQUARE };
enum { NONE = 0, ALL = (1 << TRAINED) - 1, ONE_OF_FOUR = 0x222222 };

static uint64_t trained_bytes(uint32_t unit) {
    static const uint64_t squares[4] = {3, 1, 4, 4};
    return squares[unit % 4] * SQUARE;
}

static world training_world(uint64_t budget, bool writable) {
    uint64_t bytes[TRAINED];
    for (uint32_t u = 0; u < TRAINED; u++) bytes[u] = trained_bytes(u);
    world w;
    world_spec spec = world_default(TRAINED, bytes, budget);
    spec.writable = writable;
    spec.read_only = false;
    ok(world_open(&w, &spec));
    return w;
}

static void write_set(world *w, uint32_t set) {
    for (uint32_t u = 0; u < TRAINED; u++) {
        if (!(set >> u & 1)) continue;
        world_fill(w, u, (uint8_t)(w->version[u] + 1));
        ok(sthi_unit_mark_written(w->runtime, u));
    }
}

/* compute_ns: of a forward. uses: TRAINED_USES, or fewer: an evaluation. */
static void train(world *w, int64_t compute_ns, uint32_t uses, uint32_t set) {
    int64_t all = BLOCK_BYTES * (TRAINED / 4);
    ok(sthi_step_begin(w->runtime));
    for (uint32_t t = 0; t < uses; t++) {
        uint32_t unit = t < TRAINED ? t : TRAINED_USES - 1 - t;
        int64_t part = compute_ns * (int64_t)trained_bytes(unit) / all;
        ok(world_use(w, unit, t < TRAINED ? part : 2 * part));
    }
    ok(sthi_step_end(w->runtime));
    write_set(w, set);
}

static sth_prediction prediction_of(world *w) {
    sth_prediction p;
    ok(sthi_runtime_prediction(w->runtime, &p));
    return p;
}

static void check_training(uint64_t budget, int64_t compute_ns, bool writable, uint32_t set) {
    enum { MEASURED = 8 };
    world w = training_world(budget, writable);
    for (int i = 0; i < 10; i++) train(&w, compute_ns, TRAINED_USES, set);
    sth_runtime_stats before = stats_of(&w);
    int64_t begin = w.device->ops->now_ns(w.device->self);
    for (int i = 0; i < MEASURED; i++) train(&w, compute_ns, TRAINED_USES, set);
    double step = (double)(w.device->ops->now_ns(w.device->self) - begin) / MEASURED;
    double bytes = (double)(stats_of(&w).h2d_bytes - before.h2d_bytes) / MEASURED;
    uint64_t demanded = stats_of(&w).demand_loads - before.demand_loads;
    sth_prediction p = prediction_of(&w);
    sth_step_metrics m;
    sthi_runtime_settle_times(w.runtime);
    ok(sthi_telemetry_get(w.runtime->telemetry.file, 0, &m));
    double off = step / (double)p.step_ns, shown = m.predicted_ms * 1e6 / (double)p.step_ns;
    /* A load is not copied whose unit is still there, from the load before or as a resident of the plan before: fewer
     * bytes are no fault. */
    if (off > 1.05 || off < 0.95 || shown > 1.02 || shown < 0.98 || bytes > 1.02 * (double)p.bytes_per_step ||
        bytes < 0.75 * (double)p.bytes_per_step || demanded || (double)p.lower_bound_ns > 1.001 * step)
        fail_msg("budget %llu, compute %lld, written %x: predicted %lld ns (%.0f in the metrics, no less than %lld) "
                 "and %llu bytes, measured %.0f and %.0f, %llu loads on demand", (unsigned long long)budget,
                 (long long)compute_ns, set, (long long)p.step_ns, m.predicted_ms * 1e6, (long long)p.lower_bound_ns,
                 (unsigned long long)p.bytes_per_step, step, bytes, (unsigned long long)demanded);
    world_close(&w);
}

/* Shares of the bytes as the budget, compute of a forward for the time that all bytes take on the link. */
static void check_trainings(bool writable, uint32_t set) {
    static const double shares[] = {0.15, 0.3, 0.45, 0.62, 0.8, 1.1}, ratios[] = {0.1, 0.4, 1, 2.5};
    enum { SHARES = sizeof shares / sizeof *shares, RATIOS = sizeof ratios / sizeof *ratios };
    double all = BLOCK_BYTES * (TRAINED / 4);
    for (size_t i = 0; i < SHARES * RATIOS; i += few_under_sanitizers(7, 1))
        check_training((uint64_t)(shares[i % SHARES] * all), (int64_t)(ratios[i / SHARES] * all), writable, set);
}

/* Weights that an optimizer writes come again in each step, residents too, and not before it begins. */
static void test_prediction_of_training_matches_measurement(void **state) {
    (void)state;
    check_trainings(true, ALL);
    check_training(401080, 825753, true, ALL); /* the plan of before keeps loads over the step's end, and stays */
}

/* What is frozen goes on across steps; what is trained comes between it. */
static void test_prediction_of_partial_training_matches_measurement(void **state) {
    (void)state;
    check_trainings(false, ONE_OF_FOUR);
}

/* What a plan says, and how often there was a new one. */
typedef struct look {
    int64_t step_ns;
    uint64_t bytes, replans;
} look;

static look look_at(world *w) {
    sth_prediction p = prediction_of(w);
    return (look){p.step_ns, p.bytes_per_step, stats_of(w).replans};
}

static void assert_same_plan(look a, look b) {
    assert_int_equal(a.replans, b.replans);
    assert_int_equal(a.bytes, b.bytes);
    assert_in_range(b.step_ns, a.step_ns * 99 / 100, a.step_ns * 101 / 100);
}

enum { TRAINED_BUDGET = BLOCK_BYTES * (TRAINED / 4) / 2, TRAINED_NS = BLOCK_BYTES * (TRAINED / 4) / 3 };

/* Forwards alone, to look at a loss: of all steps, and many in a row. */
static void test_an_evaluation_amid_training_changes_no_plan(void **state) {
    (void)state;
    world w = training_world(TRAINED_BUDGET, true);
    for (int i = 0; i < 20; i++) train(&w, TRAINED_NS, TRAINED_USES, ALL);
    look before = look_at(&w);
    for (unsigned i = 0; i < few_under_tsan(10, 40); i++) {
        for (unsigned k = 0; k < (i % 8 ? i % 2 : 30); k++) train(&w, TRAINED_NS, TRAINED, NONE);
        train(&w, TRAINED_NS, TRAINED_USES, ALL);
        assert_same_plan(before, look_at(&w));
    }
    assert_true(before.bytes > (uint64_t)BLOCK_BYTES * (TRAINED / 4));
    world_close(&w);
}

/* A state that is loaded; two of them long after each other. */
static void test_a_single_write_changes_no_plan(void **state) {
    (void)state;
    world w = training_world(TRAINED_BUDGET, true);
    for (int i = 0; i < 20; i++) train(&w, TRAINED_NS, TRAINED_USES, NONE);
    look before = look_at(&w);
    for (int i = 0; i < 50; i++) {
        train(&w, TRAINED_NS, TRAINED_USES, i % 10 ? NONE : ALL);
        assert_same_plan(before, look_at(&w));
    }
    world_close(&w);
}

/* An optimizer that steps after every fourth backward trains all the same; one that has stopped does not. */
static void test_training_begins_and_ends(void **state) {
    (void)state;
    world w = training_world(TRAINED_BUDGET, true);
    for (int i = 0; i < 20; i++) train(&w, TRAINED_NS, TRAINED_USES, NONE);
    look frozen = look_at(&w);
    for (int i = 0; i < 20; i++) train(&w, TRAINED_NS, TRAINED_USES, i % 4 ? NONE : ALL);
    look trained = look_at(&w);
    assert_true(trained.bytes > frozen.bytes && trained.step_ns > frozen.step_ns * 11 / 10);
    assert_true(trained.replans <= frozen.replans + 1);
    double link = w.runtime->link.rate;
    for (int i = 0; i < 40; i++) {
        train(&w, TRAINED_NS, TRAINED_USES, i % 4 ? NONE : ALL);
        assert_same_plan(trained, look_at(&w));
    }
    assert_true(w.runtime->link.rate == link); /* steps without a write are not short because the link is faster */
    for (int i = 0; i < 20; i++) train(&w, TRAINED_NS, TRAINED_USES, NONE);
    look after = look_at(&w);
    assert_true(after.bytes <= frozen.bytes && after.step_ns <= frozen.step_ns * 101 / 100);
    assert_true(after.replans <= trained.replans + 1);
    world_close(&w);
}

/* Other units every few steps, as with experts: plans are not made anew each time. */
static void test_writes_that_wander_make_few_plans(void **state) {
    (void)state;
    world w = training_world(TRAINED_BUDGET, true);
    uint32_t changes = 0, count = few_under_tsan(60, 200);
    for (uint32_t i = 0; i < count; i++) {
        train(&w, TRAINED_NS, TRAINED_USES, 0x7u << i / 2 % (TRAINED - 2));
        changes += w.runtime->writes.fresh;
    }
    assert_true(changes > count / 2);
    assert_true(stats_of(&w).replans < 16);
    world_close(&w);
}

static void test_plan_follows_a_change_of_compute(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 160000);
    ok(world_open(&w, &spec));
    for (int i = 0; i < 20; i++) ok(world_step(&w, FORWARD, 8, 2000));
    for (int i = 0; i < 8; i++) ok(world_step(&w, FORWARD, 8, 40000)); /* longer inputs from here on */
    sth_prediction p;
    ok(sthi_runtime_prediction(w.runtime, &p));
    int64_t begin = w.device->ops->now_ns(w.device->self);
    for (int i = 0; i < 10; i++) ok(world_step(&w, FORWARD, 8, 40000));
    double step = (double)(w.device->ops->now_ns(w.device->self) - begin) / 10;
    assert_true(step < 1.02 * 8 * 40000); /* compute alone: what was planned for short inputs would stall */
    assert_true(step > 0.95 * (double)p.step_ns && step < 1.05 * (double)p.step_ns);
    world_close(&w);
}

static double step_ns(world *w, int64_t compute) {
    int64_t begin = w->device->ops->now_ns(w->device->self);
    for (int i = 0; i < 10; i++) ok(world_step(w, SAWTOOTH, 16, compute));
    return (double)(w->device->ops->now_ns(w->device->self) - begin) / 10;
}

/* As another process that copies would make it; the runtime is told nothing. */
static void test_plan_follows_the_link(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 160000);
    ok(world_open(&w, &spec));
    sth_sim_options *sim = &((sim_device *)w.device->self)->options;
    double first = stats_of(&w).link_bytes_per_s;
    uint64_t rates[] = {sim->link_bytes_per_s, sim->link_bytes_per_s / 4, sim->link_bytes_per_s};
    double took[3];
    for (int i = 0; i < 3; i++) {
        sim->link_bytes_per_s = rates[i];
        steps(&w, SAWTOOTH, 16, 12);
        took[i] = step_ns(&w, 20000);
        sth_prediction p;
        ok(sthi_runtime_prediction(w.runtime, &p));
        double link = stats_of(&w).link_bytes_per_s * (double)rates[0] / (double)rates[i];
        if (link < 0.85 * first || link > 1.1 * first) fail_msg("%d: %.0f of %.0f bytes/s", i, link, first);
        if (took[i] > 1.05 * (double)p.step_ns || took[i] < 0.95 * (double)p.step_ns)
            fail_msg("%d: predicted %lld ns, measured %.0f ns", i, (long long)p.step_ns, took[i]);
    }
    assert_true(took[1] > 1.5 * took[0] && took[2] < 1.02 * took[0]);
    world_close(&w);
}

/* A caller that holds nothing beside its largest unit asks for no more than that: it may as well stay. */
static void test_a_large_unit_asks_for_no_ring(void **state) {
    (void)state;
    enum { LAYERS = 24, LAYER = 16384, HEAD = 12 * LAYER };
    uint64_t bytes[LAYERS + 1];
    uint32_t order[LAYERS + 1];
    int64_t step_ns[2];
    for (uint32_t i = 0; i <= LAYERS; i++) bytes[i] = i < LAYERS ? LAYER : HEAD, order[i] = i;
    for (int i = 0; i < 2; i++) {
        world w;
        world_spec spec = world_default(LAYERS + 1, bytes, (LAYERS * LAYER + HEAD) / 2);
        spec.least_room = i ? HEAD : 0;
        ok(world_open(&w, &spec));
        for (int k = 0; k < 12; k++) ok(world_step(&w, order, LAYERS + 1, 8000));
        sth_prediction p;
        ok(sthi_runtime_prediction(w.runtime, &p));
        step_ns[i] = p.step_ns;
        assert_true(p.ring_bytes < HEAD);
        world_close(&w);
    }
    assert_int_equal(step_ns[0], step_ns[1]);
}

/* Experts that some steps use and others do not are in no plan: what they take says nothing about the link. */
static void test_loads_on_demand_are_no_slower_link(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 160000);
    ok(world_open(&w, &spec));
    double link = stats_of(&w).link_bytes_per_s;
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t order[] = {0, 1, 2, 3, 4 + i * 7 % 4, 0, 1, 2, 3};
        ok(world_step(&w, order, 9, 6000));
    }
    assert_true(stats_of(&w).demand_loads > 20);
    assert_true(stats_of(&w).link_bytes_per_s == link);
    world_close(&w);
}

/* Nobody knows the rate of a link that hides behind compute, and no plan needs it. */
static void test_a_slower_link_behind_compute_changes_nothing(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 160000);
    ok(world_open(&w, &spec));
    sth_sim_options *sim = &((sim_device *)w.device->self)->options;
    for (int i = 0; i < 12; i++) ok(world_step(&w, SAWTOOTH, 16, 200000));
    double link = stats_of(&w).link_bytes_per_s, took = step_ns(&w, 200000);
    uint64_t plans = stats_of(&w).replans, moved = stats_of(&w).h2d_bytes;
    step_ns(&w, 200000);
    uint64_t each = stats_of(&w).h2d_bytes - moved;
    sim->link_bytes_per_s /= 2;
    moved = stats_of(&w).h2d_bytes;
    assert_true(step_ns(&w, 200000) < 1.02 * took);
    assert_true(stats_of(&w).h2d_bytes - moved == each && stats_of(&w).replans == plans);
    assert_true(stats_of(&w).link_bytes_per_s == link);
    world_close(&w);
}

/* A link that turns out slower than measured costs about what the best plan for it would take. */
static void test_plans_leave_a_margin(void **state) {
    (void)state;
    for (uint64_t budget = 100000; budget < 260000; budget += few_under_tsan(90000, 30000)) {
        world w;
        world_spec spec = world_default(8, EIGHT, budget);
        ok(world_open(&w, &spec));
        for (int i = 0; i < 6; i++) ok(world_step(&w, SAWTOOTH, 16, 9000));
        sth_plan_input in;
        sth_prediction slower;
        sthi_plan_input(w.runtime, &in);
        in.link_bytes_per_s *= 0.93;
        ok(sthi_plan_predict(&in, w.runtime->planned.plan, &slower));
        sth_plan *best;
        ok(sthi_plan_create(&in, &best));
        assert_true(slower.step_ns <= best->prediction.step_ns + best->prediction.step_ns / 50);
        sthi_plan_destroy(best);
        world_close(&w);
    }
}

static void test_forward_then_backward(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    ok(world_open(&w, &spec));
    steps(&w, SAWTOOTH, 16, 8);
    uint64_t before = stats_of(&w).h2d_bytes;
    steps(&w, SAWTOOTH, 16, 10);
    /* Less than loading everything that does not fit twice: the turn is kept. */
    uint64_t moved = (stats_of(&w).h2d_bytes - before) / 10, all = 0;
    for (int i = 0; i < 8; i++) all += EIGHT[i];
    assert_true(moved > 0 && moved < 2 * all - 140000);
    world_close(&w);
}

static void test_other_order_is_learnt(void **state) {
    (void)state;
    static const uint32_t backwards[8] = {7, 6, 5, 4, 3, 2, 1, 0};
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    ok(world_open(&w, &spec));
    steps(&w, backwards, 8, 4);
    uint64_t before = stats_of(&w).demand_loads;
    steps(&w, backwards, 8, 4);
    sth_runtime_stats s = stats_of(&w);
    assert_int_equal(s.demand_loads, before);
    assert_int_equal(s.deviations, 1);
    world_close(&w);
}

static void test_orders_longer_than_expected_are_learnt(void **state) {
    (void)state;
    enum { LONG = 1200 }; /* more than is expected of 8 units */
    static uint32_t order[LONG];
    for (uint32_t t = 0; t < LONG; t++) order[t] = t / 100 % 8;
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    ok(world_open(&w, &spec));
    steps(&w, order, LONG, 3);
    uint64_t before = stats_of(&w).demand_loads;
    steps(&w, order, LONG, 2);
    assert_int_equal(stats_of(&w).demand_loads, before);
    world_close(&w);
}

static void test_units_that_come_and_go(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 200000);
    ok(world_open(&w, &spec));
    for (int i = 0; i < 12; i++) {
        uint32_t order[8], n = 0;
        for (uint32_t u = 0; u < 8; u++)
            if (u < 4 || (u + (uint32_t)i) % 3) order[n++] = u;
        steps(&w, order, n, 1);
    }
    uint64_t deviations = stats_of(&w).deviations;
    assert_true(deviations <= 6); /* they become known as irregular and no longer upset the plan */
    world_close(&w);
}

static void test_early_exit_keeps_the_plan(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    ok(world_open(&w, &spec));
    steps(&w, FORWARD, 8, 4);
    for (uint32_t n = 0; n < 8; n++) {
        steps(&w, FORWARD, n, 1);
        steps(&w, FORWARD, 8, 2);
    }
    assert_int_equal(stats_of(&w).deviations, 0);
    world_close(&w);
}

static void test_lease_outlives_steps_and_runtime(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 200000);
    spec.capacity = 260000;
    ok(world_open(&w, &spec));
    steps(&w, FORWARD, 8, 3);
    sth_lease kept;
    ok(sthi_unit_acquire(w.runtime, 2, 0, &kept)); /* an output that is a view of the weight */
    steps(&w, FORWARD, 8, 5);
    assert_true(world_right(&w, &kept));
    ok(sthi_runtime_set_budget(w.runtime, 260000));
    steps(&w, FORWARD, 8, 3);
    assert_true(world_right(&w, &kept));
    sth_runtime *rt = w.runtime;
    w.runtime = NULL;
    sthi_runtime_destroy(rt);
    assert_true(world_right(&w, &kept));
    sthi_lease_release(rt, &kept);
    world_close(&w);
}

static void test_leases_held_for_long_leave_the_rest_of_use(void **state) {
    (void)state;
    static const uint64_t TWELVE[12] = {16384, 16384, 16384, 16384, 16384, 16384,
                                        16384, 16384, 16384, 16384, 16384, 16384};
    static const uint32_t AGAIN[14] = {0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    world w;
    world_spec spec = world_default(12, TWELVE, 7 * 16384);
    ok(world_open(&w, &spec));
    sth_lease held[2];
    for (uint32_t i = 0; i < 2; i++) ok(sthi_unit_acquire(w.runtime, i, 0, &held[i]));
    steps(&w, AGAIN, 14, 4);
    steps(&w, AGAIN + 4, 10, 4);
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(world_right(&w, &held[i]));
        sthi_lease_release(w.runtime, &held[i]);
    }
    steps(&w, AGAIN + 2, 12, 5);
    uint64_t before = stats_of(&w).deviations;
    steps(&w, AGAIN + 2, 12, 3);
    assert_int_equal(stats_of(&w).deviations, before); /* planned again */
    world_close(&w);
}

/* Pairs that are let go together, and single units between. When a plan is made that is not known: what its
 * steps then show makes it one that cannot run without loads on demand. */
static void test_a_plan_that_strays_is_looked_at_again(void **state) {
    (void)state;
    enum { ONE = 65536 };
    static const uint64_t bytes[12] = {3 * ONE, 3 * ONE, ONE, ONE, 3 * ONE, 3 * ONE,
                                       ONE,     ONE,     3 * ONE, 3 * ONE, ONE, ONE};
    world w;
    world_spec spec = world_default(12, bytes, 13 * ONE / 2);
    ok(world_open(&w, &spec));
    uint64_t loads = 0;
    for (int step = 0; step < 12; step++) {
        if (step == 2) loads = stats_of(&w).demand_loads;
        ok(sthi_step_begin(w.runtime));
        for (uint32_t i = 0; i < 12; i += 4) {
            sth_lease pair[2];
            for (uint32_t k = 0; k < 2; k++) ok(sthi_unit_acquire(w.runtime, i + k, 0, &pair[k]));
            for (uint32_t k = 0; k < 2; k++) {
                ok(w.device->ops->sim_compute(w.device->self, 0, 1000));
                assert_true(world_right(&w, &pair[k]));
                sthi_lease_release(w.runtime, &pair[k]);
            }
            for (uint32_t k = 2; k < 4; k++) ok(world_use(&w, i + k, 1000));
        }
        ok(sthi_step_end(w.runtime));
    }
    sth_runtime_stats s = stats_of(&w);
    assert_int_equal(s.deviations, 0);
    assert_true(loads > 0);
    assert_int_equal(s.demand_loads, loads);
    assert_int_equal(s.replans, 1);
    world_close(&w);
}

static void test_budget_changes(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 260000);
    ok(world_open(&w, &spec));
    static const uint64_t budgets[] = {90000, 250000, 70000, 260000, 131072};
    for (int i = 0; i < 5; i++) {
        ok(sthi_runtime_set_budget(w.runtime, budgets[i]));
        steps(&w, FORWARD, 8, 3);
        assert_true(stats_of(&w).device_bytes <= budgets[i]);
    }
    assert_int_equal(sthi_runtime_set_budget(w.runtime, 65535), STH_BUDGET_TOO_SMALL);
    steps(&w, FORWARD, 8, 2);
    world_close(&w);
}

static void test_too_small_a_budget_names_the_unit(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 65000);
    assert_int_equal(world_open(&w, &spec), STH_BUDGET_TOO_SMALL);
    assert_non_null(strstr(sth_last_error()->message, "unit.2"));
    assert_non_null(strstr(sth_last_error()->message, "65536"));
    spec.budget = 65536; /* what it said */
    ok(world_open(&w, &spec));
    steps(&w, FORWARD, 8, 3);
    world_close(&w);
}

/* A ring that is mapped twice has a size that the device can map: the smallest budget has no room for that. */
static void test_the_smallest_budget_works_for_a_ring_of_any_size(void **state) {
    (void)state;
    static const uint64_t bytes[4] = {1086464, 1085952, 1086464, 1049088};
    static const uint32_t order[4] = {0, 1, 2, 3};
    world w;
    world_spec spec = world_default(4, bytes, 1086464 - 512);
    assert_int_equal(world_open(&w, &spec), STH_BUDGET_TOO_SMALL);
    assert_non_null(strstr(sth_last_error()->message, "(1086464 bytes)"));
    spec.budget = 1086464;
    ok(world_open(&w, &spec));
    steps(&w, order, 4, 5);
    ok(sthi_runtime_set_budget(w.runtime, 4 * 1086464));
    steps(&w, order, 4, 3);
    for (uint64_t budget = 3 * 1086464; budget >= 1086464; budget -= few_under_tsan(12, 1) * 27136) {
        ok(sthi_runtime_set_budget(w.runtime, budget));
        steps(&w, order, 4, 2);
        assert_true(stats_of(&w).device_bytes <= budget);
    }
    ok(sthi_runtime_set_budget(w.runtime, 1086464));
    steps(&w, order, 4, 3);
    assert_int_equal(sthi_runtime_set_budget(w.runtime, 1086463), STH_BUDGET_TOO_SMALL);
    world_close(&w);
}

static void lease_all_at_once(world *w) {
    sth_lease held[8];
    for (uint32_t i = 0; i < 8; i++) ok(sthi_unit_acquire(w->runtime, i, 0, &held[i]));
    for (uint32_t i = 0; i < 8; i++) sthi_lease_release(w->runtime, &held[i]);
    ok(sthi_step_end(w->runtime));
}

/* Its budget has room for that; bytes of the units. */
static uint64_t open_with_room_for_all(world *w) {
    uint64_t all = 0;
    for (int i = 0; i < 8; i++) all += EIGHT[i];
    world_spec spec = world_default(8, EIGHT, all + 4096);
    ok(world_open(w, &spec));
    return all;
}

/* One odd step has all units leased together: it is known for some steps, and then it is not. */
static void test_what_was_leased_at_once_is_not_needed_for_ever(void **state) {
    (void)state;
    world w;
    uint64_t all = open_with_room_for_all(&w);
    steps(&w, FORWARD, 8, 2);
    uint64_t least = sthi_smallest_budget(w.runtime);
    lease_all_at_once(&w);
    assert_true(least < all && sthi_smallest_budget(w.runtime) >= all);
    assert_int_equal(sthi_runtime_set_budget(w.runtime, all - 1), STH_BUDGET_TOO_SMALL);
    steps(&w, FORWARD, 8, STHI_PEAK_STEPS);
    assert_int_equal(sthi_smallest_budget(w.runtime), least);
    ok(sthi_runtime_set_budget(w.runtime, least));
    steps(&w, FORWARD, 8, 2);
    world_close(&w);
}

/* What was leased together before does not keep the caller from filling more: passes to come may need less. */
static void test_reserved_bytes_take_room_that_was_leased_at_once(void **state) {
    (void)state;
    world w;
    uint64_t budget = open_with_room_for_all(&w) + 4096;
    lease_all_at_once(&w);
    ok(sthi_runtime_set_reserved(w.runtime, 16384));
    assert_true(stats_of(&w).device_bytes + 16384 <= budget);
    steps(&w, FORWARD, 8, 3);
    world_close(&w);
}

static void test_room_that_the_caller_needs_is_part_of_the_smallest_budget(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 100 * 1024 + 4096 - 1);
    spec.least_room = 100 * 1024;
    spec.reserved = 4096;
    assert_int_equal(world_open(&w, &spec), STH_BUDGET_TOO_SMALL);
    assert_non_null(strstr(sth_last_error()->message, "(106496 bytes)"));
    spec.budget++;
    ok(world_open(&w, &spec));
    assert_int_equal(sthi_smallest_budget(w.runtime), spec.budget);
    steps(&w, FORWARD, 8, 3);
    assert_int_equal(sthi_runtime_set_budget(w.runtime, spec.budget - 1), STH_BUDGET_TOO_SMALL);
    world_close(&w);
}

static sth_status lease_three(world *w, const uint32_t units[3], sth_lease leases[3], int *out_count) {
    for (*out_count = 0; *out_count < 3; ++*out_count)
        STHI_TRY(sthi_unit_acquire(w->runtime, units[*out_count], 0, &leases[*out_count]));
    return STH_OK;
}

/* The room is the sum of three: whether they fit depends on where the first ones came to lie. */
static void test_units_that_are_leased_together_fit_what_was_gathered(void **state) {
    (void)state;
    static const uint32_t three[6][3] = {{0, 1, 2}, {2, 1, 0}, {1, 2, 4}, {5, 0, 6}, {6, 4, 1}, {4, 6, 5}};
    int apart = 0;
    for (int i = 0; i < 6; i++) {
        world w;
        world_spec spec = world_default(8, EIGHT, 40448 + 12288 + 65536);
        ok(world_open(&w, &spec));
        steps(&w, FORWARD, 8, 3);
        for (int n = 0; n < 8; n++) {
            sth_lease leases[3];
            int count;
            ok(sthi_step_begin(w.runtime));
            ok(world_use(&w, (uint32_t)n, 1000));
            sth_status rc = lease_three(&w, three[i], leases, &count);
            if (rc != STH_OK) {
                assert_int_equal(rc, STH_BUDGET_TOO_SMALL);
                for (int k = 0; k < count; k++) sthi_lease_release(w.runtime, &leases[k]);
                ok(sthi_runtime_gather(w.runtime, spec.budget));
                apart++;
                ok(lease_three(&w, three[i], leases, &count));
            }
            for (int k = 0; k < 3; k++) assert_true(world_right(&w, &leases[k]));
            ok(sthi_runtime_gather(w.runtime, spec.budget)); /* what is leased stays where it is */
            for (int k = 0; k < 3; k++) assert_true(world_right(&w, &leases[k]));
            for (int k = 0; k < 3; k++) sthi_lease_release(w.runtime, &leases[k]);
            assert_true(stats_of(&w).device_bytes <= spec.budget);
            ok(sthi_step_end(w.runtime));
        }
        steps(&w, FORWARD, 8, 3);
        world_close(&w);
    }
    assert_true(apart > 0);
}

static void test_leasing_too_much_is_an_error_and_passes(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 100000);
    ok(world_open(&w, &spec));
    sth_lease a, b;
    ok(sthi_unit_acquire(w.runtime, 2, 0, &a));
    assert_int_equal(sthi_unit_acquire(w.runtime, 6, 0, &b), STH_BUDGET_TOO_SMALL);
    assert_non_null(strstr(sth_last_error()->message, "unit.6"));
    const char *said = strstr(sth_last_error()->message, "that works is ");
    assert_non_null(said);
    assert_true(strtoull(strchr(said, '(') + 1, NULL, 10) >= 131072); /* both, and what the lease keeps with it */
    assert_true(world_right(&w, &a));
    sthi_lease_release(w.runtime, &a);
    ok(sthi_runtime_poll(w.runtime));
    if (w.runtime->step.open) ok(sthi_step_end(w.runtime));
    steps(&w, FORWARD, 8, 3);
    world_close(&w);
}

static void test_writes_between_steps_reach_the_device(void **state) {
    (void)state;
    for (uint64_t budget = 80000; budget < 300000; budget += 70000) {
        world w;
        world_spec spec = world_default(8, EIGHT, budget);
        spec.writable = true;
        spec.read_only = false;
        ok(world_open(&w, &spec));
        for (uint8_t i = 1; i < 8; i++) {
            steps(&w, FORWARD, 8, 1);
            for (uint32_t u = i % 2; u < 8; u += 2) {
                world_fill(&w, u, i);
                ok(sthi_unit_mark_written(w.runtime, u));
            }
        }
        world_close(&w);
    }
}

/* A unit's bytes move elsewhere, in the middle of a step too, and the memory of before is given back. */
static void test_an_image_that_moves(void **state) {
    (void)state;
    for (uint64_t pin_limit = 0; pin_limit <= 65536; pin_limit += 65536) { /* direct, staged by readers */
        world w;
        world_spec spec = world_default(8, EIGHT, 140000);
        spec.pin_limit = pin_limit;
        spec.readers = pin_limit ? 2 : 0;
        spec.virtual_time = !pin_limit;
        ok(world_open(&w, &spec));
        for (uint8_t i = 1; i < 9; i++) {
            ok(sthi_step_begin(w.runtime));
            for (uint32_t u = 0; u < 8; u++) {
                ok(world_use(&w, u, 1000));
                if (u != i % 8) continue;
                sth_arena *arena, *before = w.runtime->units[u].arena;
                void *image;
                ok(sthi_arena_create(w.device, EIGHT[u], &arena));
                ok(sthi_arena_reserve(arena, EIGHT[u], &image));
                ok(sthi_arena_finish(arena));
                w.image[u] = image;
                world_fill(&w, u, i);
                ok(sthi_unit_set_host(w.runtime, u, image, arena));
                assert_ptr_not_equal(w.runtime->units[u].arena, before);
                sthi_arena_release(arena); /* the runtime holds it */
            }
            ok(sthi_step_end(w.runtime));
        }
        steps(&w, FORWARD, 8, 2);
        assert_int_equal(sthi_unit_set_host(w.runtime, 8, w.image[0], w.arena), STH_INVALID_ARGUMENT);
        assert_int_equal(sthi_unit_set_host(w.runtime, 1, w.image[0] + 1, w.arena), STH_INVALID_ARGUMENT);
        if (!pin_limit) assert_int_equal(sthi_unit_set_host(w.runtime, 1, w.image[1], NULL), STH_UNSUPPORTED);
        world_close(&w);
    }
}

/* What was written between two steps is renewed in the order of use, residents too: nobody waits for it. */
static void test_written_units_are_renewed_ahead_of_their_use(void **state) {
    (void)state;
    uint64_t all = 0;
    for (int i = 0; i < 8; i++) all += EIGHT[i];
    for (uint64_t budget = 140000; budget < 2 * all; budget += all) {
        world w;
        world_spec spec = world_default(8, EIGHT, budget);
        spec.writable = true;
        spec.read_only = false;
        ok(world_open(&w, &spec));
        uint64_t before = 0;
        for (uint8_t i = 1; i < 10; i++) {
            if (i == 4) before = stats_of(&w).demand_loads;
            steps(&w, SAWTOOTH, 16, 1);
            for (uint32_t u = 0; u < 8; u++) {
                world_fill(&w, u, i);
                ok(sthi_unit_mark_written(w.runtime, u));
            }
        }
        assert_int_equal(stats_of(&w).demand_loads, before);
        world_close(&w);
    }
}

/* Forward, pause, backward in the same step: one order, and images may be written in the pause. */
static void test_a_paused_step_goes_on(void **state) {
    (void)state;
    static const uint32_t backwards[8] = {7, 6, 5, 4, 3, 2, 1, 0};
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    spec.writable = true;
    spec.read_only = false;
    ok(world_open(&w, &spec));
    ok(sthi_step_pause(w.runtime)); /* nothing is open: it only waits */
    for (uint8_t i = 1; i < 8; i++) {
        uint64_t demanded = stats_of(&w).demand_loads;
        ok(sthi_step_begin(w.runtime));
        for (int u = 0; u < 8; u++) ok(world_use(&w, FORWARD[u], 1000));
        if (i % 2) { /* as autograd does with a graph that is kept; every other time without a write */
            ok(sthi_step_pause(w.runtime));
            ok(sthi_step_pause(w.runtime));
            world_fill(&w, 7, i);
            ok(sthi_unit_mark_written(w.runtime, 7));
        }
        for (int u = 0; u < 8; u++) ok(world_use(&w, backwards[u], 1000));
        ok(sthi_step_pause(w.runtime));
        if (i > 3) assert_true(stats_of(&w).demand_loads <= demanded + i % 2);
        uint64_t moved = stats_of(&w).h2d_bytes;
        ok(sthi_runtime_poll(w.runtime));
        assert_int_equal(stats_of(&w).h2d_bytes, moved); /* writable images are let alone */
        ok(sthi_step_end(w.runtime));
        assert_int_equal(stats_of(&w).steps, i);
    }
    assert_int_equal(stats_of(&w).deviations, 1);
    world_close(&w);
}

static void test_pinning_limit_falls_back_to_staging(void **state) {
    (void)state;
    for (uint32_t readers = 0; readers < 3; readers += 2) {
        world w;
        world_spec spec = world_default(8, EIGHT, 120000);
        spec.pin_limit = 65536; /* the arena is larger */
        spec.readers = readers;
        spec.virtual_time = readers == 0;
        spec.link = 0;
        ok(world_open(&w, &spec));
        steps(&w, FORWARD, 8, 6);
        sth_runtime_stats s = stats_of(&w);
        assert_true(s.staging_bytes > 0 && s.staging_bytes <= 65536);
        assert_true(s.staging_pinned);
        world_close(&w);
    }
}

static void test_static_policy(void **state) {
    (void)state;
    for (uint64_t budget = 70000; budget < 300000; budget += 50000) {
        world w;
        world_spec spec = world_default(8, EIGHT, budget);
        spec.policy = STH_POLICY_STATIC;
        ok(world_open(&w, &spec));
        steps(&w, FORWARD, 8, 6);
        assert_true(stats_of(&w).device_peak <= budget);
        world_close(&w);
    }
}

static void test_steps_that_nobody_marks(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    ok(world_open(&w, &spec));
    for (int i = 0; i < 6; i++)
        for (uint32_t u = 0; u < 8; u++) ok(world_use(&w, u, 1000));
    sth_runtime_stats s = stats_of(&w);
    assert_int_equal(s.steps, 5);
    assert_int_equal(s.deviations, 0);
    world_close(&w);
}

static void test_verify_reads_back(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(8, EIGHT, 140000);
    ok(world_open(&w, &spec));
    for (uint32_t u = 0; u < 8; u++) {
        bool equal = false;
        ok(sthi_unit_verify(w.runtime, u, &equal, NULL));
        assert_true(equal);
    }
    world_fill(&w, 3, 9); /* the source changed behind the runtime's back */
    bool equal = true;
    ok(sthi_unit_verify(w.runtime, 3, &equal, NULL));
    /* it may have been loaded again since: only a resident or ready copy can differ */
    ok(sthi_unit_mark_written(w.runtime, 3));
    ok(sthi_unit_verify(w.runtime, 3, &equal, NULL));
    assert_true(equal);
    world_close(&w);
}

static void test_nothing_leaks(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    for (int i = 0; i < 20; i++) {
        world w;
        world_spec spec = world_default(8, EIGHT, 140000);
        spec.virtual_time = i % 2;
        spec.pin_limit = i % 4 == 3 ? 65536 : 0;
        spec.readers = i % 2 ? 0 : 2;
        ok(world_open(&w, &spec));
        for (int k = 0; k < i % 3; k++) steps(&w, FORWARD, 8, 1);
        if (i % 5 == 0) ok(sthi_step_begin(w.runtime)); /* left open */
        world_close(&w);
    }
    assert_int_equal(sthi_alloc_live(), live);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_use_sees_its_bytes),
        cmocka_unit_test(test_planned_steps_never_load_on_demand),
        cmocka_unit_test(test_a_long_step_is_timed_to_its_end),
        cmocka_unit_test(test_only_uses_that_wait_are_timed_for_it),
        cmocka_unit_test(test_pieces_that_wait_for_nothing_are_one_copy),
        cmocka_unit_test(test_bytes_per_step_are_the_plans),
        cmocka_unit_test(test_prediction_matches_measurement),
        cmocka_unit_test(test_prediction_of_training_matches_measurement),
        cmocka_unit_test(test_prediction_of_partial_training_matches_measurement),
        cmocka_unit_test(test_an_evaluation_amid_training_changes_no_plan),
        cmocka_unit_test(test_a_single_write_changes_no_plan),
        cmocka_unit_test(test_training_begins_and_ends),
        cmocka_unit_test(test_writes_that_wander_make_few_plans),
        cmocka_unit_test(test_plan_follows_a_change_of_compute),
        cmocka_unit_test(test_plan_follows_the_link),
        cmocka_unit_test(test_a_slower_link_behind_compute_changes_nothing),
        cmocka_unit_test(test_a_large_unit_asks_for_no_ring),
        cmocka_unit_test(test_loads_on_demand_are_no_slower_link),
        cmocka_unit_test(test_plans_leave_a_margin),
        cmocka_unit_test(test_forward_then_backward),
        cmocka_unit_test(test_other_order_is_learnt),
        cmocka_unit_test(test_orders_longer_than_expected_are_learnt),
        cmocka_unit_test(test_units_that_come_and_go),
        cmocka_unit_test(test_early_exit_keeps_the_plan),
        cmocka_unit_test(test_lease_outlives_steps_and_runtime),
        cmocka_unit_test(test_leases_held_for_long_leave_the_rest_of_use),
        cmocka_unit_test(test_a_plan_that_strays_is_looked_at_again),
        cmocka_unit_test(test_budget_changes),
        cmocka_unit_test(test_too_small_a_budget_names_the_unit),
        cmocka_unit_test(test_the_smallest_budget_works_for_a_ring_of_any_size),
        cmocka_unit_test(test_room_that_the_caller_needs_is_part_of_the_smallest_budget),
        cmocka_unit_test(test_what_was_leased_at_once_is_not_needed_for_ever),
        cmocka_unit_test(test_reserved_bytes_take_room_that_was_leased_at_once),
        cmocka_unit_test(test_units_that_are_leased_together_fit_what_was_gathered),
        cmocka_unit_test(test_leasing_too_much_is_an_error_and_passes),
        cmocka_unit_test(test_writes_between_steps_reach_the_device),
        cmocka_unit_test(test_an_image_that_moves),
        cmocka_unit_test(test_written_units_are_renewed_ahead_of_their_use),
        cmocka_unit_test(test_a_paused_step_goes_on),
        cmocka_unit_test(test_pinning_limit_falls_back_to_staging),
        cmocka_unit_test(test_static_policy),
        cmocka_unit_test(test_steps_that_nobody_marks),
        cmocka_unit_test(test_verify_reads_back),
        cmocka_unit_test(test_nothing_leaks),
    };
    return cmocka_run_group_tests_name("runtime", tests, NULL, NULL);
}
