/* The weight runtime and the conductor: a lane for each of its two streams, and when a copy on it is due.
 * Without a conductor there are none, and nobody comes here. Lock held but in the two calls of the caller's. */
#include "load/lanes.h"

#include "load/distance.h"
#include "load/interval.h"
#include "state/state.h"

enum { USES_LOOKED_AT = 256 }; /* what is due later than these is not near */

/* When the unit is used next, by the compute times that are known; a load on demand is late already. */
static int64_t due_ns(const sth_runtime *rt, const sthi_lane *lane, uint32_t unit) {
    int64_t due = rt->device->ops->now_ns(rt->device->self);
    if (lane == rt->copies.demand_lane || !rt->order.count) return due;
    uint32_t uses = sthi_distance(rt, unit);
    for (uint32_t k = 0; k + 1 < uses && k < USES_LOOKED_AT; k++)
        due += rt->order.uses[(rt->program.cursor + k) % rt->order.count].compute_ns;
    return due;
}

sthi_way sthi_ask_lane(sth_runtime *rt, sthi_lane *lane, uint32_t unit, uint64_t bytes) {
    sthi_way way = sthi_lane_begin(lane, bytes, due_ns(rt, lane, unit), bytes);
    if (way.waits) sthi_interval_end(rt); /* the wait is not the copy's time */
    return way;
}

void sthi_lanes_close(sth_runtime *rt) {
    sthi_lane_close(rt->copies.lane);
    sthi_lane_close(rt->copies.demand_lane);
    rt->copies.lane = rt->copies.demand_lane = NULL;
}

static sth_status open_lanes(sth_runtime *rt, sth_conductor *c) {
    if (rt->shut) return sthi_shut_down(rt);
    STHI_TRY(sthi_lane_open(c, rt->device, rt->copies.stream, STH_DIRECTION_H2D, rt, &rt->copies.lane));
    return sthi_lane_open(c, rt->device, rt->copies.demand_stream, STH_DIRECTION_H2D, rt, &rt->copies.demand_lane);
}

sth_status sthi_runtime_set_conductor(sth_runtime *rt, sth_conductor *c) {
    sthi_lock(&rt->lock);
    sthi_lanes_close(rt);
    sth_status rc = c ? open_lanes(rt, c) : STH_OK;
    if (rc != STH_OK) sthi_lanes_close(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_runtime_set_max_inflight(sth_runtime *rt, uint32_t units) {
    sthi_lock(&rt->lock);
    rt->program.max_inflight = units;
    sthi_unlock(&rt->lock);
    return STH_OK;
}

sth_status sthi_runtime_set_prefetch_window(sth_runtime *rt, uint32_t units) {
    sthi_lock(&rt->lock);
    rt->options.prefetch_window = units;
    sthi_unlock(&rt->lock);
    return STH_OK;
}
