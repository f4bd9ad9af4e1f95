/* A runtime comes to its device: it asks for room where it has less than it wants, measures, plans
 * and lays memory out. One thread does so at a time. Does not decide who gives way
 * (core/account.c), who is protected (protect.c), nor how memory is laid out (geometry.c). */
#include "runtime/share/arrive.h"

#include "load/charge.h"
#include "load/issue.h"
#include "runtime/budget.h"
#include "runtime/drops.h"
#include "runtime/extents.h"
#include "runtime/geometry.h"
#include "runtime/measure.h"
#include "runtime/news.h"
#include "runtime/share/ask.h"
#include "runtime/share/give.h"
#include "runtime/share/grow.h"
#include "runtime/step.h"
#include "state/state.h"
#include "telemetry/timeline.h"

enum { FLOW_UNITS = 2, FLOW_SHARE = 16 };

/* Bytes with which a step streams all of its units at the link's rate: one is used, the next come. */
static uint64_t flow(const sth_runtime *rt, uint64_t least) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) all += rt->units[i].bytes;
    uint64_t largest = rt->unit_count ? rt->units[sthi_largest_unit(rt)].bytes : 0;
    return least + FLOW_UNITS * largest + all / FLOW_SHARE;
}

/* What others are asked for. Bytes that are free it takes in any case. */
static uint64_t asks_for(sth_runtime *rt, uint64_t least, uint64_t want) {
    sthi_account_lock(rt);
    uint64_t ask = sthi_account_asks(&rt->device->account, &rt->share.member, least, flow(rt, least), want);
    sthi_account_unlock(rt);
    return ask;
}

/* Lays memory out within what the request holds. Lock held. */
static sth_status come(sth_runtime *rt) {
    if (rt->shut) return sthi_shut_down(rt);
    sthi_drain_drops(rt);
    sthi_closing_free(rt);
    if (!rt->share.parked && !sthi_idle(rt, 1)) return STH_OK; /* in use since: at the begin of its next step */
    if (rt->step.open) STHI_TRY(sthi_step_end_locked(rt));
    bool was = rt->share.parked;
    sthi_hold(rt, rt->options.budget);
    sth_status rc = sthi_measure_link(rt);
    rt->share.parked = rt->share.lent = false;
    if (rc == STH_OK)
        rc = sthi_name_refusal(rt, was ? sthi_geometry_come_back(rt)
                                       : sthi_geometry_install_in_haste(rt, rt->options.budget));
    if (rc == STH_OK) sthi_news_plan(rt, was ? "its memory is there again" : "more memory is free");
    if (rc == STH_OK && was) rt->planned.again = false;
    /* Units that steps have shown to come on demand need room beside the others, which the first plan did not. */
    if (rc == STH_BUDGET_TOO_SMALL && rt->order.recorded) rc = sthi_without_plan(rt, rc);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        sthi_park(rt);
        (void)sthi_error_restore(&why);
    }
    sthi_settle(rt);
    if (rc == STH_OK) sthi_pump(rt); /* its residents, ahead of its next step */
    return rc;
}

static sth_status arrive_locked(sth_runtime *rt) {
    while (rt->share.arriving && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    if (rt->shut) return sthi_shut_down(rt);
    if (!rt->sealed)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is not sealed: it has no plan", rt->name);
    uint64_t least = sthi_least_to_plan(rt), want = sthi_max_u64(sthi_wanted(rt), least);
    if (!rt->share.parked && (rt->share.limit >= want || !sthi_idle(rt, 0))) return STH_OK;
    uint64_t ask = asks_for(rt, least, want);
    rt->share.arriving = true;
    rt->callers++;
    bool must = rt->share.parked;
    sthi_unlock(&rt->lock);
    sthi_mark begun = sthi_timeline_mark("ask for room", rt->name);
    sth_status rc = sthi_request_room(rt, must ? least : 0, ask);
    sthi_timeline_since(begun, STHI_TRACK_CALL, rt->name, "ask for room", 0);
    sthi_lock(&rt->lock);
    if (rc == STH_OK) {
        rc = come(rt);
        sthi_settle(rt);
    }
    rt->share.arriving = false;
    sthi_leave(rt);
    sthi_cond_broadcast(&rt->changed);
    return rc;
}

sth_status sthi_arrive(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = arrive_locked(rt);
    if (rc == STH_OK) rt->share.settled = true;
    sthi_unlock_and_say(rt);
    return rc;
}
