/* Images that an optimizer writes: copies that stay on the device are made anew while it works on. */
#include "base/fault.h"
#include "base/memory.h"
#include "stream/world.h"
#include "support/check.h"

/* Full training of 12 checkpointed blocks in the proportions of a large model on a large card: the budget is
 * 0.62 of the weights, all of them cross the link in 2.4 times the forward's compute, and the optimizer takes
 * 14 times that. */
enum { BLOCKS = 12, PARTS = 4, UNITS = BLOCKS * PARTS, FORWARD_NS = 75000, BACKWARD_NS = 146000 };
static const uint64_t PART_BYTES[PARTS] = {24576, 8192, 32768, 32768};
static const uint64_t ALL = BLOCKS * (24576 + 8192 + 32768 + 32768);
static const uint64_t LINK = 134000000;
static const double OPTIMIZER_NS_PER_BYTE = 44.6;

typedef struct training {
    world w;
    uint64_t bytes[UNITS];
    uint32_t gradients[UNITS]; /* units in the order in which their gradients come */
    int64_t due[UNITS];        /* when the gradient is there */
    uint64_t moved;            /* in the last forward and backward, which took */
    int64_t passes_ns;
    uint8_t version;
} training;

static int64_t now(const training *t) { return t->w.device->ops->now_ns(t->w.device->self); }

static void wait_until(training *t, int64_t ns) {
    if (ns > now(t)) assert_ok(t->w.device->ops->sim_compute(t->w.device->self, 0, ns - now(t)));
}

static sth_runtime_stats stats_of(world *w) {
    sth_runtime_stats s;
    sthi_runtime_stats(w->runtime, &s);
    return s;
}

static uint64_t bytes_moved(world *w) { return stats_of(w).h2d_bytes; }

static void open_training(training *t, uint64_t budget) {
    *t = (training){0};
    for (int i = 0; i < UNITS; i++) t->bytes[i] = PART_BYTES[i % PARTS];
    world_spec spec = world_default(UNITS, t->bytes, budget);
    spec.writable = true;
    spec.read_only = false;
    spec.link = LINK;
    spec.chunk = 8192;
    assert_ok(world_open(&t->w, &spec));
}

static void forward_and_backward(training *t) {
    uint64_t before = bytes_moved(&t->w);
    int64_t begin = now(t);
    uint32_t n = 0;
    assert_ok(sthi_step_begin(t->w.runtime));
    for (uint32_t u = 0; u < UNITS; u++) assert_ok(world_use(&t->w, u, FORWARD_NS));
    for (uint32_t b = BLOCKS; b-- > 0;) {
        for (uint32_t k = 0; k < PARTS; k++) assert_ok(world_use(&t->w, b * PARTS + k, FORWARD_NS));
        for (uint32_t k = PARTS; k-- > 0; n++) {
            t->gradients[n] = b * PARTS + k;
            assert_ok(world_use(&t->w, t->gradients[n], BACKWARD_NS));
            t->due[n] = now(t);
        }
    }
    t->passes_ns = now(t) - begin;
    t->moved = bytes_moved(&t->w) - before;
    assert_ok(sthi_step_pause(t->w.runtime));
}

/* One step with an optimizer that works on one gradient after the other as they come: what it took, in ns. */
static int64_t train(training *t, bool at_once) {
    int64_t begin = now(t), done = 0;
    forward_and_backward(t);
    t->version++;
    for (uint32_t n = 0; n < UNITS; n++) {
        uint32_t u = t->gradients[n];
        done = (done > t->due[n] ? done : t->due[n]) + (int64_t)(OPTIMIZER_NS_PER_BYTE * (double)t->bytes[u]);
        wait_until(t, done);
        world_fill(&t->w, u, t->version);
        if (at_once) assert_ok(sthi_unit_refresh(t->w.runtime, u));
        else assert_ok(sthi_unit_mark_written(t->w.runtime, u));
    }
    assert_ok(sthi_step_end(t->w.runtime));
    return now(t) - begin;
}

/* Forward and backward move what the plan says, in the time that it says, and the step is shorter by what the
 * next forward need not wait for. */
