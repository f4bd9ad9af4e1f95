/* The budget of a model before it runs, against a slow answer by the definition, on random models, and against
 * memory in which what is held lies as badly as it can. */
#include "core/advice.h"
#include "support/check.h"

#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/random.h"
#include "quant/segment.h"

#define MIB (UINT64_C(1) << 20)
#define STAYS STH_BUDGET_STAYS

enum { WEIGHTS = 10, MODULES = 6, PAIRS = 40 };

typedef struct model {
    sth_budget_model m;
    sth_budget_weight weights[WEIGHTS];
    uint32_t modules[MODULES];
    sth_budget_pair owners[PAIRS], inside[PAIRS];
    sth_segment segments[WEIGHTS];
} model;

static void begin(model *x) {
    memset(x, 0, sizeof *x);
    sth_budget_model_init(&x->m);
    x->m.weights = x->weights;
    x->m.modules = x->modules;
    x->m.owners = x->owners;
    x->m.inside = x->inside;
}

static uint32_t add_module(model *x, uint32_t flags) {
    x->modules[x->m.module_count] = flags;
    return x->m.module_count++;
}

static void owns(model *x, uint32_t module, uint32_t weight) {
    x->owners[x->m.owner_count++] = (sth_budget_pair){module, weight};
}

static uint32_t add_weight(model *x, uint32_t module, uint64_t bytes, uint32_t flags) {
    x->weights[x->m.weight_count] = (sth_budget_weight){.bytes = bytes, .module = module, .flags = flags};
    owns(x, module, x->m.weight_count);
    return x->m.weight_count++;
}

static void put_inside(model *x, uint32_t outer, uint32_t inner) {
    x->inside[x->m.inside_count++] = (sth_budget_pair){outer, inner};
}

/* Stands for tensors: `rows` of `cols` packed bytes, as many in a piece as fit. */
static uint64_t in_rows(const sth_segment *s, uint64_t piece) {
    uint64_t rows = piece / s->cols ? piece / s->cols : 1;
    return (rows < s->rows ? rows : s->rows) * s->cols;
}

static sth_budget_advice *advice(const model *x, uint64_t budget) {
    sth_budget_advice *a = NULL;
    assert_ok(sthi_budget_advise(&x->m, in_rows, budget, &a));
    return a;
}

/* ---- the slow answer ---- */

typedef struct answer {
    uint32_t unit[WEIGHTS], units;
    uint64_t stays, places, total, held, whole, apart, largest;
    bool stored, in_place[WEIGHTS], outer[WEIGHTS];
} answer;

static bool is_small(const sth_budget_weight *w) { return w->flags & STH_WEIGHT_SMALL || w->bytes <= 4096; }

/* The weight that is the next to stay: small, not there yet, and before all others of those. */
static int next_small(const model *x, const bool *stays) {
    int best = -1;
    for (int pass = 0; pass < 2 && best < 0; pass++)
        for (uint32_t w = 0; w < x->m.weight_count; w++) {
            bool outer = x->modules[x->weights[w].module] & STH_MODULE_OUTER;
            if (stays[w] || !is_small(&x->weights[w]) || outer != !pass) continue;
            if (best < 0 || x->weights[w].bytes < x->weights[best].bytes) best = (int)w;
        }
    return best;
}

static uint64_t bytes_of(const model *x, const answer *a, uint32_t unit) {
    uint64_t sum = 0;
    for (uint32_t w = 0; w < x->m.weight_count; w++) sum += a->unit[w] == unit ? x->weights[w].bytes : 0;
    return sum;
}

static bool module_has(const model *x, const answer *a, uint32_t module, uint32_t unit) {
    for (uint32_t i = 0; i < x->m.owner_count; i++)
        if (x->owners[i].first == module && a->unit[x->owners[i].second] == unit) return true;
    return false;
}

static bool leases(const model *x, const answer *a, uint32_t module) {
    for (uint32_t u = 0; u < a->units; u++)
        if (module_has(x, a, module, u)) return true;
    return false;
}

typedef struct leased {
    uint64_t sum, units, stay, most;
} leased;

