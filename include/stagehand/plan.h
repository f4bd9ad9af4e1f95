/* stagehand/plan.h - which units stay on the device, which stream through it, and what that will
 * cost.
 *
 * The model: a step is a fixed cyclic sequence of uses. Each use needs one unit on the device and
 * then computes for a known time. Resident units do not move. Every other use is served by a load:
 * a copy over the link into the ring, a piece of device memory that is filled in order and reused
 * in order. A copy starts in chunks, as soon as the chunk's place is free and the link is. A unit
 * FROM_DISK is read first, in the order of the copies, by a disk that runs ahead of the link by a
 * given number of bytes. The host image of a WRITTEN unit changes between steps: no copy of it
 * starts before its step begins. If it is still on the device from the step before, as a resident
 * is, it is copied again, in the order of first use.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_PLAN_H
#define STAGEHAND_PLAN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STH_UNIT_KEEP = 1u << 0,       /* must be resident */
    STH_UNIT_ON_DEMAND = 1u << 1,  /* used by some steps only: never prefetched */
    STH_UNIT_FROM_DISK = 1u << 2,  /* its bytes are read from the disk before they are copied */
    STH_UNIT_WRITTEN = 1u << 3,    /* its host image is written between each step and the next */
    STH_UNIT_PRESENT = 1u << 4,    /* it lies on the device now, as a resident */
    /* with transfer_bytes: each load of it is expanded, which takes the device as compute does */
    STH_UNIT_EXPANDED = 1u << 6,
    STH_UNIT_EITHER = 1u << 5      /* transfer_bytes cross the link for a load of it, or all, as the plan chooses. The
                                      former takes the device for the expansion, as compute does */
};

typedef struct sth_plan_unit {
    uint64_t bytes;  /* size of its place; multiple of 512 */
    uint32_t flags;  /* STH_UNIT_ bits */
    uint64_t transfer_bytes; /* that cross the link (and are read) for it, where they are fewer: it is expanded on the
                                device. 0: `bytes` */
    /* of the device, where it stays there packed: its loads are expanded from there and take nothing of the link;
     * multiple of 512. 0: it cannot */
    uint64_t packed_bytes;
} sth_plan_unit;

typedef struct sth_plan_use {
    uint32_t unit;
    uint32_t held;      /* number of consecutive uses, counting this one, after which the unit is released; at most
                           use_count. 0: held_at_once. If one load serves several uses, the number of the last one
                           applies */
    int64_t compute_ns; /* from the moment the unit may be used until its use ends */
    int64_t gap_ns;     /* work after it that needs no managed unit, until the next use begins */
} sth_plan_use;

typedef struct sth_plan_input {
    size_t size;              /* sizeof(sth_plan_input), set by init */
    const sth_plan_unit *units;
    uint32_t unit_count;
    const sth_plan_use *uses; /* one step, in order; a unit may appear more than once or never */
    uint32_t use_count;
    uint64_t budget;          /* bytes for resident units and the ring together */
    double link_bytes_per_s;  /* > 0 */
    int64_t copy_overhead_ns; /* per copy. Default 2200 */
    uint64_t chunk_bytes;     /* a copy may start in pieces of this size. Default 8 MiB */
    uint64_t ring_granularity;/* ring sizes are multiples of this. Default 512 */
    bool ring_mapped_twice;   /* a load may wrap round the end of the ring */
    uint32_t held_at_once;    /* neighboring uses whose units are held together. Default 1 */
    /* at which units FROM_DISK are read; 0: as fast as is wanted. Default 0 */
    double disk_bytes_per_s;
    uint64_t read_ahead_bytes; /* that may be read before the link takes them. Default 64 MiB */
    uint64_t least_ring_bytes; /* the ring has so many where the budget does: room for loads on demand beside what is
                                  held for longer than `held` says. Default 0 */
    /* If units are PRESENT, the first step under the plan loads the residents that are not. The
     * better of two plans takes less time for this first step and so many later steps together.
     * 0: the first step does not count. Default 0 */
    uint32_t change_steps;
    /* that the search makes at most, but some 40, for a plan that is wanted at once; 0: as many as
     * suit the timeline's length. Default 0 */
    uint32_t most_simulations;
    /* of places, at which units are expanded that stay packed, are EITHER or EXPANDED; it takes the device as compute
     * does. Default 1e12 */
    double expand_bytes_per_s;
} sth_plan_input;
STH_API void sth_plan_input_init(sth_plan_input *input);

