/* Points of a curve as text. */
#ifndef STHI_TELEMETRY_CURVE_FORM_H
#define STHI_TELEMETRY_CURVE_FORM_H
#include "base/text.h"
#include "stagehand/curve.h"

/* count: 1 or more. */
void sthi_curve_put(sthi_text *text, const sth_curve_point *points, uint32_t count, uint64_t present,
                    sth_curve_form form);
sth_status sthi_curve_write(const sth_curve_point *points, uint32_t count, uint64_t present, sth_curve_form form,
                            char **out_text);
#endif
