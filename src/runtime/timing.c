/* Timing: events round uses and copies, read when the device has passed them and never waited for. From
 * them come the step's metrics and the compute times that the next plan uses. A step for which no record
 * is free (the host is several steps ahead) goes untimed. Lock held throughout. */
#include "runtime/timing.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "load/interval.h"
#include "load/room.h"
#include "load/traced.h"
#include "runtime/link.h"
#include "state/state.h"
#include "telemetry/timeline.h"

enum {
    MOST_RECORDS = 32768,
    GROWTH = 4,
    ODD_STEPS = 3,
    LEAST_SEEN = 3,  /* steps that teach the order before the first light one */
    ONE_IN = 8,      /* steps of which one is timed in full then */
    WATCHED = 4      /* steps that are timed in full after a light one that took another time */
};
static const double STALL_NS = 50000; /* shorter waits count as hits */
static const double UNLIKE = 0.25;
static const double OTHER_TIME = 0.05; /* of a step that was timed in full */

/* Records for so many uses and copies; those that there are keep what they hold. */
static bool make_room(sthi_timed_step *t, uint32_t count) {
    sthi_timed_use *use = sthi_realloc(t->use, count, sizeof *use);
    if (!use) return false;
    memset(use + t->use_cap, 0, (count - t->use_cap) * sizeof *use);
    t->use = use;
    t->use_cap = count;
    sthi_timed_copy *copy = sthi_realloc(t->copy, count, sizeof *copy);
    if (!copy) return false;
    memset(copy + t->copy_cap, 0, (count - t->copy_cap) * sizeof *copy);
    t->copy = copy;
    t->copy_cap = count;
    return true;
}

sth_status sthi_timing_open(sth_runtime *rt) {
    rt->timing.thrifty = !(rt->device->capabilities & (STH_CAP_HOST_IS_DEVICE | STH_CAP_VIRTUAL_TIME));
    uint32_t count = rt->step.trace_cap < MOST_RECORDS ? rt->step.trace_cap : MOST_RECORDS;
    for (int i = 0; i < STHI_TIMED_STEPS; i++)
        if (!make_room(&rt->timing.steps[i], count)) return sthi_no_memory(NULL, "timing records");
    return STH_OK;
}

/* A step was longer than its records: the next ones are not. Without memory the first part of a step is timed. */
static void grow(sth_runtime *rt) {
    rt->timing.too_short = false;
    for (int i = 0; i < STHI_TIMED_STEPS; i++) {
        sthi_timed_step *t = &rt->timing.steps[i];
        uint32_t cap = t->use_cap < t->copy_cap ? t->use_cap : t->copy_cap;
        if (cap >= MOST_RECORDS) continue;
        uint32_t count = GROWTH * cap < MOST_RECORDS ? GROWTH * cap : MOST_RECORDS;
        if (count < t->use_cap) count = t->use_cap; /* half of it grew before */
        if (!make_room(t, count)) return;
    }
}

static void destroy(sth_runtime *rt, sth_event *event) {
    if (event) STHI_DEV(rt, event_destroy, event);
}

void sthi_timing_close(sth_runtime *rt) {
    for (int i = 0; i < STHI_TIMED_STEPS; i++) {
        sthi_timed_step *t = &rt->timing.steps[i];
        for (uint32_t k = 0; t->use && k < t->use_cap; k++) {
            destroy(rt, t->use[k].arrive);
            destroy(rt, t->use[k].start);
            destroy(rt, t->use[k].done);
        }
        for (uint32_t k = 0; t->copy && k < t->copy_cap; k++) {
            destroy(rt, t->copy[k].begin);
            destroy(rt, t->copy[k].end);
        }
        destroy(rt, t->end);
        sthi_free(t->use);
        sthi_free(t->copy);
        sthi_free(t->copy_bytes);
        *t = (sthi_timed_step){0};
    }
    sthi_free(rt->timing.arrows);
    rt->timing.arrows = NULL;
}

/* Events cost time on this device, and all that a plan is made for is known: nothing waits for the times of a step. */
static bool is_steady(const sth_runtime *rt) {
    const sthi_timing *t = &rt->timing;
    bool known = rt->order.recorded && t->seen >= LEAST_SEEN && t->like_plan && t->like_plan == rt->planned.count;
    return t->thrifty && known && !t->watch && !t->odd_steps && !rt->planned.again;
}

