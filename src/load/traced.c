/* A step that was timed (timing.c) becomes slices of the recording: uses on one track, with what they waited for and
 * what came between them; runs of copies, each unit with its share of the bytes; and an arrow from a unit's copy to
 * its first use behind it, which may be a later step's. Sums of the slices are the step's metrics. Lock held. */
#include "load/traced.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "telemetry/devtime.h"

static const double MB = 1e6;
static const double MIB = 1048576;
static const char AHEAD[] = "prefetched, MB", RING[] = "in the ring, MiB";

/* A unit's bytes have come. */
typedef struct arrival {
    int64_t at_ns;
    uint64_t arrow;
    uint32_t unit;
} arrival;

/* A unit's bytes have come into the ring, or its last use of a load has ended. */
typedef struct ring_event {
    int64_t at_ns;
    uint32_t unit;
    bool comes;
} ring_event;

typedef struct tracer {
    sth_runtime *rt;
    const sthi_timed_step *t;
    int64_t base_ns;
    arrival *arrivals; /* [count], by time */
    uint32_t count;
    uint64_t *arrows;  /* [units] */
    uint64_t ahead;    /* bytes that have come and are not used yet */
    ring_event *ring;  /* [ring_count] */
    uint32_t ring_count;
} tracer;

void sthi_trace_prepare(sth_runtime *rt, sthi_timed_step *t) {
    if (!rt->timing.arrows) rt->timing.arrows = sthi_zalloc(rt->unit_count, sizeof *rt->timing.arrows);
    if (t->copy_bytes_cap >= t->copy_cap) return;
    uint64_t *bytes = sthi_realloc(t->copy_bytes, t->copy_cap, sizeof *bytes);
    if (!bytes) return;
    memset(bytes + t->copy_bytes_cap, 0, (t->copy_cap - t->copy_bytes_cap) * sizeof *bytes);
    t->copy_bytes = bytes;
    t->copy_bytes_cap = t->copy_cap;
}

static int by_time(const void *a, const void *b) {
    int64_t x = ((const arrival *)a)->at_ns, y = ((const arrival *)b)->at_ns;
    return (x > y) - (x < y);
}

static int64_t at(const tracer *w, sth_event *event) {
    int64_t ns = 0;
    return STHI_DEV(w->rt, event_elapsed_ns, w->t->use[0].arrive, event, &ns) == STH_OK ? w->base_ns + ns : w->base_ns;
}

static sthi_slice slice_of(const tracer *w, sthi_track track, const char *name, int64_t begin, int64_t end) {
    return (sthi_slice){.track = track, .source = w->rt->name, .name = name, .begin_ns = begin, .end_ns = end,
                        .step = (int64_t)w->t->metrics.step};
}

static void count(const tracer *w, const char *name, int64_t at_ns, double value) {
    sthi_timeline_counter(w->rt->name, name, at_ns, value);
}

/* ---- the ring */

/* The plan by which the step's uses were served; NULL: it was not followed from end to end, or is gone. */
static const sth_plan *plan_of(const tracer *w) {
    const sth_runtime *rt = w->rt;
    const sthi_timed_step *t = w->t;
    bool same = t->whole && t->plan == rt->planned.count && t->epoch == rt->order.epoch && t->uses == rt->order.count;
    return same ? rt->planned.plan : NULL;
}

static void note_ring(tracer *w, int64_t at_ns, uint32_t unit, bool comes) {
    if (w->ring) w->ring[w->ring_count++] = (ring_event){at_ns, unit, comes};
}

/* What leaves makes room for what comes. */
static int by_ring_time(const void *a, const void *b) {
    const ring_event *x = a, *y = b;
    if (x->at_ns != y->at_ns) return x->at_ns > y->at_ns ? 1 : -1;
    return (int)x->comes - (int)y->comes;
}

