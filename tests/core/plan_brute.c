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
    unsigned resident, packed, crosses, keep; /* bit sets: by unit, and by use whose unit stays until its next use */
    int ring;
    brute_load loads[LAPS * BRUTE_USES + 1];
    int load_count;
    int cells[BRUTE_BYTES]; /* load in each cell, 0 for none */
    int current[BRUTE_UNITS]; /* latest load of each unit, 0 for none */
    bool copied[BRUTE_USES];  /* the load that begins with this use of the lap */
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
    int u = r->loads[load].unit;
    double share = r->crosses >> u & 1 ? (r->c->size[u] - 1.0) / r->c->size[u] : 1;
    if (!(r->packed >> u & 1)) r->link += cells * share;
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

static bool is_written(const brute_run *r, int unit) { return r->c->written >> unit & 1; }

static bool first_of_lap(const brute_case *c, int use) {
    for (int t = 0; t < use; t++)
        if (c->unit[t] == c->unit[use]) return false;
    return true;
}

static bool begins_load(const brute_run *r, int use) {
    return !(r->resident >> r->c->unit[use] & 1) && !kept_from_before(r, use);
}

/* Begins and copies the load; false if this choice cannot run. */
static bool bring(brute_run *r, int use, const int home[BRUTE_USES]) {
    int u = r->c->unit[use], load = r->load_count++, served = uses_served(r, use);
    if (served == 0) return false;
    r->loads[load] = (brute_load){u, served, NOT_YET, 0};
    if (!copy_load(r, load, home[use])) return false;
    r->loads[load].arrived = r->link;
    r->current[u] = load;
    return r->copied[use] = true;
}

/* Before a step begins the link goes on with loads of it whose places are free by then, in order, up to the first one
 * whose host image is still to be written. */
static bool copy_ahead(brute_run *r, const int home[BRUTE_USES]) {
    const brute_case *c = r->c;
    memset(r->copied, 0, sizeof r->copied);
    for (int t = 0; t < c->uses; t++) {
        if (!begins_load(r, t)) continue;
        if (is_written(r, c->unit[t])) return true;
        for (int i = home[t]; i < home[t] + c->size[c->unit[t]]; i++)
            if (r->loads[r->cells[i % r->ring]].let_go == NOT_YET) return true;
        if (!bring(r, t, home)) return false;
    }
    return true;
}

