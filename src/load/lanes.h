/* The conductor: when copies are due, and who else is on the link. Lock held but in the calls of
 * the caller's. */
#ifndef STHI_LOAD_LANES_H
#define STHI_LOAD_LANES_H
#include "state/state.h"

/* Before a copy of a unit's bytes on the stream: how it may go. lane: not NULL. */
sthi_way sthi_ask_lane(sth_runtime *rt, sthi_lane *lane, uint32_t unit, uint64_t bytes);
void sthi_lanes_close(sth_runtime *rt);            /* lock held */
sth_status sthi_runtime_set_conductor(sth_runtime *rt, sth_conductor *c);
sth_status sthi_runtime_set_max_inflight(sth_runtime *rt, uint32_t units);
sth_status sthi_runtime_set_prefetch_window(sth_runtime *rt, uint32_t units);
#endif
