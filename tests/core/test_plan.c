/* The planner: the figures of the design, what every plan must keep to, errors, and failing allocations. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "core/plan_brute.h"
#include "stagehand/plan.h"
#include "support/check.h"

enum { MOST_UNITS = 64, MOST_USES = 128 }; /* of random worlds; figures take up to twice as many */

typedef struct world {
    sth_plan_unit units[MOST_UNITS * 2];
    sth_plan_use uses[MOST_USES * 2];
    sth_plan_input in;
} world;

static void start_world(world *w, uint32_t units, uint32_t uses) {
    memset(w, 0, sizeof *w);
    sth_plan_input_init(&w->in);
    w->in.units = w->units;
    w->in.unit_count = units;
    w->in.uses = w->uses;
    w->in.use_count = uses;
    w->in.link_bytes_per_s = 55e9;
    w->in.ring_mapped_twice = true;
}

/* ---- the figures: 24 blocks of four matrices, hidden size 4096, bf16 ---- */

enum { BLOCKS = 24, LEAVES = 4 };
static const uint64_t HIDDEN = 4096;

static uint64_t leaf_bytes(uint32_t i) {
    static const uint64_t of_square[LEAVES] = {3, 1, 4, 4};
    return of_square[i % LEAVES] * HIDDEN * HIDDEN * 2;
}

static double figure_world(world *w, double compute_ns, double share) {
    double all = (double)(BLOCKS * 12 * HIDDEN * HIDDEN * 2);
    start_world(w, BLOCKS * LEAVES, BLOCKS * LEAVES);
    for (uint32_t i = 0; i < BLOCKS * LEAVES; i++) {
        w->units[i].bytes = leaf_bytes(i);
        w->uses[i] = (sth_plan_use){i, 0, (int64_t)(compute_ns * (double)leaf_bytes(i) / all), 0};
    }
    w->in.budget = (uint64_t)(all * share);
    double link = (all - (double)w->in.budget + (double)leaf_bytes(2)) / 55e9 * 1e9;
    return link > compute_ns ? link : compute_ns;
}

static double ratio_to_bound(double compute_ns, double share, uint64_t chunk, int64_t overhead_ns) {
    world w;
    double bound = figure_world(&w, compute_ns, share);
    w.in.chunk_bytes = chunk;
    w.in.copy_overhead_ns = overhead_ns;
    sth_plan *plan = NULL;
    assert_ok(sth_plan_create(&w.in, &plan));
    double ratio = (double)plan->prediction.step_ns / bound;
    sth_plan_destroy(plan);
    return ratio;
}

static const double COMPUTE_NS[3] = {15.7e6, 66e6, 431e6};
static const double SHARES[5] = {0.1, 0.3, 1.0 / 3, 0.6, 0.9};

/* Best ring of a simulation with evenly spread residents and free homes, 2.2 us a copy. */
static void figures_are_no_worse_than_the_best_ring(void **state) {
    (void)state;
    static const double chunks[3][5] = {
        {1.018, 1.021, 1.020, 1.021, 1.052}, {1.021, 1.026, 1.025, 1.038, 1}, {1, 1, 1, 1, 1}};
    static const double whole[3][5] = {
        {1.019, 1.023, 1.022, 1.041, 1.087}, {1.019, 1.027, 1.027, 1.050, 1}, {1, 1, 1, 1, 1}};
    for (int c = 0; c < 3; c++)
        for (int v = 0; v < 5; v++) {
            double a = ratio_to_bound(COMPUTE_NS[c], SHARES[v], 8u << 20, 2200);
            double b = ratio_to_bound(COMPUTE_NS[c], SHARES[v], UINT64_MAX, 2200);
            if (a > chunks[c][v] + 0.001 || b > whole[c][v] + 0.001)
                fail_msg("compute %.1f ms, V %.0f %%: chunks %.4f (%.3f), whole %.4f (%.3f)",
                         COMPUTE_NS[c] / 1e6, SHARES[v] * 100, a, chunks[c][v], b, whole[c][v]);
        }
}

/* Without the cost of a copy: what chunked starts and whole copies are good for. */
static void figures_without_copy_overhead(void **state) {
    (void)state;
    static const double chunks[5] = {1.01, 1.01, 1.01, 1.01, 1.04};
    static const double whole[5] = {1.02, 1.022, 1.021, 1.04, 1.09};
    for (int c = 0; c < 3; c += 2)
        for (int v = 0; v < 5; v++) {
            double a = ratio_to_bound(COMPUTE_NS[c], SHARES[v], 8u << 20, 0);
            double b = ratio_to_bound(COMPUTE_NS[c], SHARES[v], UINT64_MAX, 0);
            if (a > chunks[v] || b > whole[v])
                fail_msg("compute %.1f ms, V %.0f %%: chunks %.4f, whole %.4f", COMPUTE_NS[c] / 1e6,
                         SHARES[v] * 100, a, b);
        }
}

