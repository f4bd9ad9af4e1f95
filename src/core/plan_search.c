/* Searches for the residents and the ring that give the shortest simulated step.
 *
 * A choice of residents leaves the rest of the budget to the ring, so the search is over residents: first a
 * coarse pass over ring sizes, each with residents spread evenly in several ways, then local search from the
 * best few, led by where the simulation shows compute waiting. The number of simulations is bounded by the
 * input's size, and chance comes from a fixed seed: the same input gives the same plan.
 * Invariant: a candidate's residents and ring together never exceed the room. No locks. */
#include "core/plan.h"

#include <math.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

enum {
    MOST_TRIALS = 1500,     /* simulations for short timelines */
    LEAST_TRIALS = 24,      /* and for the longest */
    USES_TIMES_TRIALS = 2400000,
    KEPT = 4,               /* candidates that local search starts from */
    COARSE_RINGS = 28,
    HOLD_STEPS = 4
};

typedef struct candidate {
    uint8_t *resident; /* [unit_count] */
    uint64_t resident_bytes;
    sthi_choice choice;
    double step_ns;
    double link_ns;
} candidate;

typedef struct search {
    const sthi_plan_world *w;
    sthi_pipe *pipe;
    uint64_t room, least_ring;
    double floor_ns;     /* no plan is faster */
    uint32_t trials, most_trials;
    uint64_t chance;
    candidate kept[KEPT];
    uint32_t kept_count;
    candidate work;
    uint32_t *by_size;   /* [order_count] indices into order, largest first */
} search;

static uint64_t size_at(const search *s, uint32_t i) { return s->w->in->units[s->w->order[i]].bytes; }

static uint32_t chance_below(search *s, uint32_t n) {
    s->chance = s->chance * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((s->chance >> 32) * n) >> 32);
}

static void copy_candidate(const search *s, candidate *to, const candidate *from) {
    uint8_t *own = to->resident;
    memcpy(own, from->resident, s->w->in->unit_count);
    *to = *from;
    to->resident = own;
}

/* Prices one choice for the residents in `c` and keeps it there if it is better than what c had. */
static void try_choice(search *s, candidate *c, sthi_choice choice) {
    if (choice.ring == 0 || s->trials >= s->most_trials) return;
    sthi_pipe_build_loads(s->pipe, s->w, c->resident, choice.hold);
    double link_ns = sthi_pipe_link_ns(s->pipe, s->w->in);
    if (link_ns >= c->step_ns || !sthi_pipe_place(s->pipe, s->w->in, choice.ring, choice.homes)) return;
    s->trials++;
    sthi_price price = sthi_pipe_simulate(s->pipe, s->w->in, choice.ring);
    if (!price.runs || price.step_ns >= c->step_ns) return;
    c->choice = choice;
    c->step_ns = price.step_ns;
    c->link_ns = price.link_ns;
}

/* The smallest ring that gives the same whole number of turns as `ring`. */
static uint64_t even_ring(const search *s, uint64_t lap_bytes, uint64_t ring) {
    uint64_t turns = (lap_bytes + ring - 1) / ring, rounded;
    if (!sthi_round_up((lap_bytes + turns - 1) / turns, s->w->in->ring_granularity, &rounded)) return ring;
    return sthi_min_u64(rounded, ring);
}

/* Prices the residents in `c` with every layout that makes sense for them; leaves the best in c. */
static void price_once(search *s, candidate *c) {
    const sth_plan_input *in = s->w->in;
    uint64_t ring = s->room - c->resident_bytes, lap = s->w->stream_bytes - c->resident_bytes;
    ring -= ring % in->ring_granularity;
    if (ring == 0) return;
    if (in->ring_mapped_twice)
        try_choice(s, c, (sthi_choice){even_ring(s, lap, ring), 0, STHI_HOMES_EVEN});
    try_choice(s, c, (sthi_choice){ring, 0, STHI_HOMES_ROW});
}

static void price_reuse(search *s, candidate *c) {
    const sth_plan_input *in = s->w->in;
    uint64_t ring = s->room - c->resident_bytes;
    ring -= ring % in->ring_granularity;
    if (ring == 0) return;
    for (uint64_t i = 0; i <= HOLD_STEPS; i++) {
        uint64_t hold = ring / HOLD_STEPS * i;
        try_choice(s, c, (sthi_choice){ring, hold, STHI_HOMES_TURNING});
    }
    if (in->ring_mapped_twice) try_choice(s, c, (sthi_choice){ring, 0, STHI_HOMES_EVEN});
}

