/* Steps: begin, end, pause, and when to plan anew: after a change of order, when new compute times
 * promise a clearly better step, when other units are written than the plan counts with (looked at
 * every WRITES_AGAIN steps), and when loads that the plan should have made came on demand. Lock
 * held throughout. */
#include "runtime/step.h"

#include "base/invariant.h"
#include "load/charge.h"
#include "load/awaited.h"
#include "load/expand_rate.h"
#include "load/issue.h"
#include "load/queue.h"
#include "load/read/keep.h"
#include "load/read/read.h"
#include "load/read/source.h"
#include "load/slots.h"
#include "runtime/drops.h"
#include "runtime/epoch.h"
#include "runtime/extents.h"
#include "runtime/geometry.h"
#include "runtime/masters.h"
#include "runtime/news.h"
#include "runtime/order.h"
#include "runtime/program.h"
#include "runtime/publish.h"
#include "runtime/share/grow.h"
#include "runtime/timing.h"
#include "runtime/writes.h"
#include "state/state.h"
#include "telemetry/ranges.h"

enum { WRITES_AGAIN = 16 };

/* Copies of images that were written since they were made: they come again in the order of their use, and not
 * when somebody waits for them. */
static void drop_stale(sth_runtime *rt) {
    bool renewed = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        int32_t slot = rt->units[i].slot;
        if (slot == STHI_NO_SLOT || !rt->places.slots[slot].stale || sthi_slot_busy(&rt->places.slots[slot])) continue;
        if (sthi_evict(rt, slot, rt->copies.stream) != STH_OK) break; /* the rest is renewed when it is used */
        rt->program.resident_next = 0;
        if (rt->units[i].resident || rt->units[i].first_use < rt->planned.kept_end) renewed = true;
    }
    /* What waits for a place in the queue would have them wait, or take theirs. */
    if (renewed) sthi_cancel_queue(rt);
}

sth_status sthi_step_begin_locked(sth_runtime *rt, bool implicit) {
    STHI_INVARIANT(!rt->step.open && !rt->share.parked && rt->graph.state == STHI_GRAPH_IDLE);
    sthi_drain_drops(rt);
    sthi_timing_harvest_idle(rt);
    sthi_grow(rt);
    rt->current.step = (double)rt->step.number;
    if (rt->program.waits) sthi_program_reset(rt);
    rt->step.open = true;
    rt->telemetry.range = sthi_range_start("step", rt->name);
    rt->step.implicit = implicit;
    sthi_epoch_begin(rt);
    rt->step.deviated = !rt->program.on;
    rt->step.trace_count = rt->step.regular = 0;
    rt->step.trace_overflow = false;
    rt->program.cursor = 0;
    sthi_note_begin(rt);
    sthi_note_step(rt, !implicit);
    sthi_writes_note(rt);
    drop_stale(rt);
    sthi_timing_begin(rt);
    rt->program.kept_next = 0;
    sthi_pump(rt);
    return STH_OK;
}

/* A step that ended early leaves planned uses that will not come. */
static void forget_rest_of_lap(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->places.slot_cap; i++)
        if (rt->places.slots[i].live && rt->sync[i].lap <= rt->program.lap) rt->places.slots[i].uses_left = 0;
    if (!rt->planned.plan || !rt->planned.plan->load_count) return;
    /* Loads of this lap that are queued would come too late as well: start over. */
    sthi_cancel_queue(rt);
    uint64_t next_lap = (rt->program.lap + 1) * rt->planned.plan->load_count;
    if (rt->program.next_load < next_lap) rt->program.next_load = next_lap;
}

sth_status sthi_without_plan(sth_runtime *rt, sth_status rc) {
    if (rc == STH_OK) return STH_OK;
    rt->planned.again = true;
    rt->planned.why = "there was no room for the plan before";
    rt->program.on = false; /* the order may be newer than the plan */
    sthi_cancel_queue(rt);
    return rc == STH_BUDGET_TOO_SMALL || rc == STH_OUT_OF_DEVICE_MEMORY ? STH_OK : rc;
}

