/* The states a unit goes through, and the only moves between them. Pure. */
#ifndef STHI_CORE_UNIT_STATE_H
#define STHI_CORE_UNIT_STATE_H
#include "stagehand/runtime.h"

/* X(from, to, when): every legal move. */
#define STHI_UNIT_EDGE_LIST(X)                                                          \
    X(UNLOADED, HOST_STAGED, "chosen to be loaded")                                     \
    X(HOST_STAGED, PREFETCHING, "the first piece of its copy is issued")                \
    X(HOST_STAGED, UNLOADED, "its source failed, or the load was cancelled")            \
    X(PREFETCHING, GPU_READY, "all of its copy is issued and recorded")                 \
    X(PREFETCHING, UNLOADED, "the load was cancelled or failed half way, or shutdown")  \
    X(GPU_READY, EVICTING, "its place is given to another unit")                        \
    X(GPU_READY, GPU_FREEING, "the memory of its place is given back")                  \
    X(EVICTING, HOST_STAGED, "chosen again while leaving")                              \
    X(EVICTING, UNLOADED, "gone")                                                       \
    X(GPU_FREEING, UNLOADED, "gone")

bool sthi_unit_edge_allowed(sth_unit_state from, sth_unit_state to);
/* Moves *state, or returns INTERNAL naming both states and leaves it. */
sth_status sthi_unit_move(sth_unit_state *state, sth_unit_state to, const char *unit_name);
const char *sthi_unit_state_name(sth_unit_state state);
#endif
