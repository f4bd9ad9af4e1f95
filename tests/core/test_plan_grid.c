/* The planner against brute force on grids of small inputs: units of size 1-3 with compute 1-3, and every
 * budget that works. The planner's step is at most 3 % above the best one there is.
 *
 * Without arguments: cmocka cases that take seconds. `--full N [--part i/n]` walks the whole grid of N units
 * (one per rotation), printing progress. `--case "TEXT"` replays one that a failure printed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/plan_brute.h"
#include "stagehand/plan.h"
#include "support/check.h"

enum { UNIT_BYTES = 4096, UNIT_NS = 100000, CODES = 9 };
/* Where units are used twice the planner tries only some of the ways to keep places between uses. Beyond 8
 * units it does not try every set of residents: one unit of time, 1/20 of a step here, may be lost. */
/* Of more than 4 units that may stay packed only some sets are tried. */
static const double WORST = 1.03, WORST_OF_REUSE = 1.08, WORST_OF_MANY = 1.06, WORST_OF_PACKED = 1.2;

static double worst_allowed(const brute_case *c) {
    if (c->uses > c->units) return WORST_OF_REUSE;
    if ((c->packable | c->either) && c->units > 4) return WORST_OF_PACKED;
    return c->units > 8 ? WORST_OF_MANY : WORST;
}

static void describe(const brute_case *c, int budget, char *buf, size_t cap) {
    int n = snprintf(buf, cap, "%d %d %d %d %u %u %u %d :", c->units, c->uses, c->whole, c->twice,
                     c->written, c->packable, c->either, budget);
    for (int u = 0; u < c->units; u++) n += snprintf(buf + n, cap - (size_t)n, " %d", c->size[u]);
    n += snprintf(buf + n, cap - (size_t)n, " :");
    for (int t = 0; t < c->uses; t++)
        n += snprintf(buf + n, cap - (size_t)n, " %d %d", c->unit[t], c->compute[t]);
}

/* The planner's step in units of time; negative when it says that the budget is too small. */
static double planned(const brute_case *c, int budget, sth_plan **out_plan) {
    sth_plan_unit units[BRUTE_UNITS] = {0};
    sth_plan_use uses[BRUTE_USES] = {0};
    for (int u = 0; u < c->units; u++) {
        units[u].bytes = (uint64_t)c->size[u] * UNIT_BYTES;
        if (c->written >> u & 1) units[u].flags = STH_UNIT_WRITTEN;
        if (c->either >> u & 1 && c->size[u] > 1) {
            units[u].flags |= STH_UNIT_EITHER;
            units[u].transfer_bytes = (uint64_t)(c->size[u] - 1) * UNIT_BYTES;
        }
        if (c->packable >> u & 1) units[u].packed_bytes = (uint64_t)(c->size[u] - 1) * UNIT_BYTES;
    }
    for (int t = 0; t < c->uses; t++)
        uses[t] = (sth_plan_use){(uint32_t)c->unit[t], 0, (int64_t)c->compute[t] * UNIT_NS, 0};
    sth_plan_input in;
    sth_plan_input_init(&in);
    in.units = units;
    in.unit_count = (uint32_t)c->units;
    in.uses = uses;
    in.use_count = (uint32_t)c->uses;
    in.budget = (uint64_t)budget * UNIT_BYTES;
    in.link_bytes_per_s = UNIT_BYTES * (1e9 / UNIT_NS);
    in.expand_bytes_per_s = 4 * in.link_bytes_per_s;
    in.copy_overhead_ns = 0;
    in.chunk_bytes = c->whole ? UINT64_MAX : UNIT_BYTES;
    in.ring_mapped_twice = c->twice;
    sth_plan *plan = NULL;
    sth_status status = sth_plan_create(&in, &plan);
    if (status == STH_BUDGET_TOO_SMALL) return -1;
    assert_ok(status);
    double step = (double)plan->prediction.step_ns / UNIT_NS;
    if (out_plan)
        *out_plan = plan;
    else
        sth_plan_destroy(plan);
    return step;
}

static struct { long inputs, cases, above; double worst; } tally;

