/* Units that stay on the device packed: one piece of device memory, in which each has the room of its packed image. Its
 * first load copies the image there (expand.c), each later one is expanded from there. Which units those are is the
 * plan's choice; another choice frees all, and brings all again. Lock held. */
#include "load/stays.h"

#include "base/invariant.h"
#include "load/charge.h"
#include "load/memory.h"
#include "load/pieces.h"
#include "load/room.h"
#include "state/state.h"

static bool is_lossless(const sthi_unit *u) {
    bool lossless = false;
    for (uint32_t k = 0; k < u->segment_count; k++)
        lossless = lossless || u->segments[k].encoding == STH_TRANSFER_LOSSLESS;
    return lossless;
}

uint64_t sthi_stays_bytes(const sth_runtime *rt, uint32_t unit) {
    const sthi_unit *u = &rt->units[unit];
    uint64_t bytes = 0;
    bool can = sthi_packed_on_link(rt, u) && u->direct && !u->encoded.plain && is_lossless(u);
    if (!can || !sthi_round_up(u->packed_bytes, STHI_ALIGN, &bytes)) return 0;
    return bytes < u->bytes ? bytes : 0;
}

static uint64_t planned_for(const sth_runtime *rt, const sth_plan *plan, uint32_t unit) {
    uint64_t bytes = 0;
    if (plan->packed[unit]) (void)sthi_round_up(rt->units[unit].packed_bytes, STHI_ALIGN, &bytes);
    return bytes;
}

uint64_t sthi_stays_planned(const sth_runtime *rt, const sth_plan *plan) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) sum += planned_for(rt, plan, i);
    return sum;
}

bool sthi_stays_as(const sth_runtime *rt, const sth_plan *plan) {
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (plan->packed[i] != (rt->units[i].stays.at != 0)) return false;
    return true;
}

sth_status sthi_stays_alloc(sth_runtime *rt, const sth_plan *plan) {
    STHI_INVARIANT(!rt->expand.packed);
    uint64_t bytes = sthi_stays_planned(rt, plan), at = 0;
    if (!bytes) return STH_OK;
    STHI_TRY(sthi_charge(rt, bytes));
    sth_status rc = sthi_place_alloc(rt, bytes, &rt->expand.packed);
    if (rc != STH_OK) {
        sthi_uncharge(rt, bytes);
        rt->expand.packed = 0;
        return rc;
    }
    rt->expand.packed_bytes = bytes;
    rt->graph.edition++;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        if (!plan->packed[i]) continue;
        rt->units[i].stays = (sthi_stays){.at = rt->expand.packed + at};
        at += planned_for(rt, plan, i);
    }
    rt->extents.peak = sthi_max_u64(rt->extents.peak, sthi_held_bytes(rt));
    return STH_OK;
}

void sthi_stays_free(sth_runtime *rt) {
    if (!rt->expand.packed) return;
    if (rt->copies.stream) (void)STHI_DEV(rt, stream_synchronize, rt->copies.stream);
    if (rt->expand.stream) (void)STHI_DEV(rt, stream_synchronize, rt->expand.stream);
    sthi_place_free(rt, rt->expand.packed, rt->expand.packed_bytes);
    sthi_uncharge(rt, rt->expand.packed_bytes);
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->units[i].stays = (sthi_stays){0};
    rt->expand.packed = rt->expand.packed_bytes = 0;
    rt->graph.edition++;
}
