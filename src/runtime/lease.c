/* Leases: acquire and release. Acquire finds the unit (planned, or on demand), makes the stream
 * wait for its copy and counts the lease. Release is drops.c's.
 *
 * The unit's stream wait is enqueued after the lock is dropped: on the simulated device it blocks
 * the caller, and the lease already keeps the slot and its event where they are. */
#include "runtime/lease.h"

#include "base/invariant.h"
#include "load/events.h"
#include "load/awaited.h"
#include "load/fingerprint.h"
#include "load/issue.h"
#include "load/queue.h"
#include "load/read/jobs.h"
#include "load/read/slabs.h"
#include "load/reader.h"
#include "load/slots.h"
#include "load/watermarks.h"
#include "runtime/demand.h"
#include "runtime/drops.h"
#include "runtime/end.h"
#include "runtime/geometry.h"
#include "runtime/graph.h"
#include "runtime/order.h"
#include "runtime/program.h"
#include "runtime/share/arrive.h"
#include "runtime/share/ask.h"
#include "runtime/share/reserved.h"
#include "runtime/spare.h"
#include "runtime/step.h"
#include "runtime/timing.h"
#include "state/state.h"

void sthi_lease_release(sth_runtime *rt, const sth_lease *lease) {
    /* A lease keeps its place; one that is released twice does not. */
    STHI_INVARIANT(rt->places.slots[lease->slot].generation == lease->generation);
    sthi_drop_push(rt, (int32_t)lease->slot);
    sthi_runtime_unref(rt);
}

/* The slot's record of the stream: its own, a new one, or that of a stream whose uses have ended. */
static bool user_index(sth_runtime *rt, sthi_slot_sync *y, sth_stream stream, uint32_t *out) {
    for (*out = 0; *out < y->user_count; ++*out)
        if (y->users[*out] == stream) return true;
    if (y->user_count < STHI_SLOT_STREAMS) {
        y->released[y->user_count++] = NULL;
        return true;
    }
    for (*out = 0; *out < y->user_count; ++*out) {
        sth_event *last = y->released[*out];
        if (y->using_now[*out] || (last && STHI_DEV(rt, event_synchronize, last) != STH_OK)) continue;
        rt->current.host_waits++;
        sthi_event_give(rt, last);
        y->released[*out] = NULL;
        return true;
    }
    return false;
}

static sth_status add_user(sth_runtime *rt, int32_t slot, sth_stream stream) {
    sthi_slot_sync *y = &rt->sync[slot];
    const char *name = rt->units[rt->places.slots[slot].unit].name;
    uint32_t i;
    if (!user_index(rt, y, stream, &i))
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, name, "unit '%s' is used on more than %d streams at once",
                         name, STHI_SLOT_STREAMS);
    y->users[i] = stream;
    y->using_now[i] = true;
    y->last_user = i;
    return STH_OK;
}

/* Leaves the planned order for the rest of the step. */
static void deviate(sth_runtime *rt) {
    rt->step.deviated = true;
    if (!rt->program.on) return;
    rt->program.on = false;
    sthi_cancel_queue(rt);
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) rt->places.slots[i].uses_left = 0;
}

/* Follows the order. Returns the use's place in it; STH_NONE: it has none. */
static uint32_t follow(sth_runtime *rt, uint32_t unit) {
    if (rt->units[unit].flags & STH_UNIT_ON_DEMAND) return STH_NONE; /* expected at any time */
    if (!rt->step.deviated && rt->program.cursor < rt->order.count &&
        rt->order.uses[rt->program.cursor].unit == unit)
        return rt->program.cursor++;
    deviate(rt);
    return STH_NONE;
}

/* Returns the use's place in the trace; STH_NONE: the trace is full. */
static uint32_t record_trace(sth_runtime *rt, uint32_t unit) {
    if (sthi_unplanned(&rt->units[unit])) sthi_spare_used(rt, unit);
    rt->units[unit].last_step = rt->step.number + 1;
    if (sthi_in_order(&rt->units[unit])) rt->step.regular++;
    if (rt->step.trace_count == rt->step.trace_cap) {
        rt->step.trace_overflow = true;
        return STH_NONE;
    }
    rt->step.trace[rt->step.trace_count] = unit;
    rt->step.held[rt->step.trace_count] = 0;
    return rt->step.trace_count++;
}

/* The queued load that is meant for the use that has just begun, not for a later one. */
static sthi_request *due_request(sth_runtime *rt, uint32_t unit) {
    sthi_request *r = sthi_queued(rt, unit);
    return !r || !r->planned || sthi_request_due(rt, r) ? r : NULL;
}

/* Waits for readers, or reads itself where there are none. False: no read can bring the queue further, for good or as
 * long as the device fails. `failures`: those of readers before the caller began to wait. */
