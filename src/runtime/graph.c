/* A step inside a graph of the device's: the calls of stagehand/graph.h.
 *
 * While a graph is captured the runtime's own streams are in the capture, so that feed and issue go on as
 * in any step and what they enqueue becomes the graph's nodes. What must not happen then is kept away:
 * waits of the host, events of before the capture (everything is drained and waited for first), memory
 * that comes or goes, loads on demand (they need places that the plan does not know). What is recorded
 * inside belongs to the graph: at the end its events go, and the places that it fills are empty again, for
 * nothing was copied yet.
 *
 * A graph is good as long as the extents and images are those that it was made of: `edition` counts their
 * changes. It overwrites the ring, so a replay takes that over first and an ordinary step starts its plan
 * from the beginning.
 *
 * Invariants: `graph` is not IDLE only inside an explicit step, so that nobody makes the runtime give way
 * or plan. Locks: the runtime's, in each call. */
#include "runtime/graph.h"

#include "base/invariant.h"
#include "load/charge.h"
#include "load/events.h"
#include "load/fingerprint.h"
#include "load/interval.h"
#include "load/issue.h"
#include "load/queue.h"
#include "load/repack.h"
#include "load/slots.h"
#include "load/traces.h"
#include "runtime/demand.h"
#include "runtime/drops.h"
#include "runtime/epoch.h"
#include "runtime/masters.h"
#include "runtime/program.h"
#include "runtime/share/arrive.h"
#include "runtime/step.h"
#include "state/state.h"

enum { OUR_STREAMS = 3 };

static uint32_t our_streams(const sth_runtime *rt, sth_stream out[OUR_STREAMS]) {
    out[0] = rt->copies.stream;
    out[1] = rt->copies.demand_stream;
    out[2] = rt->expand.stream;
    return rt->expand.stream ? 3 : 2;
}

static sth_status wait_for_streams(sth_runtime *rt) {
    sth_stream all[OUR_STREAMS];
    for (uint32_t i = 0, n = our_streams(rt, all); i < n; i++)
        STHI_TRY(STHI_DEV(rt, stream_synchronize, all[i]));
    return STH_OK;
}

static sth_status refuse(const sth_runtime *rt, const char *why) {
    return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' %s", rt->name, why);
}

bool sthi_graph_others(const sth_runtime *rt) {
    return rt->graph.state != STHI_GRAPH_IDLE && rt->graph.thread != sthi_this_thread();
}

sth_status sthi_graph_free(const sth_runtime *rt) {
    return rt->graph.state == STHI_GRAPH_IDLE ? STH_OK : refuse(rt, "is being captured or replayed: not now");
}

static void enter(sth_runtime *rt, sthi_graph_state state) {
    STHI_INVARIANT(rt->graph.state == STHI_GRAPH_IDLE && !rt->step.open && !rt->program.on);
    rt->graph.state = state;
    rt->graph.thread = sthi_this_thread();
    rt->step.open = true;
    rt->step.implicit = rt->step.paused = rt->step.deviated = false;
    rt->program.cursor = 0;
    rt->timing.now = NULL;
    sthi_note_begin(rt);
    sthi_note_step(rt, true);
}

static void leave(sth_runtime *rt) {
    STHI_INVARIANT(rt->graph.state != STHI_GRAPH_IDLE && rt->step.open);
    rt->graph.state = STHI_GRAPH_IDLE;
    rt->step.open = false;
    rt->current = (sth_step_metrics){0};
    sthi_note_step(rt, false);
    sthi_cond_broadcast(&rt->changed);
}

/* The copies of what a graph finds in its place come before it, not in it. */
bool sthi_graph_has(sth_runtime *rt, uint32_t slot, sth_stream stream) {
    const sthi_slot_sync *y = &rt->sync[slot];
    if (rt->places.slots[slot].resident) return true;
    return y->filled_by == rt->copies.stream && sthi_graph_waited(&rt->graph.user_behind, stream, y->copy_number);
}

/* ---- before a capture, before a replay */

static sth_status check_unit(const sth_runtime *rt, const sthi_unit *u) {
    if (u->direct || u->first_use == STH_NONE) return STH_OK;
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, u->name,
                     "'%s' cannot be captured: the bytes of unit '%s' pass through slabs that the host fills (a file, "
                     "or memory that could not be pinned), and a graph cannot wait for the host; keep the model in "
                     "pinned RAM",
                     rt->name, u->name);
}

/* More steps change nothing about that. */
static sth_status no_plan_fits(const sth_runtime *rt) {
    char has[32];
    uint64_t bytes = sthi_min_u64(rt->options.budget, rt->share.limit);
    return sthi_fail(rt->planned.refused, NULL, 0, rt->name,
                     "'%s' cannot be captured: it runs without a plan, weight by weight on demand, because none fits "
                     "in the %s (%llu bytes) that it has of the device: raise the budget, or give what else is on the "
                     "device less",
                     rt->name, sthi_format_size(bytes, has, sizeof has), (unsigned long long)bytes);
}