static void price(search *s, candidate *c) {
    c->step_ns = INFINITY;
    if (c->resident_bytes > s->room) return;
    if (s->w->reuse)
        price_reuse(s, c);
    else
        price_once(s, c);
}

static bool better(const candidate *a, const candidate *b) {
    if (a->step_ns != b->step_ns) return a->step_ns < b->step_ns;
    return a->link_ns < b->link_ns;
}

/* Keeps the few best, in order, each with different residents. */
static void keep(search *s, const candidate *c) {
    uint32_t at = s->kept_count;
    for (uint32_t i = 0; i < s->kept_count; i++)
        if (memcmp(s->kept[i].resident, c->resident, s->w->in->unit_count) == 0) at = i;
    if (at == KEPT) at = KEPT - 1;
    if (!isfinite(c->step_ns) || (at < s->kept_count && !better(c, &s->kept[at]))) return;
    if (at == s->kept_count) s->kept_count++;
    copy_candidate(s, &s->kept[at], c);
    for (; at > 0 && better(&s->kept[at], &s->kept[at - 1]); at--) {
        candidate other = s->kept[at];
        s->kept[at] = s->kept[at - 1];
        s->kept[at - 1] = other;
    }
}

/* ---- residents for a given ring ---- */

typedef enum spread {
    SPREAD_TIME,  /* streamed bytes follow compute time */
    SPREAD_BYTES, /* streamed bytes follow bytes */
    SPREAD_BOTH,  /* half and half */
    SPREAD_LARGE, /* the largest stay, the size that fits in part follows bytes */
    SPREAD_OFTEN, /* the most often used stay, the rest follows bytes */
    SPREADS
} spread;

static void set_resident(search *s, candidate *c, uint32_t i, bool resident) {
    uint8_t *flag = &c->resident[s->w->order[i]];
    if (*flag == resident) return;
    *flag = resident;
    c->resident_bytes += resident ? size_at(s, i) : 0 - size_at(s, i);
}

static bool is_resident(const search *s, const candidate *c, uint32_t i) {
    return c->resident[s->w->order[i]];
}

/* Time from this unit's first use to the next one's, round the step's end. */
static double time_at(const search *s, uint32_t i) {
    const sthi_plan_world *w = s->w;
    uint32_t t = w->order_use[i], until = i + 1 < w->order_count ? w->order_use[i + 1] : w->order_use[0];
    double sum = 0;
    do {
        sum += (double)w->in->uses[t].compute_ns + (double)w->in->uses[t].gap_ns;
        t = t + 1 == w->in->use_count ? 0 : t + 1;
    } while (t != until);
    return sum;
}

/* Larger ranks stay before smaller ones; within one rank residents are spread. */
static uint64_t rank_of(const search *s, spread how, uint32_t i) {
    if (how == SPREAD_LARGE) return size_at(s, i);
    if (how == SPREAD_OFTEN) return s->w->unit_uses[s->w->order[i]];
    return 0;
}

/* The lowest rank whose members and all above fit into `target` only in part. */
static uint64_t split_rank(const search *s, spread how, uint64_t ring, uint64_t target) {
    uint64_t rank = UINT64_MAX;
    for (;;) {
        uint64_t next = 0, above = 0;
        bool found = false;
        for (uint32_t i = 0; i < s->w->order_count; i++) {
            uint64_t r = rank_of(s, how, i);
            if (size_at(s, i) > ring || r >= rank) above += size_at(s, i);
            if (r < rank && (!found || r > next)) next = r, found = true;
        }
        if (above > target || !found) return rank;
        rank = next;
    }
}

/* Error diffusion: each unit adds its share of the bytes that must stream, and streams when the sum has
 * reached the middle of it. */