static leased lease(const model *x, const answer *a, uint32_t module, bool without_outer) {
    leased l = {0};
    for (uint32_t u = 0; u < a->units; u++) {
        if (!module_has(x, a, module, u) || a->in_place[u] || (without_outer && a->outer[u])) continue;
        l.units++;
        l.sum += bytes_of(x, a, u);
        if (bytes_of(x, a, u) > l.most) l.most = bytes_of(x, a, u);
    }
    for (uint32_t i = 0; i < x->m.owner_count; i++)
        if (x->owners[i].first == module && a->unit[x->owners[i].second] == STAYS)
            l.stay += x->weights[x->owners[i].second].bytes;
    if (x->modules[module] & STH_MODULE_LIST) l = (leased){l.most, l.units > 0, 0, l.most};
    return l;
}

/* All units of the module in one piece of memory, whatever is held beside it and wherever that lies. */
static uint64_t module_room(const model *x, const answer *a, uint32_t m, bool without_outer) {
    leased own = lease(x, a, m, without_outer);
    uint64_t held = 0, pieces = 0;
    for (uint32_t i = 0; i < x->m.inside_count; i++) {
        leased outer = lease(x, a, x->inside[i].first, without_outer);
        if (x->inside[i].second != m || !outer.units) continue;
        held += outer.sum + outer.stay;
        pieces += outer.units;
    }
    uint64_t gaps = 1 + (x->m.one_extent ? 1 : 2) * pieces + (x->modules[m] & STH_MODULE_LIST ? 2 : 0);
    return gaps == 1 ? own.sum : held + gaps * (own.units ? own.sum + own.stay : 0);
}

static uint64_t room(const model *x, const answer *a, bool without_outer) {
    uint64_t most = 0;
    for (uint32_t u = 0; u < a->units; u++)
        if (!a->in_place[u] && !(without_outer && a->outer[u]) && bytes_of(x, a, u) > most) most = bytes_of(x, a, u);
    for (uint32_t m = 0; m < x->m.module_count; m++) {
        uint64_t here = leases(x, a, m) ? module_room(x, a, m, without_outer) : 0;
        if (here > most) most = here;
    }
    return most;
}

static answer slow(const model *x, uint32_t small) {
    answer a = {.stays = x->m.fixed_bytes};
    bool stays[WEIGHTS] = {false};
    for (uint32_t i = 0; i < small; i++) stays[next_small(x, stays)] = true;
    int last = -1;
    uint32_t members[WEIGHTS] = {0};
    for (uint32_t w = 0; w < x->m.weight_count; w++) {
        const sth_budget_weight *weight = &x->weights[w];
        a.unit[w] = STAYS;
        if (stays[w]) {
            a.stays += weight->bytes;
            continue;
        }
        bool same = last >= 0 && x->weights[last].module == weight->module && x->weights[last].kind == weight->kind;
        if (!same || x->modules[weight->module] & STH_MODULE_LIST) a.units++;
        a.unit[w] = a.units - 1;
        a.in_place[a.units - 1] = !members[a.units - 1]++ && weight->flags & STH_WEIGHT_IN_PLACE;
        last = (int)w;
    }
    for (uint32_t i = 0; i < x->m.inside_count; i++)
        for (uint32_t u = 0; u < a.units; u++)
            if (leases(x, &a, x->inside[i].second) && module_has(x, &a, x->inside[i].first, u)) a.outer[u] = true;
    for (uint32_t u = 0; u < a.units; u++) {
        uint64_t bytes = a.in_place[u] ? 0 : bytes_of(x, &a, u);
        a.total += bytes;
        a.held += a.outer[u] ? bytes : 0;
        if (bytes > a.largest) a.largest = bytes;
    }
    for (uint32_t w = 0; w < x->m.weight_count; w++)
        if (a.unit[w] != STAYS && !a.in_place[a.unit[w]] && x->weights[w].packed)
            a.stored |= (x->weights[w].flags & STH_WEIGHT_STORED) != 0;
    a.apart = room(x, &a, false);
    a.whole = x->m.one_extent ? a.apart : a.held + room(x, &a, true);
    a.places = a.whole < a.apart ? a.whole : a.apart;
    if (a.total < a.places) a.places = a.total;
    return a;
}

static uint64_t slow_stages(const model *x, const answer *a, uint64_t piece) {
    uint64_t most = 0;
    for (uint32_t u = 0; u < a->units; u++) {
        bool packed = false, trains = false, stored = false;
        for (uint32_t w = 0; w < x->m.weight_count; w++) {
            if (a->unit[w] != u) continue;
            packed |= x->weights[w].packed != NULL;
            trains |= (x->weights[w].flags & STH_WEIGHT_TRAINS) != 0;
            stored |= x->weights[w].packed && x->weights[w].flags & STH_WEIGHT_STORED;
        }
        if (!packed || (trains && !stored) || a->in_place[u]) continue;
        for (uint32_t w = 0; w < x->m.weight_count; w++) {
            if (a->unit[w] != u) continue;
            uint64_t bytes = x->weights[w].bytes < piece ? x->weights[w].bytes : piece;
            if (x->weights[w].packed) bytes = in_rows(x->weights[w].packed, piece);
            if (bytes > most) most = bytes;
        }
    }
    return 3 * most;
}

