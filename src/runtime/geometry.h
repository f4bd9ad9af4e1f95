/* From a plan to extents of device memory. Lock held. */
#ifndef STHI_RUNTIME_GEOMETRY_H
#define STHI_RUNTIME_GEOMETRY_H
#include "state/state.h"

bool sthi_closing_idle(sth_runtime *rt);    /* an extent that leases kept could be freed now */
void sthi_closing_free(sth_runtime *rt);    /* frees those */
void sthi_extents_free_all(sth_runtime *rt);
void sthi_plan_input(const sth_runtime *rt, sth_plan_input *out);
void sthi_plan_hold(sth_runtime *rt, bool holds); /* whether plans count with what was seen held together */
void sthi_plan_map_once(sth_plan_input *in);      /* the ring is ordinary memory, of any size */
/* What the plan in force promises with the times that are known now, at such a rate of the link; 0: it is not known. */
sth_status sthi_plan_price(sth_runtime *rt, double link, sth_prediction *out);
void sthi_plan_drop(sth_runtime *rt);      /* there is none in force */
/* The same with no more than `bytes` of the device, `reserved` included. */
sth_status sthi_geometry_install_within(sth_runtime *rt, uint64_t bytes);
/* Plans for the order and the budget in force, and lays device memory out for it. */
sth_status sthi_geometry_install(sth_runtime *rt);
/* The same if it would pay now that times are known better. */
sth_status sthi_geometry_improve(sth_runtime *rt, bool *out_changed);
void sthi_program_reset(sth_runtime *rt);  /* from the start of a lap, with what is on the device */
void sthi_program_skip(sth_runtime *rt);   /* past loads whose first use has begun */
sth_status sthi_rearrange(sth_runtime *rt, uint64_t bytes); /* all memory that is not leased, in one piece */
#endif
