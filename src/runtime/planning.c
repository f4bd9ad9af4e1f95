/* Plans: made for a link that is slower than it was measured, by bundles where those pay, and
 * priced. Does not lay memory out (geometry.c). Lock held. */
#include "runtime/planning.h"

#include "base/memory.h"
#include "core/curve.h"
#include "core/plan.h"
#include "load/charge.h"
#include "load/room.h"
#include "runtime/bundle.h"
#include "runtime/plan_input.h"
#include "state/state.h"
#include "telemetry/timeline.h"

/* Plans are made for a link that is this much slower than it was measured. Rates and compute vary from step to
 * step: of plans that promise the same, the one that needs all of the link is late when they do. */
static const double LINK_MARGIN = 0.9;

enum {
    SPARE_SHARE = 64,     /* of its room that a plan from before may leave unused */
    SEARCH_NS = 15000000  /* that the device waits for a search in haste, or more */
};

static uint64_t mixed(uint64_t n, uint64_t with) {
    n = (n ^ with) * UINT64_C(0x9E3779B97F4A7C15);
    return n ^ n >> 32;
}

void sthi_made_drop(sthi_made_plan *m) {
    sthi_plan_destroy(m->plan);
    sthi_bundles_destroy(m->bundles);
    *m = (sthi_made_plan){0};
}

/* The same input for a link, and a disk, that are slower than they were measured. */
static sth_plan_input with_margin(const sth_plan_input *in) {
    sth_plan_input slower = *in;
    slower.link_bytes_per_s *= LINK_MARGIN;
    slower.disk_bytes_per_s *= LINK_MARGIN;
    return slower;
}

/* A ring that is mapped twice is rounded up to what the device maps: where there is no room for that it is mapped
 * once. */
static sth_status create_and_price(const sth_plan_input *in, sth_plan **out) {
    sth_plan_input tight = with_margin(in);
    sth_plan *plan = NULL;
    sth_status rc = sthi_plan_create(&tight, &plan);
    if (rc == STH_BUDGET_TOO_SMALL && tight.ring_mapped_twice) {
        sthi_plan_map_once(&tight);
        rc = sthi_plan_create(&tight, &plan);
    }
    if (rc == STH_OK) rc = sthi_plan_predict(in, plan, &plan->prediction);
    if (rc != STH_OK) sthi_plan_destroy(plan);
    else *out = plan;
    return rc;
}

static sth_status create_by_bundles(sthi_bundles *b, const sth_plan_input *in, sth_plan **out) {
    sth_plan_input joined;
    sthi_bundles_input(b, in, &joined);
    STHI_TRY(create_and_price(&joined, &b->plan));
    return sthi_bundles_part(b, in, out);
}

/* Bundles may be more than there is room for. What is held together may be more than a plan can give a place of its own
 * within the budget: then some of it comes on demand. */
static sth_status create_plan(sth_runtime *rt, const sth_plan_input *in, sthi_made_plan *m) {
    sth_status rc = STH_BUDGET_TOO_SMALL;
    for (int holds = 1; holds >= 0 && rc == STH_BUDGET_TOO_SMALL; holds--) {
        sthi_plan_hold(rt, holds);
        if (m->bundles) rc = create_by_bundles(m->bundles, in, &m->plan);
        if (rc != STH_BUDGET_TOO_SMALL) break;
        rc = create_and_price(in, &m->plan);
        if (rc != STH_OK) continue;
        sthi_bundles_destroy(m->bundles);
        m->bundles = NULL;
    }
    return rc;
}

/* A number for all that a plan depends on but rates, times, the room, and where units lie now. */
static uint64_t question(const sth_plan_input *in) {
    uint64_t n = in->unit_count, of_input[] = {in->use_count, in->chunk_bytes, in->read_ahead_bytes,
                                               in->least_ring_bytes, in->ring_granularity};
    for (uint32_t i = 0; i < in->unit_count; i++) {
        const sth_plan_unit *u = &in->units[i];
        n = mixed(mixed(n, u->bytes), u->flags & ~(uint32_t)STH_UNIT_PRESENT);
        n = mixed(mixed(n, u->transfer_bytes), u->packed_bytes);
    }
    for (uint32_t t = 0; t < in->use_count; t++) n = mixed(n, in->uses[t].unit);
    for (size_t i = 0; i < sizeof of_input / sizeof *of_input; i++) n = mixed(n, of_input[i]);
    return n;
}

static sth_status make_plan(sth_runtime *rt, sthi_made_plan *out) {
    sth_plan_input in;
    sthi_plan_input(rt, &in);
    sthi_made_plan m = {.asked = question(&in), .room = in.budget};
    STHI_TRY(sthi_bundles_make(rt, &in, &m.bundles));
    sth_status rc = create_plan(rt, &in, &m);
    if (rc != STH_OK) sthi_made_drop(&m);
    else *out = m;
    return rc;
}

