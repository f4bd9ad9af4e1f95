/* Points of a curve as text, JSON and SVG. No locks. */
#include "telemetry/curve_form.h"

#include <inttypes.h>
#include <math.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "core/plan.h"

enum { BAR = 40, WIDTH = 720, HEIGHT = 380, LEFT = 72, RIGHT = 24, TOP = 28, BOTTOM = 56 };

static double longest(const sth_curve_point *p, uint32_t count) {
    double most = 0;
    for (uint32_t i = 0; i < count; i++) most = fmax(most, sthi_ms(p[i].prediction.step_ns));
    return most > 0 ? most : 1;
}

static void text_form(sthi_text *t, const sth_curve_point *p, uint32_t count, uint64_t present) {
    double most = longest(p, count);
    sthi_text_put(t, "%12s  %11s  %-8s  step time\n", "budget", "ms a step", "bound by");
    for (uint32_t i = 0; i < count; i++) {
        double step = sthi_ms(p[i].prediction.step_ns);
        int full = (int)lround(step / most * BAR);
        sthi_text_put(t, "%12s  %11.2f  %-8s  %.*s%s\n", sthi_size(p[i].budget).text, step,
                      sthi_bound_name(p[i].prediction.bound_by), full, "########################################",
                      p[i].budget == present ? " < now" : "");
    }
}

static void json_form(sthi_text *t, const sth_curve_point *p, uint32_t count, uint64_t present) {
    sthi_text_put(t, "[");
    for (uint32_t i = 0; i < count; i++) {
        const sth_prediction *m = &p[i].prediction;
        sthi_text_put(t,
                      "%s{\"budget\":%" PRIu64 ",\"step_ms\":%.6f,\"compute_ms\":%.6f,\"link_ms\":%.6f,"
                      "\"stall_ms\":%.6f,\"bytes_per_step\":%" PRIu64 ",\"resident_bytes\":%" PRIu64
                      ",\"ring_bytes\":%" PRIu64 ",\"bound_by\":\"%s\",\"present\":%s}",
                      i ? "," : "", p[i].budget, sthi_ms(m->step_ns), sthi_ms(m->compute_ns),
                      sthi_ms(m->link_ns), sthi_ms(m->stall_ns),
                      m->bytes_per_step, m->resident_bytes, m->ring_bytes, sthi_bound_name(m->bound_by),
                      p[i].budget == present ? "true" : "false");
    }
    sthi_text_put(t, "]\n");
}

/* ---- the picture */

typedef struct axes {
    double from, to, most; /* bytes in the unit, the same, ms */
    double unit;           /* bytes */
    const char *unit_name;
} axes;

static double x_of(const axes *a, double at) {
    return LEFT + (at - a->from) / (a->to - a->from) * (WIDTH - LEFT - RIGHT);
}
static double x_of_bytes(const axes *a, uint64_t bytes) { return x_of(a, (double)bytes / a->unit); }
static double y_of(const axes *a, double at) { return HEIGHT - BOTTOM - at / a->most * (HEIGHT - TOP - BOTTOM); }

/* 1, 2 or 5 times a power of ten, so that some `wanted` of them span it. */
static double nice_step(double span, int wanted) {
    double raw = span / wanted, power = pow(10, floor(log10(raw))), times = raw / power;
    if (times < 1.5) return power;
    if (times < 3.5) return 2 * power;
    return times < 7.5 ? 5 * power : 10 * power;
}

static void grid(sthi_text *t, const axes *a) {
    double each = nice_step(a->most, 5);
    for (int k = 0; k * each <= a->most * 1.0001; k++) {
        double y = y_of(a, k * each);
        sthi_text_put(t, "<line class=\"grid\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/>", LEFT, y, WIDTH - RIGHT,
                      y);
        sthi_text_put(t, "<text class=\"end\" x=\"%d\" y=\"%.1f\">%g</text>", LEFT - 8, y + 4, k * each);
    }
    each = nice_step(a->to - a->from, 6);
    for (double at = ceil(a->from / each) * each; at <= a->to + each / 1e4; at += each) {
        double x = x_of(a, at);
        sthi_text_put(t, "<line class=\"tick\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>", x, HEIGHT - BOTTOM, x,
                      HEIGHT - BOTTOM + 5);
        sthi_text_put(t, "<text class=\"mid\" x=\"%.1f\" y=\"%d\">%g</text>", x, HEIGHT - BOTTOM + 20, at);
    }
    sthi_text_put(t, "<text class=\"mid\" x=\"%d\" y=\"%d\">budget, %s</text>", (LEFT + WIDTH - RIGHT) / 2,
                  HEIGHT - 12, a->unit_name);
    sthi_text_put(t, "<text x=\"%d\" y=\"%d\">ms a step, predicted</text>", LEFT, TOP - 12);
}

