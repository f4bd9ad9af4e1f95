/* Exported functions of stagehand/budget.h: checks arguments, then calls src/core. */
#include "stagehand/budget.h"

#include "base/error.h"
#include "core/advice.h"
#include "quant/segment.h"

void sth_budget_model_init(sth_budget_model *model) {
    if (model) *model = (sth_budget_model){.size = sizeof *model};
}

static sth_status check(const sth_budget_model *m) {
    if (m->size != sizeof *m)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "model", "the model's size is %zu: call sth_budget_model_init",
                         m->size);
    if ((m->weight_count && !m->weights) || (m->module_count && !m->modules) || (m->owner_count && !m->owners) ||
        (m->inside_count && !m->inside))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "model", "the model counts entries of a list that is NULL");
    if (m->weight_count == UINT32_MAX || m->module_count == UINT32_MAX)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "model", "the model has too many weights or modules");
    for (uint32_t w = 0; w < m->weight_count; w++)
        if (m->weights[w].packed && !sthi_segment_piece(m->weights[w].packed, STH_BUDGET_LEAST_PIECE))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "weights", "weights[%u].packed is no tensor that can cross "
                             "packed", w);
    return STH_OK;
}

sth_status sth_budget_advise(const sth_budget_model *model, uint64_t budget, sth_budget_advice **out_advice) {
    if (!model || !out_advice)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_budget_advise needs a model and an address for the advice");
    STHI_TRY(check(model));
    return sthi_budget_advise(model, sthi_segment_piece, budget, out_advice);
}

void sth_budget_advice_destroy(sth_budget_advice *advice) { sthi_budget_advice_destroy(advice); }

sth_status sth_budget_with_room(const sth_budget_model *model, uint64_t room, uint64_t *out_budget) {
    if (!model || !out_budget)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_budget_with_room needs a model and an address for the budget");
    STHI_TRY(check(model));
    return sthi_budget_with_room(model, sthi_segment_piece, room, out_budget);
}
