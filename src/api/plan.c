/* Exported functions of stagehand/plan.h: checks arguments, then calls src/core. */
#include "stagehand/plan.h"

#include "base/error.h"
#include "core/plan.h"

void sth_plan_input_init(sth_plan_input *input) {
    if (input) sthi_plan_input_init(input);
}

const char *sth_bound_name(sth_bound bound) { return sthi_bound_name(bound); }

sth_status sth_plan_create(const sth_plan_input *input, sth_plan **out_plan) {
    if (!input || !out_plan)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_plan_create needs an input and an address for the plan");
    return sthi_plan_create(input, out_plan);
}

void sth_plan_destroy(sth_plan *plan) { sthi_plan_destroy(plan); }

sth_status sth_plan_predict(const sth_plan_input *input, const sth_plan *plan,
                            sth_prediction *out_prediction) {
    if (!input || !plan || !out_prediction)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_plan_predict needs an input, a plan and an address for the prediction");
    return sthi_plan_predict(input, plan, out_prediction);
}

uint64_t sth_plan_smallest_budget(const sth_plan_input *input) {
    uint64_t budget = 0;
    if (!input) {
        (void)sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_plan_smallest_budget needs an input");
        return 0;
    }
    return sthi_plan_smallest(input, &budget) == STH_OK ? budget : 0;
}
