/* Loads that somebody waits for: of a unit on demand, of a resident that is not in its place, of a
 * place that is stale. Lock held; dropped to read what is staged. */
#include "runtime/demand.h"

#include "load/distance.h"
#include "load/fill.h"
#include "load/queue.h"
#include "load/repack.h"
#include "load/slots.h"
#include "runtime/budget.h"
#include "runtime/drops.h"
#include "runtime/geometry.h"
#include "runtime/spare.h"
#include "state/state.h"

enum { RESIDENT_COST = 1024 }; /* it would be missing in every step from then on */

/* Demand loads: planned copies are taken only when nothing cheaper is there, residents only when nothing else is. */
static double demand_cost(void *context, const sthi_slot *s) {
    sth_runtime *rt = context;
    if (s->leases || !s->complete) return -1;
    double far = (double)sthi_distance(rt, s->unit);
    bool needed = s->uses_left;
    if (rt->step.deviated) { /* nobody knows what comes: what was used, and longest ago, goes first */
        far = (double)(rt->copies.fills + 1 - rt->sync[s - rt->places.slots].fill);
        needed = !sthi_used_in_step(&rt->units[s->unit], rt->step.number);
    }
    double dear = needed ? 4 : 1;
    if (s->resident) dear = RESIDENT_COST;
    return (double)s->bytes / far * dear;
}

/* So much that a place of `bytes` is found wherever the leases lie: each keeps its extent, and parts what is left.
 * No more than all units need. */
static uint64_t room_beside_leases(const sth_runtime *rt, uint64_t bytes) {
    uint64_t parts = 1, all = 0;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++)
        if (rt->places.slots[i].live && rt->places.slots[i].leases) parts += 2;
    for (uint32_t i = 0; i < rt->unit_count; i++) all += rt->units[i].bytes;
    return sthi_min_u64(rt->leases.bytes + parts * bytes, all);
}

static sth_status find_place(sth_runtime *rt, uint32_t unit, sthi_place *out) {
    sthi_unit *u = &rt->units[unit];
    if (u->resident && rt->planned.homes) {
        /* Its home may hold what strayed there; take it back if nobody is using it. */
        *out = (sthi_place){u->home.extent, u->home.offset};
        int32_t id = STHI_NO_SLOT;
        bool free_now = true;
        while ((id = sthi_places_touching(&rt->places, out->extent, out->offset, u->bytes, STHI_NO_SLOT,
                                          id)) != STHI_NO_SLOT)
            if (demand_cost(rt, &rt->places.slots[id]) < 0) free_now = false;
        if (free_now) return STH_OK;
    }
    if (sthi_unplanned(u) && sthi_spare_place(rt, unit, out)) return STH_OK;
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    /* A load half way holds its range; without it there may be room. */
    sthi_cancel_queue(rt);
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    STHI_TRY(sthi_rearrange(rt, u->bytes));
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    return sthi_no_place_error(rt, unit, room_beside_leases(rt, u->bytes));
}

sth_status sthi_demand_load(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    sthi_place place;
    int32_t slot;
    STHI_TRY(find_place(rt, unit, &place));
    STHI_TRY(sthi_open_slot(rt, unit, place.extent, place.offset, rt->copies.demand_stream, &slot));
    rt->stats.demand_loads++;
    if (rt->program.on && !(u->flags & STH_UNIT_ON_DEMAND)) rt->step.strays++;
    STHI_TRY(sthi_slot_fill(rt, slot));
    rt->places.slots[slot].resident = u->resident && place.extent == u->home.extent &&
                                      place.offset == u->home.offset;
    return STH_OK;
}

sth_status sthi_load_home(sth_runtime *rt, uint32_t unit) {
    const sthi_unit *u = &rt->units[unit];
    int32_t slot;
    STHI_TRY(sthi_open_slot(rt, unit, u->home.extent, u->home.offset, rt->copies.demand_stream, &slot));
    STHI_TRY(sthi_slot_fill(rt, slot));
    rt->places.slots[slot].resident = true;
    return STH_OK;
}

sth_status sthi_refresh(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    if (s->leases && atomic_load(&rt->sync[slot].drops) >= s->leases) { /* its end could not be noted: again */
        sthi_drain_drops(rt);
        if (s->leases && sthi_error_last()->status != STH_OK) return sthi_error_last()->status;
    }
    if (s->leases)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, u->name,
                         "unit '%s' was written while its copy on the device is in use; end that use first "
                         "(an output that is a view of the weight also counts)", u->name);
    STHI_TRY(sthi_fingerprint_take(rt, s->unit));
    STHI_TRY(sthi_wait_for_slot(rt, slot, rt->copies.demand_stream));
    sthi_forget_users(rt, slot);
    rt->sync[slot].filled_by = rt->copies.demand_stream;
    rt->sync[slot].arrived = false;
    s->complete = s->stale = false; /* a write that comes while it is read makes it stale again */
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_EVICTING, u->name));
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_HOST_STAGED, u->name));
    return sthi_slot_fill(rt, slot);
}
