/* Extents of device memory. One with a busy slot in it (leased, or a demand load under way in
 * another thread) cannot be freed; it is closed (no new places), and until a plan frees it its
 * bytes are taken off the budget. A step that ends when nothing keeps it any more plans anew. Lock
 * held throughout. */
#include "runtime/extents.h"

#include "base/invariant.h"
#include "load/charge.h"
#include "load/memory.h"
#include "load/room.h"
#include "load/slots.h"
#include "load/stays.h"
#include "load/traces.h"
#include "state/state.h"

static void extent_free(sth_runtime *rt, uint32_t x) {
    sthi_extent *e = &rt->places.extents[x];
    STHI_INVARIANT(!e->slots && (!e->closing || e->bytes <= rt->extents.closing_bytes));
    if (rt->options.allocator.alloc && rt->copies.stream) {
        /* Unlike a device's free, this one does not wait for copies that touched what was let go before. */
        (void)STHI_DEV(rt, stream_synchronize, rt->copies.stream);
        (void)STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream);
        if (rt->expand.stream) (void)STHI_DEV(rt, stream_synchronize, rt->expand.stream);
    }
    sthi_forget_traces(rt, x);
    sthi_memory_give(rt, e->base, e->bytes, e->wraps);
    sthi_uncharge(rt, e->bytes);
    if (e->closing) rt->extents.closing_bytes -= e->bytes;
    rt->extents.kind[x] = STHI_EXTENT_OTHER;
    sthi_places_drop_extent(&rt->places, x);
    if (rt->extents.ring == x) rt->extents.ring = STH_NONE;
    if (rt->extents.demand == x) rt->extents.demand = STH_NONE;
}

sth_status sthi_extent_alloc(sth_runtime *rt, uint64_t bytes, bool wraps, sthi_extent_kind kind, uint32_t *out) {
    sth_devptr base = 0;
    STHI_TRY(sthi_charge(rt, bytes));
    sth_status rc = sthi_memory_take(rt, bytes, wraps, &base);
    int32_t x = rc == STH_OK ? sthi_places_add_extent(&rt->places, base, bytes, wraps) : -1;
    if (x < 0) sthi_uncharge(rt, bytes);
    if (rc != STH_OK) return rc;
    if (x < 0) {
        sthi_memory_give(rt, base, bytes, wraps);
        return sthi_fail(STH_INTERNAL, NULL, 0, NULL, "too many extents of device memory");
    }
    STHI_INVARIANT(rt->extents.kind[x] == STHI_EXTENT_OTHER);
    rt->extents.kind[x] = (uint8_t)kind;
    if (kind != STHI_EXTENT_SPARE) rt->graph.edition++; /* in spare ones there is nothing that a graph reads */
    rt->extents.peak = sthi_max_u64(rt->extents.peak, sthi_held_bytes(rt));
    *out = (uint32_t)x;
    return wraps ? STH_OK : sthi_memory_follow(rt);
}

void sthi_extent_release(sth_runtime *rt, uint32_t x) {
    sthi_extent *e = &rt->places.extents[x];
    STHI_INVARIANT(e->live && (!e->closing || rt->extents.kind[x] == STHI_EXTENT_OTHER));
    rt->graph.edition++;
    for (int32_t id = e->first_slot, next; id != STHI_NO_SLOT; id = next) {
        next = rt->places.slots[id].next;
        if (!sthi_slot_busy(&rt->places.slots[id])) sthi_retire_slot(rt, id);
    }
    if (!e->slots) {
        extent_free(rt, x);
        return;
    }
    if (!e->closing) rt->extents.closing_bytes += e->bytes;
    e->closing = true;
    rt->extents.kind[x] = STHI_EXTENT_OTHER;
    if (rt->extents.ring == x) rt->extents.ring = STH_NONE;
    if (rt->extents.demand == x) rt->extents.demand = STH_NONE;
}

bool sthi_extent_busy(const sth_runtime *rt, const sthi_extent *e) {
    for (int32_t id = e->first_slot; id != STHI_NO_SLOT; id = rt->places.slots[id].next)
        if (sthi_slot_busy(&rt->places.slots[id])) return true;
    return false;
}

static bool extent_idle(sth_runtime *rt, const sthi_extent *e) {
    for (int32_t id = e->first_slot; id != STHI_NO_SLOT; id = rt->places.slots[id].next)
        if (!sthi_slot_idle(rt, id)) return false;
    return true;
}

bool sthi_closing_idle(sth_runtime *rt) {
    if (!rt->extents.closing_bytes) return false;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && e->closing && extent_idle(rt, e)) return true;
    }
    return false;
}

void sthi_closing_free(sth_runtime *rt) {
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && e->closing && !sthi_extent_busy(rt, e)) sthi_extent_release(rt, x);
    }
}

void sthi_extents_free_all(sth_runtime *rt) {
    for (uint32_t x = 0; x < rt->places.extent_end; x++)
        if (rt->places.extents[x].live) sthi_extent_release(rt, x);
    sthi_stays_free(rt);
}