static bool wait_for_reads(sth_runtime *rt, uint64_t failures, bool *counted) {
    if (!*counted) rt->current.host_waits++;
    *counted = true;
    if (!rt->readers.count) return sthi_read_one(rt);
    if (rt->slabs.pool_shut || rt->slabs.failures != failures) return false;
    sthi_need_slabs(rt, 1);
    sthi_cond_wait(&rt->changed, &rt->lock);
    sthi_need_slabs(rt, -1);
    return true;
}

/* Until the unit is complete in a slot. Lock held; dropped only to wait for reads: another thread may end the step
 * meanwhile. Images that the caller writes are read inside steps only, so one begins again. */
static sth_status bring(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    uint64_t failures = rt->slabs.failures;
    STHI_INVARIANT(rt->callers); /* so that nobody makes the runtime give way or captures meanwhile */
    bool counted = false;
    for (;;) {
        if (rt->shut) return sthi_shut_down(rt);
        if (!rt->step.open) STHI_TRY(sthi_step_begin_locked(rt, true));
        if (u->slot != STHI_NO_SLOT && rt->places.slots[u->slot].complete) return STH_OK;
        sthi_pump_for(rt, unit);
        if (u->slot != STHI_NO_SLOT && rt->places.slots[u->slot].complete) return STH_OK;
        if (u->slot != STHI_NO_SLOT && rt->sync[u->slot].filled_by == rt->copies.demand_stream) {
            sthi_cond_wait(&rt->changed, &rt->lock); /* another thread is loading it on demand */
            continue;
        }
        bool coming = due_request(rt, unit) || u->slot != STHI_NO_SLOT;
        if (coming && rt->queue.head_state == STHI_ISSUE_NOT_READ && wait_for_reads(rt, failures, &counted)) continue;
        /* A load that waits for a place would wait for ever if that place is leased, and one that failed is
         * tried again: not in the plan's way, then. */
        if (coming) sthi_cancel_queue(rt);
        if (coming) sthi_program_skip(rt);
        sth_status rc = sthi_demand_load(rt, unit);
        if (rc == STH_OK || (rc == STH_BUDGET_TOO_SMALL && sthi_yield_soft(rt, u->bytes))) continue;
        if (rc != STH_BUDGET_TOO_SMALL || !sthi_more_room(rt, u->bytes)) return rc;
    }
}

static sth_status begin_if_needed(sth_runtime *rt, uint32_t unit) {
    bool again = rt->step.open && rt->step.implicit && rt->step.trace_count && rt->step.trace[0] == unit &&
                 (rt->program.cursor >= rt->order.count || rt->step.deviated || !rt->order.recorded);
    if (again) STHI_TRY(sthi_step_end_locked(rt));
    return rt->step.open ? STH_OK : sthi_step_begin_locked(rt, true);
}

/* Whether its bytes are there already: the use will wait for nothing. */
static bool is_there(sth_runtime *rt, const sthi_unit *u) {
    return u->slot != STHI_NO_SLOT && !rt->places.slots[u->slot].stale && sthi_slot_arrived(rt, u->slot);
}

/* Counts the lease of a unit that is there. */
static sth_status take_lease(sth_runtime *rt, uint32_t unit, sth_stream stream, sth_lease *out) {
    int32_t slot = rt->units[unit].slot;
    sthi_slot *s = &rt->places.slots[slot];
    STHI_INVARIANT(s->live && s->unit == unit && s->complete && !s->stale);
    STHI_TRY(add_user(rt, slot, stream));
    if (!s->leases++) rt->leases.bytes += s->bytes;
    uint64_t *peak = &rt->leases.peak[rt->step.number % STHI_PEAK_STEPS];
    *peak = sthi_max_u64(*peak, rt->leases.bytes);
    atomic_fetch_add(&rt->refs, 1);
    rt->step.last_stream = stream;
    *out = (sth_lease){.address = rt->places.extents[s->extent].base + s->offset, .generation = s->generation,
                       .slot = (uint32_t)slot, .unit = unit};
    return STH_OK;
}