/* Frozen weights, forward then backward: 2 (B - V) bytes suffice, as the last pieces stay at the turns. */
static void forward_and_backward_keeps_pieces_at_the_turns(void **state) {
    (void)state;
    enum { N = MOST_UNITS * 3 / 2 };
    for (int percent = 10; percent <= 70; percent += 20) {
        world w;
        double all = 0;
        start_world(&w, N, 2 * N);
        w.in.copy_overhead_ns = 0;
        for (uint32_t i = 0; i < N; i++) all += (double)(w.units[i].bytes = leaf_bytes(i));
        w.in.budget = (uint64_t)(all * percent / 100);
        double least = 2 * (all - (double)w.in.budget) / 55e9 * 1e9;
        for (uint32_t i = 0; i < N; i++) {
            w.uses[i] = (sth_plan_use){i, 0, (int64_t)(0.4 * least * (double)w.units[i].bytes / all), 0};
            w.uses[2 * N - 1 - i] = w.uses[i];
        }
        sth_plan *plan = NULL;
        assert_ok(sth_plan_create(&w.in, &plan));
        double ratio = (double)plan->prediction.step_ns / least;
        uint32_t shared = 0;
        for (uint32_t k = 0; k < plan->load_count; k++)
            shared += plan->loads[k].first_use != plan->loads[k].last_use;
        if (ratio > 1.03 || shared == 0)
            fail_msg("V %d %%: %.4f of the bound, %u loads of %u serve both passes", percent, ratio, shared,
                     plan->load_count);
        assert_true((double)plan->prediction.lower_bound_ns >= least - 2);
        sth_plan_destroy(plan);
    }
}

/* ---- what every plan keeps to ---- */

static uint32_t next_chance(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((*state >> 32) * below) >> 32);
}

static void random_world(world *w, uint64_t seed) {
    uint64_t state = seed * 7919 + 1;
    for (int i = 0; i < 4; i++) (void)next_chance(&state, 2);
    uint32_t units = 1 + next_chance(&state, seed % 4 == 0 ? MOST_UNITS : 12), kinds = next_chance(&state, 3);
    uint32_t uses = units + (next_chance(&state, 2) ? next_chance(&state, units) : 0);
    static const uint64_t chunks[] = {512, 4096, 8u << 20, UINT64_MAX}, grains[] = {512, 1536, 65536};
    start_world(w, units, uses);
    for (uint32_t i = 0; i < units; i++) {
        uint32_t sizes[3] = {40, 20 * (1 + next_chance(&state, 4)), next_chance(&state, 200)};
        w->units[i].bytes = 512ull * sizes[kinds];
        if (next_chance(&state, 12) == 0) w->units[i].flags |= STH_UNIT_KEEP;
        if (next_chance(&state, 12) == 0) w->units[i].flags |= STH_UNIT_ON_DEMAND;
    }
    for (uint32_t t = 0; t < uses; t++) {
        w->uses[t].unit = t < units ? t : 2 * units - 1 - t;
        if (next_chance(&state, 16) == 0) w->uses[t].unit = next_chance(&state, units);
        w->uses[t].compute_ns = next_chance(&state, 4) ? next_chance(&state, 30000) : 0;
        w->uses[t].gap_ns = next_chance(&state, 4) ? 0 : next_chance(&state, 9000);
    }
    w->in.link_bytes_per_s = 1e9 * (1 + next_chance(&state, 12));
    w->in.copy_overhead_ns = next_chance(&state, 2) ? next_chance(&state, 500) : 0;
    w->in.chunk_bytes = chunks[next_chance(&state, 4)];
    w->in.ring_granularity = grains[next_chance(&state, 8) < 6 ? 0 : 1 + next_chance(&state, 2)];
    w->in.ring_mapped_twice = next_chance(&state, 3) > 0;
    w->in.held_at_once = next_chance(&state, 3) ? 1 : 1 + next_chance(&state, 4);
    if (next_chance(&state, 3)) return;
    /* Stretches whose units are let go together. */
    for (uint32_t t = 0, end; t < uses; t = end) {
        end = t + 1 + next_chance(&state, 5);
        if (end > uses) end = uses;
        for (uint32_t i = t; i < end; i++) w->uses[i].held = next_chance(&state, 4) ? end - i : 0;
    }
}

static uint64_t all_bytes(const world *w) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < w->in.unit_count; i++) sum += w->units[i].bytes;
    return sum;
}

/* A budget between the smallest and what holds everything. */
static uint64_t some_budget(const world *w, uint32_t part, uint32_t parts) {
    uint64_t least = sth_plan_smallest_budget(&w->in), most = all_bytes(w);
    return most > least ? least + (most - least) / parts * part : least;
}

static bool places_meet(const sth_plan_input *in, const sth_plan *p, uint32_t a, uint32_t b) {
    uint64_t x = p->loads[a].ring_offset, y = p->loads[b].ring_offset, ring = p->ring_bytes;
    return (y + ring - x) % ring < in->units[p->loads[a].unit].bytes ||
           (x + ring - y) % ring < in->units[p->loads[b].unit].bytes;
}

/* Loads whose units are held at the same time have places of their own. */
static void check_places(const sth_plan_input *in, const sth_plan *p, uint64_t seed) {
    int64_t n = in->use_count;
    for (uint32_t a = 0; a < p->load_count; a++)
        for (uint32_t b = 0; b < p->load_count; b++)
            for (int64_t lap = 0; lap < 2; lap++) {
                const sth_plan_load *x = &p->loads[a], *y = &p->loads[b];
                if (a == b && lap == 0) continue;
                uint32_t own = in->uses[x->last_use].held;
                int64_t held = (own ? own : in->held_at_once) - 1, from = y->first_use + lap * n;
                int64_t until = x->last_use + (x->last_use < x->first_use ? n : 0) + held;
                if (from < x->first_use || from > until) continue;
                if (places_meet(in, p, a, b))
                    fail_msg("seed %llu: loads %u and %u meet", (unsigned long long)seed, a, b);
            }
}

