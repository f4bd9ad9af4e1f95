/* A timed step on the timeline. Lock held. */
#ifndef STHI_LOAD_TRACED_H
#define STHI_LOAD_TRACED_H
#include "state/state.h"

/* What a use took, in nanoseconds: the wait for its copy, its work, and work behind it that needs no unit. */
typedef struct sthi_use_time {
    double stall, compute, gap;
} sthi_use_time;

/* Room for what a recording wants of a step that comes. Without memory its copies have no bytes, or no arrows. */
void sthi_trace_prepare(sth_runtime *rt, sthi_timed_step *t);
/* The step's uses, copies and counters, once the device has passed them. times: [t->uses]. */
void sthi_trace_step(sth_runtime *rt, const sthi_timed_step *t, const sthi_use_time *times);
#endif