/* *out_there: the stream will wait for nothing. */
static sth_status acquire_locked(sth_runtime *rt, uint32_t unit, sth_stream stream, sth_lease *out,
                                 sthi_use_ticket *out_ticket, bool *out_there) {
    const sthi_unit *u = &rt->units[unit];
    sthi_drain_drops(rt);
    *out_there = false;
    if (rt->graph.state == STHI_GRAPH_CAPTURING) {
        *out_ticket = (sthi_use_ticket){STH_NONE, rt->step.number};
        STHI_TRY(sthi_graph_use(rt, unit));
        return take_lease(rt, unit, stream, out);
    }
    STHI_TRY(begin_if_needed(rt, unit));
    sthi_step_resume(rt);
    uint64_t step = rt->step.number;
    uint32_t use = follow(rt, unit), regular_before = rt->step.regular, traced = record_trace(rt, unit);
    *out_ticket = sthi_timing_arrive(rt, unit, stream); /* before any waiting: late reads are stalls */
    *out_there = is_there(rt, u);
    STHI_TRY(bring(rt, unit));
    STHI_TRY(sthi_fingerprint_compare(rt, unit));
    while (rt->places.slots[u->slot].stale) { /* others may write, or evict, while a refresh reads */
        *out_there = false;
        STHI_TRY(sthi_refresh(rt, u->slot));
        STHI_TRY(bring(rt, unit));
    }
    if (rt->step.number != step) { /* it ended meanwhile, and what it noted of this use is no more */
        use = traced = STH_NONE;
        regular_before = rt->step.regular;
    }
    sthi_slot *s = &rt->places.slots[u->slot];
    if (use != STH_NONE && s->uses_left) s->uses_left--;
    STHI_TRY(take_lease(rt, unit, stream, out));
    if (!*out_there) sthi_awaits_copy(rt, u->slot);
    sthi_hold_begin(rt, &rt->sync[u->slot], traced, regular_before);
    if (rt->options.policy == STH_POLICY_STATIC) sthi_watermark_evictions(rt);
    sthi_pump(rt);
    return STH_OK;
}

static sth_status check_usable(const sth_runtime *rt) {
    if (rt->shut) return sthi_shut_down(rt);
    return rt->sealed ? STH_OK : sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "acquire before seal");
}

sth_status sthi_check_unit(const sth_runtime *rt, uint32_t unit) {
    if (unit < rt->unit_count) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "there is no unit %u; the runtime has %u", unit,
                     rt->unit_count);
}

sth_status sthi_unit_acquire(sth_runtime *rt, uint32_t unit, sth_stream stream, sth_lease *out) {
    STHI_TRY(sthi_check_unit(rt, unit));
    sth_lease lease;
    sthi_use_ticket ticket;
    bool there;
    sthi_lock(&rt->lock);
    rt->callers++;
    sth_status rc = check_usable(rt);
    while (rc == STH_OK && (rt->share.parked || sthi_graph_others(rt))) {
        if (rt->share.parked) {
            sthi_unlock(&rt->lock);
            rc = sthi_arrive(rt);
            sthi_lock(&rt->lock);
        } else {
            sthi_cond_wait(&rt->changed, &rt->lock);
            rc = check_usable(rt);
        }
    }
    if (rc == STH_OK) rc = acquire_locked(rt, unit, stream, &lease, &ticket, &there);
    bool leased = rc == STH_OK;
    if (leased && (rt->graph.state != STHI_GRAPH_CAPTURING || !sthi_graph_has(rt, lease.slot, stream))) {
        sth_event *ready = rt->sync[lease.slot].ready;
        sthi_unlock(&rt->lock);
        rc = STHI_DEV(rt, stream_wait, stream, ready);
        sthi_lock(&rt->lock);
    }
    if (rc == STH_OK) sthi_timing_start(rt, ticket, (int32_t)lease.slot, stream, !there);
    else if (rt->graph.state == STHI_GRAPH_CAPTURING) rt->step.deviated = true; /* the graph lacks this use */
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    if (rc == STH_OK) *out = lease;
    else if (leased) sthi_lease_release(rt, &lease);
    return rc;
}

sth_status sthi_runtime_poll(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    if (!rt->shut && rt->sealed && !sthi_graph_others(rt)) {
        sthi_drain_drops(rt);
        sthi_pump(rt);
    }
    sthi_unlock(&rt->lock);
    return STH_OK;
}

sth_status sthi_runtime_gather(sth_runtime *rt, uint64_t bytes) {
    sthi_lock(&rt->lock);
    sth_status rc = check_usable(rt);
    if (rc == STH_OK) rc = sthi_graph_free(rt);
    if (rc == STH_OK) sthi_drain_drops(rt);
    if (rc == STH_OK && !rt->share.parked && !rt->leases.bytes) rc = sthi_rearrange(rt, bytes);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_unit_mark_written(sth_runtime *rt, uint32_t unit) {
    STHI_TRY(sthi_check_unit(rt, unit));
    sthi_lock(&rt->lock);
    sthi_unit *u = &rt->units[unit];
    sthi_request *r = rt->sealed ? sthi_queued(rt, unit) : NULL;
    if (r && r->slot != STHI_NO_SLOT) { /* half of it may be old bytes */
        sthi_cancel_queue(rt);
        sthi_program_skip(rt);
    } else if (r && r->staged) {
        sthi_reads_rewind(rt);
    }
    if (u->slot != STHI_NO_SLOT) rt->places.slots[u->slot].stale = true;
    if (u->master) u->encoded.stale = true;
    u->writes.changed = rt->writes.marked = true;
    sthi_unlock(&rt->lock);
    return STH_OK;
}
