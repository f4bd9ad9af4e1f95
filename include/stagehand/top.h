/* stagehand/top.h - what runtimes of this user's processes do now: the list behind `stagehand top`.
 *
 * Each process with a sealed runtime stores figures at the end of a step into a page that it maps
 * (docs/top.md); STAGEHAND_TOP=0 in its environment turns that off. Reading needs nothing of the
 * processes: no signal, no lock that they wait for. */
#ifndef STAGEHAND_TOP_H
#define STAGEHAND_TOP_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/plan.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(field, unit, meaning): counts of a runtime at its last step's end, each a uint64_t. */
#define STH_TOP_LIST(X)                                                         \
    X(steps, "count", "steps ended")                                            \
    X(budget, "bytes", "budget in force, what the caller fills itself included") \
    X(limit, "bytes", "of it, what other runtimes of the device leave")         \
    X(device_bytes, "bytes", "on the device now, what the caller fills included") \
    X(resident_bytes, "bytes", "of units that stay, in the plan")               \
    X(ring_bytes, "bytes", "of the plan's ring")                                \
    X(streamed_bytes, "bytes", "of units that stream, in the plan")             \
    X(bytes_per_step, "bytes", "that cross the link in a step, in the plan")    \
    X(h2d_bytes, "bytes", "host to device by copies, since seal")               \
    X(d2h_bytes, "bytes", "device to host, since seal")                         \
    X(demand_loads, "count", "loads that no plan had issued in time")           \
    X(replans, "count", "plans made after the first")                           \
    X(link_bytes_per_s, "bytes/s", "rate that plans count with; 0: not known")

typedef struct sth_top_figures {
#define STH_TOP_FIELD(field, unit, text) uint64_t field;
    STH_TOP_LIST(STH_TOP_FIELD)
#undef STH_TOP_FIELD
    sth_step_metrics step; /* the newest that the device has passed; step_time_ms 0: none yet */
    uint32_t bound_by;     /* sth_bound, of the plan in force */
    uint8_t planned;       /* 1: a plan is in force */
    uint8_t parked;        /* 1: others have its memory */
    uint8_t unused[2];
    char name[64];         /* of the model; ends with 0, and is cut, as the device's */
    char device[40];       /* such as "cuda:0 NVIDIA H200" */
} sth_top_figures;

typedef struct sth_top_runtime {
    int32_t pid;
    uint32_t place;    /* in its process's page, from 0: the same as long as the runtime lives */
    char program[96];  /* command line of the process, cut */
    double age_s;      /* since the figures were stored: at a step's end, or as its memory changed */
    sth_top_figures figures;
} sth_top_runtime;

typedef struct sth_top_list {
    sth_top_runtime *runtimes; /* [count], by pid and place */
    uint32_t count;
    uint32_t passed_over; /* pages of running processes: of another version, or damaged */
} sth_top_list;

/* What runs now. pid: of the process, 0: of all. Texts hold no control characters and are UTF-8.
 * Removes pages of processes that have ended. Nobody runs: STH_OK and an empty list. Returns
 * OUT_OF_HOST_MEMORY, INVALID_ARGUMENT for a negative pid. Threads: any. Blocks: for the files.
 * Allocates: the list. */
STH_API sth_status sth_top_read(int32_t pid, sth_top_list *out_list);

/* Gives the list back, which is empty then. NULL is fine. Threads: any. Blocks: no. Allocates:
 * no. */
STH_API void sth_top_free(sth_top_list *list);

#ifdef __cplusplus
}
#endif
#endif