/* Every budget of one input. False, with the case printed, where the planner is too far above the best. */
static bool check_input(const brute_case *c) {
    double best[BRUTE_BYTES + 1];
    int total = 0;
    bool good = true;
    for (int u = 0; u < c->units; u++) total += c->size[u];
    brute_force(c, best);
    tally.inputs++;
    for (int v = 0; v <= total; v++) {
        double step = planned(c, v, NULL), ratio = 1;
        char text[256];
        tally.cases++;
        if (best[v] >= 0) ratio = step < 0 ? 99 : step / best[v];
        if (ratio > tally.worst) tally.worst = ratio;
        if (ratio > 1.0001) tally.above++;
        if (ratio <= worst_allowed(c)) continue;
        good = false;
        describe(c, v, text, sizeof text);
        printf("# planner %.3f, best %.3f, ratio %.4f: --case \"%s\"\n", step, best[v], ratio, text);
    }
    return good;
}

/* Unit i has size code[i] / 3 + 1 and compute code[i] % 3 + 1. */
static brute_case forward_case(const int *code, int units, bool whole, bool twice) {
    brute_case c = {.units = units, .uses = units, .whole = whole, .twice = twice};
    for (int u = 0; u < units; u++) {
        c.size[u] = code[u] / 3 + 1;
        c.unit[u] = u;
        c.compute[u] = code[u] % 3 + 1;
    }
    return c;
}

/* After the forward uses, backward ones with twice the compute. */
static void add_backward(brute_case *c) {
    c->uses = 2 * c->units;
    for (int u = 0; u < c->units; u++) {
        c->unit[2 * c->units - 1 - u] = u;
        c->compute[2 * c->units - 1 - u] = 2 * c->compute[u];
    }
}

/* True for one of the rotations of a code. */
static bool first_rotation(const int *code, int units) {
    for (int shift = 1; shift < units; shift++)
        for (int i = 0; i < units; i++) {
            int other = code[(i + shift) % units];
            if (other > code[i]) break;
            if (other < code[i]) return false;
        }
    return true;
}

static void decode(long number, int units, int *code) {
    for (int i = units - 1; i >= 0; i--) {
        code[i] = (int)(number % CODES);
        number /= CODES;
    }
}

static long grid_size(int units) {
    long size = 1;
    for (int i = 0; i < units; i++) size *= CODES;
    return size;
}

static void start_tally(void) { memset(&tally, 0, sizeof tally); }

static void print_tally(const char *what) {
    print_message("# %s: %ld inputs, %ld budgets, %ld above the best, worst ratio %.4f\n", what, tally.inputs,
                  tally.cases, tally.above, tally.worst);
}

static void check_grid(int units, bool whole, bool twice, const char *what) {
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (long number = 0; number < grid_size(units); number++) {
        decode(number, units, code);
        if (!first_rotation(code, units)) continue;
        brute_case c = forward_case(code, units, whole, twice);
        bad += !check_input(&c);
    }
    print_tally(what);
    assert_int_equal(bad, 0);
}

static uint32_t next_chance(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((*state >> 32) * below) >> 32);
}

static void check_sample(int units, int inputs, bool saw, bool twice, const char *what) {
    uint64_t state = 1000 + (uint64_t)units;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int i = 0; i < inputs; i++) {
        for (int u = 0; u < units; u++) code[u] = (int)next_chance(&state, CODES);
        bool whole = i % 2;
        brute_case c = forward_case(code, units, whole, twice);
        if (saw) add_backward(&c);
        bad += !check_input(&c);
    }
    print_tally(what);
    assert_int_equal(bad, 0);
}

