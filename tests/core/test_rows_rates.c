/* Hit rates of the rows' policy with a skewed router, against other policies that are simulated offline: each table's
 * experts are drawn by Zipf's law, and which are in favor may change on the way, as topics do. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "core/rows.h"
#include "support/check.h"

enum { TABLES = 8, ROWS = 64, EACH = 4 };

typedef enum policy { LRU, LFU, LFRU, POLICIES } policy; /* LFRU: uses by the time since the last one */

typedef struct offline { /* one policy, over the same slots */
    double uses[TABLES][ROWS], last[TABLES][ROWS];
    bool in[TABLES][ROWS];
    uint32_t held;
    uint64_t misses;
} offline;

typedef struct router {
    double weights[ROWS], sum;
    uint32_t order[TABLES][ROWS]; /* rows by favor */
    uint64_t drawn;
} router;

static uint64_t draw(router *r) { return sthi_random64(11, r->drawn++); }

static void shuffle(router *r) {
    for (uint32_t t = 0; t < TABLES; t++) {
        for (uint32_t i = 0; i < ROWS; i++) r->order[t][i] = i;
        for (uint32_t i = ROWS - 1; i > 0; i--) {
            uint32_t k = (uint32_t)(draw(r) % (i + 1)), was = r->order[t][i];
            r->order[t][i] = r->order[t][k];
            r->order[t][k] = was;
        }
    }
}

static void route(router *r, uint32_t table, bool *want) {
    memset(want, 0, ROWS * sizeof *want);
    for (uint32_t n = 0; n < EACH;) {
        double at = (double)(draw(r) >> 11) / (double)(1ull << 53) * r->sum;
        uint32_t pick = 0;
        while (pick < ROWS - 1 && (at -= r->weights[pick]) > 0) pick++;
        bool *row = &want[r->order[table][pick]];
        n += !*row;
        *row = true;
    }
}

static double worth(const offline *o, policy p, uint32_t t, uint32_t row, double now) {
    if (p == LRU) return o->last[t][row];
    return p == LFU ? o->uses[t][row] : o->uses[t][row] / (now - o->last[t][row] + 1);
}

static void evict(offline *o, policy p, uint32_t table, const bool *want, double now) {
    uint32_t from = 0, out = 0;
    double least = INFINITY;
    for (uint32_t t = 0; t < TABLES; t++)
        for (uint32_t row = 0; row < ROWS; row++) {
            if (!o->in[t][row] || (t == table && want[row]) || worth(o, p, t, row, now) >= least) continue;
            least = worth(o, p, t, row, now);
            from = t;
            out = row;
        }
    o->in[from][out] = false;
    o->held--;
}

static void call_offline(offline *o, policy p, uint32_t table, const bool *want, double now, uint32_t slots,
                         bool counts) {
    for (uint32_t row = 0; row < ROWS; row++) {
        if (!want[row]) continue;
        o->uses[table][row] += 1;
        o->last[table][row] = now;
        if (o->in[table][row]) continue;
        o->misses += counts;
        if (o->held == slots) evict(o, p, table, want, now);
        o->in[table][row] = true;
        o->held++;
    }
}

static uint64_t call_ours(sthi_rows *r, uint32_t table, const bool *want) {
    uint32_t rows[EACH], uses[EACH], count = 0, missing;
    sthi_rows_load loads[EACH];
    for (uint32_t row = 0; row < ROWS; row++) {
        if (!want[row]) continue;
        rows[count] = row;
        uses[count++] = 1;
    }
    assert_true(sthi_rows_ask(r, table, rows, uses, count, 1, loads, &missing));
    for (uint32_t i = 0; i < count; i++) sthi_rows_end(r, sthi_rows_slot_of(r, table, rows[i]));
    return missing;
}

/* Hit rates of all policies behind a quarter of the tokens; drift: tokens after which others are in favor; 0: never. */
static void rates(double skew, uint32_t slots, uint32_t drift, uint32_t tokens, double *out_ours, double *out) {
    static offline others[POLICIES];
    static router r;
    sthi_rows ours;
    uint32_t table;
    uint64_t misses = 0, asked = 0;
    memset(others, 0, sizeof others);
    r = (router){0};
    for (uint32_t i = 0; i < ROWS; i++) r.sum += r.weights[i] = pow(i + 1, -skew);
    sthi_rows_init(&ours);
    for (uint32_t t = 0; t < TABLES; t++) assert_ok(sthi_rows_add(&ours, ROWS, &table));
    assert_ok(sthi_rows_lay(&ours, slots, slots));
    for (uint32_t n = 0; n < tokens; n++) {
        if (!n || (drift && n % drift == 0)) shuffle(&r);
        for (uint32_t t = 0; t < TABLES; t++) {
            bool want[ROWS], counts = n >= tokens / 4;
            route(&r, t, want);
            uint64_t missed = call_ours(&ours, t, want);
            misses += counts ? missed : 0;
            asked += counts ? EACH : 0;
            for (int p = 0; p < POLICIES; p++)
                call_offline(&others[p], (policy)p, t, want, n * TABLES + t, slots, counts);
        }
    }
    *out_ours = 1 - (double)misses / (double)asked;
    for (int p = 0; p < POLICIES; p++) out[p] = 1 - (double)others[p].misses / (double)asked;
    sthi_rows_fini(&ours);
}

static void a_skewed_router_hits_as_often_as_with_the_best_of_others(void **state) {
    (void)state;
    static const double skews[] = {0.8, 1.0, 1.3};
    uint32_t tokens = 200 * cases_to_try(2);
    for (int i = 0; i < 3; i++)
        for (uint32_t slots = TABLES * ROWS / 8; slots <= TABLES * ROWS / 2; slots *= 4)
            for (uint32_t drift = 0; drift <= 200; drift += 200) {
                double ours, others[POLICIES];
                rates(skews[i], slots, drift, tokens, &ours, others);
                print_message("# Zipf %.1f, slots for %2d %%, %s: %.3f; LRU %.3f, LFU %.3f, LFRU %.3f\n", skews[i],
                              (int)(100 * slots / (TABLES * ROWS)), drift ? "topics change" : "one topic", ours,
                              others[LRU], others[LFU], others[LFRU]);
                assert_true(ours >= others[LRU] && ours >= others[LFRU]);
                assert_true(ours >= others[LFU] - 0.015); /* which is the best where favor never changes */
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_skewed_router_hits_as_often_as_with_the_best_of_others),
    };
    return cmocka_run_group_tests_name("core/rows_rates", tests, NULL, NULL);
}
