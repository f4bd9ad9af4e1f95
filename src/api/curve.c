/* Exported functions of stagehand/curve.h: check the arguments, then hand over to the rooms below. */
#include "stagehand/curve.h"

#include "api/arguments.h"
#include "base/memory.h"
#include "core/curve.h"
#include "core/plan.h"
#include "runtime/planning.h"
#include "runtime/runtime.h"
#include "telemetry/curve_form.h"

sth_status sth_plan_curve(const sth_plan_input *input, uint32_t count, sth_curve_point *points, uint32_t *out_count) {
    if (!input || !points || !out_count) return null_argument("input, points or out_count");
    return sthi_plan_curve(input, count, sthi_plan_create, points, out_count);
}

sth_status sth_runtime_curve(sth_runtime *runtime, uint32_t count, sth_curve_point *points, uint32_t *out_count) {
    if (!runtime || !points || !out_count) return null_argument("runtime, points or out_count");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_curve(runtime, count, points, out_count);
}

sth_status sth_curve_write(const sth_curve_point *points, uint32_t count, uint64_t present, sth_curve_form form,
                           char **out_text) {
    if (!points || !out_text) return null_argument("points or out_text");
    return sthi_curve_write(points, count, present, form, out_text);
}

void sth_text_free(char *text) { sthi_free(text); }
