/* What all runtimes of a device may take together. No runtime's lock is held. */
#ifndef STHI_RUNTIME_SHARE_CAP_H
#define STHI_RUNTIME_SHARE_CAP_H
#include "state/state.h"

sth_status sthi_residency_set_cap(sth_device *device, uint64_t bytes);
void sthi_residency_get(sth_device *device, sth_residency_info *out);
void sthi_residency_find_budget(sth_device *device, const sth_memory_reading *reading, sth_budget_verdict *out);
void sthi_residency_forget(sth_device *device);
#endif
