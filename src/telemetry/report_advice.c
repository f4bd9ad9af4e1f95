/* What to do, in sentences with numbers. Each says what was seen, and what would change it. Pure. */
#include <inttypes.h>
#include <math.h>

#include "base/arith.h"
#include "telemetry/report.h"

static const double WORTH = 0.03;   /* a share of the step that is worth a sentence */
static const double OFF = 0.10;     /* by so much a prediction is off */

static const sth_curve_point *present(const sth_report_input *in) {
    for (uint32_t i = 0; i < in->curve_count; i++)
        if (in->curve[i].budget == in->budget) return &in->curve[i];
    return NULL;
}

/* The first larger budget that saves enough, and the first with which nothing waits. */
static void more_memory(sthi_text *t, const sth_report_input *in) {
    const sth_curve_point *now = present(in);
    if (!now) return;
    double step = sthi_ms(now->prediction.step_ns), compute = sthi_ms(now->prediction.compute_ns);
    for (const sth_curve_point *p = now + 1; p < in->curve + in->curve_count; p++) {
        double saves = step - sthi_ms(p->prediction.step_ns);
        if (saves < WORTH * step) continue;
        sthi_text_put(t,
                      "<li><b>%s more save %.1f ms a step</b> (%.0f %%): a budget of %s is predicted to take %.1f ms.",
                      sthi_size(p->budget - now->budget).text, saves, 100 * saves / step, sthi_size(p->budget).text,
                      sthi_ms(p->prediction.step_ns));
        sthi_text_put(t, "</li>");
        break;
    }
    for (const sth_curve_point *p = now; p < in->curve + in->curve_count; p++) {
        if (sthi_ms(p->prediction.step_ns) > compute * (1 + WORTH) || compute <= 0) continue;
        if (p == now) sthi_text_put(t, "<li>More memory changes little: compute bounds the step already.</li>");
        else sthi_text_put(t, "<li>With %s compute alone bounds the step, at %.1f ms.</li>", sthi_size(p->budget).text,
                           sthi_ms(p->prediction.step_ns));
        return;
    }
}

/* Memory that could be given away. */
static void less_memory(sthi_text *t, const sth_report_input *in) {
    const sth_curve_point *now = present(in), *least = now;
    if (!now) return;
    double step = sthi_ms(now->prediction.step_ns);
    while (least > in->curve && sthi_ms(least[-1].prediction.step_ns) <= step * 1.01) least--;
    if (least == now) return;
    sthi_text_put(t, "<li>%s could be given away: a budget of %s is predicted to take as long.</li>",
                  sthi_size(now->budget - least->budget).text, sthi_size(least->budget).text);
}

static void off_prediction(sthi_text *t, const sthi_report_means *m) {
    if (m->predicted_ms <= 0) return;
    double off = m->step_ms / m->predicted_ms - 1;
    if (off > OFF)
        sthi_text_put(t, "<li>Steps take %.0f %% longer than predicted (%.1f ms, not %.1f). Does another process use "
                      "the link or the card, or does compute differ from step to step?</li>",
                      100 * off, m->step_ms, m->predicted_ms);
    else if (off < -OFF)
        sthi_text_put(t, "<li>Steps take %.0f %% less than predicted: the plan counted with a slower link, or with "
                      "copies that were not needed.</li>", -100 * off);
}

void sthi_report_advice(sthi_text *t, const sth_report_input *in, const sthi_report_means *m) {
    size_t before = t->count;
    more_memory(t, in);
    less_memory(t, in);
    if (m->steps && m->host_waits >= 1)
        sthi_text_put(t,
                      "<li>The host waits %.0f times a step for bytes from files or pageable memory (%s read). Weights "
                      "that stay in RAM (ram_budget) do not wait.</li>",
                      m->host_waits, sthi_size((uint64_t)m->file_bytes).text);
    if (m->steps && m->stall_ms > WORTH * m->step_ms)
        sthi_text_put(t, "<li>Compute waits %.1f ms of %.1f ms a step for copies. A larger batch gives the copies more "
                      "time, weights that cross the link in 8 or 4 bits (transfer=) need less.</li>",
                      m->stall_ms, m->step_ms);
    off_prediction(t, m);
    if (t->count == before && !t->failed) sthi_text_put(t, "<li>Nothing stands out.</li>");
}
