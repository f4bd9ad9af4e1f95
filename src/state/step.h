/* The open step, and the one to come. */
#ifndef STHI_STATE_STEP_H
#define STHI_STATE_STEP_H
#include "stagehand/backend.h"

/* runtime/step.c; trace: runtime/lease.c */
typedef struct sthi_step {
    bool open, implicit, deviated;
    bool backward;           /* uses are those of a backward, for recordings */
    bool paused;             /* the caller may write images; the next acquire goes on with the step */
    uint64_t number;         /* of the current or next step */
    uint64_t epoch;          /* counts the times when the caller's code may have written images */
    uint32_t *trace;         /* [trace_count] units as they were used */
    uint32_t *held;          /* [trace_count] regular uses, from each on, until its unit was let go; 0: not seen */
    uint32_t trace_count, trace_cap;
    bool trace_overflow;
    uint32_t regular;        /* uses so far, of units that are not on demand */
    sth_stream last_stream;
    uint32_t strays;         /* loads on demand in this step that the plan should have made */
    uint32_t stray_steps;    /* steps in a row that had some */
} sthi_step;
#endif
