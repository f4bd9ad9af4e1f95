/* Device memory for places: from the device, or from the allocator that the caller gave. Which of
 * the two it was is counted, for whoever looks for a budget. Does not charge the account
 * (charge.c). Lock held. */
#include "load/memory.h"

#include "load/charge.h"
#include "load/events.h"
#include "state/state.h"

/* Which memory places are in: whoever looks for a budget must know what of an allocator's numbers is ours. */
static void count_place(sth_runtime *rt, bool wraps, uint64_t more, uint64_t less) {
    sthi_account_lock(rt);
    sthi_account *a = &rt->device->account;
    uint64_t *sum = wraps || !rt->options.allocator.alloc ? &a->outside : &a->inside;
    *sum = *sum + more - less;
    a->inside_peak = sthi_max_u64(a->inside_peak, a->inside);
    sthi_account_unlock(rt);
}

static sth_status take_memory(sth_runtime *rt, uint64_t bytes, bool wraps, sth_devptr *out) {
    const sth_allocator *a = &rt->options.allocator;
    if (wraps) {
        sth_status rc = STHI_DEV(rt, ring_alloc, bytes, out);
        if (rc != STH_OUT_OF_DEVICE_MEMORY || !a->trim) return rc;
        a->trim(a->context);
        return STHI_DEV(rt, ring_alloc, bytes, out);
    }
    return a->alloc ? a->alloc(a->context, bytes, out) : STHI_DEV(rt, alloc, bytes, out);
}

sth_status sthi_memory_take(sth_runtime *rt, uint64_t bytes, bool wraps, sth_devptr *out) {
    STHI_TRY(take_memory(rt, bytes, wraps, out));
    count_place(rt, wraps, bytes, 0);
    return STH_OK;
}

sth_status sthi_memory_follow(sth_runtime *rt) {
    if (!rt->options.allocator.alloc) return STH_OK;
    sth_event *queued = NULL;
    STHI_TRY(sthi_event_take(rt, &queued));
    sth_status rc = STHI_DEV(rt, event_record, queued, 0);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_wait, rt->copies.stream, queued);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_wait, rt->copies.demand_stream, queued);
    if (rc == STH_OK && rt->expand.stream) rc = STHI_DEV(rt, stream_wait, rt->expand.stream, queued);
    sthi_event_give(rt, queued);
    return rc;
}

void sthi_memory_give(sth_runtime *rt, sth_devptr base, uint64_t bytes, bool wraps) {
    const sth_allocator *a = &rt->options.allocator;
    if (wraps) STHI_DEV(rt, ring_free, base, bytes);
    else if (a->alloc) a->free(a->context, base, bytes);
    else STHI_DEV(rt, free, base, bytes);
    count_place(rt, wraps, 0, bytes);
}

sth_status sthi_place_alloc(sth_runtime *rt, uint64_t bytes, sth_devptr *out) {
    STHI_TRY(sthi_memory_take(rt, bytes, false, out));
    sth_status rc = sthi_memory_follow(rt);
    if (rc != STH_OK) sthi_memory_give(rt, *out, bytes, false);
    return rc;
}

void sthi_place_free(sth_runtime *rt, sth_devptr base, uint64_t bytes) { sthi_memory_give(rt, base, bytes, false); }
