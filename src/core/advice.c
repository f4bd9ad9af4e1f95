/* The budget of a model that has not run yet. See advice.h.
 *
 * All answers come from `evaluate`: what the model needs when the first k of its small weights stay. More of them stay
 * with more of the budget, and pieces grow with it; where a budget would work but for that, pieces are smaller, and
 * fewer stay. So the budgets that work are all those from a smallest one on.
 *
 * No locks. Does not know in which order units are used (plan.c does), nor how a tensor is cut into pieces. */
#include "core/advice.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

enum {
    SMALL_SHARE = 8, /* small weights stay as far as 1/8 of the budget holds them */
    HELD_SHARE = 4,  /* units held while others are used are kept if they take at most 1/4 of the room for places */
    PIECES = 256,    /* a piece is 1/256 of the budget */
    STAGES_SHARE = 64, /* stages beyond the fewest are in 1/64 of the budget */
    FREE_SHARE = 8,    /* and in 1/8 of what else nobody needs */
    LARGEST_AT_ONCE = 3
};
#define BYTES_MOST (UINT64_MAX / 16) /* of all weights together */

enum { PACKED = 1, STORED = 2, TRAINS = 4, IN_PLACE = 8, OUTER = 16 }; /* of a unit */

typedef struct small_weight {
    uint32_t weight;
    bool last; /* its module has none inside */
    uint64_t bytes;
} small_weight;

/* What a call leases. bytes: with those of small weights of the module, whether these stay or not. */
typedef struct lease {
    uint64_t bytes, unit_bytes;
    uint64_t units;
} lease;

typedef struct world {
    const sth_budget_model *m;
    sthi_largest_piece *largest;
    small_weight *small; /* [small_count], in the order in which they stay */
    uint32_t small_count;
    uint32_t *owned, *owned_at; /* weights of module i: owned[owned_at[i]] up to owned[owned_at[i + 1]] */
    /* Of the evaluation: */
    uint32_t *unit;             /* [weight_count], STH_BUDGET_STAYS */
    uint64_t *unit_bytes;
    uint8_t *unit_flags;
    uint32_t *unit_seen;        /* the module that has counted the unit last, plus one */
    bool *calls;                /* [module_count]: it leases units */
    lease *leases;              /* [module_count] */
    lease *around;              /* [module_count] of all modules around it */
} world;

typedef struct needs {
    uint32_t unit_count;
    uint64_t stays, total, largest;
    uint64_t held;        /* units that a module holds while modules inside it use theirs */
    uint64_t whole, apart; /* places, where those are kept on the device, and where they are not */
    bool stored;          /* some unit crosses packed also where all fits */
} needs;

/* ---- the model ---- */

static sth_status wrong_pair(const char *list, uint32_t i) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, list, "%s[%u] names a module or a weight that there is none of",
                     list, i);
}

static sth_status check(const sth_budget_model *m) {
    uint64_t total = m->fixed_bytes;
    for (uint32_t w = 0; w < m->weight_count; w++) {
        const sth_budget_weight *weight = &m->weights[w];
        total = sthi_plus(total, weight->bytes);
        if (weight->bytes % STHI_ALIGN || weight->module >= m->module_count)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "weights",
                             "weights[%u] has %llu bytes, no multiple of %u, or a module that there is none of", w,
                             (unsigned long long)weight->bytes, STHI_ALIGN);
    }
    if (total > BYTES_MOST)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "weights", "the model has more bytes than any memory");
    for (uint32_t i = 0; i < m->owner_count; i++)
        if (m->owners[i].first >= m->module_count || m->owners[i].second >= m->weight_count)
            return wrong_pair("owners", i);
    for (uint32_t i = 0; i < m->inside_count; i++)
        if (m->inside[i].first >= m->module_count || m->inside[i].second >= m->module_count)
            return wrong_pair("inside", i);
    return STH_OK;
}

static int by_turn(const void *a, const void *b) {
    const small_weight *x = a, *y = b;
    if (x->last != y->last) return x->last ? 1 : -1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return x->weight < y->weight ? -1 : x->weight > y->weight;
}

