/* What was let go. The stream that evicts a slot is behind the slot's copy and uses, but the range
 * may go to another writer (copy, demand and expand stream): a trace of it is kept until all of
 * them are behind it. Where no event can be had for a trace, the next copy waits for all writers.
 * Lock held. */
#include "load/traces.h"

#include "base/invariant.h"
#include "load/events.h"
#include "state/state.h"

static void drop_trace(sth_runtime *rt, uint32_t i) {
    sthi_event_give(rt, rt->traces.ranges[i].event);
    rt->traces.count--;
    for (; i < rt->traces.count; i++) rt->traces.ranges[i] = rt->traces.ranges[i + 1];
}

/* The streams that fill places; the last one only where packed units are expanded. */
static uint32_t writers(const sth_runtime *rt, sth_stream out[STHI_WRITERS]) {
    out[0] = rt->copies.stream;
    out[1] = rt->copies.demand_stream;
    out[2] = rt->expand.stream;
    return rt->expand.stream ? 3 : 2;
}

static uint32_t writer_bit(const sth_runtime *rt, sth_stream stream) {
    sth_stream all[STHI_WRITERS];
    uint32_t i = 0, count = writers(rt, all);
    while (i < count && all[i] != stream) i++;
    STHI_INVARIANT(i < count);
    return 1u << i;
}

static bool all_behind(const sth_runtime *rt, uint32_t behind) { return behind == (rt->expand.stream ? 7u : 3u); }

/* Makes the writers that are not behind the trace wait for it. */
static void settle_trace(sth_runtime *rt, const sthi_trace *t) {
    sth_stream all[STHI_WRITERS];
    uint32_t count = writers(rt, all);
    for (uint32_t i = 0; i < count; i++)
        if (!(t->behind & 1u << i) && STHI_DEV(rt, stream_wait, all[i], t->event) != STH_OK)
            rt->traces.unordered = true;
}

void sthi_trace_leave(sth_runtime *rt, const sthi_slot *s, sth_stream by) {
    uint32_t behind = writer_bit(rt, by);
    bool capturing = rt->graph.state == STHI_GRAPH_CAPTURING; /* the demand stream copies nothing there */
    if (capturing) behind |= writer_bit(rt, rt->copies.demand_stream);
    if (all_behind(rt, behind)) return;
    if (rt->traces.count == STHI_TRACE_CAP) { /* the oldest one costs nothing to wait for */
        settle_trace(rt, &rt->traces.ranges[0]);
        drop_trace(rt, 0);
    }
    sth_event *event = sthi_event_behind(rt, by);
    if (!event) rt->traces.unordered = true;
    else rt->traces.ranges[rt->traces.count++] = (sthi_trace){s->extent, s->offset, s->claimed, by, behind, event};
}

void sthi_forget_traces(sth_runtime *rt, uint32_t extent) {
    for (uint32_t i = rt->traces.count; i-- > 0;)
        if (extent == STH_NONE || rt->traces.ranges[i].extent == extent) drop_trace(rt, i);
}

static sth_status wait_for_streams(sth_runtime *rt) {
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.stream));
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream));
    if (rt->expand.stream) STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->expand.stream));
    rt->current.host_waits++;
    rt->traces.unordered = false;
    return STH_OK;
}

sth_status sthi_order_behind_traces(sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes,
                                    sth_stream stream) {
    const sthi_extent *e = &rt->places.extents[extent];
    uint32_t me = writer_bit(rt, stream);
    if (rt->traces.unordered) STHI_TRY(wait_for_streams(rt));
    for (uint32_t i = rt->traces.count; i-- > 0;) {
        sthi_trace *t = &rt->traces.ranges[i];
        if (t->behind & me || t->extent != extent || !sthi_ranges_touch(e, at, bytes, t->offset, t->bytes))
            continue;
        STHI_TRY(STHI_DEV(rt, stream_wait, stream, t->event));
        t->behind |= me;
        if (all_behind(rt, t->behind)) drop_trace(rt, i);
    }
    return STH_OK;
}

bool sthi_traces_none(const sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes, sth_stream stream) {
    const sthi_extent *e = &rt->places.extents[extent];
    uint32_t me = writer_bit(rt, stream);
    for (uint32_t i = 0; i < rt->traces.count; i++) {
        const sthi_trace *t = &rt->traces.ranges[i];
        bool waits = t->extent == extent && !(t->behind & me);
        if (waits && sthi_ranges_touch(e, at, bytes, t->offset, t->bytes)) return false;
    }
    return !rt->traces.unordered;
}