static void grid_of_up_to_four_in_chunks(void **state) {
    (void)state;
    for (int units = 1; units <= 4; units++) check_grid(units, false, true, "chunks");
}
static void grid_of_up_to_four_in_whole_pieces(void **state) {
    (void)state;
    for (int units = 1; units <= 4; units++) check_grid(units, true, true, "whole pieces");
}
static void grid_of_up_to_four_in_a_ring_mapped_once(void **state) {
    (void)state;
    for (int units = 1; units <= 4; units++) check_grid(units, true, false, "mapped once");
}
static void samples_of_five_to_seven(void **state) {
    (void)state;
    check_sample(5, 120, false, true, "5 units");
    check_sample(6, 40, false, true, "6 units");
    check_sample(7, 16, false, true, "7 units");
}
/* More units than the planner tries all sets of: this is what its search by moves is worth. */
static void samples_of_nine_and_ten(void **state) {
    (void)state;
    check_sample(9, 30, false, true, "9 units");
    check_sample(10, 10, false, true, "10 units");
}
/* Some, and all, of the weights are trained. */
static void grid_of_up_to_three_that_are_written(void **state) {
    (void)state;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int units = 1; units <= 3; units++)
        for (long number = 0; number < grid_size(units); number++)
            for (unsigned written = 1; written < 1u << units; written++) {
                decode(number, units, code);
                brute_case c = forward_case(code, units, number % 2, number % 3);
                c.written = written;
                bad += !check_input(&c);
            }
    print_tally("written");
    assert_int_equal(bad, 0);
}
/* Some, and all, units may cross packed or as they are. */
static void grid_of_up_to_three_that_may_cross_either_way(void **state) {
    (void)state;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int units = 1; units <= 3; units++)
        for (long number = 0; number < grid_size(units); number++) {
            decode(number, units, code);
            brute_case c = forward_case(code, units, number % 2, number % 3);
            c.either = units < 3 || number % 2 ? (1u << units) - 1 : 1 + (unsigned)number % 6;
            bad += !check_input(&c);
        }
    print_tally("either way");
    assert_int_equal(bad, 0);
}
static void samples_of_four_to_six_that_may_cross_either_way(void **state) {
    (void)state;
    uint64_t state_of_chance = 77001;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int i = 0; i < 40; i++) {
        int units = 4 + i % 3;
        for (int u = 0; u < units; u++) code[u] = (int)next_chance(&state_of_chance, CODES);
        brute_case c = forward_case(code, units, i % 2, true);
        c.either = (1u << units) - 1;
        bad += !check_input(&c);
    }
    print_tally("more units, either way");
    assert_int_equal(bad, 0);
}
/* Whatever the rates: a choice is never slower than none, in which all cross as they are. */
static void a_choice_of_crossings_is_never_slower_than_none(void **state) {
    (void)state;
    uint64_t chance = 4711;
    long faster = 0, plain = 0;
    for (int i = 0; i < 400; i++) {
        enum { MOST = 40 };
        sth_plan_unit units[MOST] = {0}, as_they_are[MOST] = {0};
        sth_plan_use uses[MOST] = {0};
        sth_plan_input in;
        sth_plan_input_init(&in);
        in.unit_count = in.use_count = 5 + (uint32_t)next_chance(&chance, MOST - 5);
        uint64_t all = 0;
        for (uint32_t u = 0; u < in.unit_count; u++) {
            units[u].bytes = as_they_are[u].bytes = (1 + next_chance(&chance, 64)) * UNIT_BYTES;
            units[u].flags = STH_UNIT_EITHER;
            units[u].transfer_bytes = units[u].bytes * 7 / 10;
            uses[u] = (sth_plan_use){.unit = u, .compute_ns = (int64_t)next_chance(&chance, 4000000)};
            all += units[u].bytes;
        }
        in.uses = uses;
        in.budget = all * (20 + next_chance(&chance, 70)) / 100;
        in.link_bytes_per_s = UNIT_BYTES * (1e9 / UNIT_NS) * (double)(1 + next_chance(&chance, 8)) / 2;
        in.expand_bytes_per_s = in.link_bytes_per_s * (double)(1 + next_chance(&chance, 40));
        in.copy_overhead_ns = 0;
        in.chunk_bytes = 8 * UNIT_BYTES;
        sth_plan *chosen = NULL, *none = NULL;
        in.units = as_they_are;
        sth_status status = sth_plan_create(&in, &none);
        if (status == STH_BUDGET_TOO_SMALL) continue;
        assert_ok(status);
        in.units = units;
        assert_ok(sth_plan_create(&in, &chosen));
        if ((double)chosen->prediction.step_ns > 1.006 * (double)none->prediction.step_ns)
            fail_msg("input %d: %lld ns where plain takes %lld", i, (long long)chosen->prediction.step_ns,
                     (long long)none->prediction.step_ns);
        faster += chosen->prediction.step_ns < none->prediction.step_ns;
        plain += !chosen->prediction.expand_ns;
        sth_plan_destroy(chosen);
        sth_plan_destroy(none);
    }
    assert_true(faster > 50 && plain > 50);
}
/* Units that always cross packed are priced: what expands takes the device, and nothing else changes. */
static void expansions_without_a_choice_are_priced(void **state) {
    (void)state;
    uint64_t chance = 815;
    for (int i = 0; i < 100; i++) {
        enum { UNITS = 12 };
        sth_plan_unit units[UNITS] = {0};
        sth_plan_use uses[UNITS] = {0};
        sth_plan_input in;
        sth_plan_input_init(&in);
        for (uint32_t u = 0; u < UNITS; u++) {
            units[u].bytes = (1 + next_chance(&chance, 30)) * UNIT_BYTES;
            units[u].transfer_bytes = units[u].bytes * 7 / 10;
            units[u].flags = STH_UNIT_EXPANDED;
            uses[u] = (sth_plan_use){.unit = u, .compute_ns = UNIT_NS * (int64_t)(1 + next_chance(&chance, 30))};
        }
        in.units = units, in.uses = uses, in.unit_count = in.use_count = UNITS;
        in.budget = 120 * UNIT_BYTES, in.copy_overhead_ns = 0, in.chunk_bytes = 4 * UNIT_BYTES;
        in.link_bytes_per_s = UNIT_BYTES * (1e9 / UNIT_NS);
        in.expand_bytes_per_s = in.link_bytes_per_s * (double)(1 + next_chance(&chance, 20));
        sth_plan *plan = NULL;
        sth_status status = sth_plan_create(&in, &plan);
        if (status == STH_BUDGET_TOO_SMALL) continue;
        assert_ok(status);
        int64_t expands = 0;
        for (uint32_t k = 0; k < plan->load_count; k++)
            expands += (int64_t)((double)units[plan->loads[k].unit].bytes * 1e9 / in.expand_bytes_per_s + 0.5);
        assert_int_equal(plan->prediction.expand_ns, expands);
        assert_true(plan->prediction.step_ns >= plan->prediction.compute_ns + expands);
        sth_plan_destroy(plan);
    }
}
/* Some, and all, units may stay packed. Few: every set of them is tried. */
static void grid_of_up_to_three_that_may_stay_packed(void **state) {
    (void)state;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int units = 1; units <= 3; units++)
        for (long number = 0; number < grid_size(units); number++)
            for (unsigned packable = 1; packable < 1u << units; packable++) {
                decode(number, units, code);
                brute_case c = forward_case(code, units, number % 2, number % 3);
                c.packable = packable;
                bad += !check_input(&c);
            }
    print_tally("may stay packed");
    assert_int_equal(bad, 0);
}
static void samples_of_four_to_seven_that_may_stay_packed(void **state) {
    (void)state;
    uint64_t state_of_chance = 4242;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int i = 0; i < 90; i++) {
        int units = i % 15 ? 4 + i % 3 : 7;
        for (int u = 0; u < units; u++) code[u] = (int)next_chance(&state_of_chance, CODES);
        brute_case c = forward_case(code, units, i % 2, true);
        c.packable = i % 4 ? (1u << units) - 1 : next_chance(&state_of_chance, 1u << units);
        bad += !check_input(&c);
    }
    print_tally("more units that may stay packed");
    assert_int_equal(bad, 0);
}
static void samples_of_forward_and_backward_that_are_written(void **state) {
    (void)state;
    uint64_t state_of_chance = 77;
    int code[BRUTE_UNITS], bad = 0;
    start_tally();
    for (int i = 0; i < 120; i++) {
        int units = 3 + i % 2;
        for (int u = 0; u < units; u++) code[u] = (int)next_chance(&state_of_chance, CODES);
        brute_case c = forward_case(code, units, i % 2, true);
        add_backward(&c);
        c.written = i % 3 ? (1u << units) - 1 : next_chance(&state_of_chance, 1u << units);
        bad += !check_input(&c);
    }
    print_tally("forward and backward, written");
    assert_int_equal(bad, 0);
}
static void samples_of_forward_and_backward(void **state) {
    (void)state;
    check_sample(3, 100, true, true, "forward and backward over 3 units");
    check_sample(4, 30, true, true, "forward and backward over 4 units");
}

