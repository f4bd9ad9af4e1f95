/* Units that cross the link packed: what arrives, what crosses, what it takes, and what overlaps. */
#include <string.h>

#include "base/memory.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/plain_image.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/verify.h"
#include "stream/world.h"
#include "support/check.h"

static const uint64_t EIGHT[8] = {40000, 12288, 65536, 8192, 40000, 12288, 65536, 8192};
static const uint32_t FORWARD[8] = {0, 1, 2, 3, 4, 5, 6, 7};

static sth_runtime_stats stats_of(world *w) {
    sth_runtime_stats s;
    sthi_runtime_stats(w->runtime, &s);
    return s;
}

static void steps(world *w, int n, int64_t compute) {
    for (int i = 0; i < n; i++) {
        const char *why;
        assert_ok(world_step(w, FORWARD, 8, compute));
        if (!sthi_runtime_check(w->runtime, &why)) fail_msg("after step %d: %s", i, why);
    }
}

static uint64_t largest_packed(const world *w) { return w->runtime->expand.stage_bytes; }

static world_spec packed(sth_transfer encoding, uint64_t budget) {
    world_spec spec = world_default(8, EIGHT, budget);
    spec.packed = encoding;
    return spec;
}

static void every_use_sees_what_its_packed_image_says(void **state) {
    (void)state;
    static const sth_transfer encodings[] = {STH_TRANSFER_INT8, STH_TRANSFER_FP8, STH_TRANSFER_INT4,
                                             STH_TRANSFER_LOSSLESS};
    unsigned i = 0; /* of budgets */
    for (int e = 0; e < 4; e++)
        for (uint64_t budget = 90000; budget <= 330000; budget += few_under_sanitizers(120000, 40000), i++)
            for (int variant = 0; variant < 5; variant++) { /* direct, staged, by the host, static, many stages */
                if ((i + variant) % few_under_sanitizers(2, 1)) continue;
                world w;
                world_spec spec = packed(encodings[e], budget);
                if (variant == 1) spec.pin_limit = 40000;
                spec.no_expand = variant == 2;
                if (variant == 3) spec.policy = STH_POLICY_STATIC;
                if (variant == 4 && budget < 200000) continue;
                if (variant == 4) spec.stages = 8;
                assert_ok(world_open(&w, &spec));
                steps(&w, 5, 20000);
                bool equal;
                assert_ok(sthi_unit_verify(w.runtime, 2, &equal, NULL));
                assert_true(equal);
                assert_true(stats_of(&w).device_peak <= budget);
                uint64_t stages = variant == 2 ? 0 : variant == 4 ? 8 : 3;
                assert_int_equal(stats_of(&w).stage_bytes, stages * largest_packed(&w));
                assert_int_equal(*stats_of(&w).expand_error != 0, variant == 2);
                world_close(&w);
            }
}

/* A step moves the bytes that the plan says, and packed a unit has less than so much of its bytes. */
static void plan_counts(sth_transfer encoding, double share) {
    world w;
    world_spec spec = packed(encoding, 160000);
    assert_ok(world_open(&w, &spec));
    steps(&w, 8, 20000);
    uint64_t before = stats_of(&w).h2d_bytes;
    steps(&w, 10, 20000);
    sth_prediction p;
    assert_ok(sthi_runtime_prediction(w.runtime, &p));
    assert_int_equal((stats_of(&w).h2d_bytes - before) / 10, p.bytes_per_step);
    sth_unit_stats u;
    sthi_unit_stats(w.runtime, 2, &u);
    assert_true((double)u.transfer_bytes < (double)u.bytes * share);
    world_close(&w);
}

static void the_plan_counts_packed_bytes(void **state) {
    (void)state;
    plan_counts(STH_TRANSFER_INT8, 0.75); /* 48 + 4 bytes for a row of 80, and padding */
}

static int64_t step_ns(const world_spec *spec, int64_t compute) {
    world w;
    assert_ok(world_open(&w, spec));
    steps(&w, 10, compute);
    int64_t begin = w.device->ops->now_ns(w.device->self);
    steps(&w, 10, compute);
    int64_t ns = (w.device->ops->now_ns(w.device->self) - begin) / 10;
    sth_prediction p;
    assert_ok(sthi_runtime_prediction(w.runtime, &p));
    if ((double)ns > 1.06 * (double)p.step_ns || (double)ns < 0.94 * (double)p.step_ns)
        fail_msg("predicted %lld ns, measured %lld", (long long)p.step_ns, (long long)ns);
    world_close(&w);
    return ns;
}

