/* Read-back. Lock not held. */
#ifndef STHI_RUNTIME_VERIFY_H
#define STHI_RUNTIME_VERIFY_H
#include "state/state.h"

sth_status sthi_unit_verify(sth_runtime *rt, uint32_t unit, bool *out_equal, uint64_t *out_hash);
#endif