static int full(int units, int part, int parts) {
    int code[BRUTE_UNITS], bad = 0;
    long size = grid_size(units), step = size / 100 + 1;
    start_tally();
    for (long number = part; number < size; number += parts) {
        decode(number, units, code);
        if (first_rotation(code, units))
            for (int whole = 0; whole < 2; whole++) {
                brute_case c = forward_case(code, units, whole, true);
                bad += !check_input(&c);
            }
        if (number / step != (number - parts) / step) {
            printf("# %ld of %ld: %ld inputs, %ld budgets, %ld above the best, worst %.4f, %d too far\n",
                   number, size, tally.inputs, tally.cases, tally.above, tally.worst, bad);
            fflush(stdout);
        }
    }
    printf("# done, %d units, part %d/%d: %ld inputs, %ld budgets, %ld above the best, worst %.4f, "
           "%d too far\n",
           units, part, parts, tally.inputs, tally.cases, tally.above, tally.worst, bad);
    return bad != 0;
}

static bool next_number(char **text, int low, int high, int *out) {
    while (**text == ' ' || **text == ':') ++*text;
    char *end;
    long n = strtol(*text, &end, 10);
    if (end == *text || n < low || n > high) return false;
    *text = end;
    *out = (int)n;
    return true;
}

static int replay(char *text) {
    brute_case c = {0};
    int whole, twice, written, packable, either, budget;
    bool ok = next_number(&text, 1, BRUTE_UNITS, &c.units) && next_number(&text, 1, BRUTE_USES, &c.uses) &&
              next_number(&text, 0, 1, &whole) && next_number(&text, 0, 1, &twice) &&
              next_number(&text, 0, (1 << BRUTE_UNITS) - 1, &written) &&
              next_number(&text, 0, (1 << BRUTE_UNITS) - 1, &packable) &&
              next_number(&text, 0, (1 << BRUTE_UNITS) - 1, &either) && next_number(&text, 0, BRUTE_BYTES, &budget);
    for (int u = 0; ok && u < c.units; u++) ok = next_number(&text, 1, 3, &c.size[u]);
    for (int t = 0; ok && t < c.uses; t++)
        ok = next_number(&text, 0, c.units - 1, &c.unit[t]) && next_number(&text, 0, 99, &c.compute[t]);
    if (!ok) {
        fprintf(stderr, "not a case as printed by a failure\n");
        return 2;
    }
    c.whole = whole;
    c.twice = twice;
    c.written = (unsigned)written;
    c.packable = (unsigned)packable;
    c.either = (unsigned)either;
    sth_plan *plan = NULL;
    double best[BRUTE_BYTES + 1], step = planned(&c, budget, &plan);
    brute_force(&c, best);
    printf("planner %.4f, best %.4f\n", step, best[budget]);
    for (int u = 0; plan && u < c.units; u++)
        printf("unit %d: %s\n", u, plan->resident[u] ? "resident" : "streams");
    for (uint32_t k = 0; plan && k < plan->load_count; k++) {
        const sth_plan_load *load = &plan->loads[k];
        printf("load %u: unit %u, uses %u-%u, at %.3f of %.3f\n", k, load->unit, load->first_use,
               load->last_use, (double)load->ring_offset / UNIT_BYTES, (double)plan->ring_bytes / UNIT_BYTES);
    }
    sth_plan_destroy(plan);
    return !(best[budget] < 0 || (step >= 0 && step <= worst_allowed(&c) * best[budget]));
}

