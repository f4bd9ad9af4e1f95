/* The page of a report: parts in the order in which questions come up. One file: style and pictures are in it, nothing
 * is fetched, no script runs. Texts from outside, names of units and the title, are escaped. Pure. */
#include "telemetry/report.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "core/plan.h"
#include "telemetry/curve_form.h"

enum { ROWS_MOST = 400 };

sthi_report_means sthi_report_means_of(const sth_report_input *in) {
    sthi_report_means m = {0};
    uint32_t skip = in->step_count > 4 ? 2 : 0;
    for (uint32_t i = skip; i < in->step_count; i++) {
        const sth_step_metrics *s = &in->steps[i];
        m.steps++;
        m.step_ms += s->step_time_ms, m.predicted_ms += s->predicted_ms, m.compute_ms += s->compute_time_ms;
        m.copy_ms += s->copy_time_ms, m.stall_ms += s->stall_time_ms, m.link_gb_s += s->link_gb_s;
        m.h2d_bytes += s->h2d_bytes, m.d2h_bytes += s->d2h_bytes, m.file_bytes += s->file_bytes;
        m.host_waits += s->host_waits, m.hits += s->prefetch_hits, m.misses += s->prefetch_misses;
        m.vram_mb += s->vram_used_mb;
    }
    if (!m.steps) return m;
    double *each[] = {&m.step_ms, &m.predicted_ms, &m.compute_ms, &m.copy_ms, &m.stall_ms, &m.link_gb_s, &m.h2d_bytes,
                      &m.d2h_bytes, &m.file_bytes, &m.host_waits, &m.hits, &m.misses, &m.vram_mb};
    for (size_t k = 0; k < sizeof each / sizeof *each; k++) *each[k] /= m.steps;
    return m;
}

/* All rules stand under one class, so that a summary changes nothing of the page that it stands in. */
static void style(sthi_text *t) {
    sthi_text_put(t,
                  "<style>.sth{--ink:#1f2328;--dim:#59636e;--paper:#fff;--rule:#d1d9e0;--soft:#f6f8fa;--blue:#0969da;"
                  "--warm:#bc4c00;--gold:#d4a72c;--gray:#9aa4af;color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
                  "@media(prefers-color-scheme:dark){.sth{--ink:#e6edf3;--dim:#9198a1;--paper:#0d1117;--rule:#30363d;"
                  "--soft:#161b22;--blue:#4493f8;--warm:#f0883e;--gold:#d29922;--gray:#656d76}}"
                  "@media print{.sth{--ink:#000;--dim:#444;--paper:#fff;--rule:#bbb;--soft:#fff;--blue:#0969da;"
                  "--warm:#bc4c00;--gold:#d4a72c;--gray:#9aa4af;print-color-adjust:exact;"
                  "-webkit-print-color-adjust:exact}.sth section{break-inside:avoid}}"
                  "body.sth{margin:0;background:var(--paper)}"
                  ".sth main{max-width:760px;margin:0 auto;padding:32px 20px 64px}"
                  ".sth h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}"
                  ".sth h2{font-size:17px;margin:36px 0 10px}.sth p{margin:6px 0 10px}.sth .dim-text{color:var(--dim)}"
                  ".sth svg{display:block;width:100%%;height:auto}"
                  ".sth svg text{font:12px system-ui,sans-serif;fill:var(--dim)}.sth svg .end{text-anchor:end}"
                  ".sth .grid{stroke:var(--rule)}.sth .line{fill:none;stroke:var(--blue);stroke-width:2}"
                  ".sth .dimmed{stroke:var(--gray);stroke-dasharray:5 4;stroke-width:1.5}.sth .stays{fill:var(--blue)}"
                  ".sth .streams{fill:var(--gold)}.sth .compute{fill:var(--blue)}.sth .link{fill:var(--gold)}"
                  ".sth .wait{fill:var(--warm)}.sth .whole{fill:var(--ink)}.sth .dim{fill:var(--gray)}"
                  ".sth .key{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 14px}"
                  ".sth .key.stays,.sth .key.compute{background:var(--blue);margin-left:0}"
                  ".sth .key.streams{background:var(--gold)}.sth .key.wait{background:var(--warm)}"
                  ".sth table{border-collapse:collapse;width:100%%;font-variant-numeric:tabular-nums;font-size:13px}"
                  ".sth th,.sth td{padding:4px 8px;border-bottom:1px solid var(--rule);text-align:right;color:inherit;"
                  "background:none}.sth th:first-child,.sth td:first-child{text-align:left;overflow-wrap:anywhere}"
                  ".sth th{color:var(--dim);font-weight:500}"
                  ".sth dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;"
                  "margin:18px 0}"
                  ".sth dl div{background:var(--soft);border:1px solid var(--rule);border-radius:6px;padding:10px 12px}"
                  ".sth dt{color:var(--dim);font-size:12px}.sth dd{margin:0;font-size:19px;font-weight:600}"
                  ".sth li{margin:6px 0}.sth .wide{overflow-x:auto}"
                  "</style>\n");
}