static uint64_t slow_least(const model *x, const answer *a, uint64_t piece) {
    uint64_t bytes = a->stays + slow_stages(x, a, piece) + a->places;
    if (!a->stored && a->stays + a->total < bytes) bytes = a->stays + a->total;
    return bytes > a->stays ? bytes : a->stays + 1;
}

/* How many small weights an eighth of the budget holds. */
static uint32_t most_small(const model *x, uint64_t budget) {
    uint64_t total = 0;
    bool stays[WEIGHTS] = {false};
    for (uint32_t count = 0;; count++) {
        int next = next_small(x, stays);
        if (next < 0 || (total += x->weights[next].bytes) * 8 > budget) return count;
        stays[next] = true;
    }
}

static bool slow_works(const model *x, uint64_t budget) {
    for (uint32_t k = 0; k <= most_small(x, budget); k++) {
        answer a = slow(x, k);
        if (slow_least(x, &a, 16 << 10) <= budget) return true;
    }
    return false;
}

/* ---- random models ---- */

typedef struct dice {
    uint64_t key, at;
} dice;

static uint64_t roll(dice *d, uint64_t sides) { return sthi_random64(d->key, d->at++) % sides; }

/* Modules stand in a tree; children come behind their parents. */
static model random_model(dice *d, bool packed) {
    model x;
    begin(&x);
    uint32_t count = 1 + (uint32_t)roll(d, MODULES);
    uint32_t parent[MODULES];
    for (uint32_t i = 0; i < count; i++) {
        (void)add_module(&x, roll(d, 5) ? 0 : STH_MODULE_LIST);
        parent[i] = i && roll(d, 2) ? (uint32_t)roll(d, i) : UINT32_MAX;
        for (uint32_t up = parent[i]; up != UINT32_MAX; up = parent[up]) {
            put_inside(&x, up, i);
            x.modules[up] |= STH_MODULE_OUTER;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        for (uint64_t n = roll(d, 4); n && x.m.weight_count < WEIGHTS; n--) {
            uint64_t bytes = 512 * (1 + roll(d, roll(d, 2) ? 8 : packed ? 4000 : 200));
            uint32_t w = add_weight(&x, i, bytes, (uint32_t)roll(d, 2) * STH_WEIGHT_SMALL);
            if (!roll(d, 6)) x.weights[w].flags |= STH_WEIGHT_IN_PLACE;
            if (!roll(d, 6)) x.weights[w].flags |= STH_WEIGHT_TRAINS;
            x.weights[w].kind = (uint32_t)roll(d, 5) / 4;
            if (!packed || !roll(d, 2)) continue;
            if (!roll(d, 3)) x.weights[w].flags |= STH_WEIGHT_STORED;
            x.segments[w] = (sth_segment){.rows = 1 + roll(d, 200), .cols = 512 * (1 + roll(d, 100))};
        }
    for (uint32_t w = 0; w < x.m.weight_count; w++)
        if (!roll(d, 4) && x.weights[w].module + 1 < count) owns(&x, x.weights[w].module + 1, w); /* tied */
    x.m.fixed_bytes = roll(d, 2) * roll(d, 20000);
    x.m.one_extent = !roll(d, 4);
    return x;
}

/* Where the model lies now. */
static void point(model *x) {
    x->m.weights = x->weights;
    x->m.modules = x->modules;
    x->m.owners = x->owners;
    x->m.inside = x->inside;
    for (uint32_t w = 0; w < x->m.weight_count; w++)
        x->weights[w].packed = x->segments[w].rows ? &x->segments[w] : NULL;
}

/* More than three stages only where they take 1/64 of the budget at most, and places keep what they need. */
static bool has_stages(const model *x, const sth_budget_advice *a, const answer *want, uint64_t budget) {
    uint64_t three = slow_stages(x, want, a->piece_bytes), least = slow_least(x, want, a->piece_bytes);
    if (a->stages < 3 || a->stages > 17 || a->stage_bytes != three / 3 * a->stages) return false;
    if (a->stages == 3) return true;
    return a->stage_bytes <= budget / 64 && least + (a->stage_bytes - three) <= budget;
}

static bool answers(const model *x, const sth_budget_advice *a, uint32_t small, uint64_t piece,
                    uint64_t budget) {
    answer want = slow(x, small);
    return a->unit_count == want.units && !memcmp(a->unit, want.unit, x->m.weight_count * sizeof *a->unit) &&
           a->piece_bytes == piece && a->stays_bytes == want.stays && has_stages(x, a, &want, budget);
}

/* What a budget that works is used for: as many small weights as may stay, with the largest piece. */
static void check_choice(const model *x, const sth_budget_advice *a, uint64_t budget) {
    uint64_t most = budget / 256 / 512 * 512;
    most = most < 16 << 10 ? 16 << 10 : most > 8 << 20 ? 8 << 20 : most;
    for (uint32_t k = most_small(x, budget);; k--) {
        answer want = slow(x, k);
        for (uint64_t piece = most;; piece = piece / 2 > 16 << 10 ? piece / 2 / 512 * 512 : 16 << 10) {
            if (slow_least(x, &want, piece) <= budget) {
                assert_true(answers(x, a, k, piece, budget));
                return;
            }
            if (piece == 16 << 10) break;
        }
        assert_true(k > 0);
    }
}

static void check_rest(const model *x, const sth_budget_advice *a, uint64_t budget) {
    uint32_t stay = 0;
    for (uint32_t w = 0; w < x->m.weight_count; w++) stay += a->unit[w] == STAYS;
    answer want = slow(x, stay);
    uint64_t used = a->stays_bytes + a->stage_bytes, left = budget > used ? budget - used : 0;
    bool keeps = want.whole <= left && (4 * want.held <= left || want.apart > left);
    uint64_t least = keeps ? want.whole : want.apart, comfortable = 3 * want.largest;
    assert_int_equal(a->least_room, least < want.total ? least : want.total);
    assert_int_equal(a->units_bytes, want.total);
    assert_int_equal(a->units_least, want.places);
    assert_int_equal(a->comfortable, used + (comfortable > want.places ? comfortable : want.places));
    for (uint32_t u = 0; u < want.units; u++)
        assert_int_equal(a->keep[u], keeps && want.outer[u] && !want.in_place[u]);
}

static void check_budget(const model *x, uint64_t budget, uint64_t smallest) {
    sth_budget_advice *a = advice(x, budget);
    assert_int_equal(a->works, slow_works(x, budget));
    assert_int_equal(a->smallest, smallest);
    if (a->works) check_choice(x, a, budget);
    check_rest(x, a, budget);
    sthi_budget_advice_destroy(a);
}

static void check_model(const model *x, dice *d) {
    sth_budget_advice *a = advice(x, 0);
    uint64_t smallest = a->smallest;
    assert_false(a->works);
    sthi_budget_advice_destroy(a);
    check_budget(x, smallest, smallest);
    check_budget(x, smallest - 1, smallest);
    for (int i = 0; i < 20; i++) check_budget(x, roll(d, 2 * smallest), smallest);
    check_budget(x, smallest + roll(d, 64 * MIB), smallest);
}

static void test_all_answers_are_those_of_the_definition(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < cases_to_try(600); seed++) {
        dice d = {.key = seed};
        model x = random_model(&d, seed % 3 == 0);
        point(&x);
        check_model(&x, &d);
    }
}

static void test_every_budget_from_the_smallest_on_works_and_none_below(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < cases_to_try(40); seed++) {
        dice d = {.key = 1000 + seed};
        model x = random_model(&d, false);
        point(&x);
        sth_budget_advice *a = advice(&x, 0);
        uint64_t smallest = a->smallest;
        sthi_budget_advice_destroy(a);
        for (uint64_t budget = smallest % 256; budget < smallest + 100000; budget += 256)
            assert_int_equal(slow_works(&x, budget), budget >= smallest);
    }
}