/* First come those of modules that call other modules: their lease would lie between those of their children. */
static void list_small(world *x) {
    for (uint32_t w = 0; w < x->m->weight_count; w++) {
        const sth_budget_weight *weight = &x->m->weights[w];
        if (!(weight->flags & STH_WEIGHT_SMALL) && weight->bytes > STH_BUDGET_SMALL) continue;
        bool last = !(x->m->modules[weight->module] & STH_MODULE_OUTER);
        x->small[x->small_count++] = (small_weight){.weight = w, .last = last, .bytes = weight->bytes};
    }
    if (x->small_count) qsort(x->small, x->small_count, sizeof *x->small, by_turn);
}

static void list_owned(world *x) {
    const sth_budget_model *m = x->m;
    uint32_t *at = x->owned_at; /* at[i + 1] is where the next weight of module i goes, and in the end where they end */
    for (uint32_t i = 0; i < m->owner_count; i++)
        if (m->owners[i].first + 2 <= m->module_count) at[m->owners[i].first + 2]++;
    for (uint32_t i = 2; i <= m->module_count; i++) at[i] += at[i - 1];
    for (uint32_t i = 0; i < m->owner_count; i++) x->owned[at[m->owners[i].first + 1]++] = m->owners[i].second;
}

static void world_fini(world *x) {
    void *all[] = {x->small, x->owned, x->owned_at, x->unit, x->unit_bytes, x->unit_flags, x->unit_seen, x->calls,
                   x->leases, x->around};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) sthi_free(all[i]);
}

/* Fini is needed after a failure, too. */
static sth_status world_init(world *x, const sth_budget_model *m, sthi_largest_piece *largest) {
    size_t weights = m->weight_count + (size_t)1, modules = m->module_count + (size_t)1;
    *x = (world){.m = m, .largest = largest};
    STHI_TRY(check(m));
    bool made = (x->small = sthi_zalloc(weights, sizeof *x->small)) &&
                (x->owned = sthi_zalloc(m->owner_count + (size_t)1, sizeof *x->owned)) &&
                (x->owned_at = sthi_zalloc(modules, sizeof *x->owned_at)) &&
                (x->unit = sthi_zalloc(weights, sizeof *x->unit)) &&
                (x->unit_bytes = sthi_zalloc(weights, sizeof *x->unit_bytes)) &&
                (x->unit_flags = sthi_zalloc(weights, sizeof *x->unit_flags)) &&
                (x->unit_seen = sthi_zalloc(weights, sizeof *x->unit_seen)) &&
                (x->calls = sthi_zalloc(modules, sizeof *x->calls)) &&
                (x->leases = sthi_zalloc(modules, sizeof *x->leases)) &&
                (x->around = sthi_zalloc(modules, sizeof *x->around));
    if (!made) return sthi_no_memory(NULL, "advice for a model of %u weights", m->weight_count);
    list_small(x);
    list_owned(x);
    return STH_OK;
}

/* ---- what it needs when `count` small weights stay ---- */

static void add_to_unit(world *x, uint32_t unit, const sth_budget_weight *weight, bool begins) {
    uint8_t *flags = &x->unit_flags[unit];
    x->unit_bytes[unit] = (begins ? 0 : x->unit_bytes[unit]) + weight->bytes;
    if (begins) *flags = weight->flags & STH_WEIGHT_IN_PLACE ? IN_PLACE : 0;
    else *flags &= (uint8_t)~IN_PLACE;
    if (weight->packed) *flags |= PACKED | (weight->flags & STH_WEIGHT_STORED ? STORED : 0);
    if (weight->flags & STH_WEIGHT_TRAINS) *flags |= TRAINS;
}

/* Units are runs of neighbours that stream. */
static void make_units(world *x, uint32_t count, needs *n) {
    const sth_budget_weight *before = NULL;
    memset(x->unit, 0, (x->m->weight_count + (size_t)1) * sizeof *x->unit);
    for (uint32_t i = 0; i < count; i++) x->unit[x->small[i].weight] = STH_BUDGET_STAYS;
    for (uint32_t w = 0; w < x->m->weight_count; w++) {
        const sth_budget_weight *weight = &x->m->weights[w];
        if (x->unit[w] == STH_BUDGET_STAYS) {
            n->stays += weight->bytes;
            continue;
        }
        bool begins = !before || before->module != weight->module || before->kind != weight->kind ||
                      (x->m->modules[weight->module] & STH_MODULE_LIST);
        n->unit_count += begins;
        x->unit[w] = n->unit_count - 1;
        add_to_unit(x, n->unit_count - 1, weight, begins);
        before = weight;
    }
}