static void check_loads(const sth_plan_input *in, const sth_plan *p, uint64_t seed) {
    uint32_t served = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        const sth_plan_load *load = &p->loads[k];
        assert_true(load->unit < in->unit_count && !p->resident[load->unit]);
        assert_true(load->first_use < in->use_count && load->last_use < in->use_count);
        assert_true(k == 0 || load->first_use > p->loads[k - 1].first_use);
        assert_true(load->ring_offset < p->ring_bytes && load->ring_offset % 512 == 0);
        uint64_t bytes = in->units[load->unit].bytes;
        assert_true(bytes <= p->ring_bytes);
        if (!in->ring_mapped_twice) assert_true(load->ring_offset + bytes <= p->ring_bytes);
        assert_int_equal(p->use_load[load->first_use], k);
        assert_int_equal(p->use_load[load->last_use], k);
    }
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t unit = in->uses[t].unit, k = p->use_load[t];
        bool demand = (in->units[unit].flags & (STH_UNIT_KEEP | STH_UNIT_ON_DEMAND)) == STH_UNIT_ON_DEMAND;
        if ((k == STH_NONE) != (p->resident[unit] || demand))
            fail_msg("seed %llu: use %u, unit %u: load or not", (unsigned long long)seed, t, unit);
        if (k == STH_NONE) continue;
        assert_true(k < p->load_count && p->loads[k].unit == unit);
        served++;
    }
    assert_true(served >= p->load_count);
}

static void check_budget(const sth_plan_input *in, const sth_plan *p) {
    uint64_t resident = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        if (p->resident[i]) resident += in->units[i].bytes;
        if (in->units[i].flags & STH_UNIT_KEEP) assert_true(p->resident[i]);
    }
    assert_true(resident + p->ring_bytes + p->demand_bytes <= in->budget);
    assert_int_equal(p->ring_bytes % in->ring_granularity, 0);
    assert_int_equal(p->prediction.resident_bytes, resident);
    assert_int_equal(p->prediction.ring_bytes, p->ring_bytes);
}

static void assert_same_prediction(const sth_prediction *a, const sth_prediction *b) {
    assert_int_equal(a->step_ns, b->step_ns);
    assert_int_equal(a->compute_ns, b->compute_ns);
    assert_int_equal(a->link_ns, b->link_ns);
    assert_int_equal(a->stall_ns, b->stall_ns);
    assert_int_equal(a->lower_bound_ns, b->lower_bound_ns);
    assert_int_equal(a->bytes_per_step, b->bytes_per_step);
    assert_int_equal(a->resident_bytes, b->resident_bytes);
    assert_int_equal(a->ring_bytes, b->ring_bytes);
    assert_int_equal(a->streamed_bytes, b->streamed_bytes);
    assert_int_equal(a->total_bytes, b->total_bytes);
    assert_int_equal(a->bound_by, b->bound_by);
}

static void check_prediction(const sth_plan_input *in, const sth_plan *p, uint64_t seed) {
    sth_prediction again;
    assert_ok(sth_plan_predict(in, p, &again));
    assert_same_prediction(&again, &p->prediction);
    assert_true(again.step_ns >= again.compute_ns && again.step_ns >= again.link_ns);
    if (again.step_ns < again.lower_bound_ns)
        fail_msg("seed %llu: step %lld below the bound %lld", (unsigned long long)seed,
                 (long long)again.step_ns, (long long)again.lower_bound_ns);
    double replayed = brute_replay(in, p), step = (double)again.step_ns;
    if (replayed < 0 || step < replayed * 0.998 - 2 || step > replayed * 1.002 + 2)
        fail_msg("seed %llu: predicted %.0f ns, replayed %.0f", (unsigned long long)seed, step, replayed);
}

/* Each load once, and what is left of written units once more. */
static void check_bytes(const sth_plan_input *in, const sth_plan *p, uint64_t seed) {
    uint64_t bytes = 0;
    bool seen[2 * MOST_UNITS] = {false};
    for (uint32_t k = 0; k < p->load_count; k++) bytes += in->units[p->loads[k].unit].bytes;
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t unit = in->uses[t].unit, k = p->use_load[t];
        bool kept = p->resident[unit] || (k != STH_NONE && p->loads[k].first_use != t);
        if (!seen[unit] && kept && (in->units[unit].flags & STH_UNIT_WRITTEN)) bytes += in->units[unit].bytes;
        seen[unit] = true;
    }
    if (bytes != p->prediction.bytes_per_step)
        fail_msg("seed %llu: %llu bytes a step, predicted %llu", (unsigned long long)seed, (unsigned long long)bytes,
                 (unsigned long long)p->prediction.bytes_per_step);
}

