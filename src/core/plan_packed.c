/* Which units stay on the device packed. Such a unit takes its packed bytes of the budget, and each of its loads is an
 * expansion within the device: nothing of the link, and the expansion's time of the device. It then is one that
 * streams, so that places, loads and their order are found as always, in an input that says which units those are.
 *
 * Of few units every set of them is tried. Of more, sets that are spread evenly over the order fill some shares of the
 * budget. A plan is made for each, and the fastest is taken where it is worth it. The more simulations the plan without
 * may make the more sets are tried, so that they take no more than half of its time. Pure: no I/O, no clock. No
 * locks. */
#include "core/plan.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

enum { SHARES = 6, FEW_UNITS = 4, FEW_SIMULATIONS = 40, A_SET_IN = 320 /* simulations of the plan without */ };
/* A plan with packed units takes this share of the step without them, or less. */
static const double WORTH_IT = 0.99;

/* The input where some units stay packed. */
typedef struct packed_input {
    sth_plan_input in;
    sth_plan_unit *units;
    sth_plan_use *uses;
    int64_t expand_ns; /* of all uses together */
} packed_input;

static void packed_fini(packed_input *p) {
    sthi_free(p->units);
    sthi_free(p->uses);
}

static bool may_stay(const sth_plan_unit *u) {
    uint32_t never = STH_UNIT_KEEP | STH_UNIT_ON_DEMAND | STH_UNIT_FROM_DISK | STH_UNIT_WRITTEN;
    return u->packed_bytes && u->packed_bytes < u->bytes && !(u->flags & never);
}

static bool any_may_stay(const sth_plan_input *in) {
    bool any = false;
    for (uint32_t i = 0; i < in->unit_count; i++) any = any || may_stay(&in->units[i]);
    return any;
}