static int usage(void) {
    fprintf(stderr, "options: --full UNITS [--part i/n] | --case \"TEXT\"\n");
    return 2;
}

int main(int argc, char **argv) {
    int units, part = 0, parts = 1;
    if (argc == 3 && strcmp(argv[1], "--case") == 0) return replay(argv[2]);
    if (argc == 3 || argc == 5) {
        char *text = argv[2];
        if (strcmp(argv[1], "--full") != 0 || !next_number(&text, 1, BRUTE_UNITS, &units)) return usage();
        if (argc == 5 && (strcmp(argv[3], "--part") != 0 || sscanf(argv[4], "%d/%d", &part, &parts) != 2 ||
                          parts < 1 || part < 0 || part >= parts))
            return usage();
        return full(units, part, parts);
    }
    if (argc != 1) return usage();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grid_of_up_to_four_in_chunks),
        cmocka_unit_test(grid_of_up_to_four_in_whole_pieces),
        cmocka_unit_test(grid_of_up_to_four_in_a_ring_mapped_once),
        cmocka_unit_test(samples_of_five_to_seven),
        cmocka_unit_test(samples_of_nine_and_ten),
        cmocka_unit_test(samples_of_forward_and_backward),
        cmocka_unit_test(grid_of_up_to_three_that_are_written),
        cmocka_unit_test(samples_of_forward_and_backward_that_are_written),
        cmocka_unit_test(grid_of_up_to_three_that_may_stay_packed),
        cmocka_unit_test(samples_of_four_to_seven_that_may_stay_packed),
        cmocka_unit_test(grid_of_up_to_three_that_may_cross_either_way),
        cmocka_unit_test(samples_of_four_to_six_that_may_cross_either_way),
        cmocka_unit_test(a_choice_of_crossings_is_never_slower_than_none),
        cmocka_unit_test(expansions_without_a_choice_are_priced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