static uint64_t room_of(const model *x, uint64_t budget) {
    sth_budget_advice *a = advice(x, budget);
    uint64_t used = a->stays_bytes + a->stage_bytes;
    sthi_budget_advice_destroy(a);
    return budget > used ? budget - used : 0;
}

static void test_a_budget_with_room_has_it_and_is_not_larger_than_it_must_be(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < cases_to_try(200); seed++) {
        dice d = {.key = 2000 + seed};
        model x = random_model(&d, seed % 2);
        point(&x);
        uint64_t want = 512 * roll(&d, 20000), budget = 0;
        assert_ok(sthi_budget_with_room(&x.m, in_rows, want, &budget));
        assert_true(room_of(&x, budget) >= want);
        sth_budget_advice *a = advice(&x, budget);
        assert_true(a->works);
        bool bound = budget == a->smallest || budget == a->stays_bytes + a->stage_bytes + want;
        /* Pieces come in steps: a little more than there must be is left behind one. */
        assert_true(bound || budget - (a->stays_bytes + a->stage_bytes + want) < budget / 8 + 64 * 1024);
        sthi_budget_advice_destroy(a);
    }
}

/* ---- memory ---- */

/* Whether `n` held pieces can lie in `extent` units of memory so that no gap has `want`: greedily, each behind the
 * widest gap that is too small. */