/* On this link, which is slow beside the expansion, a step takes the time of the packed bytes. */
static void expansion_hides_behind_copies(void **state) {
    (void)state;
    static const uint64_t wide[8] = {65536, 512, 65536, 512, 65536, 512, 65536, 512};
    world_spec spec = packed(STH_TRANSFER_INT8, 100000);
    spec.bytes = wide;
    spec.link = UINT64_C(100000000);
    int64_t quick = step_ns(&spec, 1000);
    spec.packed = 0;
    spec.budget -= 3 * 4096; /* the same room for places */
    int64_t plain = step_ns(&spec, 1000);
    if ((double)quick > 0.72 * (double)plain)
        fail_msg("%lld ns packed, %lld ns plain", (long long)quick, (long long)plain);
}

static void a_written_master_is_encoded_again(void **state) {
    (void)state;
    for (int how = 0; how < 3; how++) { /* watched, writable, told */
        world w;
        world_spec spec = packed(STH_TRANSFER_FP8, how == 1 ? 120000 : 330000);
        spec.read_only = how == 2;
        spec.flags = how == 0 ? STH_UNIT_WATCHED : 0;
        spec.writable = how == 1;
        assert_ok(world_open(&w, &spec));
        steps(&w, 3, 1000);
        for (uint8_t version = 1; version < 4; version++) {
            if (how == 2) assert_ok(sthi_runtime_synchronize(w.runtime));
            for (uint32_t i = 0; i < 8; i++) {
                world_fill(&w, i, version);
                if (how == 2) assert_ok(sthi_unit_mark_written(w.runtime, i));
            }
            steps(&w, 1, 1000);
        }
        world_close(&w);
    }
}

/* Direct, staged, by the host, on demand: what does not fit its packed image crosses as it is, until it fits again. */
static void values_that_do_not_pack_cross_as_they_are(void **state) {
    (void)state;
    static const uint8_t versions[] = {1, WORLD_WILD, WORLD_WILD, 2, 3, WORLD_WILD, 4};
    for (int variant = 0; variant < 5; variant++) {
        world w;
        world_spec spec = packed(STH_TRANSFER_LOSSLESS, 160000);
        if (variant == 1) spec.pin_limit = 40000;
        spec.no_expand = variant == 2;
        if (variant == 3) spec.policy = STH_POLICY_STATIC;
        spec.writable = variant == 4;
        spec.read_only = false;
        spec.flags = variant == 4 ? 0 : STH_UNIT_WATCHED;
        assert_ok(world_open(&w, &spec));
        steps(&w, 4, 20000);
        for (size_t v = 0; v < sizeof versions; v++) {
            uint64_t before = stats_of(&w).h2d_bytes;
            for (uint32_t i = 0; i < 8; i++) world_fill(&w, i, versions[v]);
            steps(&w, 2, 20000);
            bool equal, wild = versions[v] == WORLD_WILD;
            assert_ok(sthi_unit_verify(w.runtime, 2, &equal, NULL));
            assert_true(equal);
            if (w.runtime->units[2].encoded.plain != wild) fail_msg("variant %d, version %u", variant, versions[v]);
            assert_true(stats_of(&w).h2d_bytes > before);
        }
        world_close(&w);
    }
}

static void lossless_bytes_are_fewer_on_the_link(void **state) {
    (void)state;
    plan_counts(STH_TRANSFER_LOSSLESS, 0.8); /* 11 bits, one in 8 an escape, room for more, and padding */
}

