/* A runtime gives way to others. Lock held. */
#ifndef STHI_RUNTIME_SHARE_GIVE_H
#define STHI_RUNTIME_SHARE_GIVE_H
#include "state/state.h"

bool sthi_stepping(const sth_runtime *rt);           /* a step is open that says where it ends, and goes on */
/* Other threads may be in a call, or have yet to drop the last tensor: lets the lock go for a moment. False: it is
 * *until already; 0 at first. */
bool sthi_wait_inside(sth_runtime *rt, int64_t *until);
/* No step that goes on, no lease, and no more than `known` callers inside. */
bool sthi_idle(const sth_runtime *rt, uint32_t known);
void sthi_park(sth_runtime *rt);                     /* all places go, but those that leases are in */
/* Lends others `bytes` of what it has, or all, where it is idle, until it comes to use them. False: nothing was given
 * because a thread is inside a call of it, or holds a lease: perhaps not for long. */
bool sthi_give_way(sth_runtime *rt, uint64_t bytes);
void sthi_runtime_lend(sth_runtime *rt, uint64_t bytes); /* the same. Lock not held */
/* The same for its own use: it plans for `bytes` less than it has, and goes on with that. */
bool sthi_make_do(sth_runtime *rt, uint64_t bytes);
#endif