static void check_plan_of(world *w, uint64_t seed) {
    sth_plan *p = NULL;
    w->in.budget = some_budget(w, (uint32_t)(seed % 5), 6);
    if (sth_plan_create(&w->in, &p) != STH_OK)
        fail_msg("seed %llu: %s", (unsigned long long)seed, sth_last_error()->message);
    check_budget(&w->in, p);
    check_loads(&w->in, p, seed);
    check_places(&w->in, p, seed);
    check_bytes(&w->in, p, seed);
    check_prediction(&w->in, p, seed);
    sth_plan_destroy(p);
}

static void every_plan_keeps_the_rules(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= few_under_sanitizers(40, 100); seed++) {
        world w;
        random_world(&w, seed);
        check_plan_of(&w, seed);
    }
}

/* ---- a plan that follows another one ---- */

static void every_plan_that_follows_one_keeps_the_rules(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        world w;
        uint64_t random = seed * 17 + 3;
        random_world(&w, seed);
        for (uint32_t i = 0; i < w.in.unit_count; i++)
            if (next_chance(&random, 2)) w.units[i].flags |= STH_UNIT_PRESENT;
        w.in.change_steps = 1 + (uint32_t)(seed % 8);
        w.in.most_simulations = seed % 2 ? 0 : 64;
        check_plan_of(&w, seed);
    }
}

/* Of the figures' model, with residents where a plan for other compute times has put them: how many bytes of them the
 * next plan lets go, and how its step is to that of a plan that is free to choose. */
static uint64_t bytes_let_go(double compute_ns, uint32_t change_steps, double *out_slower) {
    world w;
    (void)figure_world(&w, 20e6, 0.6);
    sth_plan *before = NULL, *free_to_choose = NULL, *after = NULL;
    assert_ok(sth_plan_create(&w.in, &before));
    (void)figure_world(&w, compute_ns, 0.6);
    for (uint32_t t = 0; t < w.in.use_count; t++) /* the first half computes three times as long as the second */
        w.uses[t].compute_ns = w.uses[t].compute_ns * (t < w.in.use_count / 2 ? 3 : 1) / 2;
    assert_ok(sth_plan_create(&w.in, &free_to_choose));
    for (uint32_t i = 0; i < w.in.unit_count; i++)
        if (before->resident[i]) w.units[i].flags |= STH_UNIT_PRESENT;
    w.in.change_steps = change_steps;
    assert_ok(sth_plan_create(&w.in, &after));
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < w.in.unit_count; i++)
        bytes += before->resident[i] && !after->resident[i] ? w.units[i].bytes : 0;
    *out_slower = (double)after->prediction.step_ns / (double)free_to_choose->prediction.step_ns;
    sth_plan_destroy(before);
    sth_plan_destroy(free_to_choose);
    sth_plan_destroy(after);
    return bytes;
}

/* Where the link hides behind compute wherever residents lie, all stay; where it does not, as many go as pay: more of
 * them where the plan is to last longer. */
static void residents_stay_unless_a_change_pays(void **state) {
    (void)state;
    double slower;
    uint64_t all = 24ull * 12 * HIDDEN * HIDDEN * 2;
    assert_true(bytes_let_go(600e6, 2, &slower) < all / 50);
    assert_true(slower < 1.001);
    uint64_t few = bytes_let_go(45e6, 1, &slower);
    assert_true(slower < 1.25);
    uint64_t more = bytes_let_go(45e6, 1000, &slower);
    assert_true(slower < 1.02);
    assert_true(few <= more);
    assert_true(more < all * 6 / 10);
}

/* The ring, and what there is for one beside the residents; UINT64_MAX: nothing streams. */
static uint64_t ring_of(world *w, uint64_t least, uint64_t *out_room) {
    sth_plan *p = NULL;
    w->in.least_ring_bytes = least;
    assert_int_equal(sth_plan_create(&w->in, &p), STH_OK);
    uint64_t ring = p->load_count ? p->ring_bytes : UINT64_MAX;
    *out_room = w->in.budget - p->demand_bytes - p->prediction.resident_bytes;
    sth_plan_destroy(p);
    return ring;
}

/* Where no plan runs with so much, one with less is better than none. */
static void a_ring_is_as_large_as_is_asked_for(void **state) {
    (void)state;
    uint32_t grown = 0, small = 0;
    for (uint64_t seed = 1; seed <= few_under_sanitizers(40, 100); seed++) {
        world w;
        random_world(&w, seed);
        w.in.ring_granularity = 512;
        w.in.least_ring_bytes = 200 * 512;
        check_plan_of(&w, seed);
        uint64_t least = 200 * 512, room, free_choice = ring_of(&w, 0, &room), ring = ring_of(&w, least, &room);
        if (ring == UINT64_MAX) continue;
        grown += free_choice < least && ring >= least;
        small += ring < least && room >= least;
    }
    assert_true(grown > few_under_sanitizers(3, 10));
    assert_int_equal(small, 0);
}

/* A part of the units of random worlds, or all: which does not depend on the world. */
static void write_some(world *w, uint64_t seed, bool all) {
    uint64_t state = seed * 31 + 5;
    for (uint32_t i = 0; i < w->in.unit_count; i++)
        if (all || next_chance(&state, 3) == 0) w->units[i].flags |= STH_UNIT_WRITTEN;
}

