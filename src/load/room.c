/* Room: what the runtime holds of the device now, and what a budget leaves for units. Pure
 * arithmetic. Lock held. */
#include "load/room.h"

#include "state/state.h"

uint64_t sthi_stages_bytes(const sth_runtime *rt) { return rt->expand.count * rt->expand.stage_bytes; }

uint64_t sthi_held_bytes(const sth_runtime *rt) {
    return sthi_places_total(&rt->places) + rt->expand.packed_bytes + (rt->expand.stages ? sthi_stages_bytes(rt) : 0);
}

uint64_t sthi_units_within(const sth_runtime *rt, uint64_t bytes) {
    uint64_t taken = rt->options.reserved + rt->extents.closing_bytes + sthi_stages_bytes(rt);
    return taken < bytes ? bytes - taken : 0;
}

uint64_t sthi_budget_for_units(const sth_runtime *rt) {
    return sthi_units_within(rt, sthi_min_u64(rt->options.budget, rt->share.limit));
}