static void diffuse(search *s, candidate *c, spread how, uint64_t ring, uint64_t target, uint64_t rank) {
    double bytes = 0, owed = 0;
    for (uint32_t i = 0; i < s->w->order_count; i++) {
        bool here = size_at(s, i) <= ring && rank_of(s, how, i) == rank;
        if (here) bytes += (double)size_at(s, i);
        if (!here && (size_at(s, i) > ring || rank_of(s, how, i) > rank)) set_resident(s, c, i, true);
    }
    double stream = bytes - ((double)target - (double)c->resident_bytes);
    double by_time = how == SPREAD_TIME ? 1 : how == SPREAD_BOTH ? 0.5 : 0;
    if (s->w->compute_ns == 0) by_time = 0;
    for (uint32_t i = 0; i < s->w->order_count; i++) {
        double size = (double)size_at(s, i), share = (1 - by_time) * size / bytes;
        if (by_time > 0) share += by_time * time_at(s, i) / (double)s->w->compute_ns;
        if (is_resident(s, c, i) || rank_of(s, how, i) != rank) continue;
        owed += stream * share;
        if (owed >= size / 2)
            owed -= size;
        else if (size_at(s, i) <= target - c->resident_bytes)
            set_resident(s, c, i, true);
    }
}

/* Makes more units resident, largest first, evenly within each size. */
static void fill(search *s, candidate *c, uint64_t target) {
    uint32_t n = s->w->order_count;
    for (uint32_t first = 0, next; first < n; first = next) {
        uint64_t size = size_at(s, s->by_size[first]), count = 0;
        for (next = first; next < n && size_at(s, s->by_size[next]) == size; next++)
            count += !is_resident(s, c, s->by_size[next]);
        uint64_t take = sthi_min_u64(count, (target - c->resident_bytes) / size), seen = 0;
        if (take == 0) continue;
        for (uint32_t j = first; j < next; j++) {
            if (is_resident(s, c, s->by_size[j])) continue;
            uint64_t before = (seen * take + count / 2) / count;
            seen++;
            if ((seen * take + count / 2) / count != before) set_resident(s, c, s->by_size[j], true);
        }
    }
}

/* Changes one resident for a larger unit where that fills the target best. False if nothing does. */
static bool exchange(search *s, candidate *c, uint64_t target) {
    uint32_t n = s->w->order_count, in = 0, best_in = 0, best_out = 0;
    uint64_t left = target - c->resident_bytes, gain = 0;
    for (uint32_t out = 0; out < n && gain < left; out++) {
        if (!is_resident(s, c, s->by_size[out])) continue;
        uint64_t size = size_at(s, s->by_size[out]), limit = size + left;
        while (in < n && (is_resident(s, c, s->by_size[in]) || size_at(s, s->by_size[in]) > limit)) in++;
        if (in == n) break;
        uint64_t larger = size_at(s, s->by_size[in]);
        if (larger <= size || larger - size <= gain) continue;
        gain = larger - size;
        best_in = in;
        best_out = out;
    }
    if (gain == 0) return false;
    set_resident(s, c, s->by_size[best_out], false);
    set_resident(s, c, s->by_size[best_in], true);
    return true;
}

static void try_ring(search *s, uint64_t ring, spread how) {
    candidate *c = &s->work;
    if (ring < s->least_ring || ring > s->room) return;
    uint64_t target = s->room - ring;
    memset(c->resident, 0, s->w->in->unit_count);
    c->resident_bytes = 0;
    uint64_t rank = split_rank(s, how, ring, target), forced = 0;
    for (uint32_t i = 0; i < s->w->order_count; i++)
        if (size_at(s, i) > ring) forced += size_at(s, i);
    if (forced > target) return;
    diffuse(s, c, how, ring, target, rank);
    fill(s, c, target);
    for (int i = 0; i < 4 && exchange(s, c, target); i++) fill(s, c, target);
    price(s, c);
    keep(s, c);
}

/* ---- the coarse pass ---- */

static void try_spreads(search *s, uint64_t ring) {
    bool thorough = s->most_trials >= MOST_TRIALS / 4;
    for (int how = 0; how < SPREADS; how++) {
        if (how == SPREAD_OFTEN && !s->w->reuse) continue;
        if (!thorough && how != SPREAD_TIME && how != (s->w->reuse ? SPREAD_OFTEN : SPREAD_LARGE)) continue;
        try_ring(s, ring, (spread)how);
    }
}

/* With every byte of the room in use, a lap is a whole number of turns of these rings: the bytes that do
 * not fit, over one turn less. */