/* The plan is being looked at for all that is known. */
static void forget_news(sth_runtime *rt) {
    if (rt->writes.fresh) rt->writes.look_at = rt->step.number + WRITES_AGAIN;
    rt->timing.fresh = rt->link.watch.changed = rt->writes.fresh = rt->expand.rate.changed = false;
    rt->expand.rate.planned = rt->expand.rate.bytes_per_s;
}

sth_status sthi_plan_again(sth_runtime *rt) {
    STHI_INVARIANT(!rt->step.open);
    if (rt->share.parked) return STH_OK; /* when it comes back */
    /* Another layout would shut the extents that leases are in: what there is serves until they end. */
    if (rt->leases.bytes) return sthi_without_plan(rt, STH_BUDGET_TOO_SMALL);
    const char *why = rt->planned.why ? rt->planned.why : "the caller keeps other bytes on the device itself";
    rt->planned.again = false;
    rt->planned.why = NULL;
    rt->stats.replans++;
    forget_news(rt);
    sth_status rc = sthi_geometry_install(rt);
    if (rc == STH_OK) sthi_news_plan(rt, why);
    return sthi_without_plan(rt, rc);
}

/* Why the plan is looked at, before that is forgotten. */
static const char *reason_to_look(const sth_runtime *rt, bool stray) {
    if (stray) return "units came on demand that it should have brought";
    if (rt->link.watch.changed) return "the link carries another rate";
    return rt->writes.fresh ? "other units are written between steps" : "compute takes other times";
}

static sth_status improve(sth_runtime *rt, bool stray, bool *out_changed) {
    *out_changed = false;
    if (rt->leases.bytes || rt->share.parked) return STH_OK;
    const char *why = reason_to_look(rt, stray);
    forget_news(rt);
    sth_status rc = sthi_geometry_improve(rt, out_changed);
    if (*out_changed) rt->stats.replans++;
    if (*out_changed && rc == STH_OK) sthi_news_plan(rt, why);
    else sthi_news_kept(rt, why);
    return sthi_without_plan(rt, rc);
}

static bool power_of_two(uint32_t n) { return n && !(n & (n - 1)); }

/* Loads on demand lie where there was room. What lies in the way of a planned home makes others come on demand, step
 * after step: once in a while the places are cleared, and the plan starts over. It may as well be a plan that cannot
 * do without them, made before it was seen what is held together: so it is looked at first. */
static bool strayed(sth_runtime *rt, bool whole) {
    bool some = whole && rt->program.on && rt->step.strays;
    rt->step.strays = 0;
    rt->step.stray_steps = some ? rt->step.stray_steps + 1 : 0;
    return power_of_two(rt->step.stray_steps);
}

static void start_over(sth_runtime *rt) {
    STHI_INVARIANT(!rt->step.open && rt->program.on);
    sthi_cancel_queue(rt);
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        int32_t slot = rt->units[i].slot;
        if (slot == STHI_NO_SLOT || rt->places.slots[slot].resident || sthi_slot_busy(&rt->places.slots[slot]))
            continue;
        if (sthi_evict(rt, slot, rt->copies.stream) != STH_OK) break;
    }
    sthi_program_reset(rt);
}

