/* Places on the device beside their records in core/places.h: events, leases, extents, and traces
 * of what left. */
#ifndef STHI_STATE_SLOTS_H
#define STHI_STATE_SLOTS_H
#include <stdatomic.h>

#include "stagehand/backend.h"
#include "stagehand/runtime.h"

enum {
    STHI_SLOT_STREAMS = 8,   /* different streams that may use one place before it is refilled */
    STHI_TRACE_CAP = 64,     /* ranges that were let go and that one copy stream is not behind yet */
    STHI_PEAK_STEPS = 8,     /* steps whose leases say what the next one needs at once */
    STHI_EXTENT_CAP = 4096
};

/* Events of a slot, beside its record in places (load/slots.c, runtime/drops.c). */
typedef struct sthi_slot_sync {
    sth_event *ready;       /* recorded behind its copy */
    bool arrived;            /* and it was seen that the device has passed it */
    bool awaited;            /* a use of the pass is enqueued behind the copy, which reads its image */
    uint64_t fill;           /* number of the load, in the order in which slots were opened */
    sth_stream filled_by;
    sth_event *released[STHI_SLOT_STREAMS]; /* recorded behind the last use on users[i] */
    sth_stream users[STHI_SLOT_STREAMS];
    bool using_now[STHI_SLOT_STREAMS]; /* has a use that has not ended */
    uint32_t user_count, last_user;
    uint32_t copy_number, use_number; /* in a capture: of its last copy, of the event behind its last use */
    atomic_uint drops;       /* ended leases not handled yet */
    int32_t next_dropped;
    uint32_t timed_use;      /* in the current step's timing, STH_NONE if none */
    uint64_t timed_step;
    uint32_t use;            /* in the trace of `use_step`, for which it is leased; STH_NONE: none */
    uint32_t use_regular;    /* step.regular before that use */
    uint64_t use_step;
    uint64_t lap;            /* of the load that filled it: whose uses `uses_left` counts */
} sthi_slot_sync;

/* Free events without timing (load/events.c). */
typedef struct sthi_events {
    sth_event **free;
    uint32_t count, cap;
} sthi_events;

/* A range that was let go: only the writers in `behind` are ordered behind whoever had it. */
typedef struct sthi_trace {
    uint32_t extent;
    uint64_t offset, bytes;
    sth_stream by;
    uint32_t behind;         /* bits of writers; `by` is one */
    sth_event *event;       /* recorded on `by` when it was let go */
} sthi_trace;

/* load/traces.c */
typedef struct sthi_traces {
    sthi_trace ranges[STHI_TRACE_CAP]; /* oldest first */
    uint32_t count;
    bool unordered;          /* a trace could not be kept: wait for both copy streams before the next copy */
} sthi_traces;

/* runtime/drops.c, runtime/lease.c */
typedef struct sthi_leases {
    atomic_int dropped;      /* stack of slots with ended leases, -1 = empty */
    uint64_t bytes;          /* leased now */
    uint64_t peak[STHI_PEAK_STEPS]; /* at once, in the last steps; [step % STHI_PEAK_STEPS] */
} sthi_leases;

typedef enum sthi_extent_kind {
    STHI_EXTENT_OTHER,       /* no plan's: closing, or one piece in which places are found as they are needed */
    STHI_EXTENT_RING,
    STHI_EXTENT_DEMAND,
    STHI_EXTENT_RESIDENTS,
    STHI_EXTENT_SPARE        /* beside the plan, for units in no order (runtime/spare.c) */
} sthi_extent_kind;

/* runtime/extents.c */
typedef struct sthi_extents {
    uint32_t ring, demand;   /* STH_NONE if none */
    uint8_t *kind;           /* [STHI_EXTENT_CAP] sthi_extent_kind */
    uint64_t peak;           /* most bytes of device memory so far */
    uint64_t spare_refused;  /* planned.count when memory for spare room was refused; 0: never */
    uint64_t closing_bytes;  /* extents kept only by leases */
} sthi_extents;
#endif
