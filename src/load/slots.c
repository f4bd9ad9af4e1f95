/* Slots: a place's life from the first claimed byte until its memory is another's.
 *
 * Whoever copies into a range must be ordered on the device behind all that touched it before. The stream
 * that evicts a slot waits behind the slot's copy and uses, so that the range is free for its own copies at
 * once. But the slot may be larger than what is copied over it, and the rest may go to another writer (copy, demand
 * and expand stream): a trace of what was let go is kept until all of them are behind it.
 *
 * Invariants: a live slot has a `ready` event; an incomplete slot is the load at the queue's head or a demand
 * load, and is neither evicted nor retired. Lock held throughout. */
#include "load/slots.h"

#include "load/fingerprint.h"
#include "load/issue.h"
#include "state/state.h"

sth_status sthi_event_take(sth_runtime *rt, sth_event **out) {
    if (rt->events.count) {
        *out = rt->events.free[--rt->events.count];
        return STH_OK;
    }
    return STHI_DEV(rt, event_create, false, out);
}

void sthi_event_give(sth_runtime *rt, sth_event *event) {
    if (!event) return;
    if (rt->events.count < rt->events.cap) rt->events.free[rt->events.count++] = event;
    else STHI_DEV(rt, event_destroy, event);
}

/* An event recorded on the stream now, NULL when there is none to be had. */
static sth_event *event_behind(sth_runtime *rt, sth_stream stream) {
    sth_event *event = NULL;
    if (sthi_event_take(rt, &event) != STH_OK) return NULL;
    if (STHI_DEV(rt, event_record, event, stream) == STH_OK) return event;
    sthi_event_give(rt, event);
    return NULL;
}

/* ---- what was let go */

static void drop_trace(sth_runtime *rt, uint32_t i) {
    sthi_event_give(rt, rt->traces.ranges[i].event);
    rt->traces.count--;
    for (; i < rt->traces.count; i++) rt->traces.ranges[i] = rt->traces.ranges[i + 1];
}

/* The streams that fill places; the last one only where packed units are expanded. */
static uint32_t writers(const sth_runtime *rt, sth_stream out[STHI_WRITERS]) {
    out[0] = rt->copies.stream;
    out[1] = rt->copies.demand_stream;
    out[2] = rt->expand.stream;
    return rt->expand.stream ? 3 : 2;
}

static uint32_t writer_bit(const sth_runtime *rt, sth_stream stream) {
    sth_stream all[STHI_WRITERS];
    uint32_t i = 0, count = writers(rt, all);
    while (i < count && all[i] != stream) i++;
    return 1u << i;
}

static bool all_behind(const sth_runtime *rt, uint32_t behind) { return behind == (rt->expand.stream ? 7u : 3u); }

/* Makes the writers that are not behind the trace wait for it. */
static void settle_trace(sth_runtime *rt, const sthi_trace *t) {
    sth_stream all[STHI_WRITERS];
    uint32_t count = writers(rt, all);
    for (uint32_t i = 0; i < count; i++)
        if (!(t->behind & 1u << i) && STHI_DEV(rt, stream_wait, all[i], t->event) != STH_OK)
            rt->traces.unordered = true;
}

static void leave_trace(sth_runtime *rt, const sthi_slot *s, sth_stream by) {
    uint32_t behind = writer_bit(rt, by);
    bool capturing = rt->graph.state == STHI_GRAPH_CAPTURING; /* the demand stream copies nothing there */
    if (capturing) behind |= writer_bit(rt, rt->copies.demand_stream);
    if (all_behind(rt, behind)) return;
    if (rt->traces.count == STHI_TRACE_CAP) { /* the oldest one costs nothing to wait for */
        settle_trace(rt, &rt->traces.ranges[0]);
        drop_trace(rt, 0);
    }
    sth_event *event = event_behind(rt, by);
    if (!event) rt->traces.unordered = true;
    else rt->traces.ranges[rt->traces.count++] = (sthi_trace){s->extent, s->offset, s->claimed, by, behind, event};
}

void sthi_forget_traces(sth_runtime *rt, uint32_t extent) {
    for (uint32_t i = rt->traces.count; i-- > 0;)
        if (extent == STH_NONE || rt->traces.ranges[i].extent == extent) drop_trace(rt, i);
}

static sth_status wait_for_streams(sth_runtime *rt) {
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.stream));
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream));
    if (rt->expand.stream) STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->expand.stream));
    rt->current.host_waits++;
    rt->traces.unordered = false;
    return STH_OK;
}

static sth_status order_behind_traces(sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes,
                                      sth_stream stream) {
    const sthi_extent *e = &rt->places.extents[extent];
    uint32_t me = writer_bit(rt, stream);
    if (rt->traces.unordered) STHI_TRY(wait_for_streams(rt));
    for (uint32_t i = rt->traces.count; i-- > 0;) {
        sthi_trace *t = &rt->traces.ranges[i];
        if (t->behind & me || t->extent != extent || !sthi_ranges_touch(e, at, bytes, t->offset, t->bytes))
            continue;
        STHI_TRY(STHI_DEV(rt, stream_wait, stream, t->event));
        t->behind |= me;
        if (all_behind(rt, t->behind)) drop_trace(rt, i);
    }
    return STH_OK;
}