static void test_what_stays_is_renewed_while_the_optimizer_works(void **state) {
    (void)state;
    int64_t took[2];
    uint64_t kept = 0;
    for (int at_once = 0; at_once < 2; at_once++) {
        training t;
        open_training(&t, ALL * 62 / 100);
        for (int i = 0; i < 8; i++) took[at_once] = train(&t, at_once);
        sth_prediction p;
        assert_ok(sthi_runtime_prediction(t.w.runtime, &p));
        kept = ALL - p.bytes_per_step / 2;
        assert_true(kept > ALL / 2);
        assert_int_equal(t.moved, p.bytes_per_step + (at_once ? 0 : kept));
        double late = (double)t.passes_ns / (double)p.step_ns;
        assert_true(at_once ? late > 0.95 && late < 1.05 : late > 1.2);
        world_close(&t.w);
    }
    double bound_by_link = (double)ALL * 1e9 / (double)LINK, forward = UNITS * (double)FORWARD_NS;
    assert_true((double)(took[0] - took[1]) > 0.95 * (bound_by_link - forward));
}

/* ---- what is only marked */

static const uint64_t FOUR[4] = {12288, 8192, 20480, 9216};
static const uint32_t THERE_AND_BACK[8] = {0, 1, 2, 3, 3, 2, 1, 0};

static world_spec writable(uint64_t budget) {
    world_spec spec = world_default(4, FOUR, budget);
    spec.writable = true;
    spec.read_only = false;
    return spec;
}

/* Writes the unit and returns what its renewal moved at once. */
static uint64_t renew(world *w, uint32_t unit) {
    uint64_t before = bytes_moved(w);
    const char *why;
    world_fill(w, unit, (uint8_t)(w->version[unit] + 1));
    assert_ok(sthi_unit_refresh(w->runtime, unit));
    int32_t slot = w->runtime->units[unit].slot;
    bool over = true;
    if (bytes_moved(w) > before)
        assert_ok(w->device->ops->event_query(w->device->self, w->runtime->sync[slot].ready, &over));
    assert_true(over); /* the image may be written again */
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("unit %u: %s", unit, why);
    return bytes_moved(w) - before;
}

static void settled(world *w, const world_spec *spec) {
    assert_ok(world_open(w, spec));
    for (int i = 0; i < 4; i++) assert_ok(world_step(w, THERE_AND_BACK, 8, 20000));
}

static void test_a_unit_that_stays_is_copied_once(void **state) {
    (void)state;
    world w;
    world_spec spec = writable(60000); /* all of them stay */
    settled(&w, &spec);
    uint64_t before = bytes_moved(&w);
    for (int i = 0; i < 3; i++) {
        for (uint32_t u = 0; u < 4; u++) assert_int_equal(renew(&w, u), FOUR[u]);
        assert_ok(world_step(&w, THERE_AND_BACK, 8, 20000));
    }
    assert_int_equal(bytes_moved(&w) - before, 3 * (12288 + 8192 + 20480 + 9216));
    world_fill(&w, 1, 77); /* nobody says so */
    assert_ok(world_step(&w, THERE_AND_BACK, 8, 20000));
    world_close(&w);
}

static void test_inside_a_pass_it_is_only_marked(void **state) {
    (void)state;
    world w;
    world_spec spec = writable(60000);
    settled(&w, &spec);
    assert_ok(sthi_step_begin(w.runtime));
    assert_ok(world_use(&w, 0, 1000));
    assert_int_equal(renew(&w, 0), 0);
    assert_int_equal(renew(&w, 3), 0);
    for (int i = 1; i < 8; i++) assert_ok(world_use(&w, THERE_AND_BACK[i], 1000));
    assert_ok(sthi_step_pause(w.runtime));
    assert_int_equal(renew(&w, 2), FOUR[2]);
    assert_ok(world_use(&w, 2, 1000)); /* the step goes on */
    assert_int_equal(renew(&w, 2), 0);
    assert_ok(sthi_step_end(w.runtime));
    assert_ok(world_step(&w, THERE_AND_BACK, 8, 1000));
    world_close(&w);
}

