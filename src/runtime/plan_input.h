/* What the planner is given. Lock held. */
#ifndef STHI_RUNTIME_PLAN_INPUT_H
#define STHI_RUNTIME_PLAN_INPUT_H
#include "state/state.h"

void sthi_plan_input(const sth_runtime *rt, sth_plan_input *out);
void sthi_plan_hold(sth_runtime *rt, bool holds); /* whether plans count with what was seen held together */
void sthi_plan_map_once(sth_plan_input *in);      /* the ring is ordinary memory, of any size */
#endif
