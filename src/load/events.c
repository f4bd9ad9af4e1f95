/* Events without timing. They come back to a list when whoever took them is through; a device makes
 * the rest. */
#include "load/events.h"

#include "state/state.h"

sth_status sthi_event_take(sth_runtime *rt, sth_event **out) {
    if (rt->events.count) {
        *out = rt->events.free[--rt->events.count];
        return STH_OK;
    }
    return STHI_DEV(rt, event_create, false, out);
}

void sthi_event_give(sth_runtime *rt, sth_event *event) {
    if (!event) return;
    if (rt->events.count < rt->events.cap) rt->events.free[rt->events.count++] = event;
    else STHI_DEV(rt, event_destroy, event);
}

sth_event *sthi_event_behind(sth_runtime *rt, sth_stream stream) {
    sth_event *event = NULL;
    if (sthi_event_take(rt, &event) != STH_OK) return NULL;
    if (STHI_DEV(rt, event_record, event, stream) == STH_OK) return event;
    sthi_event_give(rt, event);
    return NULL;
}
