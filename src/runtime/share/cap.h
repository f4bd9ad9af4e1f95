/* What all runtimes of a device may take together. No runtime's lock is held. */
#ifndef STHI_RUNTIME_SHARE_CAP_H
#define STHI_RUNTIME_SHARE_CAP_H
#include "state/state.h"

sth_status sthi_residency_set_cap(sth_device *device, uint64_t bytes);
void sthi_residency_get(sth_device *device, sth_residency_info *out);
void sthi_residency_find_budget(sth_device *device, const sth_memory_reading *reading, sth_budget_verdict *out);
/* With the runtime's lock for a moment, after the device's account. */
void sthi_runtime_find_budget(sth_runtime *rt, const sth_memory_reading *reading, uint64_t spare,
                              sth_budget_verdict *out);
bool sthi_residency_above_ceiling(sth_device *device, const sth_memory_reading *reading);
uint64_t sthi_runtime_budget_without(sth_runtime *rt, uint64_t bytes, uint64_t spare, uint64_t *out_freed);
void sthi_residency_forget(sth_device *device);
#endif