/* Two events around each use take up to 8 % of a step while the link is busy (docs/telemetry.md). Steps that are
 * written down are timed in full. */
static bool may_be_light(const sth_runtime *rt) {
    return is_steady(rt) && rt->step.number % ONE_IN && !rt->options.telemetry_path && !sthi_timeline_on();
}

void sthi_timing_begin(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing.now;
    if (t) { /* copies that were issued since the last step ended are in it */
        t->epoch = rt->order.epoch;
        t->light = t->light && !sthi_timeline_on(); /* a recording may have begun since */
        if (sthi_timeline_on()) sthi_trace_prepare(rt, t);
        return;
    }
    if (rt->timing.tail - rt->timing.head == STHI_TIMED_STEPS) return;
    t = &rt->timing.steps[rt->timing.tail % STHI_TIMED_STEPS];
    t->uses = t->copies = t->turns = 0;
    t->copied_bytes = 0;
    t->copy_open = t->waiting = t->ended = false;
    t->epoch = rt->order.epoch;
    t->light = may_be_light(rt);
    rt->timing.now = t;
    if (sthi_timeline_on()) sthi_trace_prepare(rt, t);
}

void sthi_timing_turn(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing.now;
    if (t && t->turns < STHI_TURNS) t->turn[t->turns++] = t->uses;
}

sthi_use_ticket sthi_timing_arrive(sth_runtime *rt, uint32_t unit, sth_stream stream) {
    sthi_use_ticket ticket = {STH_NONE, rt->step.number};
    sthi_timed_step *t = rt->timing.now;
    if (!t) return ticket;
    if (t->light && t->uses) {
        t->ended = false;
        return ticket;
    }
    if (t->uses == t->use_cap) {
        rt->timing.too_short = true;
        return ticket;
    }
    sthi_timed_use *u = &t->use[t->uses];
    if (!sthi_timing_record(rt, &u->arrive, stream)) return ticket;
    ticket.index = t->uses++;
    t->ended = false;
    u->unit = unit;
    u->started = u->finished = false;
    return ticket;
}

void sthi_timing_start(sth_runtime *rt, sthi_use_ticket ticket, int32_t slot, sth_stream stream, bool waited) {
    sthi_timed_step *t = rt->timing.now;
    if (!t || ticket.index == STH_NONE || ticket.step != rt->step.number) return; /* its step has ended */
    sthi_timed_use *u = &t->use[ticket.index];
    u->waited = waited;
    u->started = !waited || sthi_timing_record(rt, &u->start, stream);
    if (!u->started) return;
    rt->sync[slot].timed_use = ticket.index;
    rt->sync[slot].timed_step = ticket.step;
}

/* Uses that failed, or that are still waiting in another thread, have no figures. */
static void drop_unstarted(sthi_timed_step *t) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < t->uses; i++) {
        if (!t->use[i].started) continue;
        sthi_timed_use whole = t->use[i]; /* a swap: every record keeps its events */
        t->use[i] = t->use[kept];
        t->use[kept++] = whole;
    }
    t->uses = kept;
}

static void snapshot(sth_runtime *rt) {
    sth_step_metrics *m = &rt->current;
    m->vram_used_mb = (double)(sthi_held_bytes(rt) + rt->options.reserved) / (1 << 20);
    m->vram_reserved_mb = (double)rt->options.budget / (1 << 20);
    if (rt->planned.plan) m->predicted_ms = (double)rt->planned.plan->prediction.step_ns / 1e6;
    if (rt->slabs.pool) {
        sth_pool_stats pool;
        sthi_pool_stats_get(rt->slabs.pool, &pool);
        m->host_pool_free = pool.free;
        m->host_pool_in_use = pool.in_use;
    }
}

static bool record_end(sth_runtime *rt, sthi_timed_step *t) {
    t->end_on = rt->step.last_stream;
    return sthi_timing_record(rt, &t->end, t->end_on);
}

void sthi_timing_pause(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing.now;
    sthi_interval_end(rt);
    if (t && t->uses) t->ended = record_end(rt, t);
}