static sth_status check_capturable(const sth_runtime *rt) {
    if (!(rt->device->capabilities & STH_CAP_GRAPH_CAPTURE))
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, rt->name,
                         "'%s' cannot be captured: a device of '%s' has no graphs", rt->name, rt->device->ops->backend);
    if (rt->options.policy != STH_POLICY_PLANNED)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, rt->name,
                         "'%s' cannot be captured: the static policy has no plan of places", rt->name);
    if (rt->planned.refused != STH_OK) return no_plan_fits(rt);
    if (!rt->order.recorded || !rt->planned.plan || !rt->program.waits)
        return refuse(rt, "has no plan of a whole step in force: run it a few times before the capture, and hold no "
                          "tensor over a weight meanwhile (an output that is a view of one)");
    for (uint32_t i = 0; i < rt->unit_count; i++) STHI_TRY(check_unit(rt, &rt->units[i]));
    return STH_OK;
}

static sth_status holds_too_much(const sth_runtime *rt, const sthi_unit *u) {
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, u->name,
                     "'%s' cannot be captured: unit '%s' was written, its packed image has no room for the values, and "
                     "they are not in pinned memory; wrap the model again", rt->name, u->name);
}

/* The plan is followed again, from the start of a lap, by the next ordinary step. */
static void interrupt_program(sth_runtime *rt) {
    rt->program.waits = rt->program.waits || rt->program.on;
    rt->program.on = false;
}

/* Not held: brought to the device. Then locked, and between steps. */
static sth_status come_in(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = STH_OK;
    while (rc == STH_OK && rt->sealed && !rt->shut) {
        if (rt->share.parked || !rt->share.settled) {
            sthi_unlock(&rt->lock);
            rc = sthi_arrive(rt);
            sthi_lock(&rt->lock);
        } else if (rt->callers && rt->graph.state == STHI_GRAPH_IDLE) {
            rt->graph.coming++; /* a use of another thread waits for its bytes, in a step that ends here */
            sthi_cond_wait(&rt->changed, &rt->lock);
            rt->graph.coming--;
        } else {
            break;
        }
    }
    if (rc != STH_OK) return rc;
    if (rt->shut) return sthi_shut_down(rt);
    if (!rt->sealed) return refuse(rt, "is not sealed");
    STHI_TRY(sthi_graph_free(rt));
    if (rt->step.open && !rt->step.implicit) return refuse(rt, "is inside a step: end it first");
    sthi_drain_drops(rt);
    rc = rt->step.open ? sthi_step_end_locked(rt) : STH_OK;
    sthi_cancel_queue(rt);
    interrupt_program(rt);
    sthi_interval_end(rt);
    return rc;
}

static bool at_home(const sth_runtime *rt, const sthi_unit *u) {
    if (u->slot == STHI_NO_SLOT) return false;
    const sthi_slot *s = &rt->places.slots[u->slot];
    return s->extent == u->home.extent && s->offset == u->home.offset && s->complete;
}

static sth_status in_use(const sth_runtime *rt, const sthi_slot *s) {
    const char *name = rt->units[s->unit].name;
    return sthi_fail(STH_INVALID_STATE, NULL, 0, name,
                     "'%s': the place of unit '%s' is still in use (a tensor over the weight is held, such as an "
                     "output that is a view of it), and the graph needs it", rt->name, name);
}

/* Empties all that a graph writes to: every place but the residents' own. */
static sth_status empty_ring(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (u->slot == STHI_NO_SLOT || (u->resident && at_home(rt, u))) continue;
        if (sthi_slot_busy(&rt->places.slots[u->slot])) return in_use(rt, &rt->places.slots[u->slot]);
        STHI_TRY(sthi_evict(rt, u->slot, rt->copies.stream));
    }
    return STH_OK;
}

/* Residents are in their places with what host memory holds now, and so are images that are encoded from
 * it. */
static sth_status bring_residents(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!u->resident) {
            if (u->master) STHI_TRY(sthi_repack(rt, i));
            continue;
        }
        if (!at_home(rt, u)) {
            STHI_TRY(sthi_load_home(rt, i));
            continue;
        }
        STHI_TRY(sthi_fingerprint_compare(rt, i));
        if (rt->places.slots[u->slot].stale) STHI_TRY(sthi_refresh(rt, u->slot));
    }
    return STH_OK;
}

static sth_status ready_places(sth_runtime *rt) {
    STHI_INVARIANT(rt->queue.head == rt->queue.tail && !rt->program.on);
    sthi_epoch_begin(rt);
    STHI_TRY(empty_ring(rt));
    return bring_residents(rt);
}

