/* Pictures of a report, as SVG. Colors are the page's (report.c). Pure. */
#include <inttypes.h>
#include <math.h>

#include "base/arith.h"
#include "telemetry/report.h"

enum { WIDTH = 720, ROWS_MOST = 8, ROW = 26, BAR = 22, LEFT = 128, CHART = 200, SIDE = 56 };

static void begin(sthi_text *t, int height, const char *label) {
    sthi_text_put(t, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">", WIDTH, height, label);
}

static void end(sthi_text *t) { sthi_text_put(t, "</svg>\n"); }

/* ---- the model */

static void unit_part(sthi_text *t, const sth_unit_stats *u, double x, double width, int row) {
    sthi_text_put(t, "<rect class=\"%s\" x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\"><title>",
                  u->resident ? "stays" : "streams", x, row * ROW, fmax(width - 0.6, 0.4), BAR);
    sthi_text_escaped(t, u->name);
    sthi_text_put(t, ": %s, %s</title></rect>", sthi_size(u->bytes).text, u->resident ? "stays" : "streams");
}

/* Bytes from left to right, row by row, as text is read. */
void sthi_picture_map(sthi_text *t, const sth_report_input *in) {
    uint64_t all = 0, at = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) all += in->units[i].bytes;
    int rows = in->unit_count > 24 ? (int)fmin(ROWS_MOST, ceil(in->unit_count / 40.0)) : 1;
    double each = all ? (double)all / rows : 1;
    begin(t, rows * ROW, "units in order: what stays on the device and what streams");
    for (uint32_t i = 0; i < in->unit_count; i++) {
        double from = (double)at / each, to = (double)(at + in->units[i].bytes) / each;
        for (int row = (int)from; row < rows && row < to; row++) {
            double a = fmax(from, row) - row, b = fmin(to, row + 1) - row;
            if (b > a) unit_part(t, &in->units[i], a * WIDTH, (b - a) * WIDTH, row);
        }
        at += in->units[i].bytes;
    }
    end(t);
}

/* ---- what bounds a step */

static void bar(sthi_text *t, int row, const char *name, const char *kind, double ms, double most, const char *more) {
    double width = ms / most * (WIDTH - LEFT - 220);
    sthi_text_put(t, "<text class=\"end\" x=\"%d\" y=\"%d\">%s</text>", LEFT - 10, row * 30 + 19, name);
    sthi_text_put(t, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"20\" rx=\"2\"/>", kind, LEFT,
                  row * 30 + 4,
                  fmax(width, 1));
    sthi_text_put(t, "<text x=\"%.1f\" y=\"%d\">%.1f ms%s</text>", LEFT + width + 8, row * 30 + 19, ms, more);
}

void sthi_picture_bounds(sthi_text *t, const sthi_report_means *m) {
    double most = fmax(fmax(m->step_ms, m->predicted_ms), fmax(m->copy_ms, m->compute_ms));
    bool link = m->copy_ms > m->compute_ms;
    if (!(most > 0)) most = 1;
    begin(t, 5 * 30, "what a step spends its time with");
    bar(t, 0, "compute", "compute", m->compute_ms, most, !link ? ", bounds the step" : "");
    bar(t, 1, "copies (link)", "link", m->copy_ms, most, link ? ", bounds the step" : "");
    bar(t, 2, "waits", "wait", m->stall_ms, most, m->host_waits >= 1 ? ", in part for the host" : "");
    bar(t, 3, "step", "whole", m->step_ms, most, "");
    bar(t, 4, "predicted", "dim", m->predicted_ms, most, "");
    end(t);
}

/* ---- a step, unit by unit */

void sthi_picture_step(sthi_text *t, const sth_report_input *in) {
    double all = 0, x = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) all += in->units[i].compute_ms + in->units[i].stall_ms;
    if (!(all > 0)) return;
    begin(t, 44, "a mean step, unit by unit");
    for (uint32_t i = 0; i < in->unit_count; i++) {
        const sth_unit_stats *u = &in->units[i];
        double parts[] = {u->stall_ms, u->compute_ms};
        for (int k = 0; k < 2; k++) {
            double width = parts[k] / all * WIDTH;
            if (width >= 0.05) {
                sthi_text_put(t, "<rect class=\"%s\" x=\"%.2f\" y=\"0\" width=\"%.2f\" height=\"24\"><title>",
                              k ? "compute" : "wait", x, width);
                sthi_text_escaped(t, u->name);
                sthi_text_put(t, ": %s %.3f ms</title></rect>", k ? "works" : "waits", parts[k]);
            }
            x += width;
        }
    }
    sthi_text_put(t, "<text x=\"0\" y=\"40\">0</text><text class=\"end\" x=\"%d\" y=\"40\">%.1f ms</text>", WIDTH, all);
    end(t);
}

/* ---- over steps */

typedef double (*value_of)(const sth_step_metrics *m);

static double step_time(const sth_step_metrics *m) { return m->step_time_ms; }
static double predicted(const sth_step_metrics *m) { return m->predicted_ms; }
static double used(const sth_step_metrics *m) { return m->vram_used_mb; }
static double reserved(const sth_step_metrics *m) { return m->vram_reserved_mb; }

static void curve(sthi_text *t, const sth_report_input *in, value_of value, double most, const char *kind) {
    uint32_t last = in->step_count > 1 ? in->step_count - 1 : 1;
    sthi_text_put(t, "<polyline class=\"%s\" points=\"", kind);
    for (uint32_t i = 0; i < in->step_count; i++)
        sthi_text_put(t, "%.1f,%.1f ", SIDE + (double)i / last * (WIDTH - SIDE - 8),
                      CHART - 24 - value(&in->steps[i]) / most * (CHART - 44));
    sthi_text_put(t, "\"/>");
}

static void chart(sthi_text *t, const sth_report_input *in, value_of a, value_of b, const char *label) {
    double most = 0;
    for (uint32_t i = 0; i < in->step_count; i++) most = fmax(most, fmax(a(&in->steps[i]), b(&in->steps[i])));
    if (!(most > 0)) most = 1;
    begin(t, CHART, label);
    for (int k = 0; k <= 2; k++) {
        double y = CHART - 24 - k / 2.0 * (CHART - 44);
        sthi_text_put(t, "<line class=\"grid\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/>", SIDE, y, WIDTH - 8, y);
        sthi_text_put(t, "<text class=\"end\" x=\"%d\" y=\"%.1f\">%.4g</text>", SIDE - 8, y + 4, most * k / 2);
    }
    curve(t, in, b, most, "line dimmed");
    curve(t, in, a, most, "line");
    sthi_text_put(t, "<text x=\"%d\" y=\"%d\">step %.0f</text><text class=\"end\" x=\"%d\" y=\"%d\">%.0f</text>", SIDE,
                  CHART - 6, in->steps[0].step, WIDTH - 8, CHART - 6, in->steps[in->step_count - 1].step);
    sthi_text_put(t, "<text class=\"end\" x=\"%d\" y=\"12\">%s</text>", WIDTH - 8, label);
    end(t);
}

void sthi_picture_times(sthi_text *t, const sth_report_input *in) {
    chart(t, in, step_time, predicted, "ms a step; dashed: predicted");
}

void sthi_picture_memory(sthi_text *t, const sth_report_input *in) {
    chart(t, in, used, reserved, "MiB on the device; dashed: budget");
}
