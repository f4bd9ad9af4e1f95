/* Which units stay on the device packed, and which cross the link so. A unit that stays packed takes its packed bytes
 * of the budget, and each of its loads is an expansion within the device: nothing of the link, and the expansion's time
 * of the device. It then is one that streams, so that places, loads and their order are found as always, in an input
 * that says which units those are. The same holds for a unit that is EITHER: the input says how it crosses.
 *
 * Of few units every set of them is tried. Of more, all or none of those that are EITHER cross packed, or the share at
 * which the link takes as long as the device, which expands beside its compute; then sets that are spread evenly over
 * the order, and fill some shares of the budget, stay packed. A plan is made for each, and the fastest is taken where
 * it is worth it. The more simulations the first of them may make the more sets are tried,
 * so that they take no more than half of its time. Pure: no I/O, no clock. No locks. */
#include "core/plan.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

enum { FLIPPED = 12 }; /* units or fewer: the choice for each of them is also tried the other way */
enum { SHARES = 6, FEW_UNITS = 4, FEW_SIMULATIONS = 40, A_SET_IN = 320 /* simulations of the first plan */ };
/* A plan with more packed units takes this share of the step without them, or less. */
static const double WORTH_IT = 0.99;
/* A plan in which all cross as they are may take this much longer: it leaves the device to others. */
static const double PLAIN_WORTH_IT = 1.005;
static const double LEAST_ASIDE = 0.1; /* of the share that balances link and device: two more are tried beside it */

typedef struct choice {
    bool *packed, *plain; /* [unit_count], as of a plan */
} choice;

/* The input where it is chosen how units stay and cross. */
typedef struct chosen_input {
    sth_plan_input in;
    sth_plan_unit *units;
    sth_plan_use *uses;
    int64_t expand_ns; /* of all uses together */
} chosen_input;

static void chosen_fini(chosen_input *p) {
    sthi_free(p->units);
    sthi_free(p->uses);
}

static bool may_stay(const sth_plan_unit *u) {
    uint32_t never = STH_UNIT_KEEP | STH_UNIT_ON_DEMAND | STH_UNIT_FROM_DISK | STH_UNIT_WRITTEN;
    return u->packed_bytes && u->packed_bytes < u->bytes && !(u->flags & never);
}

static bool is_either(const sth_plan_unit *u) {
    return (u->flags & STH_UNIT_EITHER) && u->transfer_bytes && u->transfer_bytes < u->bytes;
}

static bool any_is(const sth_plan_input *in, bool (*what)(const sth_plan_unit *)) {
    bool any = false;
    for (uint32_t i = 0; i < in->unit_count; i++) any = any || what(&in->units[i]);
    return any;
}

static bool is_expanded(const sth_plan_unit *u) {
    return (u->flags & STH_UNIT_EXPANDED) && u->transfer_bytes && u->transfer_bytes < u->bytes;
}

/* Before the input is checked. */
static bool has_choice(const sth_plan_input *in) {
    return in->units && in->uses && (any_is(in, may_stay) || any_is(in, is_either) || any_is(in, is_expanded));
}

static bool expands(const sth_plan_input *in, const choice *c, uint32_t unit) {
    if (c->packed[unit]) return true;
    return is_either(&in->units[unit]) ? !c->plain[unit] : is_expanded(&in->units[unit]);
}

/* plan: whose loads alone expand; NULL: it is to be made, and each use expands. On success the caller calls
 * chosen_fini. */
static sth_status chosen_init(chosen_input *p, const sth_plan_input *in, const choice *c, const sth_plan *plan) {
    *p = (chosen_input){.in = *in};
    p->units = sthi_alloc((in->unit_count + 1) * sizeof *p->units);
    p->uses = sthi_alloc((in->use_count + 1) * sizeof *p->uses);
    if (!p->units || !p->uses) {
        chosen_fini(p);
        return sthi_no_memory(NULL, "a plan; free host memory");
    }
    for (uint32_t i = 0; i < in->unit_count; i++) {
        p->units[i] = in->units[i];
        if (c->packed[i]) p->units[i].flags |= STHI_UNIT_STAYS_PACKED;
        if (is_either(&in->units[i]) && c->plain[i]) p->units[i].transfer_bytes = 0;
    }
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t u = in->uses[t].unit, load = plan ? plan->use_load[t] : 0;
        p->uses[t] = in->uses[t];
        bool loads = !plan || (load < plan->load_count && plan->loads[load].first_use == t);
        if (!loads || !expands(in, c, u)) continue;
        int64_t ns = (int64_t)llround((double)in->units[u].bytes * 1e9 / in->expand_bytes_per_s);
        p->uses[t].compute_ns += ns;
        p->expand_ns += ns;
    }
    p->in.units = p->units;
    p->in.uses = p->uses;
    return STH_OK;
}

