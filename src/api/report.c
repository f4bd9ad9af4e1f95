/* Exported functions of stagehand/report.h: check the arguments; gather what a runtime knows by the calls that any
 * program has. */
#include "stagehand/report.h"

#include "api/arguments.h"
#include "base/memory.h"
#include "state/state.h"
#include "telemetry/report.h"

enum { STEPS = 100, POINTS = 16 };

void sth_report_input_init(sth_report_input *input) {
    if (input) *input = (sth_report_input){.size = sizeof *input};
}

sth_status sth_report_write(const sth_report_input *input, sth_report_form form, char **out_text) {
    if (!input || input->size != sizeof *input)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "input",
                         "the input was not set up by sth_report_input_init of this version");
    if (!input->title || !out_text) return null_argument("title or out_text");
    return sthi_report_write(input, form, out_text);
}

/* What a report of a runtime is made of. */
typedef struct gathered {
    sth_step_metrics steps[STEPS];
    sth_curve_point curve[POINTS + 1];
    sth_prediction prediction;
    sth_unit_stats *units;
} gathered;

static void gather_steps(sth_runtime *rt, gathered *g, sth_report_input *in) {
    uint32_t count = 0;
    while (count < STEPS && sth_runtime_step_metrics(rt, count, &g->steps[count]) == STH_OK) count++;
    for (uint32_t i = 0; i < count / 2; i++) {
        sth_step_metrics newer = g->steps[i];
        g->steps[i] = g->steps[count - 1 - i];
        g->steps[count - 1 - i] = newer;
    }
    in->steps = g->steps;
    in->step_count = count;
}

/* Units that have a part in steps. */
static sth_status gather_units(sth_runtime *rt, gathered *g, sth_report_input *in) {
    uint32_t all = sth_runtime_unit_count(rt);
    g->units = sthi_alloc((all + 1) * sizeof *g->units);
    if (!g->units) return sthi_no_memory(rt->name, "a report");
    for (uint32_t i = 0; i < all; i++) {
        if (rt->units[i].flags & (STH_UNIT_ASIDE | STH_UNIT_IDLE)) continue;
        STHI_TRY(sth_unit_stats_get(rt, i, &g->units[in->unit_count]));
        in->unit_count++;
    }
    in->units = g->units;
    return STH_OK;
}

static sth_status gather(sth_runtime *rt, gathered *g, sth_report_form form, sth_report_input *in) {
    sth_runtime_stats stats;
    STHI_TRY(sth_runtime_stats_get(rt, &stats));
    in->title = rt->name;
    in->budget = stats.budget;
    in->link_bytes_per_s = stats.link_bytes_per_s;
    gather_steps(rt, g, in);
    STHI_TRY(gather_units(rt, g, in));
    if (sth_runtime_prediction(rt, &g->prediction) == STH_OK) in->prediction = &g->prediction;
    if (form != STH_REPORT_PAGE || !in->prediction) return STH_OK;
    in->curve = g->curve;
    return sth_runtime_curve(rt, POINTS, g->curve, &in->curve_count);
}

sth_status sth_runtime_report(sth_runtime *runtime, sth_report_form form, char **out_text) {
    if (!runtime || !out_text) return null_argument("runtime or out_text");
    if (!runtime->sealed) return sthi_fail(STH_INVALID_STATE, NULL, 0, runtime->name, "a report before seal");
    gathered *g = sthi_zalloc(1, sizeof *g);
    if (!g) return sthi_no_memory(runtime->name, "a report");
    sth_report_input in;
    sth_report_input_init(&in);
    sth_status rc = gather(runtime, g, form, &in);
    if (rc == STH_OK) rc = sth_report_write(&in, form, out_text);
    sthi_free(g->units);
    sthi_free(g);
    return rc;
}