static void section(sthi_text *t, const char *title) { sthi_text_put(t, "<section><h2>%s</h2>\n", title); }
static void section_end(sthi_text *t) { sthi_text_put(t, "</section>\n"); }

static void fact(sthi_text *t, const char *name, const char *format, double value, const char *more) {
    sthi_text_put(t, "<div><dt>%s</dt><dd>", name);
    if (format[0] == 'm') sthi_text_put(t, "%.1f ms", value);
    else if (format[0] == '%') sthi_text_put(t, "%.1f %%", value);
    else if (format[0] == 'g') sthi_text_put(t, "%.1f GB/s", value);
    else sthi_text_put(t, "%s", sthi_size((uint64_t)value).text);
    sthi_text_put(t, "</dd>");
    if (more[0]) sthi_text_put(t, "<dt>%s</dt>", more);
    sthi_text_put(t, "</div>");
}

static void facts(sthi_text *t, const sth_report_input *in, const sthi_report_means *m) {
    sthi_text_put(t, "<dl>");
    if (m->steps) {
        char text[64];
        snprintf(text, sizeof text, "%.1f ms predicted", m->predicted_ms);
        fact(t, "a step", "ms", m->step_ms, text);
        fact(t, "waits for copies", "ms", m->stall_ms, "a step");
        fact(t, "over the link", "bytes", m->h2d_bytes, "a step");
        if (m->link_gb_s > 0) fact(t, "the link carried", "gb", m->link_gb_s, "while it copied");
        if (m->hits + m->misses > 0) fact(t, "in time", "%", 100 * m->hits / (m->hits + m->misses), "of the uses");
    }
    if (in->budget) fact(t, "budget", "bytes", (double)in->budget, "on the device");
    sthi_text_put(t, "</dl>\n");
}

static void map(sthi_text *t, const sth_report_input *in) {
    uint64_t all = 0, stays = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        all += in->units[i].bytes;
        stays += in->units[i].resident ? in->units[i].bytes : 0;
        count += in->units[i].resident;
    }
    sthi_text_put(t, "<p><span class=\"key stays\"></span>%u of %u units stay on the device, %s; "
                  "<span class=\"key streams\"></span>%u stream, %s.</p>\n",
                  count, in->unit_count, sthi_size(stays).text, in->unit_count - count, sthi_size(all - stays).text);
    sthi_picture_map(t, in);
}

static void unit_row(sthi_text *t, const sth_report_input *in, const sth_unit_stats *u) {
    sthi_text_put(t, "<tr><td>");
    sthi_text_escaped(t, u->name);
    sthi_text_put(t, "</td><td>%s</td><td>%s</td>", sthi_size(u->bytes).text, u->resident ? "stays" : "streams");
    if (u->copies) sthi_text_put(t, "<td>%" PRIu64 "</td><td>%.3f</td>", u->copies, u->h2d_ms);
    else sthi_text_put(t, "<td>-</td><td>-</td>");
    double planned = in->link_bytes_per_s > 0 ? (double)u->transfer_bytes / in->link_bytes_per_s * 1e3 : 0;
    if (planned > 0) sthi_text_put(t, "<td>%.3f</td>", planned);
    else sthi_text_put(t, "<td>-</td>");
    sthi_text_put(t, "<td>%.3f</td><td>%.3f</td></tr>\n", u->compute_ms, u->stall_ms);
}

static void unit_table(sthi_text *t, const sth_report_input *in) {
    uint32_t shown = in->unit_count < ROWS_MOST ? in->unit_count : ROWS_MOST;
    sthi_text_put(t, "<div class=\"wide\"><table><thead><tr><th>unit</th><th>bytes</th><th>plan</th><th>copies</th><th>"
                  "copy, ms</th><th>planned, ms</th><th>work, ms</th><th>waits, ms</th></tr></thead><tbody>\n");
    for (uint32_t i = 0; i < shown; i++) unit_row(t, in, &in->units[i]);
    sthi_text_put(t, "</tbody></table></div>\n");
    if (shown < in->unit_count) sthi_text_put(t, "<p class=\"dim-text\">%u more units.</p>\n", in->unit_count - shown);
}