static bool can_be_in_the_way(uint64_t extent, const uint64_t *held, int n, uint64_t want) {
    uint64_t filled = 0;
    for (int i = 0; i < n; i++) filled += want - 1 + held[i];
    return extent <= filled + want - 1;
}

static void test_the_room_holds_a_unit_however_those_that_are_held_lie(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < cases_to_try(300); seed++) {
        dice d = {.key = 3000 + seed};
        model x;
        begin(&x);
        x.m.one_extent = true;
        uint64_t held[3] = {0}, own = 512 * (16 + roll(&d, 64));
        int depth = 1 + (int)roll(&d, 3);
        for (int i = 0; i < depth; i++) {
            held[i] = 512 * (16 + roll(&d, 64));
            uint32_t module = add_module(&x, STH_MODULE_OUTER);
            (void)add_weight(&x, module, held[i], 0);
            for (uint32_t up = 0; up < module; up++) put_inside(&x, up, module);
        }
        uint32_t inner = add_module(&x, 0);
        (void)add_weight(&x, inner, own, 0);
        for (uint32_t up = 0; up < inner; up++) put_inside(&x, up, inner);
        point(&x);
        sth_budget_advice *a = advice(&x, 1 << 30);
        answer all = slow(&x, 0);
        assert_false(can_be_in_the_way(all.apart, held, depth, own));
        assert_int_equal(a->least_room, all.apart < all.total ? all.apart : all.total);
        sthi_budget_advice_destroy(a);
    }
}

/* ---- rules, one by one ---- */

static void test_small_weights_stay_as_far_as_an_eighth_of_the_budget_holds_them(void **state) {
    (void)state;
    model x;
    begin(&x);
    for (uint32_t i = 0; i < 4; i++) {
        (void)add_module(&x, i == 2 ? STH_MODULE_OUTER : 0);
        (void)add_weight(&x, i, 512, STH_WEIGHT_SMALL);
        (void)add_weight(&x, i, 8192, 0);
    }
    static const uint32_t first[] = {2, 0, 1, 3}; /* those of modules with others inside come before */
    for (uint32_t stay = 0; stay <= 4; stay++) {
        sth_budget_advice *a = advice(&x, 8 * 512 * stay + 100);
        assert_int_equal(a->works, stay >= 3);
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(a->unit[2 * first[i]] == STAYS, i < stay);
        sthi_budget_advice_destroy(a);
    }
}

/* All of an eighth, and the unit that is left: too little for both. */
static void test_small_weights_stream_where_the_rest_needs_their_room(void **state) {
    (void)state;
    model x;
    begin(&x);
    (void)add_module(&x, 0);
    (void)add_weight(&x, 0, 8192, 0);
    (void)add_module(&x, 0);
    (void)add_weight(&x, 1, 1024, STH_WEIGHT_SMALL);
    sth_budget_advice *a = advice(&x, 8704);
    assert_true(a->works && a->unit[1] == 1 && a->smallest == 8192 && a->stays_bytes == 0);
    sthi_budget_advice_destroy(a);
    a = advice(&x, 9216);
    assert_true(a->works && a->unit[1] == STAYS && a->stays_bytes == 1024);
    sthi_budget_advice_destroy(a);
}