/* Units that leave before they come in this step were in the ring at its begin. */
static uint64_t ring_at_first(const tracer *w, uint8_t *inside) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < w->ring_count; i++) {
        const ring_event *e = &w->ring[i];
        if (!e->comes && !inside[e->unit]) bytes += w->rt->units[e->unit].bytes;
        inside[e->unit] = e->comes;
    }
    return bytes;
}

static void count_ring(const tracer *w) {
    uint8_t *inside = w->ring && w->ring_count ? sthi_zalloc(w->rt->unit_count, 1) : NULL;
    if (!inside) return;
    qsort(w->ring, w->ring_count, sizeof *w->ring, by_ring_time);
    uint64_t bytes = ring_at_first(w, inside);
    count(w, RING, w->base_ns, (double)bytes / MIB);
    memset(inside, 0, w->rt->unit_count);
    for (uint32_t i = 0; i < w->ring_count; i++) {
        const ring_event *e = &w->ring[i];
        uint64_t own = w->rt->units[e->unit].bytes;
        if (e->comes && inside[e->unit]) continue;
        bytes = e->comes ? bytes + own : bytes - own;
        inside[e->unit] = e->comes;
        count(w, RING, e->at_ns, (double)bytes / MIB);
    }
    sthi_free(inside);
}

/* ---- copies */

static void copy_part(tracer *w, const sthi_timed_copy *c, int64_t begin, int64_t end, uint64_t bytes) {
    const sthi_unit *u = &w->rt->units[c->unit];
    sthi_slice s = slice_of(w, c->demand ? STHI_TRACK_COPY_DEMAND : STHI_TRACK_COPY_UP, u->name, begin, end);
    s.bytes = bytes;
    if (c->last) {
        s.arrow_from = sthi_timeline_arrow();
        w->arrivals[w->count++] = (arrival){.at_ns = end, .arrow = s.arrow_from, .unit = c->unit};
        if (!c->demand && !u->resident) note_ring(w, end, c->unit, true);
    }
    sthi_timeline_slice(&s);
}

/* A run of copies: units that came along have shares of it by their bytes, one behind the other. Returns the next. */
static uint32_t copy_run(tracer *w, uint32_t i) {
    const sthi_timed_copy *c = &w->t->copy[i];
    uint64_t bytes = i < w->t->copy_bytes_cap ? w->t->copy_bytes[i] : 0;
    int64_t begin = at(w, c->begin), end = at(w, c->end);
    uint32_t stop = i + 1;
    uint64_t along = 0;
    for (; stop < w->t->copies && w->t->copy[stop].joined; stop++) along += w->rt->units[w->t->copy[stop].unit].bytes;
    if (end > begin) {
        count(w, "link, GB/s", begin, (double)bytes / (double)(end - begin));
        count(w, "link, GB/s", end, 0);
    }
    double all = bytes ? (double)bytes : 1;
    uint64_t done = 0;
    for (; i < stop; i++) {
        uint64_t own = bytes - (along < bytes ? along : bytes);
        if (w->t->copy[i].joined) own = w->rt->units[w->t->copy[i].unit].bytes;
        int64_t from = begin + (int64_t)((double)done / all * (double)(end - begin));
        done += own;
        int64_t to = i + 1 == stop ? end : begin + (int64_t)((double)done / all * (double)(end - begin));
        copy_part(w, &w->t->copy[i], from, to, own);
    }
    return stop;
}

/* ---- uses */

static void arrive(tracer *w, uint32_t *next, int64_t until) {
    for (; *next < w->count && w->arrivals[*next].at_ns <= until; ++*next) {
        const arrival *a = &w->arrivals[*next];
        if (!w->arrows[a->unit]) w->ahead += w->rt->units[a->unit].bytes; /* else it comes again, unused */
        w->arrows[a->unit] = a->arrow;
        count(w, AHEAD, a->at_ns, (double)w->ahead / MB);
    }
}

static bool is_backward(const sthi_timed_step *t, uint32_t use) {
    uint32_t n = 0;
    while (n < t->turns && t->turn[n] <= use) n++;
    return n % 2;
}