void sthi_timing_end_late(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing.now;
    if (t && !t->ended) {
        uint32_t i = t->uses;
        while (i > 0 && !t->use[i - 1].finished) i--;
        bool ordered = i > 0 && STHI_DEV(rt, stream_wait, rt->copies.demand_stream, t->use[i - 1].done) == STH_OK;
        if (ordered) rt->step.last_stream = rt->copies.demand_stream;
        else rt->timing.now = NULL; /* untimed */
    }
    sthi_timing_end(rt);
}

static void push(sth_runtime *rt, const sth_step_metrics *metrics) {
    if (sthi_telemetry_push(rt->telemetry.file, metrics) != STH_OK) sthi_error_save(&rt->telemetry.error);
}

void sthi_timing_end(sth_runtime *rt) {
    sthi_interval_end(rt);
    snapshot(rt);
    rt->stats.host_waits += (uint64_t)rt->current.host_waits;
    sthi_timed_step *t = rt->timing.now;
    rt->timing.now = NULL;
    if (t) drop_unstarted(t);
    if (t && t->uses && (t->ended || record_end(rt, t))) {
        t->metrics = rt->current;
        t->whole = !rt->step.deviated && rt->program.cursor == rt->order.count;
        t->writes_expected = rt->writes.expected;
        t->plan = rt->planned.count;
        t->waiting = true;
        rt->timing.tail++;
    } else if (rt->step.trace_count) {
        push(rt, &rt->current);
    }
    if (rt->timing.too_short) grow(rt);
}

static double since(sth_runtime *rt, sth_event *base, sth_event *event) {
    int64_t ns = 0;
    return STHI_DEV(rt, event_elapsed_ns, base, event, &ns) == STH_OK ? (double)ns : 0;
}

typedef struct span {
    double begin, end;
} span;

static int by_begin(const void *a, const void *b) {
    double x = ((const span *)a)->begin, y = ((const span *)b)->begin;
    return x < y ? -1 : x > y;
}

/* Sorts and merges in place; returns the number left. */
static uint32_t merge_spans(span *s, uint32_t n) {
    if (!n) return 0;
    qsort(s, n, sizeof *s, by_begin);
    uint32_t kept = 0;
    for (uint32_t i = 1; i < n; i++) {
        if (s[i].begin <= s[kept].end) s[kept].end = s[i].end > s[kept].end ? s[i].end : s[kept].end;
        else s[++kept] = s[i];
    }
    return kept + 1;
}

static double total(const span *s, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += s[i].end - s[i].begin;
    return sum;
}

static double common(const span *a, uint32_t an, const span *b, uint32_t bn) {
    double sum = 0;
    for (uint32_t i = 0, j = 0; i < an && j < bn;) {
        double lo = a[i].begin > b[j].begin ? a[i].begin : b[j].begin;
        double hi = a[i].end < b[j].end ? a[i].end : b[j].end;
        if (hi > lo) sum += hi - lo;
        if (a[i].end < b[j].end) i++;
        else j++;
    }
    return sum;
}

/* What the i-th use took, in nanoseconds. */
static sthi_use_time time_use(sth_runtime *rt, const sthi_timed_step *t, uint32_t i) {
    const sthi_timed_use *u = &t->use[i];
    sth_event *start = u->waited ? u->start : u->arrive;
    double compute = u->finished ? since(rt, start, u->done) : 0;
    double next = since(rt, start, i + 1 < t->uses ? t->use[i + 1].arrive : t->end);
    if (next < 0) next = 0; /* on another stream */
    if (compute > next) compute = next; /* held while the next unit is used: its time counts there */
    return (sthi_use_time){u->waited ? since(rt, u->arrive, start) : 0, compute, next - compute};
}

/* Whether the step's compute is unlike what the order holds: another batch size or sequence length. */
static bool unlike_order(const sth_runtime *rt, const sthi_timed_step *t, const sthi_use_time *times) {
    double known = 0, seen = 0;
    for (uint32_t i = 0; i < rt->order.count; i++)
        known += (double)(rt->order.uses[i].compute_ns + rt->order.uses[i].gap_ns);
    for (uint32_t i = 0; i < t->uses; i++) seen += times[i].compute + times[i].gap;
    return seen > known * (1 + UNLIKE) || seen < known * (1 - UNLIKE);
}