static void every_plan_of_written_units_keeps_the_rules(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= few_under_sanitizers(40, 200); seed++) {
        world w;
        random_world(&w, seed);
        write_some(&w, seed, seed % 2);
        check_plan_of(&w, seed);
    }
}

/* Plans that were made before it was known: what they keep over the step's end comes again. */
static void a_plan_is_priced_for_what_is_written(void **state) {
    (void)state;
    uint32_t kept = 0;
    for (uint64_t seed = 1; seed <= few_under_sanitizers(50, 200); seed++) {
        world w;
        random_world(&w, seed);
        w.in.budget = some_budget(&w, (uint32_t)(seed % 5), 6);
        sth_plan *p = NULL;
        assert_ok(sth_plan_create(&w.in, &p));
        sth_prediction before = p->prediction;
        for (uint32_t k = 0; k < p->load_count; k++) kept += p->loads[k].last_use < p->loads[k].first_use;
        write_some(&w, seed, seed % 2);
        assert_ok(sth_plan_predict(&w.in, p, &p->prediction));
        assert_true(p->prediction.step_ns + 1 >= before.step_ns);
        assert_true(p->prediction.bytes_per_step >= before.bytes_per_step);
        check_bytes(&w.in, p, seed);
        check_prediction(&w.in, p, seed);
        sth_plan_destroy(p);
    }
    if (kept <= few_under_sanitizers(0, 4)) fail_msg("only %u loads are kept over the end of the step", kept);
}

/* Full fine-tuning of 12 blocks: forward computes 36 ms and must bring in 4.83 GB, 88 ms at 55 GB/s; backward takes
 * 106 ms. */
static void training_all_weights_waits_for_the_link_in_forward(void **state) {
    (void)state;
    enum { N = 12 * LEAVES };
    world w;
    start_world(&w, N, 2 * N);
    double all = 0;
    for (uint32_t i = 0; i < N; i++) all += (double)(w.units[i].bytes = leaf_bytes(i));
    for (uint32_t i = 0; i < N; i++) {
        double part = (double)w.units[i].bytes / all;
        w.uses[i] = (sth_plan_use){i, 0, (int64_t)(36e6 * part), 0};
        w.uses[2 * N - 1 - i] = (sth_plan_use){i, 0, (int64_t)(106e6 * part), 0};
    }
    w.in.copy_overhead_ns = 0;
    w.in.budget = 3000000000;
    sth_plan *p = NULL;
    sth_prediction after;
    assert_ok(sth_plan_create(&w.in, &p));
    assert_true(p->prediction.step_ns < 145000000);
    for (uint32_t i = 0; i < N; i++) w.units[i].flags = STH_UNIT_WRITTEN;
    assert_ok(sth_plan_predict(&w.in, p, &after));
    double least = all / 55 + 106e6;
    assert_true((double)after.step_ns > 0.999 * least && (double)after.step_ns < 1.02 * least);
    assert_true(after.bytes_per_step >= (uint64_t)all);
    sth_plan_destroy(p);
    assert_ok(sth_plan_create(&w.in, &p));
    assert_true((double)p->prediction.lower_bound_ns > 0.999 * least && (double)p->prediction.step_ns < 1.02 * least);
    assert_int_equal(p->prediction.bound_by, STH_BOUND_LINK);
    sth_plan_destroy(p);
}

static void more_budget_is_never_slower(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= few_under_sanitizers(8, 28); seed++) {
        world w;
        int64_t before = INT64_MAX;
        random_world(&w, (seed + 1) / 2);
        if (seed % 2 == 0) write_some(&w, seed, seed % 4 == 0);
        for (uint32_t part = 0; part <= 8; part++) {
            w.in.budget = some_budget(&w, part, 8);
            sth_plan *p = NULL;
            assert_ok(sth_plan_create(&w.in, &p));
            if ((double)p->prediction.step_ns > 1.01 * (double)before + 2)
                fail_msg("seed %llu: part %u of the budget takes %lld ns, less took %lld",
                         (unsigned long long)seed, part, (long long)p->prediction.step_ns, (long long)before);
            if (p->prediction.step_ns < before) before = p->prediction.step_ns;
            sth_plan_destroy(p);
        }
    }
}

static void a_link_without_limit_leaves_compute(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        world w;
        random_world(&w, seed);
        w.in.link_bytes_per_s = 1e30;
        w.in.copy_overhead_ns = 0;
        w.in.budget = some_budget(&w, 0, 1);
        sth_plan *p = NULL;
        assert_ok(sth_plan_create(&w.in, &p));
        assert_in_range(p->prediction.step_ns, p->prediction.compute_ns, p->prediction.compute_ns + 1);
        assert_int_equal(p->prediction.bound_by, STH_BOUND_COMPUTE);
        sth_plan_destroy(p);
    }
}

static void the_same_input_gives_the_same_plan(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        world w;
        random_world(&w, seed * 4);
        w.in.budget = some_budget(&w, 1, 3);
        sth_plan *a = NULL, *b = NULL;
        assert_ok(sth_plan_create(&w.in, &a));
        assert_ok(sth_plan_create(&w.in, &b));
        assert_int_equal(a->load_count, b->load_count);
        assert_int_equal(a->ring_bytes, b->ring_bytes);
        assert_memory_equal(a->resident, b->resident, a->unit_count * sizeof *a->resident);
        assert_memory_equal(a->use_load, b->use_load, a->use_count * sizeof *a->use_load);
        assert_memory_equal(a->loads, b->loads, a->load_count * sizeof *a->loads);
        sth_plan_destroy(a);
        sth_plan_destroy(b);
    }
}