static void bad_segments_are_refused(void **state) {
    (void)state;
    world w;
    world_spec spec = packed(STH_TRANSFER_INT8, 300000);
    assert_ok(world_open(&w, &spec));
    sth_segment good = w.segments[0][0], s;
    uint64_t place = w.bytes[0], bytes = 100000;
    assert_ok(sthi_segments_check(&good, 1, place, bytes, "x"));
    struct {
        const char *what;
        sth_segment s;
    } bad[] = {{"encoding", good}, {"rows", good}, {"cols", good}, {"dtype", good}, {"place", good}, {"stride", good},
               {"codes", good}, {"scales", good}, {"zeros", good}, {"huge", good}, {"past", good}};
    bad[0].s.encoding = STH_TRANSFER_COUNT;
    bad[1].s.rows = 0;
    bad[2].s.cols = UINT64_MAX;
    bad[3].s.dtype = STH_DTYPE_I8;
    bad[4].s.place_offset = 8;
    bad[5].s.stride = 32;
    bad[6].s.codes = 8;
    bad[7].s.scales = STH_TRANSFER_NONE;
    bad[8].s.zeros = UINT64_MAX - 15;
    bad[9].s.rows = UINT64_MAX / 2;
    bad[10].s.place_offset = 1 << 20;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (sthi_segments_check(&bad[i].s, 1, place, bytes, "x") != STH_INVALID_ARGUMENT) fail_msg("%s", bad[i].what);
    s = good;
    sth_segment twice[2] = {good, s};
    assert_status(sthi_segments_check(twice, 2, place, bytes, "x"), STH_INVALID_ARGUMENT);
    world_close(&w);
}

static uint64_t packed_bytes_of(world *w) {
    sth_prediction p;
    assert_ok(sthi_runtime_prediction(w->runtime, &p));
    return p.packed_bytes;
}

enum { MANY = 24 };
static uint64_t many_bytes[MANY];
static uint32_t many_order[MANY], other_order[MANY];

/* Every other one is packed; the link is the bound. */
static world_spec many(uint64_t budget) {
    for (uint32_t i = 0; i < MANY; i++) {
        many_bytes[i] = i % 2 ? 512 : 65536;
        many_order[i] = i;
        other_order[i] = (i + 10) % MANY;
    }
    world_spec spec = world_default(MANY, many_bytes, budget);
    spec.packed = STH_TRANSFER_LOSSLESS;
    spec.link = UINT64_C(100000000);
    return spec;
}

/* The same, of units that may be written. */
static world_spec many_writable(uint64_t budget) {
    world_spec spec = many(budget);
    spec.read_only = false;
    spec.flags = STH_UNIT_WATCHED;
    return spec;
}

/* The link is the bound: units stay packed, less crosses it than with as many bytes of the budget for plain residents,
 * as the plan says, and each use sees its bytes, also after a write, a smaller budget and a larger one. */
static void units_stay_packed_where_the_link_is_the_bound(void **state) {
    (void)state;
    world w;
    world_spec spec = many_writable(614000);
    assert_ok(world_open(&w, &spec));
    for (int k = 0; k < 8; k++) assert_ok(world_step(&w, many_order, MANY, 1000));
    uint64_t stays = packed_bytes_of(&w), before = stats_of(&w).h2d_bytes;
    assert_true(stays > 0);
    for (int k = 0; k < 4; k++) assert_ok(world_step(&w, many_order, MANY, 1000));
    sth_prediction p;
    assert_ok(sthi_runtime_prediction(w.runtime, &p));
    assert_int_equal((stats_of(&w).h2d_bytes - before) / 4, p.bytes_per_step);
    assert_true(stats_of(&w).device_bytes >= stays);
    for (uint8_t version = 1; version < 4; version++) {
        for (uint32_t i = 0; i < MANY; i++) world_fill(&w, i, version == 2 ? WORLD_WILD : version);
        for (int k = 0; k < 3; k++) assert_ok(world_step(&w, many_order, MANY, 1000));
    }
    world_close(&w);
}

static void sound_steps(world *w, const uint32_t *order, int n) {
    for (int i = 0; i < n; i++) {
        const char *why;
        assert_ok(world_step(w, order, MANY, 1000));
        if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
        sth_runtime_stats s = stats_of(w);
        assert_true(s.device_bytes <= s.budget);
    }
}

/* Each budget from what holds hardly anything to all, down and up; and steps in another order, which load on demand. */
static void packed_units_follow_the_budget_and_the_order(void **state) {
    (void)state;
    world w;
    uint64_t stayed = 0;
    world_spec spec = many(900000);
    assert_ok(world_open(&w, &spec));
    for (int way = 0; way < 2; way++)
        for (int k = 0; k <= 9; k++) {
            assert_ok(sthi_runtime_set_budget(w.runtime, 300000 + (uint64_t)(way ? k : 9 - k) * 60000));
            sound_steps(&w, many_order, 3);
            stayed += stats_of(&w).packed_bytes > 0;
            sound_steps(&w, other_order, 1);
            sound_steps(&w, many_order, 1);
        }
    assert_true(stayed >= 4);
    world_close(&w);
}