/* ---- capture */

/* No event of before the capture is met inside, and none of the capture after it. Nothing is under way. */
static void forget_events(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->places.slot_cap; i++)
        if (rt->places.slots[i].live) sthi_forget_users(rt, (int32_t)i);
    sthi_forget_traces(rt, STH_NONE);
    for (uint32_t i = 0; i < rt->expand.count; i++) rt->expand.stage[i].used = rt->expand.stage[i].unsure = false;
    while (rt->events.count) STHI_DEV(rt, event_destroy, rt->events.free[--rt->events.count]);
    rt->traces.unordered = false;
}

static sth_status prepare(sth_runtime *rt) {
    STHI_TRY(check_capturable(rt));
    if (rt->leases.bytes) {
        uint32_t i = 0;
        while (i < rt->places.slot_cap && !(rt->places.slots[i].live && rt->places.slots[i].leases)) i++;
        return in_use(rt, &rt->places.slots[i]);
    }
    STHI_TRY(ready_places(rt));
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (rt->units[i].encoded.plain) return holds_too_much(rt, &rt->units[i]);
    STHI_TRY(sthi_masters_wait(rt));
    STHI_TRY(wait_for_streams(rt));
    forget_events(rt);
    enter(rt, STHI_GRAPH_CAPTURING);
    rt->graph.before = rt->stats;
    rt->graph.forked = rt->graph.joined = false;
    rt->graph.user_behind = rt->graph.copies_behind = (sthi_behind){0};
    rt->graph.copy_number = rt->graph.use_number = 0;
    return STH_OK;
}