static bool crosses_packed(uint8_t flags) {
    return (flags & PACKED) && !(flags & IN_PLACE) && (flags & STORED || !(flags & TRAINS));
}

/* Modules that lease, and units that one holds while others inside it lease theirs: OUTER. */
static void find_outer(world *x) {
    const sth_budget_model *m = x->m;
    for (uint32_t i = 0; i < m->module_count; i++) {
        x->calls[i] = false;
        for (uint32_t o = x->owned_at[i]; o < x->owned_at[i + 1]; o++)
            x->calls[i] |= x->unit[x->owned[o]] != STH_BUDGET_STAYS;
    }
    for (uint32_t i = 0; i < m->inside_count; i++) {
        uint32_t outer = m->inside[i].first;
        if (!x->calls[outer] || !x->calls[m->inside[i].second]) continue;
        for (uint32_t o = x->owned_at[outer]; o < x->owned_at[outer + 1]; o++)
            if (x->unit[x->owned[o]] != STH_BUDGET_STAYS) x->unit_flags[x->unit[x->owned[o]]] |= OUTER;
    }
}

/* Of units without the flags `but`. */
static lease lease_of(world *x, uint32_t module, uint8_t but) {
    uint64_t stay = 0, most = 0;
    lease l = {0};
    for (uint32_t o = x->owned_at[module]; o < x->owned_at[module + 1]; o++) {
        uint32_t weight = x->owned[o], unit = x->unit[weight];
        if (unit == STH_BUDGET_STAYS) {
            stay += x->m->weights[weight].bytes;
            continue;
        }
        if (x->unit_flags[unit] & but || x->unit_seen[unit] == module + 1) continue;
        x->unit_seen[unit] = module + 1;
        l.unit_bytes += x->unit_bytes[unit];
        most = sthi_max_u64(most, x->unit_bytes[unit]);
        l.units++;
    }
    if (!l.units) return (lease){0};
    if (x->m->modules[module] & STH_MODULE_LIST) return (lease){most, most, 1};
    l.bytes = l.unit_bytes + stay;
    return l;
}

static uint64_t largest_unit(const world *x, uint32_t count, uint8_t but) {
    uint64_t most = 0;
    for (uint32_t u = 0; u < count; u++)
        if (!(x->unit_flags[u] & but)) most = sthi_max_u64(most, x->unit_bytes[u]);
    return most;
}

/* Bytes in which a module's units find a place beside those that are held round it. Units of one module are leased
 * together, and gathered into one piece of memory where they do not fit otherwise. */
static uint64_t room_of(const world *x, uint32_t module) {
    lease own = x->leases[module], around = x->around[module];
    uint64_t parts = 1 + (x->m->one_extent ? 1 : 2) * around.units;
    /* A loop over a list has the next before it lets go of one, and keeps the last. They are mostly of one size: a
     * place of one serves another. */
    if (x->m->modules[module] & STH_MODULE_LIST) parts += 2;
    return parts == 1 ? own.unit_bytes : sthi_plus(around.bytes, sthi_times(parts, own.bytes));
}

/* Room in which the largest unit finds a place, and each one beside those that are held, wherever they lie: a held one
 * parts what is free in two, and, where there are several extents, its extent from the rest. */
static uint64_t room_for(world *x, uint32_t unit_count, uint8_t but) {
    const sth_budget_model *m = x->m;
    uint64_t most = largest_unit(x, unit_count, but);
    memset(x->unit_seen, 0, unit_count * sizeof *x->unit_seen);
    for (uint32_t i = 0; i < m->module_count; i++) {
        x->leases[i] = lease_of(x, i, but);
        x->around[i] = (lease){0};
    }
    for (uint32_t i = 0; i < m->inside_count; i++) {
        lease outer = x->leases[m->inside[i].first], *around = &x->around[m->inside[i].second];
        around->bytes = sthi_plus(around->bytes, outer.bytes);
        around->units += outer.units;
    }
    for (uint32_t i = 0; i < m->module_count; i++)
        if (x->calls[i]) most = sthi_max_u64(most, room_of(x, i));
    return most;
}

