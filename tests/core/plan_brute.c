/* Tries every set of residents, every ring and, where units are used more than once, every choice of which
 * places are kept until the next use. Ring memory is an array of cells of one unit of size: a cell knows the
 * load that is in it, a load knows when it was let go. No shared code with src/core. */
#include "core/plan_brute.h"

#include <stdlib.h>
#include <string.h>

enum { LAPS = 36, MEASURED = 12, NOT_YET = -1 };

typedef struct brute_load {
    int unit, uses_left;
    double let_go; /* NOT_YET until the last use has ended */
    double arrived;
} brute_load;

typedef struct brute_run {
    const brute_case *c;
    unsigned resident, keep; /* bit sets: by unit, and by use whose unit stays until its next use */
    int ring;
    brute_load loads[LAPS * BRUTE_USES + 1];
    int load_count;
    int cells[BRUTE_BYTES]; /* load in each cell, 0 for none */
    int current[BRUTE_UNITS]; /* latest load of each unit, 0 for none */
    double link;
} brute_run;

/* Copies part of a load; false if it waits for a use that cannot end before it. */
static bool copy_part(brute_run *r, int load, int from, int cells) {
    for (int i = from; i < from + cells; i++) {
        int before = r->cells[i % r->ring];
        if (r->loads[before].let_go == NOT_YET) return false;
        if (r->loads[before].let_go > r->link) r->link = r->loads[before].let_go;
    }
    for (int i = from; i < from + cells; i++) r->cells[i % r->ring] = load;
    r->link += cells;
    return true;
}

static bool copy_load(brute_run *r, int load, int home) {
    int size = r->c->size[r->loads[load].unit];
    if (size > r->ring) return false;
    if (r->c->whole) return copy_part(r, load, home, size);
    for (int i = 0; i < size; i++)
        if (!copy_part(r, load, home + i, 1)) return false;
    return true;
}

static bool kept_from_before(const brute_run *r, int use) {
    const brute_case *c = r->c;
    for (int back = 1; back <= c->uses; back++) {
        int before = (use + c->uses - back) % c->uses;
        if (c->unit[before] == c->unit[use]) return r->keep >> before & 1;
    }
    return false;
}

/* How many uses in a row a load that is made for `use` serves; 0 if that never ends. */
static int uses_served(const brute_run *r, int use) {
    const brute_case *c = r->c;
    int served = 1;
    for (int i = use; r->keep >> i & 1;) {
        if (++served > c->uses) return 0;
        do i = (i + 1) % c->uses;
        while (c->unit[i] != c->unit[use]);
    }
    return served;
}

static void set_homes(const brute_run *r, int home[BRUTE_USES]) {
    const brute_case *c = r->c;
    int head = 0;
    for (int t = 0; t < c->uses; t++) {
        int size = c->size[c->unit[t]];
        if (r->resident >> c->unit[t] & 1 || kept_from_before(r, t)) continue;
        if (!c->twice && head + size > r->ring) head = 0;
        home[t] = head;
        head = c->twice ? (head + size) % r->ring : head + size;
    }
}

/* Mean step of the last laps; negative if this choice cannot run. */
static double run(brute_run *r) {
    const brute_case *c = r->c;
    int home[BRUTE_USES];
    double now = 0, mark = 0;
    r->load_count = 1;
    r->loads[0] = (brute_load){0};
    memset(r->cells, 0, sizeof r->cells);
    memset(r->current, 0, sizeof r->current);
    r->link = 0;
    set_homes(r, home);
    for (int lap = 0; lap < LAPS; lap++) {
        if (lap == LAPS - MEASURED) mark = now;
        for (int t = 0; t < c->uses; t++) {
            int u = c->unit[t];
            if (r->resident >> u & 1) {
                now += c->compute[t];
                continue;
            }
            if (!kept_from_before(r, t)) {
                int load = r->load_count++, served = uses_served(r, t);
                if (served == 0) return -1;
                r->loads[load] = (brute_load){u, served, NOT_YET, 0};
                if (!copy_load(r, load, home[t])) return -1;
                r->loads[load].arrived = r->link;
                r->current[u] = load;
            }
            brute_load *load = &r->loads[r->current[u]];
            if (load->arrived > now) now = load->arrived;
            now += c->compute[t];
            /* loads[0] stands for what a step before the first would have left: there from the start */
            if (r->current[u] != 0 && --load->uses_left == 0) load->let_go = now;
        }
    }
    return (now - mark) / MEASURED;
}

static bool unit_always_kept(const brute_run *r, int u) {
    for (int t = 0; t < r->c->uses; t++)
        if (r->c->unit[t] == u && !(r->keep >> t & 1)) return false;
    return true;
}

static bool sensible(const brute_run *r) {
    for (int t = 0; t < r->c->uses; t++)
        if (r->resident >> r->c->unit[t] & 1 && r->keep >> t & 1) return false;
    for (int u = 0; u < r->c->units; u++)
        if (!(r->resident >> u & 1) && unit_always_kept(r, u)) return false;
    return true;
}

