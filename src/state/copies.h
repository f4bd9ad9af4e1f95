/* Streams that fill places, and what lies between host memory and them: lanes, stages for packed
 * bytes. */
#ifndef STHI_STATE_COPIES_H
#define STHI_STATE_COPIES_H
#include "base/thread.h"
#include "conductor/arbiter.h"
#include "stagehand/backend.h"
#include "stagehand/budget.h"

enum {
    STHI_MOST_STAGES = STH_BUDGET_MOST_STAGES,
    STHI_WRITERS = 3         /* streams that fill places */
};

/* Copies on one stream that read host images which the caller may write after the step. */
typedef struct sthi_master_reads {
    bool pending;
    sth_event *event;       /* behind the newest of them; NULL: the stream itself must be waited for */
} sthi_master_reads;

/* A copy of a slot that is gone, behind which a use of the pass is enqueued: the newest on its stream. */
typedef struct sthi_awaited {
    sth_event *event;
    uint64_t fill;
} sthi_awaited;
enum { STHI_AWAITED = 3 }; /* of the copy stream, of the demand stream, of others */

/* load/copy.c, load/lanes.c; what is awaited: load/awaited.c */
typedef struct sthi_copies {
    uint64_t chunk;          /* bytes of a copy of a staged source */
    sth_stream stream, demand_stream; /* of planned loads, of loads on demand */
    sthi_lane *lane, *demand_lane; /* NULL without a conductor */
    sthi_master_reads masters[2]; /* of the two streams */
    sthi_awaited awaited[STHI_AWAITED];
    bool awaiting;           /* a use of the pass may be behind a copy that reads its image */
    uint64_t fills;          /* slots opened so far */
} sthi_copies;

/* Device memory in which packed bytes arrive. */
typedef struct sthi_stage {
    sth_event *full;        /* behind the copy into it */
    sth_event *emptied;     /* behind the expansion out of it */
    bool used, unsure;       /* unsure: `emptied` is not recorded behind its last expansion */
} sthi_stage;

#define STHI_EXPAND_RATE_GUESSED 1e12 /* bytes of places in a second, until it is measured */

/* load/expand_rate.c */
typedef struct sthi_expand_rate {
    sth_event *events[2];    /* round the expansion that is timed */
    bool timed;              /* both are recorded and not read yet */
    uint64_t bytes, longest; /* of its place; of any that was seen */
    double bytes_per_s;      /* 0: nothing was measured */
    double planned;          /* what the plan in force was priced with; 0: STHI_EXPAND_RATE_GUESSED */
    bool changed;            /* another one since */
} sthi_expand_rate;

/* load/stages.c, load/expand.c */
typedef struct sthi_expansion {
    sth_stream stream;       /* 0: nothing is expanded on the device */
    bool on;                 /* packed units are expanded there */
    char error[512];         /* why they are not */
    sth_devptr stages;       /* `count` of stage_bytes each; 0: not allocated now */
    uint64_t stage_bytes;
    sth_devptr packed;       /* where units stay packed; 0: there are none (load/stays.c) */
    uint64_t packed_bytes;
    uint32_t count;          /* the last one is for loads on demand, the others for planned loads */
    sthi_stage stage[STHI_MOST_STAGES];
    uint32_t next_stage;
    sthi_expand_rate rate;
    bool comparing, has_thread; /* masters with images: the thread is at it; it is to be joined */
    sthi_thread comparer;
} sthi_expansion;

/* What is copied at once: [begin, begin + bytes) of a place from [from, from + from_bytes) of its source. */
typedef struct sthi_piece_of {
    uint64_t begin, bytes, from, from_bytes;
    uint32_t segment, segments; /* packed: these are expanded */
} sthi_piece_of;
#endif
