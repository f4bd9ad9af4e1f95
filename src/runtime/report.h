/* What a runtime says about itself. Lock not held. */
#ifndef STHI_RUNTIME_REPORT_H
#define STHI_RUNTIME_REPORT_H
#include "state/state.h"

void sthi_unit_stats(sth_runtime *rt, uint32_t unit, sth_unit_stats *out);
void sthi_runtime_stats(sth_runtime *rt, sth_runtime_stats *out);
sth_status sthi_runtime_prediction(sth_runtime *rt, sth_prediction *out);
sth_status sthi_runtime_step_metrics(sth_runtime *rt, uint32_t i, sth_step_metrics *out);
uint32_t sthi_runtime_file_count(sth_runtime *rt);
sth_status sthi_runtime_file_way(sth_runtime *rt, uint32_t i, sth_file_way *out);
#endif
