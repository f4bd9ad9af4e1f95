/* Every invariant that must hold between calls. Tests call it after each event. */
#include "runtime/check.h"

#include "load/room.h"
#include "state/state.h"

static bool units_ok(sth_runtime *rt, const char **why) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (u->slot == STHI_NO_SLOT) {
            *why = "a unit without a slot is not unloaded";
            if (u->state != STH_UNIT_STATE_UNLOADED) return false;
            continue;
        }
        const sthi_slot *s = &rt->places.slots[u->slot];
        *why = "a unit's slot is not its own";
        if (!s->live || s->unit != i) return false;
        *why = "a complete slot's unit is not ready, or the other way round";
        if (s->complete != (u->state == STH_UNIT_STATE_GPU_READY)) return false;
    }
    return true;
}

static bool slots_ok(sth_runtime *rt, const char **why) {
    uint64_t leased = 0;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) {
        const sthi_slot *s = &rt->places.slots[i];
        if (!s->live) continue;
        *why = "a slot's unit lies elsewhere";
        if (rt->units[s->unit].slot != (int32_t)i) return false;
        *why = "a slot has no event for its copy";
        if (!rt->sync[i].ready) return false;
        if (s->leases) leased += s->bytes;
    }
    *why = "leased bytes are not the sum of the leased slots";
    return leased == rt->leases.bytes;
}

static bool memory_ok(sth_runtime *rt, const char **why) {
    *why = "device memory is over the budget";
    if (sthi_held_bytes(rt) + rt->options.reserved > rt->options.budget) return false;
    uint64_t closing = 0;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && e->closing) closing += e->bytes;
    }
    *why = "bytes of closing extents are not what was counted";
    return closing == rt->extents.closing_bytes;
}

static bool queue_ok(sth_runtime *rt, const char **why) {
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        const sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
        *why = "a request's slot holds another unit";
        if (r->slot != STHI_NO_SLOT && rt->places.slots[r->slot].unit != r->unit) return false;
        *why = "a load is under way behind the head of the queue";
        if (r->slot != STHI_NO_SLOT && n != rt->queue.head) return false;
    }
    return true;
}

bool sthi_runtime_check(sth_runtime *rt, const char **out_why) {
    sthi_lock(&rt->lock);
    bool ok = sthi_places_check(&rt->places, out_why) && units_ok(rt, out_why) && slots_ok(rt, out_why) &&
              memory_ok(rt, out_why) && queue_ok(rt, out_why);
    if (ok) *out_why = "";
    sthi_unlock(&rt->lock);
    return ok;
}
