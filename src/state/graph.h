/* A step inside a graph of the device's. */
#ifndef STHI_STATE_GRAPH_H
#define STHI_STATE_GRAPH_H
#include "stagehand/backend.h"
#include "stagehand/runtime.h"

/* Up to which number a stream waits for what another one does, inside a capture: there handles do not change hands. */
typedef struct sthi_behind {
    sth_stream stream;       /* of the two the caller's */
    uint32_t number;
} sthi_behind;

typedef enum sthi_graph_state { STHI_GRAPH_IDLE, STHI_GRAPH_CAPTURING, STHI_GRAPH_REPLAYING } sthi_graph_state;

/* runtime/graph.c */
typedef struct sthi_graph {
    uint64_t edition;        /* counts changes of extents and images, from 1: what a graph's addresses depend on */
    sthi_graph_state state;
    uint64_t thread;         /* which captures or replays */
    uint32_t coming;         /* threads that wait until no caller is inside, to begin one */
    bool forked, joined;
    uint32_t copy_number, use_number; /* in this capture: copies on the copy stream, events behind uses */
    sthi_behind user_behind, copies_behind; /* of copies; of uses */
    sth_runtime_stats before; /* a capture counts for nothing: nothing is copied */
} sthi_graph;

/* In a capture: a wait would say nothing new, for one for a number as high comes before it. Else it is noted. */
static inline bool sthi_graph_waited(sthi_behind *behind, sth_stream stream, uint32_t number) {
    if (behind->stream == stream && behind->number >= number) return true;
    *behind = (sthi_behind){stream, number};
    return false;
}
#endif
