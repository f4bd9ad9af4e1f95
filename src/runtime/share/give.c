/* A runtime gives way: it lends a part of its places, or leaves the device (parks), where it is idle.
 * When it comes it plans for the room that it finds, and what is left of its places stays. Does not
 * decide who gives way (core/account.c). Lock held. */
#include "runtime/share/give.h"

#include "base/clock.h"
#include "load/issue.h"
#include "load/queue.h"
#include "load/room.h"
#include "load/stages.h"
#include "load/stays.h"
#include "runtime/budget.h"
#include "runtime/drops.h"
#include "runtime/extents.h"
#include "runtime/geometry.h"
#include "runtime/news.h"
#include "runtime/publish.h"
#include "runtime/step.h"
#include "state/state.h"

bool sthi_stepping(const sth_runtime *rt) {
    return rt->step.open && !rt->step.implicit && !rt->step.paused;
}

bool sthi_wait_inside(sth_runtime *rt, int64_t *until) {
    int64_t now = sthi_now_ns();
    if (!*until) *until = now + STHI_INSIDE_NS;
    if (now >= *until) return false;
    rt->callers++; /* destroy waits */
    (void)sthi_cond_wait_for(&rt->changed, &rt->lock, STHI_LOOK_NS);
    sthi_leave(rt);
    return true;
}

bool sthi_idle(const sth_runtime *rt, uint32_t known) {
    return !sthi_stepping(rt) && !rt->leases.bytes && rt->callers <= known;
}

void sthi_park(sth_runtime *rt) {
    rt->program.on = false;
    sthi_cancel_queue(rt);
    sthi_extents_free_all(rt);
    sthi_stages_free(rt);
    sthi_plan_put_away(rt);
    rt->share.parked = true;
    rt->share.lent = false;
    rt->share.settled = false;
    sthi_publish(rt);
}

/* The ring first: nothing in it outlasts a step. Of the residents those that were placed last. */
static void lend(sth_runtime *rt, uint64_t bytes) {
    rt->program.on = rt->planned.homes = false;
    sthi_cancel_queue(rt);
    uint64_t has = sthi_held_bytes(rt);
    sthi_stays_free(rt);
    if (rt->extents.demand != STH_NONE) sthi_extent_release(rt, rt->extents.demand);
    if (rt->extents.ring != STH_NONE) sthi_extent_release(rt, rt->extents.ring);
    for (uint32_t x = rt->places.extent_end; x-- && has - sthi_held_bytes(rt) < bytes;)
        if (rt->places.extents[x].live && !rt->places.extents[x].closing) sthi_extent_release(rt, x);
    rt->share.lent = true;
    rt->share.parked = true;
    rt->share.settled = false;
    sthi_publish(rt);
}

/* Plans for `bytes` less than it has now. */
static bool shrink(sth_runtime *rt, uint64_t bytes) {
    uint64_t has = sthi_held_bytes(rt) + rt->options.reserved;
    if (has < bytes || has - bytes < sthi_smallest_budget(rt)) return false;
    if (sthi_geometry_install_in_haste(rt, has - bytes) != STH_OK) return false;
    sthi_news_plan(rt, "another model needs memory");
    sthi_publish(rt);
    return true;
}

/* Whether it may change its places now. False: *out_gave is what there is to say. */
static bool can_give(sth_runtime *rt, bool *out_gave) {
    sthi_drain_drops(rt);
    *out_gave = true;
    if (rt->shut || !rt->sealed) return false;
    sthi_closing_free(rt);
    if (rt->share.parked && !rt->share.lent) return false;
    *out_gave = !rt->callers && !rt->leases.bytes;
    if (!sthi_idle(rt, 0)) return false;
    if (rt->step.open) (void)sthi_step_end_locked(rt);
    rt->stats.yields++;
    return true;
}

bool sthi_give_way(sth_runtime *rt, uint64_t bytes) {
    bool gave;
    if (!can_give(rt, &gave)) return gave;
    uint64_t has = sthi_held_bytes(rt) + rt->options.reserved;
    bool some = rt->planned.plan && has >= bytes && has - bytes >= sthi_smallest_budget(rt);
    if (some) lend(rt, bytes);
    else sthi_park(rt);
    return true;
}

void sthi_runtime_lend(sth_runtime *rt, uint64_t bytes) {
    sthi_lock(&rt->lock);
    (void)sthi_give_way(rt, bytes);
    sthi_unlock(&rt->lock);
}

bool sthi_make_do(sth_runtime *rt, uint64_t bytes) {
    bool gave;
    if (!can_give(rt, &gave)) return gave;
    if (shrink(rt, bytes)) sthi_pump(rt);
    else sthi_park(rt);
    return true;
}
