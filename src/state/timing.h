/* Timing events of the last steps, and the step's records. */
#ifndef STHI_STATE_TIMING_H
#define STHI_STATE_TIMING_H
#include "base/error.h"
#include "base/log.h"
#include "stagehand/backend.h"
#include "stagehand/runtime.h"
#include "telemetry/telemetry.h"

enum {
    STHI_TIMED_STEPS = 4, /* steps whose timing events may be outstanding */
    STHI_TURNS = 64       /* between forward and backward, in a step; later ones are not seen */
};

typedef struct sthi_timed_copy {
    uint32_t unit;
    bool last;               /* the unit's copy ends with it */
    bool demand;             /* on the demand stream, else the copy stream */
    bool joined;             /* the unit's bytes were in the interval of the record before it; no events of its own */
    sth_event *begin, *end;
} sthi_timed_copy;

typedef struct sthi_timed_use {
    uint32_t unit;
    bool started, waited;    /* it has begun; `start` is recorded, else it began as it arrived */
    bool finished, late;     /* `done` is recorded; behind the step's `end` */
    sth_event *arrive, *start, *done; /* before the wait for its copy, behind it, behind its work */
    sth_stream done_on;
} sthi_timed_use;

typedef struct sthi_timed_step {
    uint64_t epoch;          /* of the order that was followed */
    uint32_t uses, copies, use_cap, copy_cap;
    sthi_timed_use *use;     /* [use_cap] */
    sthi_timed_copy *copy;   /* [copy_cap] */
    uint64_t copied_bytes;   /* in `copy`: not those that were issued between steps */
    uint64_t *copy_bytes;    /* [copy_bytes_cap] of each interval, those that joined included; while recorded */
    uint32_t copy_bytes_cap;
    sth_event *end;
    sth_stream end_on;
    bool ended;              /* `end` is recorded, and no use has come since */
    bool copy_open;          /* copy[copies] has begun */
    bool waiting;            /* closed, its events are not all done yet */
    bool whole;              /* followed the order from end to end */
    bool light;              /* only its first use and its end have events */
    bool writes_expected;    /* as of the runtime */
    uint32_t plan;           /* the number of plans taken by then */
    uint32_t turn[STHI_TURNS]; /* [turns] uses with which a backward begins, or a forward again, by turns */
    uint32_t turns;
    sth_step_metrics metrics;
} sthi_timed_step;

/* A use in the step's timing: reserved when it arrives, so that threads do not share a record. */
typedef struct sthi_use_ticket {
    uint32_t index;          /* STH_NONE: not timed */
    uint64_t step;
} sthi_use_ticket;

/* runtime/timing.c; copies: load/interval.c */
typedef struct sthi_timing {
    sthi_timed_step steps[STHI_TIMED_STEPS];
    uint64_t head, tail;     /* closed ones not yet read, oldest first */
    sthi_timed_step *now;    /* of the open step, NULL when none is free */
    bool too_short;          /* a step had more uses or copies than records */
    bool fresh;              /* compute times changed since the plan was made */
    uint32_t seen;           /* steps whose times went into the order */
    uint64_t *arrows;        /* [units] of a recording: from the copy that the next use gets, or 0; NULL: none was on */
    uint32_t odd_steps;      /* in a row, whose compute was unlike that in the order */
    bool thrifty;            /* events cost time, and reading them does: most steps are light once times are known */
    uint32_t watch;          /* steps that are timed in full, whatever is known */
    sth_step_metrics like;   /* of the last whole step that was timed in full */
    uint32_t like_plan;      /* its plan; 0: there was none */
} sthi_timing;

typedef struct sthi_step_records {
    sthi_telemetry *file;
    sthi_error_copy error;   /* of its file; the end of the step says it */
    sthi_message *news;      /* for the log, until a caller's thread takes them along (runtime/news.c) */
    struct sthi_top_place *top; /* in the live view; NULL: not in it */
    uint64_t range;          /* of the open step, for a profiler; 0: there is none */
} sthi_step_records;
#endif