/* On success the caller calls packed_fini. */
static sth_status packed_init(packed_input *p, const sth_plan_input *in, const bool *packed) {
    *p = (packed_input){.in = *in};
    p->units = sthi_alloc((in->unit_count + 1) * sizeof *p->units);
    p->uses = sthi_alloc((in->use_count + 1) * sizeof *p->uses);
    if (!p->units || !p->uses) {
        packed_fini(p);
        return sthi_no_memory(NULL, "a plan; free host memory");
    }
    for (uint32_t i = 0; i < in->unit_count; i++) {
        p->units[i] = in->units[i];
        if (packed[i]) p->units[i].flags |= STHI_UNIT_STAYS_PACKED;
    }
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t u = in->uses[t].unit;
        p->uses[t] = in->uses[t];
        if (!packed[u]) continue;
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

/* Expansion is not compute of the model. */
static void put_right(const sthi_plan_world *w, int64_t expand_ns, sth_prediction *r) {
    r->compute_ns -= expand_ns;
    r->stall_ns = r->step_ns - r->compute_ns;
    r->lower_bound_ns = least_ns(w, r->compute_ns);
}

sth_status sthi_plan_predict(const sth_plan_input *in, const sth_plan *plan, sth_prediction *out) {
    if (plan->unit_count != in->unit_count || !any_may_stay(in)) return sthi_plan_predict_as_it_is(in, plan, out);
    packed_input p;
    sthi_plan_world w;
    STHI_TRY(sthi_plan_world_init(&w, in));
    sth_status rc = packed_init(&p, in, plan->packed);
    if (rc == STH_OK) {
        rc = sthi_plan_predict_as_it_is(&p.in, plan, out);
        if (rc == STH_OK) put_right(&w, p.expand_ns, out);
        packed_fini(&p);
    }
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

static sth_status try_set(const sthi_plan_world *w, const bool *packed, sth_plan **best) {
    const sth_plan_input *in = w->in;
    packed_input p;
    sth_plan *plan = NULL;
    STHI_TRY(packed_init(&p, in, packed));
    if (in->unit_count > FEW_UNITS) p.in.most_simulations = FEW_SIMULATIONS;
    sth_status rc = sthi_plan_create_as_it_is(&p.in, &plan);
    packed_fini(&p);
    if (rc == STH_BUDGET_TOO_SMALL) return STH_OK; /* so many cannot stay */
    if (rc != STH_OK) return rc;
    memcpy(plan->packed, packed, in->unit_count * sizeof *packed);
    bool plain = false; /* all fits as it is */
    for (uint32_t i = 0; i < in->unit_count; i++) plain = plain || (packed[i] && plan->resident[i]);
    if (plain || (double)plan->prediction.step_ns >= WORTH_IT * (double)(*best)->prediction.step_ns) {
        sthi_plan_destroy(plan);
        return STH_OK;
    }
    put_right(w, p.expand_ns, &plan->prediction);
    sthi_plan_destroy(*best);
    *best = plan;
    return STH_OK;
}

static sth_status try_every_set(const sthi_plan_world *w, bool *packed, sth_plan **best) {
    for (uint32_t set = 1; set < 1u << w->in->unit_count; set++) {
        bool all_may = true;
        for (uint32_t i = 0; i < w->in->unit_count; i++) {
            packed[i] = set >> i & 1;
            all_may = all_may && (!packed[i] || may_stay(&w->in->units[i]));
        }
        if (all_may) STHI_TRY(try_set(w, packed, best));
    }
    return STH_OK;
}

/* Sixths of the budget, and units of the ring beside them. In this order: the first few are within some hundredths of
 * the best of all where units are many. */
static const struct {
    int share, ring;
} SETS[] = {{5, 0}, {6, 2}, {3, 0}, {4, 0}, {6, 1}, {2, 0}, {5, 1}, {6, 0}, {1, 0},
            {4, 1}, {5, 2}, {3, 1}, {4, 2}, {2, 1}, {3, 2}, {1, 1}, {2, 2}, {1, 2}};
enum { SET_COUNT = sizeof SETS / sizeof SETS[0] };

static sth_status try_shares(const sthi_plan_world *w, bool *packed, sth_plan **best) {
    const sth_plan_input *in = w->in;
    uint32_t most = 1 + sthi_plan_trials(w) / A_SET_IN;
    double largest = 0, kept = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        bool keep = in->units[i].flags & STH_UNIT_KEEP;
        if (keep) kept += (double)in->units[i].bytes;
        else largest = fmax(largest, (double)in->units[i].bytes);
    }
    for (uint32_t i = 0, tried = 0; i < SET_COUNT && tried < most; i++) {
        double ring = fmax((SETS[i].ring + 1.125) * largest, (double)in->least_ring_bytes);
        double room = ((double)in->budget - kept - ring) * SETS[i].share / SHARES;
        if (room <= 0 || !spread(in, room, packed)) continue;
        STHI_TRY(try_set(w, packed, best));
        tried++;
    }
    return STH_OK;
}

static sth_status choose_packed(const sthi_plan_world *w, sth_plan **best) {
    bool *packed = sthi_zalloc(w->in->unit_count, sizeof *packed);
    if (!packed) return sthi_no_memory(NULL, "a plan; free host memory");
    sth_prediction *r = &(*best)->prediction;
    r->lower_bound_ns = least_ns(w, r->compute_ns);
    bool waits = (double)r->compute_ns < WORTH_IT * (double)r->step_ns;
    sth_status rc = STH_OK;
    if (waits) rc = w->in->unit_count > FEW_UNITS ? try_shares(w, packed, best) : try_every_set(w, packed, best);
    sthi_free(packed);
    return rc;
}

sth_status sthi_plan_create(const sth_plan_input *in, sth_plan **out_plan) {
    sth_plan *best = NULL;
    STHI_TRY(sthi_plan_create_as_it_is(in, &best));
    if (any_may_stay(in)) {
        sthi_plan_world w;
        sth_status rc = sthi_plan_world_init(&w, in);
        if (rc == STH_OK) {
            rc = choose_packed(&w, &best);
            sthi_plan_world_fini(&w);
        }
        if (rc != STH_OK) {
            sthi_plan_destroy(best);
            return rc;
        }
    }
    *out_plan = best;
    return STH_OK;
}
