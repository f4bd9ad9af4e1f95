/* Events without timing: taken from those that are free, or made. Lock held. */
#ifndef STHI_LOAD_EVENTS_H
#define STHI_LOAD_EVENTS_H
#include "state/state.h"

sth_status sthi_event_take(sth_runtime *rt, sth_event **out);
void sthi_event_give(sth_runtime *rt, sth_event *event);
sth_event *sthi_event_behind(sth_runtime *rt, sth_stream stream);
#endif