/* No step is shorter than compute, and no byte of the budget saves more than one of the link. */
static int64_t least_ns(const sthi_plan_world *w, int64_t compute_ns) {
    double wire = 0;
    for (uint32_t i = 0; i < w->order_count; i++) wire += (double)sthi_wire_bytes(w->in, w->order[i]);
    return (int64_t)fmax((double)compute_ns, (wire - (double)w->in->budget) * 1e9 / w->in->link_bytes_per_s);
}

static sth_status predict_chosen(const sthi_plan_world *w, const sth_plan *plan, sth_prediction *out) {
    choice c = {plan->packed, plan->plain};
    chosen_input p;
    STHI_TRY(chosen_init(&p, w->in, &c, plan));
    sth_status rc = sthi_plan_predict_as_it_is(&p.in, plan, out);
    chosen_fini(&p);
    if (rc != STH_OK) return rc;
    out->compute_ns -= p.expand_ns; /* expansion is not compute of the model */
    out->expand_ns = p.expand_ns;
    out->stall_ns = out->step_ns - out->compute_ns;
    out->lower_bound_ns = least_ns(w, out->compute_ns);
    return STH_OK;
}

sth_status sthi_plan_predict(const sth_plan_input *in, const sth_plan *plan, sth_prediction *out) {
    if (plan->unit_count != in->unit_count || plan->use_count != in->use_count || !has_choice(in))
        return sthi_plan_predict_as_it_is(in, plan, out);
    sthi_plan_world w;
    STHI_TRY(sthi_plan_world_init(&w, in));
    sth_status rc = predict_chosen(&w, plan, out);
    sthi_plan_world_fini(&w);
    return rc;
}

/* Units of `bytes` packed bytes or less in all, spread over the order of first uses. False: none. */
static bool spread(const sth_plan_input *in, double bytes, bool *packed) {
    double all = 0, owed = 0, taken = 0;
    memset(packed, 0, in->unit_count * sizeof *packed);
    for (uint32_t i = 0; i < in->unit_count; i++)
        if (may_stay(&in->units[i])) all += (double)in->units[i].packed_bytes;
    double share = fmin(1, bytes / all);
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t u = in->uses[t].unit;
        double size = (double)in->units[u].packed_bytes;
        if (packed[u] || !may_stay(&in->units[u])) continue;
        owed += share * size;
        if (owed < size / 2 || taken + size > bytes) continue;
        packed[u] = true;
        owed -= size;
        taken += size;
    }
    return taken > 0;
}

typedef struct chooser {
    const sthi_plan_world *w;
    choice c;       /* to be tried next */
    sth_plan *best; /* NULL: none yet */
} chooser;

/* Takes the plan for the choice where it takes `worth` of the best one's step or less. */
static sth_status try_choice(chooser *x, uint32_t most_simulations, double worth) {
    const sth_plan_input *in = x->w->in;
    chosen_input p;
    sth_plan *plan = NULL;
    STHI_TRY(chosen_init(&p, in, &x->c, NULL));
    p.in.most_simulations = most_simulations;
    sth_status rc = sthi_plan_create_as_it_is(&p.in, &plan);
    chosen_fini(&p);
    if (rc == STH_BUDGET_TOO_SMALL && x->best) return STH_OK; /* so many cannot stay */
    if (rc != STH_OK) return rc;
    memcpy(plan->packed, x->c.packed, in->unit_count * sizeof *plan->packed);
    bool fits = true; /* what stays packed would, as it is */
    for (uint32_t i = 0; i < in->unit_count; i++) {
        plan->plain[i] = x->c.plain[i] && !plan->packed[i] && is_either(&in->units[i]);
        fits = fits && !(plan->packed[i] && plan->resident[i]);
    }
    rc = predict_chosen(x->w, plan, &plan->prediction);
    bool better = !x->best || (double)plan->prediction.step_ns <= worth * (double)x->best->prediction.step_ns;
    if (rc != STH_OK || !fits || !better) {
        sthi_plan_destroy(plan);
        return rc;
    }
    sthi_plan_destroy(x->best);
    x->best = plan;
    return STH_OK;
}