static void coarse_turns(search *s, uint32_t rings) {
    uint64_t over = s->w->stream_bytes - s->room;
    uint64_t few = (over + s->room - 1) / s->room, many = sthi_max_u64(over / s->least_ring, few);
    double factor = pow((double)many / (double)few, 1.0 / rings);
    uint64_t last = 0;
    for (double x = (double)few; last < many; x *= factor) {
        uint64_t turns = sthi_max_u64(sthi_min_u64((uint64_t)(x + 0.5), many), last + 1);
        x = fmax(x, (double)turns);
        try_spreads(s, (over + turns - 1) / turns);
        last = turns;
    }
}

static void coarse_geometric(search *s, uint32_t rings) {
    double low = (double)s->least_ring, factor = pow((double)s->room / low, 1.0 / rings);
    for (uint32_t i = 0; i <= rings; i++, low *= factor) try_spreads(s, (uint64_t)low);
}

/* Rings of one, two and three units of each of the few largest sizes. */
static void coarse_sizes(search *s, uint32_t most) {
    uint64_t size = 0;
    for (uint32_t j = 0; j < s->w->order_count && most > 0; j++) {
        if (size_at(s, s->by_size[j]) == size) continue;
        size = size_at(s, s->by_size[j]);
        for (uint64_t times = 1; times <= 3; times++) try_spreads(s, size * times);
        most--;
    }
}

static void refine_ring(search *s) {
    if (s->kept_count == 0) return;
    uint64_t ring = s->kept[0].choice.ring;
    static const int sixty_fourths[] = {-1, 1, -2, 2, -4, 4, -8, 8, -12, 12};
    for (size_t i = 0; i < sizeof sixty_fourths / sizeof *sixty_fourths; i++)
        try_spreads(s, (uint64_t)((double)ring * (1 + sixty_fourths[i] / 64.0)));
}

/* ---- local search ---- */

/* A streamed unit, more likely one that compute waited for. */
static uint32_t pick_streamed(search *s, const candidate *c) {
    uint32_t best = STH_NONE, found = 0;
    for (uint32_t tries = 0; tries < 24 && found < 3; tries++) {
        uint32_t i = chance_below(s, s->w->order_count);
        if (is_resident(s, c, i)) continue;
        const double *stall = s->pipe->stall;
        if (best == STH_NONE || stall[s->w->order_use[i]] > stall[s->w->order_use[best]]) best = i;
        found++;
    }
    return best;
}

/* A resident unit, half of the time one near `near`. */
static uint32_t pick_resident(search *s, const candidate *c, uint32_t near) {
    uint32_t n = s->w->order_count, start = chance_below(s, 2) ? near : chance_below(s, n);
    bool up = chance_below(s, 2);
    for (uint32_t d = 1; d <= n && d <= 64; d++) {
        uint32_t i = (up ? start + d : start + n - d % n) % n;
        if (is_resident(s, c, i)) return i;
    }
    return STH_NONE;
}

/* One change of residents. */
static void move(search *s, candidate *c) {
    uint32_t kind = chance_below(s, 8), in = pick_streamed(s, c);
    uint32_t out = pick_resident(s, c, in == STH_NONE ? 0 : in);
    if (in != STH_NONE && kind != 6) set_resident(s, c, in, true);
    if (out != STH_NONE && kind != 7) set_resident(s, c, out, false);
    if (kind == 4 || kind == 5) {
        in = pick_streamed(s, c);
        out = pick_resident(s, c, out == STH_NONE ? 0 : out);
        if (in != STH_NONE && chance_below(s, 2)) set_resident(s, c, in, true);
        if (out != STH_NONE && chance_below(s, 2)) set_resident(s, c, out, false);
    }
}

static void improve(search *s, candidate *best, uint32_t most_trials) {
    uint32_t first = s->trials;
    for (uint32_t round = 0; s->trials - first < most_trials && s->trials < s->most_trials &&
                             round < 8 * most_trials;
         round++) {
        if (best->step_ns <= s->floor_ns * 1.0001) return;
        copy_candidate(s, &s->work, best);
        move(s, &s->work);
        if (s->work.resident_bytes > s->room) continue;
        price(s, &s->work);
        if (s->work.step_ns <= best->step_ns) copy_candidate(s, best, &s->work);
    }
}

/* ---- the whole ---- */