/* Models that take turns on a device that holds one of them. */
static void packed_units_give_way_to_another_model_and_come_back(void **state) {
    (void)state;
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = 800000;
    sim.virtual_time = true;
    sim.link_bytes_per_s = UINT64_C(100000000);
    world_spec spec = many(614000);
    assert_ok(sthi_device_open("sim", &sim, &spec.device));
    world a, b;
    uint64_t stayed = 0;
    spec.name = "a";
    assert_ok(world_open(&a, &spec));
    sound_steps(&a, many_order, 8);
    assert_true(stats_of(&a).packed_bytes > 0);
    spec.name = "b";
    assert_ok(world_open(&b, &spec));
    for (int turn = 0; turn < 4; turn++) {
        sound_steps(&b, many_order, 8);
        stayed += stats_of(&b).packed_bytes > 0;
        assert_true(stats_of(&a).device_bytes + stats_of(&b).device_bytes <= sim.memory_bytes);
        sound_steps(&a, many_order, turn % 2 ? 1 : 5);
    }
    assert_true(stayed > 0);
    world_close(&a);
    sound_steps(&b, many_order, 2);
    world_close(&b);
    sthi_device_release(spec.device);
}

static uint64_t moved_by(world *w, int64_t compute_ns) {
    uint64_t before = 0;
    for (int k = 0; k < 12; k++) {
        before = stats_of(w).h2d_bytes;
        assert_ok(world_step(w, many_order, MANY, compute_ns));
    }
    return stats_of(w).h2d_bytes - before;
}

static uint32_t crossing_plain(const world *w) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < MANY; i++) count += w->runtime->units[i].encoded.crosses_plain;
    return count;
}

/* Where compute is the bound units cross as they are, and packed where the link is; writes between are seen either way,
 * also those that do not pack. */
static void units_cross_as_it_suits_the_bound(void **state) {
    (void)state;
    world w;
    world_spec spec = many(400000);
    enum { LONG = 3500, SHORT = 100 }; /* beside which expansions take more than 1/200 */
    spec.link = UINT64_C(10000000000);
    spec.latency_ns = 1;
    spec.either = true;
    spec.read_only = false;
    spec.flags = STH_UNIT_WATCHED;
    assert_ok(world_open(&w, &spec));
    uint64_t packed = moved_by(&w, SHORT);
    assert_int_equal(crossing_plain(&w), 0);
    uint64_t plain = moved_by(&w, LONG);
    assert_int_equal(crossing_plain(&w), MANY / 2);
    assert_true(packed < plain);
    assert_int_equal(packed_bytes_of(&w), 0);
    for (uint8_t version = 1; version < 4; version++)
        for (int bound = 0; bound < 2; bound++) {
            uint8_t next = version == 2 ? WORLD_WILD : (uint8_t)(version + 4 * bound);
            for (uint32_t i = 0; i < MANY; i++) world_fill(&w, i, next);
            for (int k = 0; k < 6; k++) assert_ok(world_step(&w, many_order, MANY, bound ? SHORT : LONG));
        }
    assert_true(moved_by(&w, SHORT) < plain);
    assert_int_equal(crossing_plain(&w), 0);
    world_close(&w);
}

/* Compute is the bound: none stays packed. */
static void none_stays_packed_where_compute_is_the_bound(void **state) {
    (void)state;
    world w;
    world_spec spec = packed(STH_TRANSFER_LOSSLESS, 200000);
    assert_ok(world_open(&w, &spec));
    steps(&w, 8, 10000000);
    assert_int_equal(packed_bytes_of(&w), 0);
    world_close(&w);
}

static uint32_t dropped(world *w) {
    uint32_t units[MANY], count = 0;
    assert_ok(sthi_runtime_dropped_masters(w->runtime, true, units, MANY, &count));
    for (uint32_t i = 0; i < count; i++) assert_null(w->runtime->units[units[i]].master);
    return count;
}

/* At rest a packed image is all that there is of a unit. Its plain one comes back as it was, is
 * seen when it is written, and goes again once the packed one says all of it: never before, and not
 * at all where that has no room. */
