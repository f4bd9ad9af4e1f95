/* Figures: events round layers, read when the device has passed them. Two runs may be outstanding; a run that comes
 * when neither tape is free goes untimed, so that nothing waits for a figure. Lock: the runner's. */
#include <string.h>

#include "base/invariant.h"
#include "base/memory.h"
#include "runner/runner.h"
#include "runtime/report.h"
#include "runtime/timing.h"

#define DEV(r, op, ...) ((r)->device->ops->op((r)->device->self, __VA_ARGS__))

sth_status sthi_tapes_open(sth_runner *r) {
    for (int i = 0; i < STHI_RUNNER_TAPES; i++) {
        sthi_tape *t = &r->tapes[i];
        t->arrive = sthi_zalloc(r->unit_count, sizeof *t->arrive);
        t->start = sthi_zalloc(r->unit_count, sizeof *t->start);
        t->end = sthi_zalloc(r->layer_count, sizeof *t->end);
        if (!t->arrive || !t->start || !t->end) return sthi_no_memory(NULL, "the times of layers");
    }
    return STH_OK;
}

static void destroy(sth_runner *r, sth_event **events, uint32_t count) {
    for (uint32_t i = 0; events && i < count; i++)
        if (events[i]) DEV(r, event_destroy, events[i]);
    sthi_free(events);
}

void sthi_tapes_close(sth_runner *r) {
    for (int i = 0; i < STHI_RUNNER_TAPES; i++) {
        destroy(r, r->tapes[i].arrive, r->unit_count);
        destroy(r, r->tapes[i].start, r->unit_count);
        destroy(r, r->tapes[i].end, r->layer_count);
        r->tapes[i] = (sthi_tape){0};
    }
}

bool sthi_tape_record(sth_runner *r, sth_event **event, sth_stream stream) {
    if (!*event && DEV(r, event_create, true, event) != STH_OK) {
        *event = NULL;
        return false;
    }
    return DEV(r, event_record, *event, stream) == STH_OK;
}

static double ns_between(sth_runner *r, sth_event *a, sth_event *b) {
    int64_t ns = 0;
    return DEV(r, event_elapsed_ns, a, b, &ns) == STH_OK && ns > 0 ? (double)ns : 0;
}

static void read_tape(sth_runner *r, sthi_tape *t) {
    STHI_INVARIANT(t->whole && t->run < r->runs);
    sth_run_metrics m = {.run = t->run};
    for (uint32_t u = 0; u < r->unit_count; u++) {
        sth_event *from = t->start[u];
        for (uint32_t i = r->units[u].first; i < r->units[u].first + r->units[u].count; i++) {
            sthi_runner_layer *l = &r->layers[i];
            double stall = i == r->units[u].first ? ns_between(r, t->arrive[u], t->start[u]) : 0;
            double compute = ns_between(r, from, t->end[i]);
            l->stall_ns += stall;
            l->compute_ns += compute;
            l->runs++;
            m.stall_ms += stall / 1e6;
            m.compute_ms += compute / 1e6;
            from = t->end[i];
        }
    }
    m.latency_ms = ns_between(r, t->arrive[0], t->end[r->layer_count - 1]) / 1e6;
    if (!r->known || m.run >= r->newest.run) {
        r->newest = m;
        r->newest_step = t->step;
    }
    r->known = true;
    t->whole = false;
}

/* Reads what is done; the oldest first, as the tapes are taken in turn. */
static void harvest(sth_runner *r) {
    for (uint64_t k = 0; k < STHI_RUNNER_TAPES; k++) {
        sthi_tape *t = &r->tapes[(r->runs + k) % STHI_RUNNER_TAPES];
        bool done = false;
        if (!t->whole) continue;
        if (DEV(r, event_query, t->end[r->layer_count - 1], &done) == STH_OK && done) read_tape(r, t);
    }
}

sthi_tape *sthi_tape_begin(sth_runner *r) {
    harvest(r);
    sthi_tape *t = &r->tapes[r->runs % STHI_RUNNER_TAPES];
    if (t->whole) return NULL;
    t->step = r->runtime->step.number; /* open, and nobody else's */
    return t;
}

void sthi_tape_end(sth_runner *r, sthi_tape *t, bool whole) {
    STHI_INVARIANT(!t->whole);
    t->run = r->runs;
    t->whole = whole;
}

sth_status sthi_runner_settle(sth_runner *r) {
    for (uint64_t k = 0; k < STHI_RUNNER_TAPES; k++) {
        sthi_tape *t = &r->tapes[(r->runs + k) % STHI_RUNNER_TAPES];
        if (!t->whole) continue;
        STHI_TRY(DEV(r, event_synchronize, t->end[r->layer_count - 1]));
        read_tape(r, t);
    }
    sthi_runtime_settle_times(r->runtime);
    return STH_OK;
}

static double mean_ms(double ns, uint64_t count) { return count ? ns / (double)count / 1e6 : 0; }

void sthi_runner_layer_figures(sth_runner *r, uint32_t layer, sth_layer_metrics *out) {
    const sthi_runner_layer *l = &r->layers[layer];
    uint32_t unit = 0;
    while (layer >= r->units[unit].first + r->units[unit].count) unit++;
    uint64_t group = 0;
    for (uint32_t i = 0; i < r->units[unit].count; i++) group += r->layers[r->units[unit].first + i].bytes;
    sth_unit_stats stats;
    sthi_unit_stats(r->runtime, unit, &stats);
    *out = (sth_layer_metrics){.name = l->said->name, .bytes = l->bytes, .runs = l->runs,
                               .h2d_ms = group ? stats.h2d_ms * (double)l->bytes / (double)group : 0,
                               .compute_ms = mean_ms(l->compute_ns, l->runs),
                               .stall_ms = mean_ms(l->stall_ns, l->runs)};
}

sth_status sthi_runner_figures(sth_runner *r, sth_run_metrics *out) {
    if (!r->known) return sthi_fail(STH_NOT_FOUND, NULL, 0, NULL, "no run has ended yet, or none could be timed");
    *out = r->newest;
    sth_step_metrics m;
    for (uint32_t i = 0; sthi_runtime_step_metrics(r->runtime, i, &m) == STH_OK; i++) {
        if ((uint64_t)m.step != r->newest_step) continue;
        out->h2d_bytes = (uint64_t)m.h2d_bytes;
        out->copy_ms = m.copy_time_ms;
        out->bandwidth_gb_s = m.link_gb_s;
        out->overlap_ratio = m.copy_time_ms > 0 ? m.overlap_ratio : 1;
        out->file_bytes = (uint64_t)m.file_bytes;
        return STH_OK;
    }
    return STH_OK; /* its record has left the window: what events say is all there is */
}