static void everything_that_fits_is_resident(void **state) {
    (void)state;
    world w;
    (void)figure_world(&w, 66e6, 1.0);
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    assert_int_equal(p->load_count, 0);
    assert_int_equal(p->ring_bytes, 0);
    for (uint32_t i = 0; i < p->unit_count; i++) assert_true(p->resident[i]);
    assert_int_equal(p->prediction.step_ns, p->prediction.compute_ns);
    assert_int_equal(p->prediction.lower_bound_ns, p->prediction.compute_ns);
    sth_plan_destroy(p);
}

static void a_step_without_uses_can_be_planned(void **state) {
    (void)state;
    world w;
    start_world(&w, 2, 0);
    w.units[0] = (sth_plan_unit){.bytes = 1024, .flags = STH_UNIT_KEEP};
    w.units[1] = (sth_plan_unit){.bytes = 2048};
    w.in.budget = 1024;
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    assert_true(p->resident[0] && !p->resident[1]);
    assert_int_equal(p->prediction.step_ns, 0);
    sth_plan_destroy(p);
}

/* A third of the units crosses in full: what stays is theirs, and the step is that of the others' packed bytes. */
static void units_that_cross_packed_stream_first(void **state) {
    (void)state;
    world w;
    (void)figure_world(&w, 1e6, 0.4);
    for (uint32_t i = 0; i < w.in.unit_count; i++)
        if (i / LEAVES % 3) w.units[i].transfer_bytes = w.units[i].bytes / 2;
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    uint64_t wire = 0, full = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        uint32_t u = p->loads[k].unit;
        wire += w.units[u].transfer_bytes ? w.units[u].transfer_bytes : w.units[u].bytes;
        if (!w.units[u].transfer_bytes) full += w.units[u].bytes;
    }
    assert_int_equal(p->prediction.bytes_per_step, wire);
    assert_int_equal(full, 0);
    assert_true((double)p->prediction.step_ns < 1.06 * (double)p->prediction.lower_bound_ns);
    sth_plan_destroy(p);
}

static void a_long_timeline_can_be_planned(void **state) {
    (void)state;
    enum { N = 20000 };
    sth_plan_unit *units = calloc(N, sizeof *units);
    sth_plan_use *uses = calloc(2 * N, sizeof *uses);
    assert_true(units && uses);
    uint64_t chance = 5, sum = 0;
    for (uint32_t i = 0; i < N; i++) {
        sum += units[i].bytes = 512ull * (1 + next_chance(&chance, 5000));
        uses[i] = uses[2 * N - 1 - i] = (sth_plan_use){i, 0, 20000, 0};
    }
    world w;
    start_world(&w, N, 2 * N);
    w.in.units = units;
    w.in.uses = uses;
    w.in.copy_overhead_ns = 0;
    w.in.budget = sum / 3;
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    assert_true((double)p->prediction.step_ns <= 1.05 * (double)p->prediction.lower_bound_ns);
    sth_plan_destroy(p);
    free(units);
    free(uses);
}

/* ---- predictions under other conditions ---- */

static void a_plan_is_priced_under_another_link(void **state) {
    (void)state;
    world w;
    (void)figure_world(&w, 15.7e6, 0.3);
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    w.in.link_bytes_per_s /= 2;
    w.in.copy_overhead_ns = 0;
    sth_prediction slow;
    assert_ok(sth_plan_predict(&w.in, p, &slow));
    double halved = 2 * (double)p->prediction.bytes_per_step / 55e9 * 1e9;
    assert_true((double)slow.step_ns > 0.999 * halved && (double)slow.step_ns < 1.02 * halved);
    assert_int_equal(slow.bound_by, STH_BOUND_LINK);
    sth_plan_destroy(p);
}

static void a_plan_for_something_else_is_refused(void **state) {
    (void)state;
    world w;
    sth_prediction out;
    (void)figure_world(&w, 15.7e6, 0.3);
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    w.in.use_count--;
    assert_status(sth_plan_predict(&w.in, p, &out), STH_INVALID_ARGUMENT);
    w.in.use_count++;
    uint64_t offset = p->loads[1].ring_offset;
    p->loads[1].ring_offset = p->ring_bytes;
    assert_status(sth_plan_predict(&w.in, p, &out), STH_INVALID_ARGUMENT);
    p->loads[1].ring_offset = offset;
    w.in.held_at_once = 90; /* the ring is far too small to hold so many */
    assert_status(sth_plan_predict(&w.in, p, &out), STH_INVALID_ARGUMENT);
    sth_plan_destroy(p);
}

/* ---- errors ---- */

