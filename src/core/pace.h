/* When the memory of a device is read for one model whose budget is found; sth_budget_pace in
 * include/stagehand/residency.h has the rules. Pure: times are the caller's, on any steady clock. */
#ifndef STHI_CORE_PACE_H
#define STHI_CORE_PACE_H
#include "stagehand/residency.h"

void sthi_pace_inputs(sth_budget_pace *pace, uint64_t bytes, bool inside_step);
bool sthi_pace_due(sth_budget_pace *pace, int64_t now_ns, bool turn, double *out_growth);
void sthi_pace_looked(sth_budget_pace *pace, int64_t now_ns);
void sthi_pace_hurry(sth_budget_pace *pace);
void sthi_pace_renew(sth_budget_pace *pace);
#endif