static double compute_of(const brute_run *r, int use) {
    int u = r->c->unit[use];
    bool expands = r->packed >> u & 1 || (r->crosses >> u & 1 && !(r->resident >> u & 1) && begins_load(r, use));
    return r->c->compute[use] + (expands ? r->c->size[u] / 4.0 : 0);
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
        double begin = now;
        if (lap == LAPS - MEASURED) mark = now;
        if (!copy_ahead(r, home)) return -1;
        for (int t = 0; t < c->uses; t++) {
            int u = c->unit[t];
            bool fresh = is_written(r, u) && first_of_lap(c, t);
            if (fresh && begin > r->link) r->link = begin;
            if (fresh && !begins_load(r, t)) { /* it has its place, with the bytes of before */
                r->link += c->size[u];
                if (r->link > now) now = r->link;
            }
            if (r->resident >> u & 1) {
                now += c->compute[t];
                continue;
            }
            if (begins_load(r, t) && !r->copied[t] && !bring(r, t, home)) return -1;
            brute_load *load = &r->loads[r->current[u]];
            if (load->arrived > now) now = load->arrived;
            now += compute_of(r, t);
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
    double copies = 0, compute = 0;
    for (int t = 0; t < r->c->uses; t++) {
        compute += compute_of(r, t);
        bool fresh = is_written(r, r->c->unit[t]) && first_of_lap(r->c, t);
        if (r->packed >> r->c->unit[t] & 1) continue;
        if (fresh || begins_load(r, t)) copies += r->c->size[r->c->unit[t]] - (r->crosses >> r->c->unit[t] & 1);
    }
    return copies > compute ? copies : compute;
}

static void every_ring(brute_run *r, int total, double best[BRUTE_BYTES + 1]) {
    const brute_case *c = r->c;
    int held = 0;
    for (int u = 0; u < c->units; u++) {
        held += r->resident >> u & 1 ? c->size[u] : 0;
        held += r->packed >> u & 1 ? c->size[u] - 1 : 0;
    }
    bool all = held == total;
    for (r->ring = all ? 0 : 1; held + r->ring <= (all ? held : total); r->ring++) {
        double known = best[held + r->ring];
        if (known >= 0 && known <= least_step(r)) continue;
        double step = run(r);
        for (int v = held + r->ring; step >= 0 && v <= total; v++)
            if (best[v] < 0 || step < best[v]) best[v] = step;
    }
}

static bool may_be_packed(const brute_run *r) {
    unsigned both = r->packed | r->crosses;
    bool may = !(r->packed & ~r->c->packable) && !(r->crosses & ~r->c->either) && !(both & r->resident);
    for (int u = 0; u < r->c->units; u++) may = may && (!(both >> u & 1) || r->c->size[u] > 1);
    return may;
}

void brute_force(const brute_case *c, double best[BRUTE_BYTES + 1]) {
    static _Thread_local brute_run r;
    int total = 0;
    for (int u = 0; u < c->units; u++) total += c->size[u];
    for (int v = 0; v <= BRUTE_BYTES; v++) best[v] = -1;
    r.c = c;
    unsigned keeps = c->uses > c->units ? 1u << c->uses : 1;
    for (r.resident = 0; r.resident < 1u << c->units; r.resident++)
        for (r.packed = 0; r.packed <= c->packable; r.packed++)
            for (r.crosses = 0; r.crosses <= c->either; r.crosses++)
                for (r.keep = 0; r.keep < keeps && may_be_packed(&r); r.keep++)
                    if (sensible(&r)) every_ring(&r, total, best);
}

/* ---- replay of a plan ---- */

enum { REPLAY_LAPS = 36 };

typedef struct replay_load {
    uint64_t offset, bytes;
    long last; /* use, counted through the laps, whose end lets go of the place */
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

typedef struct replay_state {
    const sth_plan_input *in;
    const sth_plan *plan;
    replay_load *loads;
    double *ends, *arrived; /* by use, counted through the laps; by load of the plan */
    bool *copied;           /* by load of the plan: in this lap */
    long count;
    double link;
} replay_state;

static bool unit_is_written(const sth_plan_input *in, uint32_t unit) {
    return in->units[unit].flags & STH_UNIT_WRITTEN && in->units[unit].bytes;
}

static void copy_chunk(replay_state *r, uint64_t bytes, double share) {
    r->link += (double)bytes * share / r->in->link_bytes_per_s * 1e9 + (double)r->in->copy_overhead_ns;
}

static double share_on_link(const sth_plan_input *in, uint32_t unit) {
    const sth_plan_unit *u = &in->units[unit];
    return u->transfer_bytes ? (double)u->transfer_bytes / (double)u->bytes : 1;
}

/* Copies load k of the lap that begins with use `lap`, before `use`. False: a chunk waits for a use that is not before
 * it. */
static bool replay_copy(replay_state *r, uint32_t k, long lap, long use, bool only_look) {
    const sth_plan_input *in = r->in;
    const sth_plan_load *planned = &r->plan->loads[k];
    long n = in->use_count, loads = r->plan->load_count;
    bool over_the_end = planned->last_use < planned->first_use;
    uint32_t held = in->uses[planned->last_use].held;
    replay_load load = {planned->ring_offset, in->units[planned->unit].bytes,
                        lap + planned->last_use + (over_the_end ? n : 0) + (held ? held : in->held_at_once) - 1};
    /* loads of more than two laps ago have all been let go */
    long oldest = r->count > 2 * loads ? r->count - 2 * loads : 0;
    for (uint64_t at = 0; at < load.bytes;) {
        uint64_t left = load.bytes - at, part = left < in->chunk_bytes ? left : in->chunk_bytes;
        uint64_t ring = r->plan->ring_bytes;
        double free_at = wait_for(r->loads, oldest, r->count, r->ends, use, load.offset + at, part, ring);
        if (free_at < 0) return false;
        at += part;
        if (only_look) continue;
        if (free_at > r->link) r->link = free_at;
        copy_chunk(r, part, share_on_link(in, planned->unit));
    }
    if (only_look) return true;
    r->arrived[k] = r->link;
    r->loads[r->count++] = load;
    return r->copied[k] = true;
}

/* What is copied of a step before it begins, in order: nothing that is written, and nothing behind what has no place
 * yet. */
static void replay_ahead(replay_state *r, long lap) {
    for (uint32_t k = 0; k < r->plan->load_count; k++) r->copied[k] = false;
    for (uint32_t k = 0; k < r->plan->load_count; k++)
        if (unit_is_written(r->in, r->plan->loads[k].unit) || !replay_copy(r, k, lap, lap, true) ||
            !replay_copy(r, k, lap, lap, false))
            return;
}

static bool first_in_step(const sth_plan_input *in, uint32_t use) {
    for (uint32_t t = 0; t < use; t++)
        if (in->uses[t].unit == in->uses[use].unit) return false;
    return true;
}

static double replay(replay_state *r) {
    const sth_plan_input *in = r->in;
    long n = in->use_count, lap = 0;
    double now = 0, mark = 0, begin = 0;
    for (long use = 0; use < n * REPLAY_LAPS; use++) {
        uint32_t t = (uint32_t)(use % n), unit = in->uses[t].unit, begins = STH_NONE;
        if (use == n * (REPLAY_LAPS - MEASURED)) mark = now;
        if (t == 0) {
            begin = now;
            lap = use;
            replay_ahead(r, lap);
        }
        for (uint32_t k = 0; k < r->plan->load_count; k++)
            if (r->plan->loads[k].first_use == t) begins = k;
        bool demand = (in->units[unit].flags & (STH_UNIT_KEEP | STH_UNIT_ON_DEMAND)) == STH_UNIT_ON_DEMAND;
        bool written = unit_is_written(in, unit) && !demand;
        bool again = written && begins == STH_NONE && first_in_step(in, t);
        if (((written && begins != STH_NONE) || again) && begin > r->link) r->link = begin;
        if (begins != STH_NONE && !r->copied[begins] && !replay_copy(r, begins, lap, use, false)) return -1;
        for (uint64_t at = 0, bytes = in->units[unit].bytes; again && at < bytes; at += in->chunk_bytes) {
            copy_chunk(r, bytes - at < in->chunk_bytes ? bytes - at : in->chunk_bytes, share_on_link(in, unit));
            if (in->chunk_bytes > bytes - at) break; /* the sum may be more than its type holds */
        }
        if (again && r->link > now) now = r->link;
        uint32_t needs = r->plan->use_load[t];
        if (needs != STH_NONE && r->arrived[needs] > now) now = r->arrived[needs];
        now += (double)in->uses[t].compute_ns;
        r->ends[use] = now;
        now += (double)in->uses[t].gap_ns;
    }
    return (now - mark) / MEASURED;
}

double brute_replay(const sth_plan_input *in, const sth_plan *plan) {
    size_t n = (size_t)in->use_count * REPLAY_LAPS;
    replay_state r = {.in = in, .plan = plan, .loads = calloc(n + 1, sizeof *r.loads)};
    r.ends = calloc(n + 1, sizeof *r.ends);
    r.arrived = calloc(plan->load_count + 1, sizeof *r.arrived);
    r.copied = calloc(plan->load_count + 1, sizeof *r.copied);
    double step = r.loads && r.ends && r.arrived && r.copied ? replay(&r) : -1;
    free(r.loads);
    free(r.ends);
    free(r.arrived);
    free(r.copied);
    return step;
}
