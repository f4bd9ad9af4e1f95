/* Who stays on the device. Lock not held. */
#ifndef STHI_RUNTIME_SHARE_PROTECT_H
#define STHI_RUNTIME_SHARE_PROTECT_H
#include "state/state.h"

sth_status sthi_runtime_keep_begin(sth_runtime *rt);
void sthi_runtime_keep_end(sth_runtime *rt);
sth_status sthi_runtime_reserve(sth_runtime *rt, sth_resident_priority priority);
void sthi_runtime_release(sth_runtime *rt);
sth_status sthi_runtime_guest_begin(sth_runtime *rt);
sth_status sthi_runtime_guest_end(sth_runtime *rt, uint64_t *out_left);
#endif
