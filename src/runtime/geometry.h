/* From a plan to extents of device memory. Lock held. */
#ifndef STHI_RUNTIME_GEOMETRY_H
#define STHI_RUNTIME_GEOMETRY_H
#include "state/state.h"

/* Plans for the order and the budget in force, and lays device memory out for it. */
sth_status sthi_geometry_install(sth_runtime *rt);
/* The same with no more than `bytes` of the device, `reserved` included, while the device waits for it. */
sth_status sthi_geometry_install_in_haste(sth_runtime *rt, uint64_t bytes);
/* The same for a runtime that gave way: with the plan that it had then, where that suits (sthi_plan_before). */
sth_status sthi_geometry_come_back(sth_runtime *rt);
/* The same if it would pay now that times are known better. */
sth_status sthi_geometry_improve(sth_runtime *rt, bool *out_changed);
void sthi_plan_drop(sth_runtime *rt);      /* there is no plan in force any more */
/* The same, and the plan waits in `before` for the runtime to come back. */
void sthi_plan_put_away(sth_runtime *rt);
sth_status sthi_rearrange(sth_runtime *rt, uint64_t bytes); /* all memory that is not leased, in one piece */
#endif
