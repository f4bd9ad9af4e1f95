/* Slots: a place's life from the first claimed byte until its memory is another's.
 *
 * Whoever copies into a range must be ordered on the device behind all that touched it before. The
 * stream that evicts a slot waits behind the slot's copy and uses, so that the range is free for its
 * own copies at once; traces.c keeps what other writers have to wait for.
 *
 * Invariants: a live slot has a `ready` event; an incomplete slot is the load at the queue's head or
 * a demand load, and is neither evicted nor retired. Lock held throughout. */
#include "load/slots.h"

#include "base/invariant.h"
#include "load/awaited.h"
#include "load/copy.h"
#include "load/events.h"
#include "load/interval.h"
#include "load/repack.h"
#include "load/traces.h"
#include "state/state.h"

sth_status sthi_open_slot(sth_runtime *rt, uint32_t unit, uint32_t extent, uint64_t offset, sth_stream by,
                          int32_t *out) {
    sthi_unit *u = &rt->units[unit];
    sth_event *ready = NULL;
    STHI_INVARIANT(unit < rt->unit_count && u->slot == STHI_NO_SLOT);
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
    STHI_INVARIANT(!y->ready && !atomic_load(&y->drops)); /* of whoever had the record before */
    y->ready = ready;
    y->arrived = y->awaited = false;
    y->fill = ++rt->copies.fills;
    y->filled_by = by;
    y->user_count = 0;
    y->timed_use = y->use = STH_NONE;
    u->slot = *out = slot;
    return STH_OK;
}

sth_status sthi_wait_for_slot(sth_runtime *rt, int32_t slot, sth_stream behind) {
    sthi_slot_sync *y = &rt->sync[slot];
    STHI_INVARIANT(sthi_slot_is_open(&rt->places, slot) && y->ready);
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
    STHI_INVARIANT(u->slot == slot);
    sthi_forget_users(rt, slot);
    sthi_keep_awaited(rt, slot);
    sthi_event_give(rt, rt->sync[slot].ready);
    rt->sync[slot].ready = NULL;
    if (u->state == STH_UNIT_STATE_GPU_READY) (void)sthi_unit_move(&u->state, by_way_of, u->name);
    (void)sthi_unit_move(&u->state, STH_UNIT_STATE_UNLOADED, u->name);
    u->slot = STHI_NO_SLOT;
    sthi_slot_close(&rt->places, slot);
}

sth_status sthi_evict(sth_runtime *rt, int32_t slot, sth_stream behind) {
    const sthi_slot *s = &rt->places.slots[slot];
    STHI_INVARIANT(!sthi_slot_busy(s));
    STHI_TRY(sthi_wait_for_slot(rt, slot, behind));
    if (rt->device->ops->poison)
        STHI_DEV(rt, poison, rt->places.extents[s->extent].base + s->offset, s->claimed, behind);
    sthi_trace_leave(rt, s, behind);
    close_slot(rt, slot, STH_UNIT_STATE_EVICTING);
    rt->stats.evictions++;
    rt->current.evictions++;
    return STH_OK;
}

void sthi_abandon_slot(sth_runtime *rt, int32_t slot) {
    const sthi_slot *s = &rt->places.slots[slot];
    sth_stream by = rt->sync[slot].filled_by;
    STHI_INVARIANT(!s->leases && !s->complete);
    if (s->claimed) sthi_trace_leave(rt, s, by);
    if (rt->units[s->unit].state == STH_UNIT_STATE_PREFETCHING) sthi_master_read(rt, s->unit, sthi_copies_on(rt, slot));
    close_slot(rt, slot, STH_UNIT_STATE_EVICTING);
}

void sthi_forget_slot(sth_runtime *rt, int32_t slot) { close_slot(rt, slot, STH_UNIT_STATE_EVICTING); }

static void wait_for_event(sth_runtime *rt, sth_event *event, sth_stream stream) {
    if (STHI_DEV(rt, event_synchronize, event) != STH_OK) (void)STHI_DEV(rt, stream_synchronize, stream);
}

void sthi_retire_slot(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    STHI_INVARIANT(!sthi_slot_busy(&rt->places.slots[slot]));
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
    STHI_INVARIANT(!y->arrived || rt->places.slots[slot].complete);
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
    uint64_t at = range_start(rt, s, begin);
    if (sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT) != STHI_NO_SLOT) return false;
    return sthi_traces_none(rt, s->extent, at, bytes, rt->sync[slot].filled_by);
}

sth_status sthi_claim_range(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes) {
    sthi_slot *s = &rt->places.slots[slot];
    sth_stream stream = rt->sync[slot].filled_by;
    STHI_INVARIANT(!s->complete && begin <= s->claimed); /* from the front, and nothing is left out */
    STHI_INVARIANT(bytes <= s->bytes - begin);
    uint64_t at = range_start(rt, s, begin);
    int32_t id = sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT);
    if (id != STHI_NO_SLOT) sthi_interval_end(rt); /* the stream may stand still now */
    for (; id != STHI_NO_SLOT;
         id = sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT))
        STHI_TRY(sthi_evict(rt, id, stream));
    STHI_TRY(sthi_order_behind_traces(rt, s->extent, at, bytes, stream));
    if (s->claimed < begin + bytes) s->claimed = begin + bytes;
    return STH_OK;
}