static void units(sthi_text *t, const sth_report_input *in) {
    section(t, "What stays and what streams");
    map(t, in);
    section_end(t);
    section(t, "A mean step, unit by unit");
    sthi_text_put(t,
                  "<p><span class=\"key compute\"></span>works <span class=\"key wait\"></span>waits for its copy. "
                  "What came when is in a trace (stagehand.trace).</p>\n");
    sthi_picture_step(t, in);
    section_end(t);
}

static void steps(sthi_text *t, const sth_report_input *in, const sthi_report_means *m) {
    section(t, "What bounds a step");
    sthi_picture_bounds(t, m);
    section_end(t);
    section(t, "Steps, against what was predicted");
    sthi_picture_times(t, in);
    section_end(t);
    section(t, "Memory");
    sthi_picture_memory(t, in);
    section_end(t);
}

static void missing(sthi_text *t, const sth_report_input *in) {
    const char *parts[3];
    uint32_t count = 0;
    if (!in->step_count) parts[count++] = "steps, for none has ended yet";
    if (!in->unit_count) parts[count++] = "the model's units";
    if (!in->curve_count) parts[count++] = "other budgets";
    if (!count) return;
    sthi_text_put(t, "<p class=\"dim-text\">Not known here: ");
    for (uint32_t i = 0; i < count; i++) sthi_text_put(t, "%s%s", i ? "; " : "", parts[i]);
    sthi_text_put(t, ". In Python, runtime.report_html() has what its run knows.</p>\n");
}

static void page(sthi_text *t, const sth_report_input *in) {
    sthi_report_means m = sthi_report_means_of(in);
    sthi_text_put(t, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
                  "content=\"width=device-width\"><meta name=\"color-scheme\" content=\"light dark\"><title>");
    sthi_text_escaped(t, in->title);
    sthi_text_put(t, " - stagehand</title>\n");
    style(t);
    sthi_text_put(t, "</head><body class=\"sth\"><main>\n<h1>");
    sthi_text_escaped(t, in->title);
    sthi_text_put(t, "</h1>\n<p class=\"dim-text\">Stagehand, means of %u steps", m.steps);
    if (in->prediction) sthi_text_put(t, "; the plan is bound by %s", sthi_bound_name(in->prediction->bound_by));
    sthi_text_put(t, "</p>\n");
    facts(t, in, &m);
    section(t, "Advice");
    sthi_text_put(t, "<ul>\n");
    sthi_report_advice(t, in, &m);
    sthi_text_put(t, "</ul>\n");
    section_end(t);
    if (in->unit_count) units(t, in);
    if (in->step_count) steps(t, in, &m);
    if (in->curve_count) {
        section(t, "Other budgets");
        sthi_curve_put(t, in->curve, in->curve_count, in->budget, STH_CURVE_SVG);
        section_end(t);
    }
    if (in->unit_count) {
        sthi_text_put(t, "<section style=\"break-inside:auto\"><h2>Plan against measured, unit by unit</h2>\n");
        unit_table(t, in);
        section_end(t);
    }
    missing(t, in);
    sthi_text_put(t, "</main></body></html>\n");
}

static void summary(sthi_text *t, const sth_report_input *in) {
    sthi_report_means m = sthi_report_means_of(in);
    sthi_text_put(t, "<div class=\"sth\" style=\"max-width:720px\">");
    style(t);
    sthi_text_put(t, "<b>");
    sthi_text_escaped(t, in->title);
    sthi_text_put(t, "</b>\n");
    facts(t, in, &m);
    if (in->unit_count) map(t, in);
    sthi_text_put(t, "</div>\n");
}

sth_status sthi_report_write(const sth_report_input *in, sth_report_form form, char **out_text) {
    sthi_text t = {0};
    if (form != STH_REPORT_PAGE && form != STH_REPORT_SUMMARY)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "form", "a report is a page or a summary");
    if (form == STH_REPORT_PAGE) page(&t, in);
    else summary(&t, in);
    *out_text = sthi_text_take(&t);
    return *out_text ? STH_OK : sthi_no_memory("report", "the text of a report");
}
