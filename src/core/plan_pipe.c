/* Prices a lap of loads by running it: the link copies chunks in order, each as soon as every earlier load
 * in its place has been let go; compute runs the uses in order, each as soon as its load has arrived.
 *
 * The step is a recurrence, not an event queue: when the copy of load k is worked out, at its first use, all
 * uses before that are known, and a chunk that waits for a later one would wait for ever.
 *
 * What is written between laps is copied from the begin of its lap on: the link stands still for it, and what comes
 * behind it in order waits as well. Only loads that wait for no use of their own lap, up to the first one that is
 * written, are copied before the begin, and so before all renewals (`ahead`).
 * Invariants: freed[k] and arrive[k] hold the latest lap's times; freed[load_count] is 0 for ever.
 * No locks. Does not choose loads or homes. */
#include "core/plan.h"

#include <math.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

/* Laps until a step that still changes is averaged, over the last part of them. 12 is a multiple of the
 * periods that short cycles have. Long timelines get fewer. */
enum { LAPS = 20, AVERAGED = 12, LONG_LAPS = 8, LONG_AVERAGED = 4, LONG_USES = 8192 };

/* Bounds per load. A place has two ends, and two laps may differ: 4 spans. Homes repeat when deps are noted:
 * of the 2 spans a load each write covers some for ever and cuts 2 more, in at most 2 parts: 6 deps. A dep
 * is the last of at most one run of whole chunks and one chunk that crosses its end: 12 runs. */
enum { SPANS_PER_LOAD = 4, DEPS_PER_LOAD = 6, RUNS_PER_LOAD = 12, SPARE = 16 };

/* Of plans whose steps take about the same time the one that moves less is better: the step may become shorter. */
static const double LINK_SHARE = 1.0 / 64;

typedef struct part {
    void **array;
    size_t count, each;
} part;

sth_status sthi_pipe_init(sthi_pipe *p, uint32_t use_count) {
    size_t n = use_count;
    *p = (sthi_pipe){.use_count = use_count};
    const part parts[] = {
        {(void **)&p->loads, n, sizeof *p->loads},
        {(void **)&p->end, n, sizeof *p->end},
        {(void **)&p->stall, n, sizeof *p->stall},
        {(void **)&p->arrive, n + 1, sizeof *p->arrive},
        {(void **)&p->freed, n + 1, sizeof *p->freed},
        {(void **)&p->spans, SPANS_PER_LOAD * n + SPARE, sizeof *p->spans},
        {(void **)&p->deps, DEPS_PER_LOAD * n + SPARE, sizeof *p->deps},
        {(void **)&p->runs, RUNS_PER_LOAD * n + SPARE, sizeof *p->runs},
        {(void **)&p->tree, 2 * n + 1, sizeof *p->tree},
        {(void **)&p->distance, n, sizeof *p->distance},
        {(void **)&p->use_load, n, sizeof *p->use_load},
        {(void **)&p->start_load, n, sizeof *p->start_load},
        {(void **)&p->free_load, n, sizeof *p->free_load},
        {(void **)&p->free_next, n, sizeof *p->free_next},
        {(void **)&p->run_first, n + 1, sizeof *p->run_first},
        {(void **)&p->held, n, sizeof *p->held},
        {(void **)&p->missing, n, sizeof *p->missing},
        {(void **)&p->written, n, sizeof *p->written},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].array = sthi_zalloc(parts[i].count, parts[i].each);
        if (*parts[i].array) continue;
        sthi_pipe_fini(p);
        return sthi_no_memory(NULL, "simulating %u uses; free host memory", use_count);
    }
    return STH_OK;
}

void sthi_pipe_fini(sthi_pipe *p) {
    void *const blocks[] = {p->loads, p->end,      p->stall,    p->arrive,     p->freed,
                            p->spans, p->deps,     p->runs,     p->tree,       p->distance,
                            p->held,  p->use_load, p->run_first, p->start_load, p->free_load, p->free_next,
                            p->written, p->missing};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) sthi_free(blocks[i]);
    *p = (sthi_pipe){0};
}

typedef struct link_rate {
    double ns_per_byte, overhead_ns;
    uint64_t chunk;
} link_rate;

static link_rate rate_of(const sth_plan_input *in) {
    return (link_rate){1e9 / in->link_bytes_per_s, (double)in->copy_overhead_ns, in->chunk_bytes};
}

static uint64_t chunks_in(uint64_t bytes, uint64_t chunk) { return bytes / chunk + (bytes % chunk != 0); }