/* No step is shorter than its compute or its copies. */
static double least_step(const brute_run *r) {
    int copies = 0, compute = 0;
    for (int t = 0; t < r->c->uses; t++) {
        compute += r->c->compute[t];
        if (r->resident >> r->c->unit[t] & 1 || kept_from_before(r, t)) continue;
        copies += r->c->size[r->c->unit[t]];
    }
    return copies > compute ? copies : compute;
}

void brute_force(const brute_case *c, double best[BRUTE_BYTES + 1]) {
    static _Thread_local brute_run r;
    int total = 0;
    for (int u = 0; u < c->units; u++) total += c->size[u];
    for (int v = 0; v <= BRUTE_BYTES; v++) best[v] = -1;
    r.c = c;
    unsigned keeps = c->uses > c->units ? 1u << c->uses : 1;
    for (r.resident = 0; r.resident < 1u << c->units; r.resident++)
        for (r.keep = 0; r.keep < keeps; r.keep++) {
            if (!sensible(&r)) continue;
            int held = 0;
            for (int u = 0; u < c->units; u++) held += r.resident >> u & 1 ? c->size[u] : 0;
            bool all = held == total;
            for (r.ring = all ? 0 : 1; held + r.ring <= (all ? held : total); r.ring++) {
                double known = best[held + r.ring];
                if (known >= 0 && known <= least_step(&r)) continue;
                double step = run(&r);
                for (int v = held + r.ring; step >= 0 && v <= total; v++)
                    if (best[v] < 0 || step < best[v]) best[v] = step;
            }
        }
}

/* ---- replay of a plan ---- */

enum { REPLAY_LAPS = 36 };

typedef struct replay_load {
    uint64_t offset, bytes;
    long last; /* use, counted through the laps, whose end lets go of the place */
    double arrived;
} replay_load;

static bool ranges_meet(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes, uint64_t ring) {
    uint64_t b_behind = (b + ring - a) % ring, a_behind = (a + ring - b) % ring;
    return b_behind < a_bytes || a_behind < b_bytes;
}

/* Latest end of the uses that the bytes wait for; negative if one of them is not before `use`. */
static double wait_for(const replay_load *loads, long from, long count, const double *ends, long use, uint64_t offset,
                       uint64_t bytes, uint64_t ring) {
    double until = 0;
    for (long i = from; i < count; i++) {
        if (!ranges_meet(offset % ring, bytes, loads[i].offset, loads[i].bytes, ring)) continue;
        if (loads[i].last >= use) return -1;
        if (ends[loads[i].last] > until) until = ends[loads[i].last];
    }
    return until;
}

static double replay(const sth_plan_input *in, const sth_plan *plan, replay_load *loads, double *ends,
                     double *arrived) {
    long n = in->use_count, count = 0;
    double now = 0, link = 0, mark = 0;
    for (long use = 0; use < n * REPLAY_LAPS; use++) {
        long t = use % n;
        if (use == n * (REPLAY_LAPS - MEASURED)) mark = now;
        for (uint32_t k = 0; k < plan->load_count; k++) {
            if (plan->loads[k].first_use != t) continue;
            bool over_the_end = plan->loads[k].last_use < plan->loads[k].first_use;
            replay_load *load = &loads[count];
            load->offset = plan->loads[k].ring_offset;
            load->bytes = in->units[plan->loads[k].unit].bytes;
            uint32_t held = in->uses[plan->loads[k].last_use].held;
            load->last = use - t + plan->loads[k].last_use + (over_the_end ? n : 0) +
                         (held ? held : in->held_at_once) - 1;
            /* loads of more than two laps ago have all been let go */
            long oldest = count > 2 * (long)plan->load_count ? count - 2 * (long)plan->load_count : 0;
            for (uint64_t at = 0; at < load->bytes;) {
                uint64_t left = load->bytes - at, part = left < in->chunk_bytes ? left : in->chunk_bytes;
                double free_at =
                    wait_for(loads, oldest, count, ends, use, load->offset + at, part, plan->ring_bytes);
                if (free_at < 0) return -1;
                if (free_at > link) link = free_at;
                link += (double)part / in->link_bytes_per_s * 1e9 + (double)in->copy_overhead_ns;
                at += part;
            }
            arrived[k] = link;
            count++;
        }
        uint32_t needs = plan->use_load[t];
        if (needs != STH_NONE && arrived[needs] > now) now = arrived[needs];
        now += (double)in->uses[t].compute_ns;
        ends[use] = now;
        now += (double)in->uses[t].gap_ns;
    }
    return (now - mark) / MEASURED;
}

double brute_replay(const sth_plan_input *in, const sth_plan *plan) {
    size_t n = (size_t)in->use_count * REPLAY_LAPS;
    replay_load *loads = calloc(n + 1, sizeof *loads);
    double *ends = calloc(n + 1, sizeof *ends), *arrived = calloc(plan->load_count + 1, sizeof *arrived);
    double step = loads && ends && arrived ? replay(in, plan, loads, ends, arrived) : -1;
    free(loads);
    free(ends);
    free(arrived);
    return step;
}
