/* Plans made and priced. Lock held. */
#ifndef STHI_RUNTIME_PLANNING_H
#define STHI_RUNTIME_PLANNING_H
#include "stagehand/curve.h"
#include "state/state.h"

void sthi_made_drop(sthi_made_plan *m);
/* For the order, the budget and the rates in force. */
sth_status sthi_plan_make(sth_runtime *rt, sthi_made_plan *out);
/* What the plan in force promises with the times that are known now, at such a rate of the link; 0: it is not known. */
sth_status sthi_plan_price(sth_runtime *rt, double link, sth_prediction *out);
/* Takes the plan that was put away (sthi_plan_put_away), if it was made for the present order, units and, but for a
 * little, room, and another cannot save more than the search for it takes. False: there is none, or it does not suit
 * and is gone. */
bool sthi_plan_before(sth_runtime *rt, sthi_made_plan *out);
/* As sth_runtime_curve. Lock not held. */
sth_status sthi_runtime_curve(sth_runtime *rt, uint32_t count, sth_curve_point *points, uint32_t *out_count);
#endif