static double copy_ns(link_rate rate, uint64_t chunks, uint64_t bytes) {
    return (double)chunks * rate.overhead_ns + (double)bytes * rate.ns_per_byte;
}

double sthi_pipe_link_ns(const sthi_pipe *p, const sth_plan_input *in) {
    link_rate rate = rate_of(in);
    double sum = 0;
    for (uint32_t k = 0; k < p->load_count + p->renewal_count; k++)
        sum += copy_ns(rate, chunks_in(p->loads[k].bytes, rate.chunk), sthi_wire_bytes(in, p->loads[k].unit));
    return sum;
}

uint64_t sthi_wire_bytes(const sth_plan_input *in, uint32_t unit) {
    const sth_plan_unit *u = &in->units[unit];
    if (u->flags & STHI_UNIT_STAYS_PACKED) return 0;
    return u->transfer_bytes ? u->transfer_bytes : u->bytes;
}

/* Time for each byte of the load's place. */
static link_rate rate_of_load(const sth_plan_input *in, const sthi_lap_load *load) {
    link_rate rate = rate_of(in);
    rate.ns_per_byte *= (double)sthi_wire_bytes(in, load->unit) / (double)load->bytes;
    return rate;
}

bool sthi_is_written(const sth_plan_input *in, uint32_t unit) {
    return (in->units[unit].flags & STH_UNIT_WRITTEN) && in->units[unit].bytes;
}

void sthi_pipe_note_missing(sthi_pipe *p, const sthi_plan_world *w, const uint8_t *resident) {
    const sth_plan_input *in = w->in;
    p->first_share = w->changes ? 1.0 / in->change_steps : 0;
    p->missing_ns = 0;
    for (uint32_t i = 0; w->changes && i < w->order_count; i++) {
        uint32_t u = w->order[i];
        bool here = in->units[u].flags & STH_UNIT_PRESENT;
        p->missing[w->order_use[i]] =
            resident[u] && !here ? (double)sthi_wire_bytes(in, u) * 1e9 / in->link_bytes_per_s : 0;
        p->missing_ns += p->missing[w->order_use[i]];
    }
}

bool sthi_from_disk(const sth_plan_input *in, uint32_t unit) {
    return in->disk_bytes_per_s > 0 && (in->units[unit].flags & STH_UNIT_FROM_DISK);
}

double sthi_pipe_disk_ns(const sthi_pipe *p, const sth_plan_input *in) {
    double sum = 0;
    for (uint32_t k = 0; k < p->load_count + p->renewal_count; k++)
        if (sthi_from_disk(in, p->loads[k].unit)) 
            sum += (double)sthi_wire_bytes(in, p->loads[k].unit) * 1e9 / in->disk_bytes_per_s;
    return sum;
}

/* Splits the load's chunks into runs with the same deps; deps [first, dep_count) are the load's. */
static uint32_t split_runs(sthi_pipe *p, uint32_t run, uint64_t bytes, uint32_t first, link_rate rate) {
    uint32_t lo = first;
    for (uint64_t at = 0; at < bytes;) {
        while (p->deps[lo].end <= at) lo++;
        uint64_t whole = (sthi_min_u64(p->deps[lo].end, bytes) - at) / rate.chunk, chunks = whole;
        uint64_t end = at + whole * rate.chunk;
        uint32_t hi = lo;
        if (whole == 0 || (p->deps[lo].end >= bytes && end < bytes)) {
            end = rate.chunk < bytes - end ? end + rate.chunk : bytes;
            chunks = whole + 1;
        }
        while (p->deps[hi].end < end) hi++;
        p->runs[run++] = (sthi_run){.dep_first = lo, .dep_last = hi, .ns = copy_ns(rate, chunks, end - at)};
        at = end;
    }
    return run;
}

/* True if every load's deps are let go before its first use. A dep at or behind the load in lap order was
 * written in the lap before. */
static bool deps_can_run(const sthi_pipe *p, const sth_plan_input *in, uint32_t k, uint32_t first_dep) {
    for (uint32_t d = first_dep; d < p->dep_count; d++) {
        uint32_t owner = p->deps[d].load;
        if (owner == p->load_count) continue;
        uint64_t free_at = sthi_let_go(in, p->loads[owner].last_use);
        uint64_t start = p->loads[k].first_use + (owner >= k ? (uint64_t)p->use_count : 0);
        if (free_at >= start) return false;
    }
    return true;
}