/* Whether its uses are those of the order, but for units on demand in between: also where it taught the order. */
static bool shows_order(const sth_runtime *rt, const sthi_timed_step *t) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < t->uses; i++) {
        if (rt->units[t->use[i].unit].flags & STH_UNIT_ON_DEMAND) continue;
        if (at == rt->order.count || rt->order.uses[at++].unit != t->use[i].unit) return false;
    }
    return at == rt->order.count;
}

static void learn_compute(sth_runtime *rt, const sthi_timed_step *t, const sthi_use_time *times) {
    if (!shows_order(rt, t)) return;
    if (rt->timing.seen > 2 && unlike_order(rt, t, times)) {
        /* One odd step teaches nothing; when it stays so, start over, and the plan is looked at again. */
        if (++rt->timing.odd_steps < ODD_STEPS) return;
        rt->timing.seen = 0;
    }
    rt->timing.odd_steps = 0;
    double keep = rt->timing.seen > 1 ? 0.5 : 0; /* the first steps are slow: kernels load, caches fill */
    uint32_t at = 0;
    for (uint32_t i = 0; i < t->uses && at < rt->order.count; i++) {
        sth_plan_use *o = &rt->order.uses[at];
        if (o->unit != t->use[i].unit) continue; /* a unit on demand, in between */
        o->compute_ns = (int64_t)(keep * (double)o->compute_ns + (1 - keep) * times[i].compute);
        o->gap_ns = (int64_t)(keep * (double)o->gap_ns + (1 - keep) * times[i].gap);
        at++;
    }
    rt->timing.seen++;
    rt->timing.fresh = true;
}

/* The units that came with one copy share its time by their bytes: records from `i` on; returns the next one. */
static uint32_t share_copy(sth_runtime *rt, const sthi_timed_step *t, uint32_t i, double ns) {
    uint32_t end = i + 1;
    if (end == t->copies || !t->copy[end].joined) {
        rt->units[t->copy[i].unit].times.h2d_ns += ns;
        rt->units[t->copy[i].unit].times.h2d_count += t->copy[i].last;
        return end;
    }
    double bytes = (double)rt->units[t->copy[i].unit].bytes;
    for (; end < t->copies && t->copy[end].joined; end++) bytes += (double)rt->units[t->copy[end].unit].bytes;
    for (; i < end; i++) {
        sthi_unit *u = &rt->units[t->copy[i].unit];
        u->times.h2d_ns += ns * (double)u->bytes / bytes;
        u->times.h2d_count += t->copy[i].last;
    }
    return end;
}

static uint32_t copy_spans(sth_runtime *rt, const sthi_timed_step *t, sth_event *base, span *out) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->copies; n++) {
        out[n] = (span){since(rt, base, t->copy[i].begin), since(rt, base, t->copy[i].end)};
        if (out[n].end < out[n].begin) out[n].end = out[n].begin;
        i = share_copy(rt, t, i, out[n].end - out[n].begin);
    }
    return merge_spans(out, n);
}

/* Of a light step the whole is known, and the rest is as it was in the last full one. */
static void fill_light(sth_runtime *rt, sth_step_metrics *m) {
    const sth_step_metrics *like = &rt->timing.like;
    double change = m->step_time_ms - like->step_time_ms;
    m->compute_time_ms = like->compute_time_ms;
    m->copy_time_ms = like->copy_time_ms;
    m->link_gb_s = like->link_gb_s;
    m->stall_time_ms = like->stall_time_ms + change > 0 ? like->stall_time_ms + change : 0;
    m->prefetch_hits = like->prefetch_hits;
    m->prefetch_misses = like->prefetch_misses;
    m->stall_count = like->stall_count;
    m->overlap_ratio = like->overlap_ratio;
    if (change > OTHER_TIME * like->step_time_ms || change < -OTHER_TIME * like->step_time_ms)
        rt->timing.watch = WATCHED;
}

static void note_full(sth_runtime *rt, const sthi_timed_step *t) {
    if (rt->timing.watch) rt->timing.watch--;
    if (!t->whole || t->epoch != rt->order.epoch) return;
    rt->timing.like = t->metrics;
    rt->timing.like_plan = t->plan;
}