/* The best plan's choice is the next one's. */
static void go_on_from_best(chooser *x) {
    memcpy(x->c.packed, x->best->packed, x->w->in->unit_count * sizeof *x->c.packed);
    memcpy(x->c.plain, x->best->plain, x->w->in->unit_count * sizeof *x->c.plain);
}

/* Compute is not the bound of the best plan. */
static bool waits(const chooser *x) {
    const sth_prediction *r = &x->best->prediction;
    return (double)r->compute_ns < WORTH_IT * (double)r->step_ns;
}

/* Each set of `may` units, in `set`. */
static sth_status try_every_set(chooser *x, bool *set, bool (*may)(const sth_plan_unit *)) {
    const sth_plan_input *in = x->w->in;
    for (uint32_t bits = 0; bits < 1u << in->unit_count; bits++) {
        bool all_may = bits || !x->best;
        for (uint32_t i = 0; i < in->unit_count; i++) {
            set[i] = bits >> i & 1;
            all_may = all_may && (!set[i] || may(&in->units[i]));
        }
        if (all_may) STHI_TRY(try_choice(x, in->most_simulations, WORTH_IT));
    }
    return STH_OK;
}

/* Units with such a share of the bytes, spread over the order, cross plain. */
static void cross_plain(chooser *x, double share) {
    double owed = 0;
    for (uint32_t i = 0; i < x->w->order_count; i++) {
        uint32_t u = x->w->order[i];
        double size = (double)x->w->in->units[u].bytes;
        owed += share * size;
        x->c.plain[u] = owed >= size / 2;
        if (x->c.plain[u]) owed -= size;
    }
}

/* What a step takes when all or none cross plain: the link's time and the device's beside the model's compute. */
typedef struct crossing_times {
    double plain_ns, packed_ns, expand_ns;
} crossing_times;

static crossing_times times_of(const sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    double wire = 0, packed = 0, expanded = 0;
    for (uint32_t i = 0; i < w->order_count; i++) {
        const sth_plan_unit *u = &in->units[w->order[i]];
        wire += (double)u->bytes;
        packed += (double)(is_either(u) ? u->transfer_bytes : u->bytes);
        if (is_either(u)) expanded += (double)u->bytes;
    }
    double room = fmax(0, (double)in->budget - (double)w->fixed_bytes - (double)w->demand_bytes);
    double streams = wire > 0 ? fmax(0, wire - room) / wire : 0;
    return (crossing_times){.plain_ns = wire * streams * 1e9 / in->link_bytes_per_s,
                            .packed_ns = packed * streams * 1e9 / in->link_bytes_per_s,
                            .expand_ns = expanded * streams * 1e9 / in->expand_bytes_per_s};
}

/* The share of bytes that cross plain at which the link takes as long as the device: more of it costs the one, less the
 * other. */
static double balanced_share(const sthi_plan_world *w, const crossing_times *t) {
    double gained = t->plain_ns - t->packed_ns + t->expand_ns;
    return gained > 0 ? ((double)w->compute_ns + t->expand_ns - t->packed_ns) / gained : 1;
}

/* How units that are EITHER cross: all, none, or as many as make the link and the device take the same time. A plan in
 * which all cross plain is the one that there is without a choice, and is taken where no other is faster. It is looked
 * at in any case but where its bytes alone take longer than the best plan. Adds to `tried`. */
