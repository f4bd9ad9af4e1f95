/* Which units stay on the device packed. Such a unit takes its packed bytes of the budget, and each of its loads is an
 * expansion within the device: nothing of the link, and the expansion's time of the device. It then is one that streams,
 * so that places, loads and their order are found as always, in an input that says which units those are.
 *
 * Of few units every set of them is tried. Of more, sets that are spread evenly over the order fill some shares of the
 * budget. A plan is made for each, and the fastest is taken where it is worth it. Plans of sets make no more simulations
 * together than the input allows for one plan. Pure: no I/O, no clock. No locks. */
#include "core/plan.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

enum { SHARES = 6, RINGS = 3, FEW_UNITS = 4, FEW_SIMULATIONS = 40 };
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
static int64_t least_ns(const sth_plan_input *in, int64_t compute_ns) {
    double wire = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        bool used = false;
        for (uint32_t t = 0; t < in->use_count && !used; t++) used = in->uses[t].unit == i;
        if (used && !(in->units[i].flags & (STH_UNIT_KEEP | STH_UNIT_ON_DEMAND)))
            wire += (double)sthi_wire_bytes(in, i);
    }
    return (int64_t)fmax((double)compute_ns, (wire - (double)in->budget) * 1e9 / in->link_bytes_per_s);
}

/* Expansion is not compute of the model. */
static void put_right(const sth_plan_input *in, int64_t expand_ns, sth_prediction *r) {
    r->compute_ns -= expand_ns;
    r->stall_ns = r->step_ns - r->compute_ns;
    r->lower_bound_ns = least_ns(in, r->compute_ns);
}

sth_status sthi_plan_predict(const sth_plan_input *in, const sth_plan *plan, sth_prediction *out) {
    if (plan->unit_count != in->unit_count || !any_may_stay(in)) return sthi_plan_predict_as_it_is(in, plan, out);
    packed_input p;
    STHI_TRY(packed_init(&p, in, plan->packed));
    sth_status rc = sthi_plan_predict_as_it_is(&p.in, plan, out);
    if (rc == STH_OK) put_right(in, p.expand_ns, out);
    packed_fini(&p);
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

static sth_status try_set(const sth_plan_input *in, const bool *packed, sth_plan **best) {
    packed_input p;
    sth_plan *plan = NULL;
    STHI_TRY(packed_init(&p, in, packed));
    if (in->unit_count > FEW_UNITS) p.in.most_simulations = FEW_SIMULATIONS;
    sth_status rc = sthi_plan_create_as_it_is(&p.in, &plan);
    packed_fini(&p);
    if (rc == STH_BUDGET_TOO_SMALL) return STH_OK; /* so many cannot stay */
    if (rc != STH_OK) return rc;
    memcpy(plan->packed, packed, in->unit_count * sizeof *packed);
    for (uint32_t i = 0; i < in->unit_count; i++)
        if (packed[i] && plan->resident[i]) rc = STH_BUDGET_TOO_SMALL; /* all fits as it is */
    if (rc != STH_OK || (double)plan->prediction.step_ns >= WORTH_IT * (double)(*best)->prediction.step_ns) {
        sthi_plan_destroy(plan);
        return STH_OK;
    }
    put_right(in, p.expand_ns, &plan->prediction);
    sthi_plan_destroy(*best);
    *best = plan;
    return STH_OK;
}

static sth_status try_every_set(const sth_plan_input *in, bool *packed, sth_plan **best) {
    for (uint32_t set = 1; set < 1u << in->unit_count; set++) {
        bool all_may = true;
        for (uint32_t i = 0; i < in->unit_count; i++) {
            packed[i] = set >> i & 1;
            all_may = all_may && (!packed[i] || may_stay(&in->units[i]));
        }
        if (all_may) STHI_TRY(try_set(in, packed, best));
    }
    return STH_OK;
}

/* Large shares first: they are best where the link is slow. */
static sth_status try_shares(const sth_plan_input *in, bool *packed, sth_plan **best) {
    uint32_t left = in->most_simulations ? in->most_simulations / FEW_SIMULATIONS : SHARES * RINGS;
    double largest = 0, kept = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        bool keep = in->units[i].flags & STH_UNIT_KEEP;
        if (keep) kept += (double)in->units[i].bytes;
        else largest = fmax(largest, (double)in->units[i].bytes);
    }
    for (int share = SHARES; share > 0; share--)
        for (int ring = 0; ring < RINGS && left; ring++) {
            double room = (double)in->budget - kept - fmax((ring + 1.125) * largest, (double)in->least_ring_bytes);
            if (room * share / SHARES <= 0 || !spread(in, room * share / SHARES, packed)) continue;
            STHI_TRY(try_set(in, packed, best));
            left--;
        }
    return STH_OK;
}

sth_status sthi_plan_create(const sth_plan_input *in, sth_plan **out_plan) {
    sth_plan *best = NULL;
    STHI_TRY(sthi_plan_create_as_it_is(in, &best));
    bool *packed = any_may_stay(in) ? sthi_zalloc(in->unit_count, sizeof *packed) : NULL;
    if (packed) {
        best->prediction.lower_bound_ns = least_ns(in, best->prediction.compute_ns);
        bool waits = (double)best->prediction.compute_ns < WORTH_IT * (double)best->prediction.step_ns;
        sth_status rc = STH_OK;
        if (waits) rc = in->unit_count > FEW_UNITS ? try_shares(in, packed, &best) : try_every_set(in, packed, &best);
        sthi_free(packed);
        if (rc != STH_OK) {
            sthi_plan_destroy(best);
            return rc;
        }
    }
    *out_plan = best;
    return STH_OK;
}
