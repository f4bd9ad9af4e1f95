/* The weight runtime's state, in parts. One lock (`lock`) guards everything but the stack of ended
 * leases, which is atomic so that destructors can push to it. The lock is dropped while waiting for
 * disk, for slabs and for leases; it is held while waiting for the device where a step ends (copies
 * that read writable images) and where a plan changes (docs/locking.md).
 *
 * Each part stands in a header of this folder, which names the files that write it. The functions
 * are above: src/load fills places, src/runtime decides when. */
#ifndef STHI_STATE_STATE_H
#define STHI_STATE_STATE_H
#include "base/arith.h"
#include "base/error.h"
#include "base/thread.h"
#include "core/places.h"
#include "device/device.h"
#include "stagehand/graph.h"
#include "stagehand/runtime.h"
#include "state/copies.h"
#include "state/graph.h"
#include "state/order.h"
#include "state/plan.h"
#include "state/queue.h"
#include "state/reading.h"
#include "state/sharing.h"
#include "state/slots.h"
#include "state/step.h"
#include "state/timing.h"
#include "state/unit.h"

#define STHI_DEV(rt, op, ...) ((rt)->device->ops->op((rt)->device->self, __VA_ARGS__))

struct sth_runtime {
    sth_device *device;
    sth_runtime_options options;
    char *name;              /* for messages */
    atomic_int refs;         /* 1 for the owner, 1 per lease */
    unsigned fork_depth;     /* of the process that made it: in a child no lock may be taken */
    sthi_mutex lock;
    sthi_cond changed;       /* for callers: a read or a load ended, the queue moved, shut, callers left */
    uint32_t callers;        /* inside acquire, verify or synchronize: destroy and captures wait for them */
    bool seal_tried, sealed, shut;

    sthi_unit *units;        /* [unit_count] */
    uint32_t unit_count, unit_cap;

    sthi_places places;      /* which bytes of which extent hold which unit */
    sthi_slot_sync *sync;    /* [places.slot_cap] */
    sthi_events events;
    sthi_traces traces;
    sthi_leases leases;
    sthi_extents extents;

    sthi_copies copies;
    sthi_expansion expand;
    sthi_queue queue;
    sthi_sources sources;
    sthi_reads reads;
    sthi_slabs slabs;
    sthi_readers readers;

    sthi_planned planned;
    sthi_program program;
    sthi_order order;
    sthi_writes writes;
    sthi_link link;
    sthi_graph graph;
    sthi_sharing share;

    sthi_step step;
    sthi_timing timing;
    sth_step_metrics current; /* counters of the open step */
    sthi_step_records telemetry;
    sth_runtime_stats stats;
};

/* A caller counted in `callers` leaves. Lock held. */
static inline void sthi_leave(sth_runtime *rt) {
    if (!--rt->callers && (rt->shut || rt->graph.coming)) sthi_cond_broadcast(&rt->changed);
}

/* The error of a call that comes after the end of the runtime. */
static inline sth_status sthi_shut_down(const sth_runtime *rt) {
    return sthi_fail(STH_SHUT_DOWN, NULL, 0, rt->name, "'%s' has been shut down: make a new runtime", rt->name);
}
#endif
