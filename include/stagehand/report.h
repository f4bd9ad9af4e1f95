/* stagehand/report.h - a run as a page of HTML: one file without network, light and dark.
 *
 * Unless a function says otherwise: Threads: any. Blocks: no. Allocates: the text, which the
 * caller gives back to sth_text_free (curve.h), and scratch. */
#ifndef STAGEHAND_REPORT_H
#define STAGEHAND_REPORT_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/curve.h"
#include "stagehand/plan.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a report is made of. A part that is not there is left out, and the page says so. */
typedef struct sth_report_input {
    size_t size;                      /* sizeof(sth_report_input), set by init */
    const char *title;                /* name of the model, or of the file. Required */
    const sth_step_metrics *steps;    /* [step_count] oldest first */
    uint32_t step_count;
    const sth_unit_stats *units;      /* [unit_count] */
    uint32_t unit_count;
    const sth_prediction *prediction; /* of the plan in force; NULL: not known */
    const sth_curve_point *curve;     /* [curve_count] */
    uint32_t curve_count;
    uint64_t budget;                  /* bytes; 0: not known */
    double link_bytes_per_s;          /* that plans count with; 0: not known */
} sth_report_input;
STH_API void sth_report_input_init(sth_report_input *input);

typedef enum sth_report_form {
    STH_REPORT_PAGE,   /* a whole page */
    STH_REPORT_SUMMARY /* a small table with a picture, to stand in another page */
} sth_report_form;

/* Returns INVALID_ARGUMENT, OUT_OF_HOST_MEMORY. */
STH_API sth_status sth_report_write(const sth_report_input *input, sth_report_form form,
                                    char **out_text);

/* The same of a runtime: its last 100 steps, its units, its plan; a page has its curve, too.
 * Returns also INVALID_STATE before seal, SHUT_DOWN. Blocks: for the runtime's lock; a page
 * computes a plan for each point of the curve, up to seconds. */
STH_API sth_status sth_runtime_report(sth_runtime *runtime, sth_report_form form, char **out_text);

#ifdef __cplusplus
}
#endif
#endif
