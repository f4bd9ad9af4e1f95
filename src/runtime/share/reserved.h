/* Bytes of the budget that the caller fills itself. Lock not held. */
#ifndef STHI_RUNTIME_SHARE_RESERVED_H
#define STHI_RUNTIME_SHARE_RESERVED_H
#include "state/state.h"

sth_status sthi_runtime_set_reserved(sth_runtime *rt, uint64_t bytes);
void sthi_runtime_soften(sth_runtime *rt, uint64_t bytes);
uint64_t sthi_runtime_reserved(sth_runtime *rt);
/* A lease finds no place for `bytes`: the soft part of `reserved` is the places'. False: there is none. Lock held. */
bool sthi_yield_soft(sth_runtime *rt, uint64_t bytes);
#endif