/* True if all that the load waits for is over when its lap begins. */
static bool waits_for_no_use_of_its_lap(const sthi_pipe *p, const sth_plan_input *in, uint32_t k) {
    uint32_t last = p->runs[p->run_first[k + 1] - 1].dep_last;
    for (uint32_t d = p->runs[p->run_first[k]].dep_first; d <= last; d++) {
        uint32_t owner = p->deps[d].load;
        if (owner == p->load_count) continue;
        if (owner < k || sthi_let_go(in, p->loads[owner].last_use) >= p->use_count) return false;
    }
    return true;
}

/* Renewals are one run each, without deps. Loads that come before all of them are worked out where the lap begins. */
static void run_renewals(sthi_pipe *p, const sth_plan_input *in, uint32_t run) {
    for (uint32_t i = 0; i < p->renewal_count; i++) {
        uint32_t k = p->load_count + i;
        link_rate rate = rate_of_load(in, &p->loads[k]);
        double ns = copy_ns(rate, chunks_in(p->loads[k].bytes, rate.chunk), p->loads[k].bytes);
        p->runs[run++] = (sthi_run){.dep_first = 1, .dep_last = 0, .ns = ns};
        p->run_first[k + 1] = run;
    }
    p->ahead = 0;
    while (p->ahead < p->load_count && !p->written[p->ahead] && waits_for_no_use_of_its_lap(p, in, p->ahead))
        p->ahead++;
    for (uint32_t k = 0; k < p->load_count; k++) p->start_load[p->loads[k].first_use] = k < p->ahead ? STH_NONE : k;
}

/* Writes two laps on the tape; what the second one overwrites is what its copies wait for. */
static bool find_runs(sthi_pipe *p, const sth_plan_input *in, uint64_t ring) {
    uint32_t run = 0;
    sthi_tape_reset(p, ring);
    p->dep_count = 0;
    for (uint32_t k = 0; k < p->load_count; k++)
        sthi_tape_write(p, ring, p->loads[k].offset, p->loads[k].bytes, k, false);
    for (uint32_t k = 0; k < p->load_count; k++) {
        uint32_t first = p->dep_count;
        sthi_tape_write(p, ring, p->loads[k].offset, p->loads[k].bytes, p->load_count + k, true);
        if (!deps_can_run(p, in, k, first)) return false;
        p->run_first[k] = run;
        run = split_runs(p, run, p->loads[k].bytes, first, rate_of_load(in, &p->loads[k]));
    }
    p->run_first[p->load_count] = run;
    if (p->renewal_count) run_renewals(p, in, run);
    return true;
}

/* When the copy ends; *out_start is when its first chunk begins. */
static inline __attribute__((always_inline)) double copy_load(const sthi_pipe *p, uint32_t k, double link,
                                                              double *out_start) {
    for (uint32_t r = p->run_first[k]; r < p->run_first[k + 1]; r++) {
        const sthi_run *run = &p->runs[r];
        for (uint32_t d = run->dep_first; d <= run->dep_last; d++)
            if (p->freed[p->deps[d].load] > link) link = p->freed[p->deps[d].load];
        if (r == p->run_first[k]) *out_start = link;
        link += run->ns;
    }
    return link;
}

typedef struct lap_state {
    double ready, link, disk; /* when compute, link and disk are free */
    double begin;            /* of the lap */
    double least, most;      /* how much later than a lap ago: the smallest and the largest */
} lap_state;

static void note_shift(lap_state *s, double shift) {
    if (shift < s->least) s->least = shift;
    if (shift > s->most) s->most = shift;
}

/* Reads are back to back, but what is beyond the read-ahead only begins when the copy does. */
static double read_load(const sth_plan_input *in, const sthi_lap_load *load, double start, lap_state *s) {
    double ns = 1e9 / in->disk_bytes_per_s;
    uint64_t bytes = sthi_wire_bytes(in, load->unit), beyond = bytes - sthi_min_u64(bytes, in->read_ahead_bytes);
    s->disk = fmax(s->disk + (double)bytes * ns, start + (double)beyond * ns);
    return s->disk;
}

/* `writes` is known when this is compiled: laps in which nothing is written, which are most, pay nothing for it. So is
 * `first`: whether residents that are missing come in this lap, each in the order of its first use. */