static void use(tracer *w, uint32_t i, const sthi_use_time *took, uint32_t *next) {
    const sthi_timed_use *use = &w->t->use[i];
    const sthi_unit *u = &w->rt->units[use->unit];
    int64_t arrived = at(w, use->arrive), begin = arrived + (int64_t)took->stall, end = begin + (int64_t)took->compute;
    char text[160];
    if (took->stall > 0) {
        snprintf(text, sizeof text, "waits for %.100s", u->name);
        sthi_slice wait = slice_of(w, STHI_TRACK_COMPUTE, text, arrived, begin);
        sthi_timeline_slice(&wait);
    }
    arrive(w, next, begin);
    bool backward = is_backward(w->t, i);
    if (backward) snprintf(text, sizeof text, "%.140s, backward", u->name);
    sthi_slice s = slice_of(w, STHI_TRACK_COMPUTE, backward ? text : u->name, begin, end);
    s.bytes = u->bytes;
    s.arrow_to = w->arrows[use->unit];
    sthi_timeline_slice(&s);
    if (s.arrow_to) {
        w->arrows[use->unit] = 0;
        w->ahead -= u->bytes < w->ahead ? u->bytes : w->ahead;
        count(w, AHEAD, begin, (double)w->ahead / MB);
    }
    const sth_plan *plan = plan_of(w);
    uint32_t load = plan ? plan->use_load[i] : STH_NONE;
    if (load != STH_NONE && plan->loads[load].last_use == i) note_ring(w, end, use->unit, false);
    if (took->gap < 1) return;
    sthi_slice gap = slice_of(w, STHI_TRACK_COMPUTE, "other work", end, end + (int64_t)took->gap);
    sthi_timeline_slice(&gap);
}

/* ---- the step */

/* Resident set of the process in bytes; 0: not known. */
static double process_bytes(void) {
    unsigned long long all, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file) return 0;
    if (fscanf(file, "%llu %llu", &all, &resident) != 2) resident = 0;
    (void)fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

static void whole(const tracer *w) {
    char text[128];
    const sth_step_metrics *m = &w->t->metrics;
    int64_t end = at(w, w->t->end);
    snprintf(text, sizeof text, "step %.0f: %.2f ms, %.2f predicted", m->step, m->step_time_ms, m->predicted_ms);
    sthi_slice s = slice_of(w, STHI_TRACK_STEPS, text, w->base_ns, end);
    s.bytes = (uint64_t)m->h2d_bytes;
    sthi_timeline_slice(&s);
    count(w, "device memory, MiB", end, m->vram_used_mb);
    sthi_timeline_counter("host", "memory of the process, MB", sthi_timeline_now(), process_bytes() / MB);
}

void sthi_trace_step(sth_runtime *rt, const sthi_timed_step *t, const sthi_use_time *times) {
    tracer w = {.rt = rt, .t = t, .arrows = rt->timing.arrows,
                .arrivals = sthi_alloc((t->copies + 1) * sizeof *w.arrivals)};
    if (!w.arrivals || !w.arrows || !sthi_devtime_of(rt->device, t->use[0].arrive, &w.base_ns)) {
        sthi_free(w.arrivals);
        return;
    }
    if (plan_of(&w)) w.ring = sthi_alloc((t->copies + t->uses) * sizeof *w.ring);
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (w.arrows[i]) w.ahead += rt->units[i].bytes;
    uint32_t next = 0;
    for (uint32_t i = 0; i < t->copies;) i = copy_run(&w, i);
    qsort(w.arrivals, w.count, sizeof *w.arrivals, by_time);
    for (uint32_t i = 0; i < t->uses; i++) use(&w, i, &times[i], &next);
    arrive(&w, &next, INT64_MAX);
    count_ring(&w);
    whole(&w);
    sthi_free(w.ring);
    sthi_free(w.arrivals);
}