static void test_a_leased_unit_is_only_marked(void **state) {
    (void)state;
    world w;
    world_spec spec = writable(60000);
    settled(&w, &spec);
    sth_lease lease;
    assert_ok(sthi_step_begin(w.runtime));
    assert_ok(sthi_unit_acquire(w.runtime, 0, 0, &lease));
    assert_ok(sthi_step_pause(w.runtime));
    assert_int_equal(renew(&w, 0), 0);
    sthi_lease_release(w.runtime, &lease);
    assert_int_equal(renew(&w, 0), FOUR[0]); /* it has ended, and nobody has said so yet */
    assert_ok(sthi_step_end(w.runtime));
    assert_ok(world_step(&w, THERE_AND_BACK, 8, 1000));
    world_close(&w);
}

static void test_what_has_no_place_for_the_next_step_is_only_marked(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++) {
        world w;
        world_spec spec = writable(how == 0 ? 42000 : 60000);
        if (how == 1) spec.policy = STH_POLICY_STATIC;
        if (how == 2) spec.pin_limit = 16384, spec.virtual_time = true; /* staged */
        if (how == 3) spec.packed = STH_TRANSFER_INT8, spec.budget = 90000;
        settled(&w, &spec);
        for (int i = 0; i < 3; i++) {
            uint64_t at_once = 0;
            for (uint32_t u = 0; u < 4; u++) {
                uint64_t bytes = renew(&w, u);
                bool packed = how == 3 && u % 2 == 0;
                assert_true(bytes == 0 || (bytes == FOUR[u] && !packed));
                at_once += bytes;
            }
            if (how == 0) assert_true(at_once > 0 && at_once < 42000);
            if (how == 1 || how == 2) assert_int_equal(at_once, 0);
            assert_ok(world_step(&w, THERE_AND_BACK, 8, 1000));
        }
        world_close(&w);
    }
}

/* ---- failures */

/* The n-th call of the device fails, while the copy is made: it comes at the next use. */
static void test_a_copy_that_fails_is_made_at_the_next_use(void **state) {
    (void)state;
    bool met = true;
    for (uint64_t n = 1; met; n++) {
        world w;
        world_spec spec = writable(60000);
        settled(&w, &spec);
        world_fill(&w, 2, 9);
        sthi_fault_arm(STHI_FAULT_DEVICE_CALL, n, false);
        sth_status rc = sthi_unit_refresh(w.runtime, 2);
        met = sthi_fault_seen(STHI_FAULT_DEVICE_CALL) >= n;
        sthi_fault_disarm_all();
        const char *why;
        if (!sthi_runtime_check(w.runtime, &why)) fail_msg("call %llu: %s", (unsigned long long)n, why);
        if (rc != STH_OK) assert_status(rc, STH_DEVICE_ERROR);
        assert_true(met || rc == STH_OK);
        assert_true(n > 1 || rc == STH_DEVICE_ERROR);
        uint64_t waited_for = stats_of(&w).demand_loads;
        assert_ok(world_step(&w, THERE_AND_BACK, 8, 1000));
        assert_int_equal(stats_of(&w).demand_loads, waited_for);
        assert_int_equal(renew(&w, 2), FOUR[2]); /* it is back in its place */
        world_close(&w);
    }
}

static void test_the_end_may_come_at_once(void **state) {
    (void)state;
    world w;
    world_spec spec = writable(60000);
    settled(&w, &spec);
    assert_int_equal(renew(&w, 0), FOUR[0]);
    assert_int_equal(sthi_unit_refresh(w.runtime, 4), STH_INVALID_ARGUMENT);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_stays_is_renewed_while_the_optimizer_works),
        cmocka_unit_test(test_a_unit_that_stays_is_copied_once),
        cmocka_unit_test(test_inside_a_pass_it_is_only_marked),
        cmocka_unit_test(test_a_leased_unit_is_only_marked),
        cmocka_unit_test(test_what_has_no_place_for_the_next_step_is_only_marked),
        cmocka_unit_test(test_a_copy_that_fails_is_made_at_the_next_use),
        cmocka_unit_test(test_the_end_may_come_at_once),
    };
    return cmocka_run_group_tests_name("written", tests, NULL, NULL);
}