sth_status sthi_step_end_locked(sth_runtime *rt) {
    STHI_INVARIANT(rt->step.open && rt->graph.state == STHI_GRAPH_IDLE);
    STHI_INVARIANT(rt->program.cursor <= rt->order.count && rt->step.trace_count <= rt->step.trace_cap);
    sthi_drain_drops(rt);
    sthi_timing_harvest(rt, false); /* here the device has the rest of the step to do */
    /* Writable host images must not be read once the caller may write them again. */
    sth_status waited = sthi_masters_wait(rt), rc = sthi_awaited_wait(rt);
    if (waited == STH_OK) waited = rc;
    rc = STH_OK;
    bool whole = !rt->step.deviated && rt->program.cursor == rt->order.count, recorded = rt->order.recorded;
    uint64_t epoch = rt->order.epoch;
    sthi_sources_settle(rt);
    sthi_keep_settle(rt);
    sthi_read_rate_settle(rt);
    sthi_timing_end(rt);
    rt->current = (sth_step_metrics){0}; /* what happens between steps counts for the next */
    if (rt->step.deviated) {
        rc = sthi_order_learn(rt);
    } else {
        rt->order.deviations = 0;
        sthi_order_note_held(rt);
        if (whole) rt->order.recorded = true;
        else forget_rest_of_lap(rt);
        if (whole) sthi_writes_age(rt);
        if (whole) rc = sthi_order_regular(rt);
    }
    for (uint32_t i = 0; i < rt->unit_count; i++)
        rt->units[i].used_before = sthi_used_in_step(&rt->units[i], rt->step.number);
    rt->step.open = rt->step.paused = rt->step.backward = false;
    sthi_range_end(rt->telemetry.range);
    rt->telemetry.range = 0;
    sthi_note_step(rt, false);
    rt->step.number++;
    rt->leases.peak[rt->step.number % STHI_PEAK_STEPS] = rt->leases.bytes;
    rt->stats.steps++;
    rt->program.lap++;
    rt->program.cursor = 0;
    bool stray = strayed(rt, whole), writes = rt->writes.fresh && rt->step.number >= rt->writes.look_at;
    bool learnt = rt->order.recorded && (!recorded || epoch != rt->order.epoch);
    sthi_expand_rate_read(rt);
    if (learnt) sthi_timing_harvest(rt, true); /* a plan for a new order is worth the wait for its times */
    else sthi_timing_harvest_idle(rt);
    if (sthi_closing_idle(rt)) {
        rt->planned.again = true;
        rt->planned.why = "memory is free that leases held";
    }
    rt->planned.hurry = learnt;
    if (rc == STH_OK && rt->planned.again) rc = sthi_plan_again(rt);
    else if (rc == STH_OK && !rt->program.on) sthi_program_reset(rt);
    else if (rc == STH_OK && (stray || rt->link.watch.changed || rt->expand.rate.changed || writes ||
                              (rt->timing.fresh && power_of_two(rt->timing.seen)))) {
        bool changed;
        rc = improve(rt, stray, &changed);
        if (rc == STH_OK && stray && !changed) start_over(rt);
    }
    rt->planned.hurry = false;
    rt->timing.fresh = rt->timing.fresh || learnt;
    bool queued = rt->queue.head < rt->queue.tail;
    if (rc == STH_OK && queued && rt->queue.requests[rt->queue.head % STHI_REQUEST_CAP].failed) sthi_cancel_queue(rt);
    sthi_timing_begin(rt); /* of the step to come: what is issued now is for it */
    sthi_pump(rt);
    sthi_publish(rt);
    return rc == STH_OK ? waited : rc;
}

sth_status sthi_step_pause_locked(sth_runtime *rt) {
    sthi_drain_drops(rt);
    if (rt->step.open && !rt->step.paused) {
        rt->step.paused = true; /* before the wait: nobody starts reading writable images meanwhile */
        sthi_timing_pause(rt);
    }
    STHI_TRY(sthi_masters_wait(rt));
    STHI_TRY(sthi_awaited_wait(rt));
    sthi_pump(rt); /* what is not written goes on */
    if (rt->step.paused) sthi_note_step(rt, false);
    return STH_OK;
}

void sthi_step_resume(sth_runtime *rt) {
    if (!rt->step.paused) return;
    rt->step.paused = false;
    sthi_note_step(rt, !rt->step.implicit);
    sthi_epoch_begin(rt);
}