static void search_fini(search *s) {
    for (uint32_t i = 0; i < KEPT; i++) sthi_free(s->kept[i].resident);
    sthi_free(s->work.resident);
    sthi_free(s->by_size);
}

static void sort_by_size(search *s, uint32_t *scratch) {
    uint32_t n = s->w->order_count;
    uint32_t *from = s->by_size, *to = scratch;
    for (uint32_t i = 0; i < n; i++) from[i] = i;
    for (uint32_t width = 1; width < n; width *= 2) {
        for (uint32_t lo = 0; lo < n; lo += 2 * width) {
            uint32_t a = lo, mid = lo + width < n ? lo + width : n, b = mid;
            uint32_t end = mid + width < n ? mid + width : n;
            for (uint32_t k = lo; k < end; k++) {
                bool left = b == end || (a < mid && size_at(s, from[a]) >= size_at(s, from[b]));
                to[k] = left ? from[a++] : from[b++];
            }
        }
        uint32_t *other = from;
        from = to;
        to = other;
    }
    if (from != s->by_size) memcpy(s->by_size, from, n * sizeof *from);
}

static sth_status search_init(search *s) {
    uint32_t units = s->w->in->unit_count;
    bool ok = true;
    for (uint32_t i = 0; i < KEPT; i++)
        ok = (s->kept[i].resident = sthi_zalloc(units, 1)) != NULL && ok;
    ok = (s->work.resident = sthi_zalloc(units, 1)) != NULL && ok;
    ok = (s->by_size = sthi_zalloc(s->w->order_count, sizeof *s->by_size)) != NULL && ok;
    uint32_t *scratch = ok ? sthi_zalloc(s->w->order_count, sizeof *scratch) : NULL;
    if (!scratch) {
        search_fini(s);
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory to plan; free host memory");
    }
    sort_by_size(s, scratch);
    sthi_free(scratch);
    return STH_OK;
}

static void try_smallest(search *s, const sthi_choice *smallest) {
    candidate *c = &s->work;
    memset(c->resident, 0, s->w->in->unit_count);
    c->resident_bytes = 0;
    c->step_ns = INFINITY;
    try_choice(s, c, *smallest);
    keep(s, c);
}

sth_status sthi_plan_search(const sthi_plan_world *w, sthi_pipe *pipe, uint64_t room,
                            const sthi_choice *smallest, uint64_t least_bytes, uint8_t *resident,
                            sthi_choice *out_choice) {
    search s = {.w = w, .pipe = pipe, .room = room, .chance = 20240229};
    uint64_t trials = USES_TIMES_TRIALS / (w->in->use_count ? w->in->use_count : 1);
    s.most_trials = (uint32_t)sthi_max_u64(LEAST_TRIALS, sthi_min_u64(trials, MOST_TRIALS));
    s.least_ring = w->in->ring_granularity;
    for (uint32_t i = 0; i < w->order_count; i++)
        if (i == 0 || w->in->units[w->order[i]].bytes < s.least_ring) s.least_ring = w->in->units[w->order[i]].bytes;
    s.floor_ns = fmax((double)w->compute_ns, (double)least_bytes * 1e9 / w->in->link_bytes_per_s);
    STHI_TRY(search_init(&s));
    try_smallest(&s, smallest);
    uint32_t all = s.most_trials, rings = (uint32_t)sthi_min_u64(COARSE_RINGS, all / 8);
    s.most_trials = all / 2;
    if (!w->reuse && w->in->ring_mapped_twice)
        coarse_turns(&s, rings);
    else
        coarse_geometric(&s, rings);
    coarse_sizes(&s, rings / 6);
    s.most_trials = all * 5 / 8;
    refine_ring(&s);
    s.most_trials = all;
    for (uint32_t i = 0; i < s.kept_count; i++) improve(&s, &s.kept[i], (all - s.trials) / (i == 0 ? 2 : 3));
    const candidate *best = &s.kept[0];
    for (uint32_t i = 1; i < s.kept_count; i++)
        if (better(&s.kept[i], best)) best = &s.kept[i];
    bool found = s.kept_count > 0;
    if (found) {
        memcpy(resident, best->resident, w->in->unit_count);
        *out_choice = best->choice;
    }
    search_fini(&s);
    return found ? STH_OK
                 : sthi_fail(STH_INTERNAL, NULL, 0, NULL, "the planner found no plan for a sufficient budget");
}
