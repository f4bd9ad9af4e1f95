/* Who stays on the device. Lock not held. */
#ifndef STHI_RUNTIME_SHARE_PROTECT_H
#define STHI_RUNTIME_SHARE_PROTECT_H
#include "state/state.h"

sth_status sthi_runtime_keep_begin(sth_runtime *rt); /* these are not held, as all public calls */
void sthi_runtime_keep_end(sth_runtime *rt);
sth_status sthi_runtime_reserve(sth_runtime *rt, sth_resident_priority priority);
void sthi_runtime_release(sth_runtime *rt);
sth_status sthi_runtime_guest_begin(sth_runtime *rt);
sth_status sthi_runtime_guest_end(sth_runtime *rt, uint64_t *out_left);
sth_status sthi_runtime_set_reserved(sth_runtime *rt, uint64_t bytes);
sth_status sthi_residency_set_cap(sth_device *device, uint64_t bytes);
void sthi_residency_get(sth_device *device, sth_residency_info *out);
void sthi_residency_find_budget(sth_device *device, const sth_memory_reading *reading, sth_budget_verdict *out);
void sthi_residency_forget(sth_device *device);
#endif
