/* Copies from host memory to the device, through the conductor where there is one, and which of
 * them read images that the caller may write. Only enqueues. Lock held. */
#include "load/copy.h"

#include "load/events.h"
#include "load/interval.h"
#include "load/lanes.h"
#include "state/state.h"
#include "telemetry/ranges.h"

enum { RUN_MAX = 32 << 20 };

uint64_t sthi_run_bytes(const sth_runtime *rt) { return sthi_max_u64(rt->copies.chunk, RUN_MAX); }

/* Through the conductor, when there is one. */
static sth_status copy_by_lane(sth_runtime *rt, sthi_lane *lane, uint32_t unit, sth_devptr to, const uint8_t *from,
                               uint64_t bytes, sth_stream stream) {
    sthi_way way = sthi_ask_lane(rt, lane, unit, bytes);
    if (rt->timing.now && !rt->timing.now->copy_open) sthi_interval_begin(rt, unit, stream);
    sth_status rc = STH_OK;
    for (uint64_t at = 0; at < bytes && rc == STH_OK; at += way.piece)
        rc = STHI_DEV(rt, copy_h2d, to + at, from + at, sthi_min_u64(way.piece, bytes - at), stream);
    sthi_lane_end(lane, way.flight);
    return rc;
}

static sth_status copy_bytes(sth_runtime *rt, uint32_t unit, sth_devptr to, const uint8_t *from, uint64_t bytes,
                             sth_stream stream) {
    sthi_lane *lane = stream == rt->copies.demand_stream ? rt->copies.demand_lane : rt->copies.lane;
    if (lane && rt->graph.state != STHI_GRAPH_CAPTURING) { /* when a graph is launched is not known here */
        STHI_TRY(copy_by_lane(rt, lane, unit, to, from, bytes, stream));
    } else {
        if (rt->timing.now && !rt->timing.now->copy_open) sthi_interval_begin(rt, unit, stream);
        STHI_TRY(STHI_DEV(rt, copy_h2d, to, from, bytes, stream));
    }
    if (stream == rt->copies.stream) rt->graph.copy_number++;
    rt->stats.h2d_bytes += bytes;
    sthi_timed_step *t = rt->timing.now;
    if (t && t->copy_open) {
        t->copied_bytes += bytes;
        if (t->copies < t->copy_bytes_cap) t->copy_bytes[t->copies] += bytes;
    }
    rt->current.h2d_bytes += (double)bytes;
    return STH_OK;
}

/* A profiler shows the copy on the device under the range in which it was enqueued. */
sth_status sthi_copy_bytes(sth_runtime *rt, uint32_t unit, sth_devptr to, const uint8_t *from, uint64_t bytes,
                           sth_stream stream) {
    bool ranged = sthi_onlookers() & STHI_PROFILED;
    if (ranged) sthi_range_push("copy", rt->units[unit].name);
    sth_status rc = copy_bytes(rt, unit, to, from, bytes, stream);
    if (ranged) sthi_range_pop();
    return rc;
}

sth_stream sthi_copies_on(const sth_runtime *rt, int32_t slot) {
    sth_stream writer = rt->sync[slot].filled_by;
    return rt->expand.stream && writer == rt->expand.stream ? rt->copies.stream : writer;
}

void sthi_master_read(sth_runtime *rt, uint32_t unit, sth_stream stream) {
    if (rt->options.read_only || !(rt->units[unit].flags & STH_UNIT_WRITABLE)) return;
    if (rt->graph.state == STHI_GRAPH_CAPTURING) return; /* nothing is read yet; the replay's end waits */
    sthi_master_reads *m = &rt->copies.masters[stream == rt->copies.stream ? 0 : 1];
    m->pending = true;
    sthi_event_give(rt, m->event);
    m->event = sthi_event_behind(rt, stream);
}