/* ---- slots */

sth_status sthi_open_slot(sth_runtime *rt, uint32_t unit, uint32_t extent, uint64_t offset, sth_stream by,
                          int32_t *out) {
    sthi_unit *u = &rt->units[unit];
    sth_event *ready = NULL;
    STHI_TRY(sthi_fingerprint_take(rt, unit));
    STHI_TRY(sthi_event_take(rt, &ready));
    int32_t slot = sthi_slot_open(&rt->places, unit, extent, offset, u->bytes);
    sth_status rc = slot == STHI_NO_SLOT
                        ? sthi_fail(STH_INTERNAL, NULL, 0, u->name, "no record left for a place of unit '%s'",
                                    u->name)
                        : sthi_unit_move(&u->state, STH_UNIT_STATE_HOST_STAGED, u->name);
    if (rc != STH_OK) {
        sthi_event_give(rt, ready);
        if (slot != STHI_NO_SLOT) sthi_slot_close(&rt->places, slot);
        return rc;
    }
    sthi_slot_sync *y = &rt->sync[slot];
    y->ready = ready;
    y->arrived = false;
    y->filled_by = by;
    y->user_count = 0;
    y->timed_use = y->use = STH_NONE;
    u->slot = *out = slot;
    return STH_OK;
}

sth_status sthi_wait_for_slot(sth_runtime *rt, int32_t slot, sth_stream behind) {
    sthi_slot_sync *y = &rt->sync[slot];
    if (y->filled_by != behind) STHI_TRY(STHI_DEV(rt, stream_wait, behind, y->ready));
    if (rt->graph.state == STHI_GRAPH_CAPTURING && behind == rt->copies.stream && y->user_count == 1 &&
        sthi_graph_waited(&rt->graph.copies_behind, y->users[0], y->use_number))
        return STH_OK;
    for (uint32_t i = 0; i < y->user_count; i++)
        if (y->released[i]) STHI_TRY(STHI_DEV(rt, stream_wait, behind, y->released[i]));
    return STH_OK;
}

void sthi_forget_users(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    for (uint32_t i = 0; i < y->user_count; i++) {
        sthi_event_give(rt, y->released[i]);
        y->released[i] = NULL;
    }
    y->user_count = 0;
}

/* The record goes; the unit is no longer on the device. */
static void close_slot(sth_runtime *rt, int32_t slot, sth_unit_state by_way_of) {
    sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    sthi_forget_users(rt, slot);
    sthi_event_give(rt, rt->sync[slot].ready);
    rt->sync[slot].ready = NULL;
    if (u->state == STH_UNIT_STATE_GPU_READY) (void)sthi_unit_move(&u->state, by_way_of, u->name);
    (void)sthi_unit_move(&u->state, STH_UNIT_STATE_UNLOADED, u->name);
    u->slot = STHI_NO_SLOT;
    sthi_slot_close(&rt->places, slot);
}

sth_status sthi_evict(sth_runtime *rt, int32_t slot, sth_stream behind) {
    const sthi_slot *s = &rt->places.slots[slot];
    STHI_TRY(sthi_wait_for_slot(rt, slot, behind));
    if (rt->device->ops->poison)
        STHI_DEV(rt, poison, rt->places.extents[s->extent].base + s->offset, s->claimed, behind);
    leave_trace(rt, s, behind);
    close_slot(rt, slot, STH_UNIT_STATE_EVICTING);
    rt->stats.evictions++;
    rt->current.evictions++;
    return STH_OK;
}

void sthi_abandon_slot(sth_runtime *rt, int32_t slot) {
    const sthi_slot *s = &rt->places.slots[slot];
    sth_stream by = rt->sync[slot].filled_by;
    if (s->claimed) leave_trace(rt, s, by);
    if (rt->units[s->unit].state == STH_UNIT_STATE_PREFETCHING) sthi_master_read(rt, s->unit, sthi_copies_on(rt, slot));
    close_slot(rt, slot, STH_UNIT_STATE_EVICTING);
}

void sthi_forget_slot(sth_runtime *rt, int32_t slot) { close_slot(rt, slot, STH_UNIT_STATE_EVICTING); }

static void wait_for_event(sth_runtime *rt, sth_event *event, sth_stream stream) {
    if (STHI_DEV(rt, event_synchronize, event) != STH_OK) (void)STHI_DEV(rt, stream_synchronize, stream);
}

void sthi_retire_slot(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    /* Our own streams end with all of their work, and before the last leased place does. */
    if (rt->copies.stream) wait_for_event(rt, y->ready, y->filled_by);
    for (uint32_t i = 0; i < y->user_count; i++)
        if (y->released[i]) wait_for_event(rt, y->released[i], y->users[i]);
    close_slot(rt, slot, STH_UNIT_STATE_GPU_FREEING);
}

