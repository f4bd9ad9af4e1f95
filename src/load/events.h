/* Events without timing: taken from those that are free, or made. Lock held. */
#ifndef STHI_LOAD_EVENTS_H
#define STHI_LOAD_EVENTS_H
#include "state/state.h"

/* A free one, or a new one; given back, or destroyed, with sthi_event_give, which takes NULL. */
sth_status sthi_event_take(sth_runtime *rt, sth_event **out);
void sthi_event_give(sth_runtime *rt, sth_event *event);
/* An event recorded on the stream now, NULL when there is none to be had. */
sth_event *sthi_event_behind(sth_runtime *rt, sth_stream stream);
#endif
