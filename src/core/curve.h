/* Step times over budgets. Pure. */
#ifndef STHI_CORE_CURVE_H
#define STHI_CORE_CURVE_H
#include "stagehand/curve.h"

typedef sth_status (*sthi_plan_maker)(const sth_plan_input *in, sth_plan **out);

/* As sth_plan_curve, with plans by `make`. */
sth_status sthi_plan_curve(const sth_plan_input *in, uint32_t count, sthi_plan_maker make, sth_curve_point *points,
                           uint32_t *out_count);
#endif
