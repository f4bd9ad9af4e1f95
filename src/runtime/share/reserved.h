/* Bytes of the budget that the caller fills itself. Lock not held. */
#ifndef STHI_RUNTIME_SHARE_RESERVED_H
#define STHI_RUNTIME_SHARE_RESERVED_H
#include "state/state.h"

sth_status sthi_runtime_set_reserved(sth_runtime *rt, uint64_t bytes);
#endif
