/* A runtime's place in the device's account. Lock not held. */
#ifndef STHI_RUNTIME_SHARE_JOIN_H
#define STHI_RUNTIME_SHARE_JOIN_H
#include "state/state.h"

sth_status sthi_residency_join(sth_runtime *rt);
void sthi_residency_retire(sth_runtime *rt);         /* shut; waits for askers */
void sthi_residency_leave(sth_runtime *rt);          /* the last use of it */
#endif
