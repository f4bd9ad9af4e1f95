/* A runtime among others comes to the device. Lock not held unless the line says otherwise. */
#ifndef STHI_RUNTIME_SHARE_ARRIVE_H
#define STHI_RUNTIME_SHARE_ARRIVE_H
#include "state/state.h"

/* Not held: makes room for `want` bytes of the runtime, or at least for `least`, and begins a hold on it. On failure
 * there is no hold. */
sth_status sthi_request_room(sth_runtime *rt, uint64_t least, uint64_t want);
bool sthi_stepping(const sth_runtime *rt);           /* a step is open that says where it ends, and goes on */
/* Other threads may be in a call, or have yet to drop the last tensor: lets the lock go for a moment. False: it is
 * *until already; 0 at first. */
bool sthi_wait_inside(sth_runtime *rt, int64_t *until);
/* No step that goes on, no lease, and no more than `known` callers inside. */
bool sthi_idle(const sth_runtime *rt, uint32_t known);
void sthi_park(sth_runtime *rt);                     /* all places go, but those that leases are in */
/* Plans for `bytes` less than it has, or parks, where it is idle. False: nothing was given because a thread is inside a
 * call of it, or holds a lease: perhaps not for long. */
bool sthi_give_way(sth_runtime *rt, uint64_t bytes);
/* Not held: brings a runtime that is parked, or has not had its budget yet, onto the device. */
sth_status sthi_arrive(sth_runtime *rt);
void sthi_grow(sth_runtime *rt);                     /* before a step: into what has become free */
/* May drop the lock: others give way for `bytes` more than the runtime has. True: look for a place again. */
bool sthi_more_room(sth_runtime *rt, uint64_t bytes);
sth_status sthi_residency_join(sth_runtime *rt);     /* not held */
void sthi_residency_retire(sth_runtime *rt);         /* not held: shut; waits for askers */
void sthi_residency_leave(sth_runtime *rt);          /* the last use of it */
#endif
