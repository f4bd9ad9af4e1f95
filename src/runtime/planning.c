/* Plans: made for a link that is slower than it was measured, by bundles where those pay, and
 * priced. Does not lay memory out (geometry.c). Lock held. */
#include "runtime/planning.h"

#include "core/plan.h"
#include "runtime/bundle.h"
#include "runtime/plan_input.h"
#include "state/state.h"

/* Plans are made for a link that is this much slower than it was measured. Rates and compute vary from step to
 * step: of plans that promise the same, the one that needs all of the link is late when they do. */
static const double LINK_MARGIN = 0.9;

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

sth_status sthi_plan_make(sth_runtime *rt, sthi_made_plan *out) {
    sth_plan_input in;
    sthi_made_plan m = {0};
    sthi_plan_input(rt, &in);
    STHI_TRY(sthi_bundles_make(rt, &in, &m.bundles));
    sth_status rc = create_plan(rt, &in, &m);
    if (rc != STH_OK) sthi_made_drop(&m);
    else *out = m;
    return rc;
}

sth_status sthi_plan_price(sth_runtime *rt, double link, sth_prediction *out) {
    sth_plan_input in, joined;
    sthi_plan_input(rt, &in);
    if (link > 0) in.link_bytes_per_s = link;
    if (!rt->planned.bundles) return sthi_plan_predict(&in, rt->planned.plan, out);
    sthi_bundles_input(rt->planned.bundles, &in, &joined);
    return sthi_plan_predict(&joined, rt->planned.bundles->plan, out);
}
