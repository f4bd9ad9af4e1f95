/* Leases that have ended. A release only pushes on an atomic stack; whoever enters the runtime next
 * pops it, records the events behind the uses and lets the places be refilled. Lock: none to push,
 * the runtime's to drain. */
#include "runtime/drops.h"

#include "base/invariant.h"
#include "load/events.h"
#include "load/interval.h"
#include "state/state.h"

/* Records an event behind the ended uses on the slot's i-th stream, or waits for the stream. False: the
 * device does neither now. */
static bool end_uses(sth_runtime *rt, sthi_slot_sync *y, uint32_t i) {
    if (!y->released[i] && sthi_event_take(rt, &y->released[i]) != STH_OK) y->released[i] = NULL;
    y->use_number = ++rt->graph.use_number;
    if (y->released[i] && STHI_DEV(rt, event_record, y->released[i], y->users[i]) == STH_OK) return true;
    sthi_event_give(rt, y->released[i]);
    y->released[i] = NULL;
    rt->current.host_waits++;
    return STHI_DEV(rt, stream_synchronize, y->users[i]) == STH_OK;
}

/* The slot is let go, or used again while it is held. */
static void note_held(sth_runtime *rt, sthi_slot_sync *y) {
    if (y->use != STH_NONE && y->use_step == rt->step.number && y->use < rt->step.trace_count)
        rt->step.held[y->use] = rt->step.regular - y->use_regular;
    y->use = STH_NONE;
}

void sthi_hold_begin(sth_runtime *rt, sthi_slot_sync *y, uint32_t use, uint32_t regular_before) {
    note_held(rt, y);
    y->use = use;
    y->use_regular = regular_before;
    y->use_step = rt->step.number;
}

/* The last lease of the slot has ended. False: that cannot be said to the device yet. */
static bool note_release(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    STHI_INVARIANT(rt->places.slots[slot].bytes <= rt->leases.bytes);
    for (uint32_t i = 0; i < y->user_count; i++) {
        if (y->using_now[i] && !end_uses(rt, y, i)) return false;
        y->using_now[i] = false;
    }
    sthi_timed_step *t = rt->timing.now;
    if (t && y->timed_use != STH_NONE && y->timed_step == rt->step.number) {
        sthi_timed_use *u = &t->use[y->timed_use];
        u->done_on = y->users[y->last_user];
        u->late = t->ended;
        u->finished = sthi_timing_record(rt, &u->done, u->done_on);
    }
    y->timed_use = STH_NONE;
    note_held(rt, y);
    rt->leases.bytes -= rt->places.slots[slot].bytes;
    return true;
}

void sthi_drop_push(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    if (atomic_fetch_add(&y->drops, 1) != 0) return; /* it is on the stack */
    int32_t head = atomic_load(&rt->leases.dropped);
    do y->next_dropped = head;
    while (!atomic_compare_exchange_weak(&rt->leases.dropped, &head, slot));
}

void sthi_drain_drops(sth_runtime *rt) {
    int32_t slot = atomic_exchange(&rt->leases.dropped, STHI_NO_SLOT);
    while (slot != STHI_NO_SLOT) {
        /* Read before the count: after it the slot may be pushed again. */
        int32_t next = rt->sync[slot].next_dropped;
        uint32_t n = atomic_exchange(&rt->sync[slot].drops, 0);
        sthi_slot *s = &rt->places.slots[slot];
        STHI_INVARIANT(s->live && n && n <= s->leases);
        if (n < s->leases) {
            s->leases -= n;
        } else if (note_release(rt, slot)) {
            s->leases = 0;
        } else { /* the next drain tries again */
            s->leases = 1;
            sthi_drop_push(rt, slot);
        }
        slot = next;
    }
}