static void test_a_larger_budget_has_more_stages(void **state) {
    (void)state;
    model x;
    begin(&x);
    for (uint32_t i = 0; i < 4; i++) {
        (void)add_module(&x, 0);
        (void)add_weight(&x, i, UINT64_C(256) << 20, 0);
        x.segments[i] = (sth_segment){.rows = 512, .cols = 1 << 19};
    }
    point(&x);
    static const struct { uint64_t budget; uint32_t stages; } with[] = {
        {UINT64_C(600) << 20, 4}, {UINT64_C(900) << 20, 4}, {UINT64_C(3) << 30, 6}, {UINT64_C(64) << 30, 17}};
    for (int i = 0; i < 4; i++) {
        sth_budget_advice *a = advice(&x, with[i].budget);
        assert_true(a->works);
        assert_int_equal(a->stages, with[i].stages);
        assert_int_equal(a->stage_bytes, a->stages * in_rows(&x.segments[0], a->piece_bytes));
        assert_true(a->stage_bytes <= with[i].budget / 64);
        sthi_budget_advice_destroy(a);
    }
    sth_budget_advice *a = advice(&x, 0);
    uint64_t smallest = a->smallest;
    sthi_budget_advice_destroy(a);
    a = advice(&x, smallest);
    assert_true(a->works && a->stages == 3);
    sthi_budget_advice_destroy(a);
}

static void test_numbers_that_cannot_be_are_named(void **state) {
    (void)state;
    sth_budget_advice *a = NULL;
    uint64_t budget;
    model x;
    begin(&x);
    (void)add_module(&x, 0);
    (void)add_weight(&x, 0, 512, 0);
    assert_ok(sth_budget_advise(&x.m, 4096, &a));
    sth_budget_advice_destroy(a);
    sth_budget_advice_destroy(NULL);
    assert_status(sth_budget_advise(NULL, 1, &a), STH_INVALID_ARGUMENT);
    assert_status(sth_budget_with_room(&x.m, 1, NULL), STH_INVALID_ARGUMENT);
    model wrong = x;
    point(&wrong);
    wrong.m.size = 1;
    assert_status(sth_budget_advise(&wrong.m, 1, &a), STH_INVALID_ARGUMENT);
    wrong = x, point(&wrong), wrong.weights[0].bytes = 100;
    assert_status(sth_budget_with_room(&wrong.m, 1, &budget), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->object, "weights");
    wrong = x, point(&wrong), wrong.weights[0].bytes = UINT64_MAX - 511;
    assert_status(sth_budget_advise(&wrong.m, 1, &a), STH_INVALID_ARGUMENT);
    wrong = x, point(&wrong), wrong.owners[0].second = 1;
    assert_status(sth_budget_advise(&wrong.m, 1, &a), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->object, "owners");
    wrong = x, point(&wrong), put_inside(&wrong, 0, 1);
    assert_status(sth_budget_advise(&wrong.m, 1, &a), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->object, "inside");
    wrong = x, wrong.segments[0] = (sth_segment){.encoding = STH_TRANSFER_INT8, .rows = 4}, point(&wrong);
    assert_status(sth_budget_advise(&wrong.m, 1, &a), STH_INVALID_ARGUMENT);
}

static void test_without_memory_there_is_an_error_and_nothing_is_left(void **state) {
    (void)state;
    model x;
    begin(&x);
    (void)add_module(&x, 0);
    (void)add_weight(&x, 0, 512, 0);
    long before = sthi_alloc_live();
    for (int n = 1;; n++) {
        sth_budget_advice *a = NULL;
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sth_budget_advise(&x.m, 4096, &a);
        sthi_fault_disarm_all();
        if (rc == STH_OK) {
            sth_budget_advice_destroy(a);
            assert_true(n > 10);
            break;
        }
        assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
        assert_int_equal(sthi_alloc_live(), before);
    }
    assert_int_equal(sthi_alloc_live(), before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_answers_are_those_of_the_definition),
        cmocka_unit_test(test_every_budget_from_the_smallest_on_works_and_none_below),
        cmocka_unit_test(test_a_budget_with_room_has_it_and_is_not_larger_than_it_must_be),
        cmocka_unit_test(test_the_room_holds_a_unit_however_those_that_are_held_lie),
        cmocka_unit_test(test_small_weights_stay_as_far_as_an_eighth_of_the_budget_holds_them),
        cmocka_unit_test(test_small_weights_stream_where_the_rest_needs_their_room),
        cmocka_unit_test(test_a_larger_budget_has_more_stages),
        cmocka_unit_test(test_numbers_that_cannot_be_are_named),
        cmocka_unit_test(test_without_memory_there_is_an_error_and_nothing_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