#define STH_NONE UINT32_MAX

typedef struct sth_plan_load {
    uint32_t unit;
    /* uses that this load serves; a last below first lies in the next step */
    uint32_t first_use, last_use;
    uint64_t ring_offset;         /* in [0, ring_bytes) */
} sth_plan_load;

/* The limit of a step. */
typedef enum sth_bound { STH_BOUND_COMPUTE, STH_BOUND_LINK, STH_BOUND_RING, STH_BOUND_DISK } sth_bound;

typedef struct sth_prediction {
    int64_t step_ns;         /* steady state: from the second step on */
    int64_t compute_ns;      /* sum of compute and gaps: the step with everything resident */
    int64_t link_ns;         /* time that the copies of one step take back to back */
    int64_t disk_ns;         /* time that the reads of one step take back to back */
    int64_t stall_ns;        /* compute waiting for copies, and for expansions */
    int64_t expand_ns;       /* of the device, for expansions */
    /* max(compute, bytes that no plan can avoid / link, ...); see docs/planner.md */
    int64_t lower_bound_ns;
    /* over the link, as they cross it; what was WRITTEN and comes again included */
    uint64_t bytes_per_step;
    uint64_t disk_bytes_per_step; /* of them, read from the disk */
    uint64_t resident_bytes;
    uint64_t packed_bytes;   /* of the device, for units that stay there packed */
    uint64_t ring_bytes;
    uint64_t streamed_bytes; /* total size of the units that stream */
    uint64_t total_bytes;    /* B: all units used in a step, without those on demand */
    sth_bound bound_by;      /* what limits the step */
} sth_prediction;

typedef struct sth_plan {
    uint32_t unit_count, use_count, load_count;
    bool *resident;         /* [unit_count] */
    bool *packed;           /* [unit_count] it stays packed, and is expanded for each load */
    bool *plain;            /* [unit_count] of those that are EITHER: all bytes cross the link */
    sth_plan_load *loads;   /* [load_count], in the order in which copies are issued */
    uint32_t *use_load;     /* [use_count]: index of the load that serves the use, STH_NONE if resident
                               or on demand */
    uint64_t ring_bytes;
    bool ring_mapped_twice; /* as in the input that it was made for */
    uint64_t demand_bytes;  /* set aside for units with STH_UNIT_ON_DEMAND */
    sth_prediction prediction;
} sth_plan;

/* "compute", "link", "ring" or "disk"; "unknown" for anything else. */
STH_API const char *sth_bound_name(sth_bound bound);

/* Makes the plan with the shortest predicted step within the budget.
 * Returns BUDGET_TOO_SMALL with the unit, what it needs and the smallest budget that works;
 * INVALID_ARGUMENT; OUT_OF_HOST_MEMORY. Threads: any. Blocks: no (computes). Allocates: yes. */
STH_API sth_status sth_plan_create(const sth_plan_input *input, sth_plan **out_plan);
STH_API void sth_plan_destroy(sth_plan *plan); /* NULL is fine */

/* Predicts a given plan under other timings, link or chunk size (same units and uses).
 * Threads: any. Blocks: no. Allocates: scratch, freed before it returns. */
STH_API sth_status sth_plan_predict(const sth_plan_input *input, const sth_plan *plan,
                                    sth_prediction *out_prediction);

/* Smallest budget with which the input can run at all; 0 when the input is invalid or host
 * memory is out. Threads: any. Blocks: no. Allocates: scratch, freed before it returns. */
STH_API uint64_t sth_plan_smallest_budget(const sth_plan_input *input);

#ifdef __cplusplus
}
#endif
#endif
