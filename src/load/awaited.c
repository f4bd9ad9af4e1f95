/* Copies behind which uses of a pass are enqueued.
 *
 * The host runs ahead of the device. A use may have been enqueued behind a copy that has not read its image yet, and a
 * write into the image would show in that use. So the pass's end waits for the newest such copy of each stream. Copies
 * for uses to come are not waited for: they are compared before they are used (fingerprint.c). Lock held throughout. */
#include "load/awaited.h"

#include "base/invariant.h"
#include "load/events.h"
#include "state/state.h"

static sthi_awaited *awaited_of(sth_runtime *rt, sth_stream stream) {
    if (stream == rt->copies.stream) return &rt->copies.awaited[0];
    return &rt->copies.awaited[stream == rt->copies.demand_stream ? 1 : 2];
}

void sthi_awaits_copy(sth_runtime *rt, int32_t slot) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    STHI_INVARIANT(rt->places.slots[slot].complete && rt->places.slots[slot].leases);
    if (rt->options.read_only || !u->direct || rt->graph.state == STHI_GRAPH_CAPTURING) return;
    rt->sync[slot].awaited = rt->copies.awaiting = true;
}

void sthi_keep_awaited(sth_runtime *rt, int32_t slot) {
    sthi_slot_sync *y = &rt->sync[slot];
    sthi_awaited *newest = awaited_of(rt, y->filled_by);
    STHI_INVARIANT(!y->awaited || (rt->copies.awaiting && y->ready));
    /* Once the runtime is shut no pass ends any more, and nobody would give the event back. */
    if (y->awaited && !y->arrived && !rt->shut && y->fill > newest->fill) {
        sthi_event_give(rt, newest->event);
        *newest = (sthi_awaited){y->ready, y->fill};
        y->ready = NULL;
    }
    y->awaited = false;
}

/* The newest copies that are awaited, among those of live slots too. */
static void find_newest(sth_runtime *rt, sthi_awaited newest[STHI_AWAITED]) {
    for (int i = 0; i < STHI_AWAITED; i++) newest[i] = rt->copies.awaited[i];
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) {
        sthi_slot_sync *y = &rt->sync[i];
        if (!y->awaited) continue;
        y->awaited = false;
        sthi_awaited *n = &newest[awaited_of(rt, y->filled_by) - rt->copies.awaited];
        if (!y->arrived && y->fill > n->fill) *n = (sthi_awaited){y->ready, y->fill};
    }
}

sth_status sthi_awaited_wait(sth_runtime *rt) {
    if (!rt->copies.awaiting) return STH_OK;
    rt->copies.awaiting = false;
    sthi_awaited newest[STHI_AWAITED];
    find_newest(rt, newest);
    sth_status rc = STH_OK;
    for (int i = 0; i < STHI_AWAITED; i++) {
        if (newest[i].event) {
            sth_status waited = STHI_DEV(rt, event_synchronize, newest[i].event);
            if (rc == STH_OK) rc = waited;
        }
        sthi_event_give(rt, rt->copies.awaited[i].event);
        rt->copies.awaited[i] = (sthi_awaited){0};
    }
    return rc;
}