static void too_small_a_budget_names_the_unit_and_what_works(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= few_under_sanitizers(30, 100); seed++) {
        world w;
        char number[32];
        random_world(&w, seed);
        uint64_t least = sth_plan_smallest_budget(&w.in);
        if (least == 0) continue;
        w.in.budget = least - 1;
        sth_plan *p = NULL;
        assert_status(sth_plan_create(&w.in, &p), STH_BUDGET_TOO_SMALL);
        assert_null(p);
        snprintf(number, sizeof number, "%llu", (unsigned long long)least);
        assert_non_null(strstr(sth_last_error()->message, number));
        assert_int_equal(strncmp(sth_last_error()->object, "unit ", 5), 0);
        w.in.budget = least;
        assert_ok(sth_plan_create(&w.in, &p));
        sth_plan_destroy(p);
    }
}

/* As autograd holds an adapter while its checkpointed block is computed again: beside it one unit at a time. */
static void a_small_unit_that_is_held_long_takes_its_own_bytes_alone(void **state) {
    (void)state;
    enum { BLOCK = 4, LARGE = 1 << 20, SMALL = 4096 };
    for (int twice = 0; twice < 2; twice++) {
        world w;
        start_world(&w, 2 * (BLOCK + 1), 2 * (BLOCK + 1));
        w.in.ring_mapped_twice = twice;
        for (uint32_t t = 0; t < w.in.use_count; t++) {
            bool small = t % (BLOCK + 1) == 0;
            w.units[t].bytes = small ? SMALL : LARGE;
            w.uses[t] = (sth_plan_use){.unit = t, .compute_ns = 1000, .held = small ? BLOCK + 1 : 1};
        }
        assert_int_equal(sth_plan_smallest_budget(&w.in), LARGE + SMALL);
        sth_plan *plan = NULL;
        w.in.budget = LARGE + SMALL;
        assert_ok(sth_plan_create(&w.in, &plan));
        check_places(&w.in, plan, (uint64_t)twice);
        sth_plan_destroy(plan);
    }
}

static void neighbours_that_are_held_together_are_counted(void **state) {
    (void)state;
    world w;
    start_world(&w, 12, 12);
    for (uint32_t i = 0; i < 12; i++) {
        w.units[i].bytes = 4096;
        w.uses[i] = (sth_plan_use){i, 0, 1000, 0};
    }
    for (uint32_t held = 1; held <= 4; held++) {
        w.in.held_at_once = held;
        assert_int_equal(sth_plan_smallest_budget(&w.in), 4096 * held);
    }
}

static void units_on_demand_are_set_aside(void **state) {
    (void)state;
    world w;
    start_world(&w, 4, 3);
    for (uint32_t i = 0; i < 4; i++) w.units[i].bytes = 4096;
    for (uint32_t t = 0; t < 3; t++) w.uses[t] = (sth_plan_use){t, 0, 1000, 0};
    w.units[2] = (sth_plan_unit){.bytes = 8192, .flags = STH_UNIT_ON_DEMAND};
    w.units[3] = (sth_plan_unit){.bytes = 12288, .flags = STH_UNIT_ON_DEMAND};
    assert_int_equal(sth_plan_smallest_budget(&w.in), 4096 + 12288);
    w.in.budget = 4096 + 12288;
    sth_plan *p = NULL;
    assert_ok(sth_plan_create(&w.in, &p));
    assert_int_equal(p->demand_bytes, 12288);
    assert_int_equal(p->use_load[2], STH_NONE);
    assert_false(p->resident[2]);
    sth_plan_destroy(p);
}

/* The figures' model behind a disk of 6 GB/s: what is read sets the pace, whatever else the link carries. */
static double disk_step_ns(double ram_share, double vram_share, uint64_t *out_read, uint64_t *out_ram_resident) {
    static world w;
    (void)figure_world(&w, COMPUTE_NS[0], vram_share);
    double owed = 0;
    for (uint32_t i = 0; i < BLOCKS * LEAVES; i++) {
        owed += ram_share * (double)w.units[i].bytes;
        if (owed >= (double)w.units[i].bytes / 2) owed -= (double)w.units[i].bytes;
        else w.units[i].flags = STH_UNIT_FROM_DISK;
    }
    w.in.disk_bytes_per_s = 6e9;
    sth_plan *plan = NULL;
    assert_ok(sth_plan_create(&w.in, &plan));
    sth_prediction p = plan->prediction;
    *out_read = p.disk_bytes_per_step;
    *out_ram_resident = 0;
    for (uint32_t i = 0; i < BLOCKS * LEAVES; i++)
        if (plan->resident[i] && !w.units[i].flags) *out_ram_resident += w.units[i].bytes;
    assert_true(p.step_ns >= p.disk_ns && p.disk_ns >= (int64_t)((double)p.disk_bytes_per_step / 6.0));
    assert_true(p.step_ns >= p.lower_bound_ns);
    if (p.disk_bytes_per_step) assert_int_equal(p.bound_by, STH_BOUND_DISK);
    sth_plan_destroy(plan);
    return (double)p.step_ns;
}

