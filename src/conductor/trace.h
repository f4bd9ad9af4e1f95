/* The newest events of a conductor. Pure. */
#ifndef STHI_CONDUCTOR_TRACE_H
#define STHI_CONDUCTOR_TRACE_H
#include "stagehand/conductor.h"

enum { STHI_EVENTS = 4096 };

typedef struct sthi_trace_ring {
    sth_conductor_event events[STHI_EVENTS]; /* history numbers [head, tail) */
    uint64_t head, tail;
} sthi_trace_ring;

void sthi_trace_put(sthi_trace_ring *t, sth_conductor_event event); /* the oldest goes when it is full */
bool sthi_trace_take(sthi_trace_ring *t, sth_conductor_event *out); /* false: there is none */
#endif