static needs evaluate(world *x, uint32_t count) {
    needs n = {.stays = x->m->fixed_bytes};
    make_units(x, count, &n);
    find_outer(x);
    for (uint32_t u = 0; u < n.unit_count; u++) {
        if (x->unit_flags[u] & IN_PLACE) continue;
        n.total += x->unit_bytes[u];
        if (x->unit_flags[u] & OUTER) n.held += x->unit_bytes[u];
        n.stored |= (x->unit_flags[u] & STORED) != 0;
    }
    n.largest = largest_unit(x, n.unit_count, IN_PLACE);
    n.apart = room_for(x, n.unit_count, IN_PLACE);
    n.whole = x->m->one_extent ? n.apart : sthi_plus(n.held, room_for(x, n.unit_count, IN_PLACE | OUTER));
    return n;
}

/* Bytes of one stage, of the units of the last evaluation. */
static uint64_t stage(const world *x, uint64_t piece) {
    uint64_t most = 0;
    for (uint32_t w = 0; w < x->m->weight_count; w++) {
        const sth_budget_weight *weight = &x->m->weights[w];
        if (x->unit[w] == STH_BUDGET_STAYS || !crosses_packed(x->unit_flags[x->unit[w]])) continue;
        most = sthi_max_u64(most, weight->packed ? x->largest(weight->packed, piece)
                                                 : sthi_min_u64(weight->bytes, piece));
    }
    return most;
}

/* Bytes of the fewest stages. */
static uint64_t stages(const world *x, uint64_t piece) { return sthi_times(STH_BUDGET_STAGES, stage(x, piece)); }

/* How many stages: more than the least as far as a share of the budget, and of what places do not need, holds them. */
static uint32_t stage_count(uint64_t stage_bytes, uint64_t budget, uint64_t free) {
    uint64_t room = sthi_min_u64(budget / STAGES_SHARE, free / FREE_SHARE);
    if (!stage_bytes || room <= sthi_times(STH_BUDGET_STAGES, stage_bytes)) return STH_BUDGET_STAGES;
    return (uint32_t)sthi_min_u64(room / stage_bytes, STH_BUDGET_MOST_STAGES);
}

static uint64_t places(const needs *n) { return sthi_min_u64(sthi_min_u64(n->whole, n->apart), n->total); }

/* The least budget with the units as they are. */
static uint64_t least(const needs *n, uint64_t stage_bytes) {
    uint64_t bytes = sthi_plus(sthi_plus(n->stays, stage_bytes), places(n));
    if (!n->stored) bytes = sthi_min_u64(bytes, n->stays + n->total); /* where all fits nothing crosses packed */
    return sthi_max_u64(bytes, n->stays + 1);
}

/* ---- answers ---- */

static uint64_t piece_of(uint64_t budget) {
    uint64_t piece = budget / PIECES / STHI_ALIGN * STHI_ALIGN;
    return sthi_max_u64(STH_BUDGET_LEAST_PIECE, sthi_min_u64(STH_BUDGET_MOST_PIECE, piece));
}

/* How many of the small weights 1/8 of the budget holds. */
static uint32_t small_that_stay(const world *x, uint64_t budget) {
    uint64_t total = 0;
    uint32_t count = 0;
    while (count < x->small_count && (total += x->small[count].bytes) <= budget / SMALL_SHARE) count++;
    return count;
}

static uint64_t smallest(world *x) {
    uint64_t best = UINT64_MAX, total = 0;
    for (uint32_t count = 0; count <= x->small_count; count++) {
        if (count) total += x->small[count - 1].bytes;
        if (sthi_times(SMALL_SHARE, total) >= best) break;
        needs n = evaluate(x, count);
        uint64_t here = sthi_max_u64(sthi_times(SMALL_SHARE, total), least(&n, stages(x, STH_BUDGET_LEAST_PIECE)));
        best = sthi_min_u64(best, here);
    }
    return best;
}

/* The largest piece, halved as often as need be, with which the budget is enough; 0: none. */
static uint64_t piece_that_fits(const world *x, const needs *n, uint64_t budget) {
    for (uint64_t piece = piece_of(budget);; piece = sthi_max_u64(STH_BUDGET_LEAST_PIECE, piece / 2)) {
        piece = piece / STHI_ALIGN * STHI_ALIGN;
        if (least(n, stages(x, piece)) <= budget) return piece;
        if (piece == STH_BUDGET_LEAST_PIECE) return 0;
    }
}