sth_status sthi_graph_prepare(sth_runtime *rt) {
    sth_status rc = come_in(rt);
    if (rc == STH_OK) rc = prepare(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

/* The streams in `from` are waited for by those in `to`. Lock held. */
static sth_status order(sth_runtime *rt, const sth_stream *from, uint32_t n, const sth_stream *to,
                        uint32_t m) {
    for (uint32_t i = 0; i < n; i++) {
        sth_event *event = NULL;
        STHI_TRY(sthi_event_take(rt, &event));
        sth_status rc = STHI_DEV(rt, event_record, event, from[i]);
        for (uint32_t k = 0; k < m && rc == STH_OK; k++) rc = STHI_DEV(rt, stream_wait, to[k], event);
        sthi_event_give(rt, event);
        STHI_TRY(rc);
    }
    return STH_OK;
}

static sth_status check_capturing(const sth_runtime *rt) {
    if (rt->shut) return sthi_shut_down(rt);
    bool ours = rt->graph.state == STHI_GRAPH_CAPTURING && !sthi_graph_others(rt);
    return ours ? STH_OK : refuse(rt, "is not being captured by this thread");
}

sth_status sthi_graph_fork(sth_runtime *rt, sth_stream stream) {
    sth_stream all[OUR_STREAMS];
    sthi_lock(&rt->lock);
    sth_status rc = check_capturing(rt);
    if (rc == STH_OK) rc = order(rt, &stream, 1, all, our_streams(rt, all));
    if (rc == STH_OK) {
        rt->graph.forked = true;
        sthi_program_reset(rt);
        sthi_pump(rt);
    }
    sthi_unlock(&rt->lock);
    return rc;
}

/* A step that ends early is right: it has loaded more than it uses. */
static sth_status followed(const sth_runtime *rt) {
    if (!rt->step.deviated) return STH_OK;
    return refuse(rt, "was not captured: the step left the recorded order, or a use of it failed");
}

sth_status sthi_graph_join(sth_runtime *rt, sth_stream stream) {
    sth_stream all[OUR_STREAMS];
    sthi_lock(&rt->lock);
    sth_status rc = check_capturing(rt);
    if (rc == STH_OK && rt->graph.forked) {
        sthi_drain_drops(rt);
        sthi_cancel_queue(rt);
        interrupt_program(rt);
        rc = order(rt, all, our_streams(rt, all), &stream, 1);
        rt->graph.joined = rc == STH_OK;
        if (rc == STH_OK) rc = followed(rt);
    }
    sthi_unlock(&rt->lock);
    return rc;
}

/* The capture copied nothing: what it loaded is not there. A place that is leased keeps its record. */
static sth_status undo_loads(sth_runtime *rt) {
    sth_status rc = STH_OK;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) {
        sthi_slot *s = &rt->places.slots[i];
        if (!s->live) continue;
        const sthi_unit *u = &rt->units[s->unit];
        bool loaded = !(u->resident && at_home(rt, u));
        if (!s->leases && loaded) {
            sthi_forget_slot(rt, (int32_t)i);
        } else if (s->leases) {
            if (rc == STH_OK) rc = in_use(rt, s);
            if (loaded) s->stale = true;
            if (loaded) (void)STHI_DEV(rt, event_record, rt->sync[i].ready, rt->sync[i].filled_by);
        }
    }
    return rc;
}

static sth_status settle(sth_runtime *rt, sth_graph_info *out) {
    sthi_error_copy why;
    sthi_drain_drops(rt);
    sthi_cancel_queue(rt);
    interrupt_program(rt);
    sth_status rc = rt->graph.forked && rt->graph.joined
                        ? followed(rt)
                        : refuse(rt, "was not captured: fork and join come first");
    if (rc != STH_OK) sthi_error_save(&why);
    sth_graph_info info = {.edition = rt->graph.edition,
                           .h2d_bytes = rt->stats.h2d_bytes - rt->graph.before.h2d_bytes,
                           .copies = rt->stats.copies - rt->graph.before.copies,
                           .read_bytes = rt->stats.resident_bytes};
    sth_status held = undo_loads(rt);
    forget_events(rt);
    rt->stats = rt->graph.before;
    leave(rt);
    if (rc != STH_OK) return sthi_error_restore(&why);
    if (held == STH_OK) *out = info;
    return held;
}

sth_status sthi_graph_settle(sth_runtime *rt, sth_graph_info *out) {
    sthi_lock(&rt->lock);
    sth_status rc = check_capturing(rt);
    if (rc == STH_OK) rc = settle(rt, out);
    sthi_unlock(&rt->lock);
    return rc;
}

/* A use inside a capture. Lock held. */
sth_status sthi_graph_use(sth_runtime *rt, uint32_t unit) {
    const sthi_unit *u = &rt->units[unit];
    STHI_INVARIANT(rt->graph.state == STHI_GRAPH_CAPTURING && !sthi_graph_others(rt));
    bool inside = rt->graph.forked && !rt->graph.joined && !rt->step.deviated;
    bool follows = inside && rt->program.cursor < rt->order.count && rt->order.uses[rt->program.cursor].unit == unit;
    if (follows) {
        rt->program.cursor++;
        sthi_pump_for(rt, unit);
    }
    sthi_slot *s = follows && u->slot != STHI_NO_SLOT ? &rt->places.slots[u->slot] : NULL;
    if (s && s->complete && !s->stale) {
        if (s->uses_left) s->uses_left--;
        return STH_OK;
    }
    rt->step.deviated = true;
    return sthi_fail(STH_INVALID_STATE, NULL, 0, u->name,
                     follows ? "'%s' cannot be captured: unit '%s' has no place when it is used; what was used before "
                               "is still held, or was written meanwhile"
                             : "'%s' cannot be captured: unit '%s' is not what the recorded steps use here; a graph "
                               "holds one order, so run the model as it is to be captured a few times first",
                     rt->name, u->name);
}

/* ---- replay */

sth_status sthi_graph_replay_begin(sth_runtime *rt, uint64_t edition, sth_stream stream, bool *out) {
    sth_stream all[OUR_STREAMS];
    sth_status rc = come_in(rt);
    bool current = rc == STH_OK && edition == rt->graph.edition && rt->planned.plan;
    if (current) rc = ready_places(rt);
    current = current && edition == rt->graph.edition; /* an image may have changed with what was written */
    if (current && rc == STH_OK) rc = order(rt, all, our_streams(rt, all), &stream, 1);
    if (rc == STH_OK) {
        if (current) enter(rt, STHI_GRAPH_REPLAYING);
        *out = current;
    }
    sthi_unlock(&rt->lock);
    return rc;
}

/* Its copies read images that the caller may write when the step is over. */
static bool reads_writable(const sth_runtime *rt) {
    if (rt->options.read_only) return false;
    const uint32_t may_change = STH_UNIT_WRITABLE | STH_UNIT_WATCHED;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (!rt->units[i].resident && rt->units[i].flags & may_change) return true;
    return false;
}

sth_status sthi_graph_replay_end(sth_runtime *rt, sth_stream stream) {
    sth_stream all[OUR_STREAMS];
    sthi_lock(&rt->lock);
    bool ours = rt->graph.state == STHI_GRAPH_REPLAYING && !sthi_graph_others(rt);
    sth_status rc = ours ? STH_OK : refuse(rt, "is not being replayed by this thread");
    if (rc == STH_OK) {
        rc = order(rt, &stream, 1, all, our_streams(rt, all));
        if (rc != STH_OK || reads_writable(rt)) {
            sth_status waited = STHI_DEV(rt, stream_synchronize, stream);
            if (rc == STH_OK) rc = waited;
        }
        sth_status read = sthi_masters_wait(rt); /* residents that were renewed before the launch */
        if (rc == STH_OK) rc = read;
        leave(rt);
    }
    sthi_unlock(&rt->lock);
    return rc;
}