static inline __attribute__((always_inline)) void run_copy(sthi_pipe *p, const sth_plan_input *in, uint32_t k,
                                                           lap_state *s, bool writes) {
    if (writes && p->written[k]) s->link = fmax(s->link, s->begin);
    double copy_start = s->link;
    s->link = copy_load(p, k, s->link, &copy_start);
    if (sthi_from_disk(in, p->loads[k].unit)) {
        if (writes && p->written[k]) s->disk = fmax(s->disk, s->begin);
        s->link = fmax(s->link, read_load(in, &p->loads[k], copy_start, s));
    }
    note_shift(s, s->link - p->arrive[k]);
    p->arrive[k] = s->link;
}

static inline __attribute__((always_inline)) void run_uses(sthi_pipe *p, const sth_plan_input *in, lap_state *s,
                                                           bool writes, bool first) {
    s->least = INFINITY;
    s->most = 0;
    s->begin = s->ready;
    for (uint32_t k = 0; writes && k < p->ahead; k++) run_copy(p, in, k, s, writes);
    for (uint32_t t = 0; t < p->use_count; t++) {
        uint32_t k = p->start_load[t];
        if (k != STH_NONE) run_copy(p, in, k, s, writes);
        double start = s->ready;
        if (first && p->missing[t] > 0) start = fmax(start, s->link += p->missing[t]);
        if (writes && k != STH_NONE && k >= p->load_count && s->link > start) start = s->link;
        if (p->use_load[t] != STH_NONE && p->arrive[p->use_load[t]] > start)
            start = p->arrive[p->use_load[t]];
        p->stall[t] = start - s->ready;
        double end = start + (double)in->uses[t].compute_ns;
        note_shift(s, end - p->end[t]);
        p->end[t] = end;
        for (uint32_t f = p->free_load[t]; f != STH_NONE; f = p->free_next[f]) p->freed[f] = end;
        s->ready = end + (double)in->uses[t].gap_ns;
    }
}

static void run_lap(sthi_pipe *p, const sth_plan_input *in, lap_state *s) {
    run_uses(p, in, s, false, false);
}

static __attribute__((noinline)) void run_lap_with_writes(sthi_pipe *p, const sth_plan_input *in, lap_state *s) {
    run_uses(p, in, s, true, false);
}

static __attribute__((noinline)) void run_first_lap(sthi_pipe *p, const sth_plan_input *in, lap_state *s) {
    if (p->writes) run_uses(p, in, s, true, true);
    else run_uses(p, in, s, false, true);
}

/* The smallest and the largest shift of any time from lap to lap enclose the steady step (a later start
 * never makes anything earlier); they meet when the laps repeat. */
static double steady_step(sthi_pipe *p, const sth_plan_input *in, double limit, double *out_first) {
    lap_state s = {0};
    bool is_long = p->use_count > LONG_USES;
    uint32_t laps = is_long ? LONG_LAPS : LAPS, averaged = is_long ? LONG_AVERAGED : AVERAGED;
    double mark = 0;
    for (uint32_t lap = 0; lap < laps; lap++) {
        if (lap == laps - averaged) mark = s.ready;
        if (lap == 0 && p->first_share > 0) run_first_lap(p, in, &s);
        else if (p->writes) run_lap_with_writes(p, in, &s);
        else run_lap(p, in, &s);
        if (lap == 0) limit -= p->first_share * (*out_first = s.ready);
        if (lap > 0 && s.most - s.least <= 0.5 + 1e-7 * s.most) return s.most;
        if (lap > 0 && s.least >= limit) return INFINITY;
    }
    return (s.ready - mark) / averaged;
}

sthi_price sthi_pipe_simulate(sthi_pipe *p, const sth_plan_input *in, uint64_t ring, double limit) {
    sthi_price price = {.runs = false, .step_ns = INFINITY, .price_ns = INFINITY, .link_ns = sthi_pipe_link_ns(p, in),
                        .disk_ns = sthi_pipe_disk_ns(p, in)};
    if (!find_runs(p, in, ring)) return price;
    memset(p->arrive, 0, (p->load_count + p->renewal_count + 1) * sizeof *p->arrive);
    memset(p->freed, 0, (p->load_count + 1) * sizeof *p->freed);
    memset(p->end, 0, p->use_count * sizeof *p->end);
    price.runs = true;
    double first = 0, link = 0;
    if (p->first_share > 0) link = LINK_SHARE * (price.link_ns + p->first_share * (price.link_ns + p->missing_ns));
    price.step_ns = fmax(steady_step(p, in, limit - link, &first), fmax(price.link_ns, price.disk_ns));
    price.price_ns = price.step_ns + p->first_share * first + link;
    return price;
}