sth_status sthi_plan_make(sth_runtime *rt, sthi_made_plan *out) {
    sthi_mark begun = sthi_timeline_mark("plan", rt->name);
    sth_status rc = make_plan(rt, out);
    sthi_timeline_since(begun, STHI_TRACK_CALL, rt->name, "plan", 0);
    return rc;
}

static sth_status price(const sth_plan_input *in, const sth_plan *plan, sthi_bundles *bundles, sth_prediction *out) {
    sth_plan_input joined;
    if (!bundles) return sthi_plan_predict(in, plan, out);
    sthi_bundles_input(bundles, in, &joined);
    return sthi_plan_predict(&joined, bundles->plan, out);
}

sth_status sthi_plan_price(sth_runtime *rt, double link, sth_prediction *out) {
    sth_plan_input in;
    sthi_plan_input(rt, &in);
    if (link > 0) in.link_bytes_per_s = link;
    return price(&in, rt->planned.plan, rt->planned.bundles, out);
}

/* What another plan can save at most until the runtime gives way again, if it makes as many steps as last time. */
static double worth_of_another(sth_runtime *rt, const sth_prediction *now) {
    sthi_account_lock(rt);
    uint32_t steps = rt->share.member.last_run;
    sthi_account_unlock(rt);
    return (double)(now->step_ns - now->lower_bound_ns) * (steps ? steps : 1);
}

static bool suits(sth_runtime *rt, const sthi_made_plan *m) {
    sth_plan_input in;
    sth_prediction now, *then = &m->plan->prediction;
    if (rt->planned.again) return false;
    sthi_plan_input(rt, &in);
    uint64_t needs = then->resident_bytes + then->packed_bytes + m->plan->ring_bytes + m->plan->demand_bytes;
    if (in.budget < needs || in.budget > m->room + m->room / SPARE_SHARE || question(&in) != m->asked) return false;
    if (price(&in, m->plan, m->bundles, &now) != STH_OK || worth_of_another(rt, &now) > SEARCH_NS) return false;
    *then = now;
    return true;
}

bool sthi_plan_before(sth_runtime *rt, sthi_made_plan *out) {
    sthi_made_plan m = rt->planned.before;
    rt->planned.before = (sthi_made_plan){0};
    if (!m.plan) return false;
    if (suits(rt, &m)) {
        *out = m;
        return true;
    }
    sthi_made_drop(&m);
    return false;
}

/* What is known for plans, for use without the lock: the steady step, wherever units lie now. */
static sth_status copy_input(sth_runtime *rt, sth_plan_input *in, sth_plan_unit **out_units, sth_plan_use **out_uses) {
    sthi_plan_input(rt, in);
    *out_units = sthi_alloc((in->unit_count + 1) * sizeof **out_units);
    *out_uses = sthi_alloc((in->use_count + 1) * sizeof **out_uses);
    if (!*out_units || !*out_uses) return sthi_no_memory(rt->name, "a curve");
    for (uint32_t i = 0; i < in->unit_count; i++) {
        (*out_units)[i] = in->units[i];
        (*out_units)[i].flags &= ~(uint32_t)STH_UNIT_PRESENT;
    }
    for (uint32_t i = 0; i < in->use_count; i++) (*out_uses)[i] = in->uses[i];
    in->units = *out_units;
    in->uses = *out_uses;
    sthi_plan_map_once(in);
    return STH_OK;
}

static sth_status check_curve(const sth_runtime *rt) {
    if (rt->shut) return sthi_shut_down(rt);
    if (rt->sealed && rt->options.policy == STH_POLICY_PLANNED) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' has no plans to predict: %s", rt->name,
                     rt->sealed ? "its policy is static" : "it is not sealed");
}

sth_status sthi_runtime_curve(sth_runtime *rt, uint32_t count, sth_curve_point *points, uint32_t *out_count) {
    sth_plan_input in;
    sth_plan_unit *units = NULL;
    sth_plan_use *uses = NULL;
    sthi_lock(&rt->lock);
    sth_status rc = check_curve(rt);
    if (rc == STH_OK) rc = copy_input(rt, &in, &units, &uses);
    uint64_t beside = rt->options.reserved + sthi_stages_bytes(rt);
    if (rc == STH_OK) in.budget = rt->options.budget - sthi_min_u64(rt->options.budget, beside);
    sthi_unlock(&rt->lock);
    if (rc == STH_OK) rc = sthi_plan_curve(&in, count, create_and_price, points, out_count);
    for (uint32_t i = 0; rc == STH_OK && i < *out_count; i++) points[i].budget += beside;
    sthi_free(units);
    sthi_free(uses);
    return rc;
}
