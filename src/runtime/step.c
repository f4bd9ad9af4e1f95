/* Steps: begin, end, the order that was seen, and when to plan anew.
 *
 *   first step      follows the order in which units were added (the guess)
 *   same as order   nothing to do; new compute times may improve the plan
 *   a prefix of it  (exception, early exit) the plan stays, the next step starts over
 *   anything else   served on demand; a single odd step changes nothing. When the next one is odd too,
 *                   units that one of the two used and the other did not are marked on demand and leave
 *                   the order; an order seen twice in a row becomes the plan's.
 *
 * Training writes weights between steps, and a plan for that is another one. A unit counts as written once it was
 * marked before two steps with at most WRITTEN_WITHIN whole ones from one to the other, and until STHI_UNWRITTEN_STEPS
 * whole ones in a row saw no write: a state that is loaded is no reason to plan anew, nor is an evaluation amid
 * training, whose steps are parts of the order. Where other units are written in each step the plan is looked at every
 * WRITES_AGAIN steps. Lock held throughout. */
#include "runtime/step.h"

#include "load/charge.h"
#include "load/issue.h"
#include "load/queue.h"
#include "load/read/keep.h"
#include "load/read/read.h"
#include "load/read/source.h"
#include "load/slots.h"
#include "runtime/epoch.h"
#include "runtime/geometry.h"
#include "runtime/graph.h"
#include "runtime/lease.h"
#include "runtime/masters.h"
#include "runtime/runtime.h"
#include "runtime/share/arrive.h"
#include "runtime/timing.h"
#include "state/state.h"

enum { REGULAR_AGAIN = 8 };
enum { WRITTEN_WITHIN = 4 };
enum { WRITES_AGAIN = 16 };

sth_status sthi_order_set(sth_runtime *rt, const uint32_t *units, uint32_t count) {
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->units[i].first_use = STH_NONE;
    uint32_t kept = 0;
    for (uint32_t t = 0; t < count && kept < rt->order.cap; t++) {
        const sthi_unit *u = &rt->units[units[t]];
        if (u->flags & STH_UNIT_ON_DEMAND) continue;
        const sthi_unit_times *seen = &u->times;
        double known = seen->use_count ? seen->compute_ns / (double)seen->use_count : (double)u->bytes / 1000.0;
        rt->order.held[kept] = 0;
        rt->order.uses[kept++] = (sth_plan_use){.unit = units[t], .compute_ns = (int64_t)known};
    }
    rt->order.count = kept;
    for (uint32_t t = kept; t-- > 0;) {
        sthi_unit *u = &rt->units[rt->order.uses[t].unit];
        rt->order.next[t] = u->first_use;
        u->first_use = t;
    }
    rt->order.epoch++;
    rt->timing.seen = 0;
    return STH_OK;
}

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

static void set_written(sth_runtime *rt, sthi_unit *u, bool written) {
    if (u->writes.written == written) return;
    u->writes.written = written;
    if (written) rt->writes.units++;
    else rt->writes.units--;
    rt->writes.fresh = true;
}

/* A step begins: what was written since the last one did. */
static void note_writes(sth_runtime *rt) {
    rt->writes.expected = rt->writes.marked || !rt->writes.units;
    if (!rt->writes.marked) return;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (u->writes.changed != u->writes.written) rt->writes.expected = false;
        if (!u->writes.changed) continue;
        if (u->writes.unwritten_steps <= WRITTEN_WITHIN) set_written(rt, u, true);
        u->writes.changed = false;
        u->writes.unwritten_steps = 0;
        rt->writes.age = true;
    }
    rt->writes.marked = false;
}

/* A whole step has ended. */
static void age_writes(sth_runtime *rt) {
    if (!rt->writes.age) return;
    rt->writes.age = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (u->writes.unwritten_steps < STHI_UNWRITTEN_STEPS) u->writes.unwritten_steps++;
        if (u->writes.unwritten_steps == STHI_UNWRITTEN_STEPS) set_written(rt, u, false);
        else rt->writes.age = true;
    }
}

sth_status sthi_step_begin_locked(sth_runtime *rt, bool implicit) {
    sthi_drain_drops(rt);
    sthi_timing_harvest(rt, false);
    sthi_grow(rt);
    rt->current.step = (double)rt->step.number;
    if (rt->program.waits) sthi_program_reset(rt);
    rt->step.open = true;
    rt->step.implicit = implicit;
    sthi_epoch_begin(rt);
    rt->step.deviated = !rt->program.on;
    rt->step.trace_count = 0;
    rt->step.trace_overflow = false;
    rt->program.cursor = 0;
    sthi_note_step(rt, !implicit);
    note_writes(rt);
    drop_stale(rt);
    sthi_timing_begin(rt);
    rt->program.kept_next = 0;
    sthi_pump(rt);
    return STH_OK;
}

