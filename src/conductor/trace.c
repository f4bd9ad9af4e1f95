/* A ring of events. Invariant: tail - head <= STHI_EVENTS. */
#include "conductor/trace.h"

#include "base/invariant.h"

void sthi_trace_put(sthi_trace_ring *t, sth_conductor_event event) {
    t->events[t->tail++ % STHI_EVENTS] = event;
    if (t->tail - t->head > STHI_EVENTS) t->head++;
    STHI_INVARIANT(t->tail - t->head <= STHI_EVENTS);
}

bool sthi_trace_take(sthi_trace_ring *t, sth_conductor_event *out) {
    if (t->head == t->tail) return false;
    *out = t->events[t->head++ % STHI_EVENTS];
    return true;
}
