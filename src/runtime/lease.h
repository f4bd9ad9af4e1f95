/* Acquire and release. Lock not held. */
#ifndef STHI_RUNTIME_LEASE_H
#define STHI_RUNTIME_LEASE_H
#include "state/state.h"

void sthi_lease_release(sth_runtime *rt, const sth_lease *lease);
sth_status sthi_check_unit(const sth_runtime *rt, uint32_t unit); /* not held: there is one of that number */
sth_status sthi_unit_acquire(sth_runtime *rt, uint32_t unit, sth_stream stream, sth_lease *out);
sth_status sthi_runtime_poll(sth_runtime *rt);
sth_status sthi_runtime_gather(sth_runtime *rt, uint64_t bytes);
sth_status sthi_unit_mark_written(sth_runtime *rt, uint32_t unit);
#endif
