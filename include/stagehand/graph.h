/* stagehand/graph.h - a step of a runtime inside a graph of the device's (CUDA graphs, hipGraph), replayed
 * as often as wanted.
 *
 * Life:
 *     a step or two as usual, so that the order is known
 *     sth_graph_prepare -> the framework begins to capture `stream`
 *         -> sth_graph_fork -> { sth_unit_acquire -> kernels -> sth_lease_release } -> sth_graph_join
 *     -> the framework ends the capture -> sth_graph_settle
 *     every replay: sth_graph_replay_begin -> the graph is launched on `stream` -> sth_graph_replay_end
 *
 * A graph holds the step's copies from host images into the ring, and reads residents where they are. It
 * begins with an empty ring and leaves one behind, so that replays and ordinary steps follow each other in
 * any order. Images are read again by each replay. docs/graphs.md says what makes a graph stale and what it
 * costs.
 *
 * Unless a function says otherwise: Threads: one, the same from prepare to settle, and from a replay's
 * begin to its end; other threads' acquires wait meanwhile. Blocks: no. Allocates: no. A forked child's
 * calls return INVALID_STATE. */
#ifndef STAGEHAND_GRAPH_H
#define STAGEHAND_GRAPH_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_graph_info {
    uint64_t edition;       /* of the places that the graph is made of */
    uint64_t h2d_bytes;     /* copied by each replay */
    uint64_t copies;        /* units loaded by each replay */
    uint64_t read_bytes;    /* of units that it reads where they stay */
} sth_graph_info;

/* Brings what stays to its place, empties the ring, and keeps both as they are until settle. The
 * plan is the one in force: begin with a few ordinary steps. Returns UNSUPPORTED with the
 * reason: the device has no graphs, the policy is not the planned one, a unit's bytes pass
 * through slabs (files, images that are not pinned). INVALID_STATE inside a step, while leases
 * last, or before an order was recorded; BUDGET_TOO_SMALL as step_begin, and where no plan fits,
 * which more steps do not change; OUT_OF_DEVICE_MEMORY in the same way. Blocks: for the copies
 * under way. Allocates: device memory, where the runtime was parked. */
STH_API sth_status sth_graph_prepare(sth_runtime *runtime);

/* The runtime's streams join the capture of `stream`, which has begun. An acquire from here on
 * must follow the recorded order, and may end early: one that does not fails with INVALID_STATE,
 * names the unit, and so do join and settle then. */
STH_API sth_status sth_graph_fork(sth_runtime *runtime, sth_stream stream);

/* `stream` waits for them: the capture may end. Also after a failure inside. */
STH_API sth_status sth_graph_join(sth_runtime *runtime, sth_stream stream);

/* After the capture's end, or instead of one: the runtime is as between steps. Returns
 * INVALID_STATE with the reason where the graph must not be used: an acquire failed, or
 * something still leases a place of it. Allocates: no. */
STH_API sth_status sth_graph_settle(sth_runtime *runtime, sth_graph_info *out_info);

/* Before a launch on `stream`: residents are in their places, as they are in host memory now,
 * nobody else is in the ring, and `stream` waits for all of that. *out_current is false, and no
 * replay has begun, when the graph's places are no more: capture again. Returns INVALID_STATE
 * inside a step, or while a place in the ring is leased; BUDGET_TOO_SMALL, SHUT_DOWN. Blocks:
 * for residents that were written (their master is encoded again). */
STH_API sth_status sth_graph_replay_begin(sth_runtime *runtime, uint64_t edition, sth_stream stream,
                                          bool *out_current);

/* The launch is enqueued, or was not made. Later work of the runtime comes behind it. Blocks: where
 * the graph copies writable images, until it has run. */
STH_API sth_status sth_graph_replay_end(sth_runtime *runtime, sth_stream stream);

#ifdef __cplusplus
}
#endif
#endif