static uint64_t trace_hash(const sth_runtime *rt) {
    uint64_t h = 1469598103934665603u;
    for (uint32_t t = 0; t < rt->step.trace_count; t++) {
        uint32_t unit = rt->step.trace[t];
        if (!(rt->units[unit].flags & STH_UNIT_ON_DEMAND)) h = (h ^ (unit + 1)) * 1099511628211u;
    }
    return h;
}

/* Units that came and went between this step and the last leave the order. */
static bool mark_irregular(sth_runtime *rt) {
    bool changed = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if ((u->flags & STH_UNIT_ON_DEMAND) || sthi_used_in_step(u, rt->step.number) == u->used_before) continue;
        u->flags |= STH_UNIT_ON_DEMAND;
        u->regular_steps = 0;
        changed = true;
    }
    return changed;
}

/* Units on demand that have come for a while return to the order. */
static bool mark_regular(sth_runtime *rt) {
    bool changed = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!(u->flags & STH_UNIT_ON_DEMAND)) continue;
        u->regular_steps = sthi_used_in_step(u, rt->step.number) ? u->regular_steps + 1 : 0;
        if (u->regular_steps < REGULAR_AGAIN) continue;
        u->flags &= ~(uint32_t)STH_UNIT_ON_DEMAND;
        changed = true;
    }
    return changed;
}

static sth_status adopt_trace(sth_runtime *rt) {
    rt->order.recorded = true;
    rt->planned.again = true;
    return sthi_order_set(rt, rt->step.trace, rt->step.trace_count);
}

sth_status sthi_order_regular(sth_runtime *rt) { return mark_regular(rt) ? adopt_trace(rt) : STH_OK; }

/* The step did not follow the order: decide what the next one follows. */
static sth_status learn(sth_runtime *rt) {
    rt->stats.deviations++;
    rt->order.deviations++;
    if (rt->step.trace_overflow) sthi_records_grow(rt); /* the next step is recorded whole */
    if (!rt->step.trace_count || rt->step.trace_overflow) return STH_OK;
    if (!rt->order.recorded) return adopt_trace(rt);
    bool changed = rt->order.deviations > 1 && mark_irregular(rt);
    uint64_t hash = trace_hash(rt);
    bool repeats = rt->order.deviations > 1 && hash == rt->order.last_trace;
    rt->order.last_trace = hash;
    return changed || repeats ? adopt_trace(rt) : STH_OK;
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
    rt->program.on = false; /* the order may be newer than the plan */
    sthi_cancel_queue(rt);
    return rc == STH_BUDGET_TOO_SMALL || rc == STH_OUT_OF_DEVICE_MEMORY ? STH_OK : rc;
}

/* The plan is being looked at for all that is known. */
static void forget_news(sth_runtime *rt) {
    if (rt->writes.fresh) rt->writes.look_at = rt->step.number + WRITES_AGAIN;
    rt->timing.fresh = rt->link.watch.changed = rt->writes.fresh = false;
}

static sth_status plan_again(sth_runtime *rt) {
    if (rt->share.parked) return STH_OK; /* when it comes back */
    /* Another layout would shut the extents that leases are in: what there is serves until they end. */
    if (rt->leases.bytes) return sthi_without_plan(rt, STH_BUDGET_TOO_SMALL);
    rt->planned.again = false;
    rt->stats.replans++;
    forget_news(rt);
    return sthi_without_plan(rt, sthi_geometry_install(rt));
}

