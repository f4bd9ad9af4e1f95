/* A step inside a graph of the device's. Lock not held unless the line says otherwise. */
#ifndef STHI_RUNTIME_GRAPH_H
#define STHI_RUNTIME_GRAPH_H
#include "state/state.h"

bool sthi_graph_others(const sth_runtime *rt);       /* held: another thread captures or replays: wait on `changed` */
sth_status sthi_graph_free(const sth_runtime *rt);   /* held: nobody does, or the error */
/* Held, in a capture: the stream waits for the slot's copy already (sthi_graph_waited). */
bool sthi_graph_has(sth_runtime *rt, uint32_t slot, sth_stream stream);
sth_status sthi_graph_prepare(sth_runtime *rt);
sth_status sthi_graph_fork(sth_runtime *rt, sth_stream stream);
/* What was forked is joined whatever happened inside, or the capture could not end. */
sth_status sthi_graph_join(sth_runtime *rt, sth_stream stream);
sth_status sthi_graph_settle(sth_runtime *rt, sth_graph_info *out);
sth_status sthi_graph_use(sth_runtime *rt, uint32_t unit); /* held: the next use in a capture is of the unit */
sth_status sthi_graph_replay_begin(sth_runtime *rt, uint64_t edition, sth_stream stream, bool *out_current);
sth_status sthi_graph_replay_end(sth_runtime *rt, sth_stream stream);
#endif