static void plain_images_come_and_go(void **state) {
    (void)state;
    world w;
    world_spec spec = many_writable(614000);
    assert_ok(world_open(&w, &spec));
    for (uint8_t version = 1; version < 5; version++) {
        bool wild = version == 3, kept;
        sound_steps(&w, many_order, 2);
        for (uint32_t i = 0; i < MANY; i += 2) assert_ok(sthi_unit_drop_master(w.runtime, i));
        uint32_t gone = dropped(&w);
        if (wild || version == 1) assert_int_equal(gone, MANY / 2);
        sound_steps(&w, many_order, 3);
        for (uint32_t i = 0; i < MANY; i += 2) {
            assert_ok(sthi_unit_keep_master(w.runtime, i, &kept));
            assert_int_equal(kept, w.runtime->units[i].master != NULL);
            if (!kept) assert_ok(sthi_unit_give_master(w.runtime, i, w.image[i]));
            assert_status(sthi_unit_give_master(w.runtime, i, w.image[i]), STH_INVALID_STATE);
        }
        sound_steps(&w, many_order, 2);
        for (uint32_t i = 0; i < MANY; i++) world_fill(&w, i, wild ? WORLD_WILD : version);
        for (uint32_t i = 0; i < MANY; i += 2) assert_ok(sthi_unit_drop_master(w.runtime, i));
        assert_int_equal(dropped(&w), 0); /* none says it yet */
        for (int k = 0; k < 6; k++) {
            sound_steps(&w, many_order, 1);
            gone = dropped(&w);
            if (wild) assert_int_equal(gone, 0);
        }
        sound_steps(&w, many_order, 1);
        for (uint32_t i = 0; i < MANY; i += 2) {
            if (!wild) assert_null(w.runtime->units[i].master);
            if (!w.runtime->units[i].master) assert_ok(sthi_unit_give_master(w.runtime, i, w.image[i]));
        }
    }
    assert_status(sthi_unit_drop_master(w.runtime, 1), STH_INVALID_ARGUMENT); /* it is not packed */
    world_close(&w);
}

/* Plans price expansions as the device makes them: beside a device that is slow at it all cross as they are, though
 * packed ones would be the faster for the link. */
static void the_rate_of_expansions_is_measured(void **state) {
    (void)state;
    static const uint64_t rates[] = {UINT64_C(1000000000000), UINT64_C(3000000000)};
    for (int i = 0; i < 2; i++) {
        sth_sim_options sim;
        sth_sim_options_init(&sim);
        sim.virtual_time = true;
        sim.link_bytes_per_s = UINT64_C(4000000000);
        sim.copy_latency_ns = 1;
        sim.expand_bytes_per_s = rates[i];
        world w;
        world_spec spec = many(400000);
        spec.either = true;
        assert_ok(sthi_device_open("sim", &sim, &spec.device));
        assert_ok(world_open(&w, &spec));
        (void)moved_by(&w, 100);
        double measured = w.runtime->expand.rate.bytes_per_s;
        assert_true(measured > 0.8 * (double)rates[i] && measured < 1.2 * (double)rates[i]);
        assert_int_equal(crossing_plain(&w), i ? MANY / 2 : 0);
        world_close(&w);
        sthi_device_release(spec.device);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_use_sees_what_its_packed_image_says),
        cmocka_unit_test(the_plan_counts_packed_bytes),
        cmocka_unit_test(expansion_hides_behind_copies),
        cmocka_unit_test(a_written_master_is_encoded_again),
        cmocka_unit_test(values_that_do_not_pack_cross_as_they_are),
        cmocka_unit_test(lossless_bytes_are_fewer_on_the_link),
        cmocka_unit_test(units_stay_packed_where_the_link_is_the_bound),
        cmocka_unit_test(packed_units_follow_the_budget_and_the_order),
        cmocka_unit_test(packed_units_give_way_to_another_model_and_come_back),
        cmocka_unit_test(units_cross_as_it_suits_the_bound),
        cmocka_unit_test(none_stays_packed_where_compute_is_the_bound),
        cmocka_unit_test(plain_images_come_and_go),
        cmocka_unit_test(the_rate_of_expansions_is_measured),
        cmocka_unit_test(bad_segments_are_refused),
    };
    return cmocka_run_group_tests_name("packed", tests, NULL, NULL);
}
