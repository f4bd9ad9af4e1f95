/* stagehand/curve.h - what a step takes over budgets, before anything runs.
 *
 * Unless a function says otherwise: Threads: any. Blocks: no. Allocates: scratch, freed before it
 * returns. */
#ifndef STAGEHAND_CURVE_H
#define STAGEHAND_CURVE_H
#include <stdint.h>

#include "stagehand/plan.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_curve_point {
    uint64_t budget;           /* bytes */
    sth_prediction prediction; /* of the best plan found for it, or for a smaller one */
} sth_curve_point;

/* Predictions for `count` budgets, 2 or more, in equal steps from the smallest that works to the
 * one that holds everything, and for input->budget where that lies between them: the points, in
 * ascending order. `points` has room for count + 1; *out_count is set. A larger budget never has a
 * longer step, because a plan for less works too. Returns as sth_plan_create does, but never
 * BUDGET_TOO_SMALL. Blocks: no, but computes as many plans. */
STH_API sth_status sth_plan_curve(const sth_plan_input *input, uint32_t count,
                                  sth_curve_point *points, uint32_t *out_count);

/* The same for a runtime, with the order, compute times and rates that are known by now; budgets
 * are those of sth_runtime_set_budget. Returns INVALID_STATE before seal and where the policy is
 * static, SHUT_DOWN. Blocks: for the runtime's lock; computes without it. */
STH_API sth_status sth_runtime_curve(sth_runtime *runtime, uint32_t count, sth_curve_point *points,
                                     uint32_t *out_count);

typedef enum sth_curve_form {
    STH_CURVE_TEXT, /* a table with bars */
    STH_CURVE_JSON, /* an array of objects */
    STH_CURVE_SVG   /* a picture, light and dark */
} sth_curve_form;

/* Writes points. present: the budget in force, which is marked; 0: none is. The caller gives
 * *out_text back to sth_text_free. Returns INVALID_ARGUMENT, OUT_OF_HOST_MEMORY. Allocates: the
 * text. */
STH_API sth_status sth_curve_write(const sth_curve_point *points, uint32_t count, uint64_t present,
                                   sth_curve_form form, char **out_text);

/* Text that this library made; NULL is fine. Allocates: no. */
STH_API void sth_text_free(char *text);

#ifdef __cplusplus
}
#endif
#endif