static void read_step(sth_runtime *rt, sthi_timed_step *t) {
    span *copies = sthi_alloc((t->copies + 1) * sizeof *copies);
    span *stalls = sthi_alloc((t->uses + 1) * sizeof *stalls);
    sthi_use_time *times = sthi_alloc((t->uses + 1) * sizeof *times);
    sth_step_metrics *m = &t->metrics;
    if (copies && stalls && times) {
        sth_event *base = t->use[0].arrive;
        uint32_t copy_count = copy_spans(rt, t, base, copies), stall_count = 0;
        for (uint32_t i = 0; i < t->uses && !t->light; i++) {
            sthi_unit *u = &rt->units[t->use[i].unit];
            times[i] = time_use(rt, t, i);
            u->times.compute_ns += times[i].compute;
            u->times.stall_ns += times[i].stall;
            u->times.use_count++;
            m->compute_time_ms += (times[i].compute + times[i].gap) / 1e6;
            m->stall_time_ms += times[i].stall / 1e6;
            if (times[i].stall > STALL_NS) m->prefetch_misses++, m->stall_count++;
            else m->prefetch_hits++;
            if (times[i].stall <= 0) continue;
            double at = since(rt, base, t->use[i].arrive);
            stalls[stall_count++] = (span){at, at + times[i].stall};
        }
        stall_count = merge_spans(stalls, stall_count);
        double copied = total(copies, copy_count);
        m->step_time_ms = since(rt, base, t->end) / 1e6;
        m->copy_time_ms = copied / 1e6;
        m->overlap_ratio = copied > 0 ? 1 - common(copies, copy_count, stalls, stall_count) / copied : 0;
        m->link_gb_s = copied > 0 ? (double)t->copied_bytes / copied : 0;
        if (t->light) fill_light(rt, m);
        else learn_compute(rt, t, times);
        if (!t->light) note_full(rt, t);
        sthi_link_follow(rt, t, since(rt, base, t->end));
        if (sthi_timeline_on() && !t->light) sthi_trace_step(rt, t, times);
    }
    sthi_free(copies);
    sthi_free(stalls);
    sthi_free(times);
    push(rt, m);
}

/* Everything of the step has run: its uses before `end`, on its stream, with it; its copies may run longer. */
static bool all_done(sth_runtime *rt, const sthi_timed_step *t) {
    bool done = false, asked[2] = {false, false};
    if (STHI_DEV(rt, event_query, t->end, &done) != STH_OK || !done) return false;
    for (uint32_t i = t->copies; i-- > 0;) { /* the last of each stream: it is behind those before it */
        if (t->copy[i].joined || asked[t->copy[i].demand]) continue;
        asked[t->copy[i].demand] = true;
        if (STHI_DEV(rt, event_query, t->copy[i].end, &done) != STH_OK || !done) return false;
    }
    for (uint32_t i = 0; i < t->uses; i++)
        if (t->use[i].finished && (t->use[i].late || t->use[i].done_on != t->end_on) &&
            (STHI_DEV(rt, event_query, t->use[i].done, &done) != STH_OK || !done))
            return false;
    return true;
}

void sthi_timing_harvest(sth_runtime *rt, bool wait) {
    while (rt->timing.head < rt->timing.tail) {
        sthi_timed_step *t = &rt->timing.steps[rt->timing.head % STHI_TIMED_STEPS];
        if (wait) {
            (void)STHI_DEV(rt, event_synchronize, t->end);
            for (uint32_t i = 0; i < t->copies; i++)
                if (!t->copy[i].joined) (void)STHI_DEV(rt, event_synchronize, t->copy[i].end);
        } else if (!all_done(rt, t)) {
            return;
        }
        read_step(rt, t);
        t->waiting = false;
        rt->timing.head++;
    }
}

void sthi_timing_harvest_idle(sth_runtime *rt) {
    if (!is_steady(rt)) sthi_timing_harvest(rt, false);
}

void sthi_runtime_settle_times(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    if (!rt->shut && rt->sealed) sthi_timing_harvest(rt, true);
    sthi_unlock(&rt->lock);
}