static sth_status try_crossings(chooser *x, uint32_t *tried) {
    const sth_plan_input *in = x->w->in;
    crossing_times t = times_of(x->w);
    double share = balanced_share(x->w, &t);
    bool packed_first = share < 0.5;
    cross_plain(x, packed_first ? 0 : 1);
    STHI_TRY(try_choice(x, in->most_simulations, 1));
    if (!packed_first && !waits(x)) return STH_OK;
    double aside = fmax(LEAST_ASIDE, 1.0 / (x->w->order_count + 1));
    for (int i = -1; i <= 1; i++) {
        double near = share + i * aside;
        if (near <= 0 || near >= 1) continue;
        cross_plain(x, near);
        STHI_TRY(try_choice(x, FEW_SIMULATIONS, WORTH_IT));
        ++*tried;
    }
    for (uint32_t i = 0; i < x->w->order_count && x->w->order_count <= FLIPPED; i++) {
        go_on_from_best(x);
        x->c.plain[x->w->order[i]] = !x->c.plain[x->w->order[i]];
        STHI_TRY(try_choice(x, FEW_SIMULATIONS, WORTH_IT));
    }
    if (packed_first && t.plain_ns >= PLAIN_WORTH_IT * (double)x->best->prediction.step_ns) return STH_OK;
    cross_plain(x, packed_first ? 1 : 0);
    STHI_TRY(try_choice(x, packed_first ? in->most_simulations : FEW_SIMULATIONS,
                        packed_first ? PLAIN_WORTH_IT : WORTH_IT));
    ++*tried;
    return STH_OK;
}

/* Sixths of the budget, and units of the ring beside them. In this order: the first few are within some hundredths of
 * the best of all where units are many. */
static const struct {
    int share, ring;
} SETS[] = {{5, 0}, {6, 2}, {3, 0}, {4, 0}, {6, 1}, {2, 0}, {5, 1}, {6, 0}, {1, 0},
            {4, 1}, {5, 2}, {3, 1}, {4, 2}, {2, 1}, {3, 2}, {1, 1}, {2, 2}, {1, 2}};
enum { SET_COUNT = sizeof SETS / sizeof SETS[0] };

static sth_status try_shares(chooser *x, uint32_t tried) {
    const sth_plan_input *in = x->w->in;
    uint32_t most = 1 + sthi_plan_trials(x->w) / A_SET_IN;
    double largest = 0, kept = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        bool keep = in->units[i].flags & STH_UNIT_KEEP;
        if (keep) kept += (double)in->units[i].bytes;
        else largest = fmax(largest, (double)in->units[i].bytes);
    }
    for (uint32_t i = 0; i < SET_COUNT && tried < most; i++) {
        double ring = fmax((SETS[i].ring + 1.125) * largest, (double)in->least_ring_bytes);
        double room = ((double)in->budget - kept - ring) * SETS[i].share / SHARES;
        if (room <= 0 || !spread(in, room, x->c.packed)) continue;
        STHI_TRY(try_choice(x, FEW_SIMULATIONS, WORTH_IT));
        tried++;
    }
    return STH_OK;
}

static sth_status choose(chooser *x) {
    bool few = x->w->in->unit_count <= FEW_UNITS;
    uint32_t tried = 0;
    if (few) STHI_TRY(try_every_set(x, x->c.plain, is_either));
    else if (any_is(x->w->in, is_either)) STHI_TRY(try_crossings(x, &tried));
    else STHI_TRY(try_choice(x, x->w->in->most_simulations, 1));
    if (!any_is(x->w->in, may_stay) || !waits(x)) return STH_OK;
    go_on_from_best(x);
    return few ? try_every_set(x, x->c.packed, may_stay) : try_shares(x, tried);
}

sth_status sthi_plan_create(const sth_plan_input *in, sth_plan **out_plan) {
    if (!has_choice(in)) return sthi_plan_create_as_it_is(in, out_plan);
    sthi_plan_world w;
    STHI_TRY(sthi_plan_world_init(&w, in));
    chooser x = {.w = &w, .c = {sthi_zalloc(in->unit_count, sizeof(bool)), sthi_zalloc(in->unit_count, sizeof(bool))}};
    sth_status rc = x.c.packed && x.c.plain ? choose(&x) : sthi_no_memory(NULL, "a plan; free host memory");
    sthi_free(x.c.packed);
    sthi_free(x.c.plain);
    sthi_plan_world_fini(&w);
    if (rc != STH_OK) sthi_plan_destroy(x.best);
    else *out_plan = x.best;
    return rc;
}