static void line_of(sthi_text *t, const axes *a, const sth_curve_point *p, uint32_t count) {
    sthi_text_put(t, "<polyline class=\"line\" points=\"");
    for (uint32_t i = 0; i < count; i++)
        sthi_text_put(t, "%.1f,%.1f ", x_of_bytes(a, p[i].budget), y_of(a, sthi_ms(p[i].prediction.step_ns)));
    sthi_text_put(t, "\"/>");
    for (uint32_t i = 0; i < count; i++)
        sthi_text_put(t,
                      "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"><title>%s: %.2f ms, bound by %s</title>"
                      "</circle>",
                      x_of_bytes(a, p[i].budget), y_of(a, sthi_ms(p[i].prediction.step_ns)),
                      sthi_size(p[i].budget).text, sthi_ms(p[i].prediction.step_ns),
                      sthi_bound_name(p[i].prediction.bound_by));
}

static void now_mark(sthi_text *t, const axes *a, const sth_curve_point *p) {
    double x = x_of_bytes(a, p->budget), y = y_of(a, sthi_ms(p->prediction.step_ns));
    const char *side = x > (WIDTH + LEFT) / 2 ? "end" : "begin";
    sthi_text_put(t, "<line class=\"now\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>", x, TOP, x, HEIGHT - BOTTOM);
    sthi_text_put(t, "<circle class=\"now-dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"/>", x, y);
    sthi_text_put(t, "<text class=\"strong %s\" x=\"%.1f\" y=\"%d\">now: %s, %.1f ms</text>", side,
                  side[0] == 'e' ? x - 8 : x + 8, TOP + 12, sthi_size(p->budget).text, sthi_ms(p->prediction.step_ns));
}

static void svg_form(sthi_text *t, const sth_curve_point *p, uint32_t count, uint64_t present) {
    double compute = sthi_ms(p[0].prediction.compute_ns);
    bool large = p[count - 1].budget >= UINT64_C(1) << 30;
    axes a = {.unit = large ? 1073741824.0 : 1048576.0, .unit_name = large ? "GiB" : "MiB",
              .most = longest(p, count) * 1.08};
    a.from = (double)p[0].budget / a.unit;
    a.to = (double)p[count - 1].budget / a.unit;
    if (!(a.to > a.from)) a.to = a.from + 1;
    sthi_text_put(t,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"stagehand-curve\" viewBox=\"0 0 %d %d\" "
                  "role=\"img\" aria-label=\"step time over budgets\"><style>"
                  ".stagehand-curve{--ink:#1f2328;--dim:#656d76;--rule:#d8dee4;--blue:#0969da;--warm:#bc4c00;"
                  "max-width:%dpx;width:100%%}"
                  "@media(prefers-color-scheme:dark){.stagehand-curve{--ink:#e6edf3;--dim:#9198a1;--rule:#30363d;"
                  "--blue:#58a6ff;--warm:#f0883e}}"
                  ".stagehand-curve text{font:12px system-ui,sans-serif;fill:var(--dim)}"
                  ".stagehand-curve .mid{text-anchor:middle}.stagehand-curve .end{text-anchor:end}"
                  ".stagehand-curve .strong{fill:var(--ink);font-weight:600}"
                  ".stagehand-curve .grid{stroke:var(--rule)}.stagehand-curve .tick{stroke:var(--dim)}"
                  ".stagehand-curve .line{fill:none;stroke:var(--blue);stroke-width:2}"
                  ".stagehand-curve .dot{fill:var(--blue)}.stagehand-curve .now-dot{fill:var(--warm)}"
                  ".stagehand-curve .now{stroke:var(--warm);stroke-dasharray:4 3}"
                  ".stagehand-curve .floor{stroke:var(--dim);stroke-dasharray:2 4}</style>",
                  WIDTH, HEIGHT, WIDTH);
    grid(t, &a);
    if (compute > a.most / 50) {
        double y = y_of(&a, compute);
        sthi_text_put(t, "<line class=\"floor\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/>", LEFT, y, WIDTH - RIGHT,
                      y);
        sthi_text_put(t, "<text class=\"end\" x=\"%d\" y=\"%.1f\">compute alone</text>", WIDTH - RIGHT, y + 14);
    }
    line_of(t, &a, p, count);
    for (uint32_t i = 0; i < count; i++)
        if (p[i].budget == present) now_mark(t, &a, &p[i]);
    sthi_text_put(t, "</svg>\n");
}

void sthi_curve_put(sthi_text *t, const sth_curve_point *p, uint32_t count, uint64_t present, sth_curve_form form) {
    if (form == STH_CURVE_TEXT) text_form(t, p, count, present);
    else if (form == STH_CURVE_JSON) json_form(t, p, count, present);
    else svg_form(t, p, count, present);
}

sth_status sthi_curve_write(const sth_curve_point *p, uint32_t count, uint64_t present, sth_curve_form form,
                            char **out_text) {
    sthi_text t = {0};
    if (!count || form < STH_CURVE_TEXT || form > STH_CURVE_SVG)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "curve", "a curve has points and a form that is known");
    sthi_curve_put(&t, p, count, present, form);
    *out_text = sthi_text_take(&t);
    return *out_text ? STH_OK : sthi_no_memory("curve", "the text of a curve");
}