static sth_status improve(sth_runtime *rt, bool *out_changed) {
    *out_changed = false;
    if (rt->leases.bytes || rt->share.parked) return STH_OK;
    forget_news(rt);
    sth_status rc = sthi_geometry_improve(rt, out_changed);
    if (*out_changed) rt->stats.replans++;
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
    sthi_drain_drops(rt);
    /* Writable host images must not be read once the caller may write them again. */
    sth_status waited = sthi_masters_wait(rt), rc = STH_OK;
    bool whole = !rt->step.deviated && rt->program.cursor == rt->order.count;
    sthi_sources_settle(rt);
    sthi_keep_settle(rt);
    sthi_read_rate_settle(rt);
    sthi_timing_end(rt);
    rt->current = (sth_step_metrics){0}; /* what happens between steps counts for the next */
    if (rt->step.deviated) {
        rc = learn(rt);
    } else {
        rt->order.deviations = 0;
        if (whole) rt->order.recorded = true;
        else forget_rest_of_lap(rt);
        if (whole) age_writes(rt);
        if (whole) rc = sthi_order_regular(rt);
    }
    for (uint32_t i = 0; i < rt->unit_count; i++)
        rt->units[i].used_before = sthi_used_in_step(&rt->units[i], rt->step.number);
    rt->step.open = rt->step.paused = false;
    sthi_note_step(rt, false);
    rt->step.number++;
    rt->leases.peak[rt->step.number % STHI_PEAK_STEPS] = rt->leases.bytes;
    rt->stats.steps++;
    rt->program.lap++;
    rt->program.cursor = 0;
    bool stray = strayed(rt, whole), writes = rt->writes.fresh && rt->step.number >= rt->writes.look_at;
    sthi_timing_harvest(rt, false);
    if (sthi_closing_idle(rt)) rt->planned.again = true;
    if (rc == STH_OK && rt->planned.again) rc = plan_again(rt);
    else if (rc == STH_OK && !rt->program.on) sthi_program_reset(rt);
    else if (rc == STH_OK && (stray || rt->link.watch.changed || writes ||
                              (rt->timing.fresh && power_of_two(rt->timing.seen)))) {
        bool changed;
        rc = improve(rt, &changed);
        if (rc == STH_OK && stray && !changed) start_over(rt);
    }
    bool queued = rt->queue.head < rt->queue.tail;
    if (rc == STH_OK && queued && rt->queue.requests[rt->queue.head % STHI_REQUEST_CAP].failed) sthi_cancel_queue(rt);
    sthi_timing_begin(rt); /* of the step to come: what is issued now is for it */
    sthi_pump(rt);
    return rc == STH_OK ? waited : rc;
}

static sth_status pause_locked(sth_runtime *rt) {
    sthi_drain_drops(rt);
    if (rt->step.open && !rt->step.paused) {
        rt->step.paused = true; /* before the wait: nobody starts reading writable images meanwhile */
        sthi_timing_pause(rt);
    }
    STHI_TRY(sthi_masters_wait(rt));
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

sth_status sthi_step_pause(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    rt->callers++; /* the wait may drop the lock */
    sth_status rc = rt->shut ? sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down")
                    : !rt->sealed ? sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a step before seal")
                                  : sthi_graph_free(rt);
    if (rc == STH_OK) rc = pause_locked(rt);
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_step_begin(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    while (!rt->share.settled && rt->sealed && !rt->shut && (!rt->step.open || rt->step.implicit)) {
        sthi_unlock(&rt->lock);
        STHI_TRY(sthi_arrive(rt));
        sthi_lock(&rt->lock); /* it may have given way again by now */
    }
    sth_status rc = STH_OK;
    if (rt->shut) rc = sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    else if (!rt->sealed) rc = sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a step before seal");
    else if (rt->step.open && !rt->step.implicit)
        rc = sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a step is open already; end it first");
    if (rc == STH_OK && rt->step.open) rc = sthi_step_end_locked(rt);
    if (rc == STH_OK) rc = sthi_step_begin_locked(rt, false);
    sthi_unlock(&rt->lock);
    return rc;
}

/* What went wrong with the telemetry file, once. */
static sth_status telemetry_failure(sth_runtime *rt) {
    if (rt->telemetry.error.status == STH_OK) return STH_OK;
    sth_status said = sthi_error_restore(&rt->telemetry.error);
    rt->telemetry.error.status = STH_OK;
    return said;
}

sth_status sthi_runtime_flush_telemetry(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = STH_OK;
    if (rt->shut) rc = sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    else if (rt->sealed) sthi_timing_harvest(rt, true);
    if (rc == STH_OK && sthi_telemetry_flush(rt->telemetry.file) != STH_OK) sthi_error_save(&rt->telemetry.error);
    if (rc == STH_OK) rc = telemetry_failure(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_step_end(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = rt->shut ? sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down")
                    : !rt->step.open ? sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "no step is open")
                                     : sthi_graph_free(rt);
    if (rc == STH_OK) rc = sthi_step_end_locked(rt);
    if (rc == STH_OK) rc = telemetry_failure(rt);
    sthi_unlock(&rt->lock);
    return rc;
}