bool sthi_slot_busy(const sthi_slot *s) { return s->leases || !s->complete; }

static bool passed(sth_runtime *rt, sth_event *event) {
    bool done = false;
    return STHI_DEV(rt, event_query, event, &done) == STH_OK && done;
}

bool sthi_slot_arrived(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    if (!y->arrived) y->arrived = rt->places.slots[slot].complete && passed(rt, y->ready);
    return y->arrived;
}

bool sthi_slot_idle(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    if (sthi_slot_busy(&rt->places.slots[slot]) || !sthi_slot_arrived(rt, slot)) return false;
    for (uint32_t i = 0; i < y->user_count; i++)
        if (y->released[i] && !passed(rt, y->released[i])) return false;
    return true;
}

/* ---- ranges */

static uint64_t range_start(const sth_runtime *rt, const sthi_slot *s, uint64_t begin) {
    const sthi_extent *e = &rt->places.extents[s->extent];
    return e->wraps ? (s->offset + begin) % e->bytes : s->offset + begin;
}

static bool takeable(const sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes, int32_t but) {
    int32_t id = STHI_NO_SLOT;
    while ((id = sthi_places_touching(&rt->places, extent, at, bytes, but, id)) != STHI_NO_SLOT)
        if (sthi_slot_busy(&rt->places.slots[id]) || rt->places.slots[id].uses_left) return false;
    return true;
}

bool sthi_range_takeable(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes) {
    const sthi_slot *s = &rt->places.slots[slot];
    return takeable(rt, s->extent, range_start(rt, s, begin), bytes, slot);
}

bool sthi_place_takeable(const sth_runtime *rt, uint32_t extent, uint64_t offset, uint64_t bytes) {
    return takeable(rt, extent, offset, bytes, STHI_NO_SLOT);
}

bool sthi_range_free(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes) {
    const sthi_slot *s = &rt->places.slots[slot];
    const sthi_extent *e = &rt->places.extents[s->extent];
    uint64_t at = range_start(rt, s, begin);
    uint32_t me = writer_bit(rt, rt->sync[slot].filled_by);
    if (sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT) != STHI_NO_SLOT) return false;
    for (uint32_t i = 0; i < rt->traces.count; i++) {
        const sthi_trace *t = &rt->traces.ranges[i];
        bool waits = t->extent == s->extent && !(t->behind & me);
        if (waits && sthi_ranges_touch(e, at, bytes, t->offset, t->bytes)) return false;
    }
    return !rt->traces.unordered;
}

sth_status sthi_claim_range(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes) {
    sthi_slot *s = &rt->places.slots[slot];
    sth_stream stream = rt->sync[slot].filled_by;
    uint64_t at = range_start(rt, s, begin);
    int32_t id = sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT);
    if (id != STHI_NO_SLOT) sthi_interval_end(rt); /* the stream may stand still now */
    for (; id != STHI_NO_SLOT;
         id = sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT))
        STHI_TRY(sthi_evict(rt, id, stream));
    STHI_TRY(order_behind_traces(rt, s->extent, at, bytes, stream));
    if (s->claimed < begin + bytes) s->claimed = begin + bytes;
    return STH_OK;
}

/* ---- host images that may be written */

void sthi_master_read(sth_runtime *rt, uint32_t unit, sth_stream stream) {
    if (rt->options.read_only || !(rt->units[unit].flags & STH_UNIT_WRITABLE)) return;
    if (rt->graph.state == STHI_GRAPH_CAPTURING) return; /* nothing is read yet; the replay's end waits */
    sthi_master_reads *m = &rt->copies.masters[stream == rt->copies.stream ? 0 : 1];
    m->pending = true;
    sthi_event_give(rt, m->event);
    m->event = event_behind(rt, stream);
}

static sth_status wait_for_master(sth_runtime *rt, sthi_master_reads *m, sth_stream stream) {
    if (!m->pending) return STH_OK;
    if (!m->event || STHI_DEV(rt, event_synchronize, m->event) != STH_OK)
        STHI_TRY(STHI_DEV(rt, stream_synchronize, stream));
    m->pending = false;
    return STH_OK;
}

sth_status sthi_masters_wait(sth_runtime *rt) {
    if (rt->options.read_only) return STH_OK;
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) /* those not copied yet come too late now */
        if (rt->units[rt->queue.requests[n % STHI_REQUEST_CAP].unit].flags & STH_UNIT_WRITABLE) {
            sthi_cancel_queue(rt);
            break;
        }
    while (rt->reads.masters) sthi_cond_wait(&rt->changed, &rt->lock);
    sth_status rc = wait_for_master(rt, &rt->copies.masters[0], rt->copies.stream);
    sth_status rc2 = wait_for_master(rt, &rt->copies.masters[1], rt->copies.demand_stream);
    return rc != STH_OK ? rc : rc2;
}