static void a_disk_sets_the_pace(void **state) {
    (void)state;
    uint64_t read, ram_resident, all = BLOCKS * 12 * HIDDEN * HIDDEN * 2;
    double none = disk_step_ns(0, 0.1, &read, &ram_resident);
    assert_in_range(read, all * 9 / 10, all);
    assert_true(none < (double)read / 6.0 * 1.01);
    double half = disk_step_ns(0.5, 0.1, &read, &ram_resident);
    assert_in_range(read, all * 4 / 10 - all / 50, all / 2); /* half, less what is on the device */
    assert_in_range(ram_resident, 0, all / 50);
    assert_true(none / half > 2.0 && half < (double)read / 6.0 * 1.01);
    double most = disk_step_ns(0.8, 0.3, &read, &ram_resident);
    assert_true(most < none / 8);
    (void)disk_step_ns(1, 0.3, &read, &ram_resident);
    assert_int_equal(read, 0);
}

static void invalid_inputs_are_refused(void **state) {
    (void)state;
    world good, w;
    sth_plan *p = NULL;
    (void)figure_world(&good, 15.7e6, 0.3);
#define REFUSED(change)                                                  \
    do {                                                                 \
        w = good;                                                        \
        w.in.units = w.units;                                            \
        w.in.uses = w.uses;                                              \
        change;                                                          \
        assert_status(sth_plan_create(&w.in, &p), STH_INVALID_ARGUMENT); \
        assert_int_equal(sth_plan_smallest_budget(&w.in), 0);            \
    } while (0)
    REFUSED(w.in.size = 8);
    REFUSED(w.in.units = NULL);
    REFUSED(w.in.uses = NULL);
    REFUSED(w.in.link_bytes_per_s = 0);
    REFUSED(w.in.link_bytes_per_s = -1);
    REFUSED(w.in.copy_overhead_ns = -1);
    REFUSED(w.in.disk_bytes_per_s = -1);
    REFUSED(w.in.chunk_bytes = 0);
    REFUSED(w.in.ring_granularity = 0);
    REFUSED(w.in.ring_granularity = UINT64_MAX);
    REFUSED(w.in.held_at_once = 0);
    REFUSED(w.units[3].bytes = 100);
    REFUSED(w.units[3].bytes = UINT64_MAX - 511);
    REFUSED(w.uses[5].unit = BLOCKS * LEAVES);
    REFUSED(w.uses[5].compute_ns = -1);
    REFUSED(w.uses[5].gap_ns = -1);
    REFUSED(w.uses[5].gap_ns = INT64_MAX);
#undef REFUSED
    assert_status(sth_plan_create(NULL, &p), STH_INVALID_ARGUMENT);
    assert_status(sth_plan_create(&good.in, NULL), STH_INVALID_ARGUMENT);
    assert_int_equal(sth_plan_smallest_budget(NULL), 0);
    sth_plan_destroy(NULL);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    world w;
    random_world(&w, 8);
    w.in.budget = some_budget(&w, 1, 3);
    long live = sthi_alloc_live();
    sth_status status = STH_OUT_OF_HOST_MEMORY;
    uint64_t n = 0;
    while (status != STH_OK && n < 1000) {
        sth_plan *p = NULL;
        sth_prediction out;
        sthi_fault_arm(STHI_FAULT_ALLOC, ++n, false);
        status = sth_plan_create(&w.in, &p);
        if (status == STH_OK) status = sth_plan_predict(&w.in, p, &out);
        sthi_fault_disarm_all();
        assert_true(status == STH_OK || status == STH_OUT_OF_HOST_MEMORY);
        sth_plan_destroy(p);
        assert_int_equal(sthi_alloc_live(), live);
    }
    assert_in_range(n, 40, 999);
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, true);
    assert_int_equal(sth_plan_smallest_budget(&w.in), 0);
    sthi_fault_disarm_all();
    assert_int_equal(sthi_alloc_live(), live);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(figures_are_no_worse_than_the_best_ring),
        cmocka_unit_test(figures_without_copy_overhead),
        cmocka_unit_test(forward_and_backward_keeps_pieces_at_the_turns),
        cmocka_unit_test(every_plan_keeps_the_rules),
        cmocka_unit_test(every_plan_that_follows_one_keeps_the_rules),
        cmocka_unit_test(residents_stay_unless_a_change_pays),
        cmocka_unit_test(a_ring_is_as_large_as_is_asked_for),
        cmocka_unit_test(every_plan_of_written_units_keeps_the_rules),
        cmocka_unit_test(a_plan_is_priced_for_what_is_written),
        cmocka_unit_test(training_all_weights_waits_for_the_link_in_forward),
        cmocka_unit_test(more_budget_is_never_slower),
        cmocka_unit_test(a_link_without_limit_leaves_compute),
        cmocka_unit_test(the_same_input_gives_the_same_plan),
        cmocka_unit_test(everything_that_fits_is_resident),
        cmocka_unit_test(a_step_without_uses_can_be_planned),
        cmocka_unit_test(units_that_cross_packed_stream_first), cmocka_unit_test(a_long_timeline_can_be_planned),
        cmocka_unit_test(a_plan_is_priced_under_another_link),
        cmocka_unit_test(a_plan_for_something_else_is_refused),
        cmocka_unit_test(too_small_a_budget_names_the_unit_and_what_works),
        cmocka_unit_test(a_small_unit_that_is_held_long_takes_its_own_bytes_alone),
        cmocka_unit_test(neighbours_that_are_held_together_are_counted),
        cmocka_unit_test(units_on_demand_are_set_aside),
        cmocka_unit_test(a_disk_sets_the_pace),
        cmocka_unit_test(invalid_inputs_are_refused),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