/* What the budget is used for: all small weights that its share holds, or as many fewer as leave enough. */
static needs settle(world *x, uint64_t budget, bool works, uint64_t *out_piece) {
    uint32_t count = small_that_stay(x, budget);
    needs n = evaluate(x, count);
    *out_piece = works ? piece_that_fits(x, &n, budget) : piece_of(budget);
    while (!*out_piece) {
        n = evaluate(x, --count);
        *out_piece = piece_that_fits(x, &n, budget);
    }
    return n;
}

static void fill(world *x, const needs *n, uint64_t budget, sth_budget_advice *out) {
    uint64_t room = sthi_minus(sthi_minus(budget, n->stays), out->stage_bytes);
    bool keeps = n->whole <= room && (sthi_times(n->held, HELD_SHARE) <= room || n->apart > room);
    out->weight_count = x->m->weight_count;
    out->unit_count = n->unit_count;
    out->stays_bytes = n->stays;
    out->units_bytes = n->total;
    out->units_least = places(n);
    out->least_room = sthi_min_u64(keeps ? n->whole : n->apart, n->total);
    out->comfortable = sthi_plus(sthi_plus(n->stays, out->stage_bytes),
                            sthi_max_u64(places(n), sthi_times(LARGEST_AT_ONCE, n->largest)));
    for (uint32_t u = 0; u < n->unit_count; u++) out->keep[u] = keeps && (x->unit_flags[u] & OUTER) &&
                                                                !(x->unit_flags[u] & IN_PLACE);
    for (uint32_t w = 0; w < x->m->weight_count; w++) out->unit[w] = x->unit[w];
}

void sthi_budget_advice_destroy(sth_budget_advice *advice) {
    if (!advice) return;
    sthi_free(advice->unit);
    sthi_free(advice->keep);
    sthi_free(advice);
}

static sth_budget_advice *advice_create(uint32_t weights) {
    sth_budget_advice *advice = sthi_zalloc(1, sizeof *advice);
    if (!advice) return NULL;
    advice->unit = sthi_zalloc(weights + (size_t)1, sizeof *advice->unit);
    advice->keep = sthi_zalloc(weights + (size_t)1, sizeof *advice->keep);
    if (advice->unit && advice->keep) return advice;
    sthi_budget_advice_destroy(advice);
    return NULL;
}

static sth_status advise(world *x, uint64_t budget, sth_budget_advice **out) {
    sth_budget_advice *advice = advice_create(x->m->weight_count);
    if (!advice) return sthi_no_memory(NULL, "advice for a model of %u weights", x->m->weight_count);
    advice->smallest = smallest(x);
    advice->works = budget >= advice->smallest;
    needs n = settle(x, budget, advice->works, &advice->piece_bytes);
    uint64_t bytes = stage(x, advice->piece_bytes);
    advice->stages = stage_count(bytes, budget, sthi_minus(budget, least(&n, sthi_times(STH_BUDGET_STAGES, bytes))));
    advice->stage_bytes = sthi_times(advice->stages, bytes);
    fill(x, &n, budget, advice);
    *out = advice;
    return STH_OK;
}

sth_status sthi_budget_advise(const sth_budget_model *m, sthi_largest_piece *largest, uint64_t budget,
                              sth_budget_advice **out) {
    world x;
    sth_status rc = world_init(&x, m, largest);
    if (rc == STH_OK) rc = advise(&x, budget, out);
    world_fini(&x);
    return rc;
}

static uint64_t with_room(world *x, uint64_t room) {
    for (uint64_t budget = smallest(x);;) {
        needs n = evaluate(x, small_that_stay(x, budget));
        uint64_t bytes = stage(x, piece_of(budget));
        uint64_t enough = sthi_plus(sthi_plus(n.stays, sthi_times(stage_count(bytes, budget, budget), bytes)), room);
        if (enough <= budget || budget == UINT64_MAX) return budget;
        budget = enough;
    }
}

sth_status sthi_budget_with_room(const sth_budget_model *m, sthi_largest_piece *largest, uint64_t room,
                                 uint64_t *out_budget) {
    world x;
    sth_status rc = world_init(&x, m, largest);
    if (rc == STH_OK) *out_budget = with_room(&x, room);
    world_fini(&x);
    return rc;
}
