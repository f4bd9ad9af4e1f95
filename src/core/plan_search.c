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
    MOST_TRIALS_SHORT = 5000, /* simulations for the shortest timelines */
    SHORT_USES_TIMES_TRIALS = 100000,
    MOST_TRIALS = 1000,       /* for those of more than SHORT_USES_TIMES_TRIALS / MOST_TRIALS uses */
    LEAST_TRIALS = 40,        /* and for the longest */
    USES_TIMES_TRIALS = 2000000,
    KEPT = 4,                 /* candidates that local search starts from */
    COARSE_RINGS = 28,
    HOLD_STEPS = 4,
    REJECTED_A_TRIAL = 4,     /* that cost as much as one simulation */
    TINY = 8,                 /* streamable units up to which every set of residents is priced */
    TINY_RINGS = 24           /* with so many rings */
};

typedef struct candidate {
    uint8_t *resident; /* [unit_count] */
    uint8_t *anew;     /* [use_count] the use loads its unit even where choice.hold would keep it */
    uint64_t resident_bytes;
    sthi_choice choice;
    double price_ns;
    double link_ns;
} candidate;

typedef struct search {
    const sthi_plan_world *w;
    sthi_pipe *pipe;
    uint64_t room, least_ring;
    uint64_t asked_ring; /* by the input; 0 once nothing is found with so much */
    uint64_t present_bytes; /* of units that are PRESENT, where changes cost something */
    double floor_ns;     /* no plan is faster */
    uint32_t trials;      /* simulations so far */
    uint32_t rejected;    /* choices whose copies alone took too long: no simulation, but some work as well */
    uint32_t most_trials; /* allowed in this phase */
    uint32_t all_trials;  /* allowed in all */
    uint64_t chance;
    candidate kept[KEPT];
    uint32_t kept_count;
    candidate work;
    uint32_t *by_size;   /* [order_count] indices into order, largest first */
} search;

static uint64_t size_at(const search *s, uint32_t i) { return s->w->in->units[s->w->order[i]].bytes; }

static void set_resident(search *s, candidate *c, uint32_t i, bool resident) {
    uint8_t *flag = &c->resident[s->w->order[i]];
    if (*flag == resident || (s->w->in->units[s->w->order[i]].flags & STHI_UNIT_STAYS_PACKED)) return;
    *flag = resident;
    c->resident_bytes += resident ? size_at(s, i) : 0 - size_at(s, i);
}

static void none_resident(search *s, candidate *c) {
    memset(c->resident, 0, s->w->in->unit_count);
    c->resident_bytes = 0;
}

static bool is_resident(const search *s, const candidate *c, uint32_t i) {
    return c->resident[s->w->order[i]];
}

static uint32_t chance_below(search *s, uint32_t n) {
    s->chance = s->chance * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((s->chance >> 32) * n) >> 32);
}

static void copy_candidate(const search *s, candidate *to, const candidate *from) {
    uint8_t *resident = to->resident, *anew = to->anew;
    memcpy(resident, from->resident, s->w->in->unit_count);
    memcpy(anew, from->anew, s->w->in->use_count);
    *to = *from;
    to->resident = resident;
    to->anew = anew;
}

/* Prices one choice for the residents in `c` and keeps it there if it is better than what c had. */
static void try_choice(search *s, candidate *c, sthi_choice choice) {
    if (choice.ring < s->asked_ring) return;
    if (choice.ring > s->room - c->resident_bytes || s->trials >= s->most_trials) return;
    if (c->price_ns <= s->floor_ns) return;
    sthi_pipe_build_loads(s->pipe, s->w, c->resident, choice.hold, c->anew);
    double link_ns = fmax(sthi_pipe_link_ns(s->pipe, s->w->in), sthi_pipe_disk_ns(s->pipe, s->w->in));
    if (link_ns >= c->price_ns || !sthi_pipe_place(s->pipe, s->w->in, choice.ring, choice.homes)) {
        /* The limit of a search that has none from its caller leaves room for them. */
        if (s->w->in->most_simulations && ++s->rejected % REJECTED_A_TRIAL == 0) s->trials++;
        return;
    }
    s->trials++;
    sthi_pipe_note_missing(s->pipe, s->w, c->resident);
    sthi_price price = sthi_pipe_simulate(s->pipe, s->w->in, choice.ring, c->price_ns);
    if (!price.runs || price.price_ns >= c->price_ns) return;
    c->choice = choice;
    c->price_ns = price.price_ns;
    c->link_ns = price.link_ns;
}

/* Rounds up to the ring's granularity. */
static uint64_t whole_grains(const search *s, uint64_t bytes) {
    uint64_t grain = s->w->in->ring_granularity;
    return bytes + (grain - bytes % grain) % grain;
}

/* The smallest ring that gives the same whole number of turns as `ring`. */
static uint64_t even_ring(const search *s, uint64_t lap_bytes, uint64_t ring) {
    uint64_t turns = (lap_bytes + ring - 1) / ring;
    return sthi_min_u64(whole_grains(s, (lap_bytes + turns - 1) / turns), ring);
}

/* The bytes of `count` neighbouring streamed units from the i-th unit on: rings of such a size let a row
 * start again at its beginning without waste. */
static uint64_t run_bytes(const search *s, const candidate *c, uint32_t i, uint32_t count) {
    uint64_t sum = 0;
    for (uint32_t seen = 0; seen < s->w->order_count && count > 0; seen++) {
        uint32_t at = (i + seen) % s->w->order_count;
        if (is_resident(s, c, at)) continue;
        sum += size_at(s, at);
        count--;
    }
    return sum;
}

static void try_homes(search *s, candidate *c, uint64_t ring, uint64_t hold) {
    if (s->w->reuse) try_choice(s, c, (sthi_choice){ring, hold, STHI_HOMES_TURNING});
    if (!s->w->reuse || s->w->order_count <= TINY)
        try_choice(s, c, (sthi_choice){ring, hold, STHI_HOMES_ROW});
    if (s->w->holds) try_choice(s, c, (sthi_choice){ring, hold, STHI_HOMES_APART});
}

/* False for timelines so long that only few simulations are to be had. */
static bool thorough(const search *s) { return s->all_trials >= MOST_TRIALS / 4; }

static void try_holds(search *s, candidate *c, uint64_t ring) {
    uint64_t steps = thorough(s) ? HOLD_STEPS : 2;
    if (s->w->order_count <= TINY) steps = 2 * HOLD_STEPS;
    try_homes(s, c, ring, 0);
    if (s->w->reuse) try_homes(s, c, ring, 1);
    for (uint64_t i = 1; i <= steps && s->w->reuse; i++) try_homes(s, c, ring, ring / steps * i);
}

/* A ring below what there is room for may suit the row better: one by chance. */
static void try_smaller_ring(search *s, candidate *c, uint64_t ring) {
    uint64_t sum = 0, next;
    uint32_t n = s->w->order_count, i = chance_below(s, n);
    for (uint32_t count = 1; count < 64 && (next = run_bytes(s, c, i, count)) < ring && next > sum; count++)
        sum = next;
    if (sum > 0) try_homes(s, c, whole_grains(s, sum), c->choice.hold);
}

static uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The step in which rings of few units are tried: places and chunks meet at multiples of their common
 * divisor, but no more than TINY_RINGS of them are tried. */
static uint64_t ring_step(const search *s) {
    uint64_t step = s->w->in->chunk_bytes <= s->w->largest ? s->w->in->chunk_bytes : 0;
    for (uint32_t i = 0; i < s->w->order_count; i++) step = common_divisor(size_at(s, i), step);
    return whole_grains(s, sthi_max_u64(step, s->room / TINY_RINGS));
}

/* All such rings worth trying. */
static void try_smaller_rings(search *s, candidate *c, uint64_t ring) {
    uint64_t tried[TINY * TINY + TINY_RINGS], step = ring_step(s);
    uint32_t n = s->w->order_count, count = 0;
    for (uint64_t sum = step; sum < ring && count < TINY_RINGS; sum += step) tried[count++] = sum;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t length = 1; !is_resident(s, c, i) && length < n; length++) {
            uint64_t sum = whole_grains(s, run_bytes(s, c, i, length));
            uint32_t j = 0;
            while (j < count && tried[j] != sum) j++;
            if (j == count && sum < ring) tried[count++] = sum;
        }
    for (uint32_t i = 0; i < count; i++) try_holds(s, c, tried[i]);
}

/* Prices the residents in `c` with every layout that makes sense for them; leaves the best in c. */
static void price(search *s, candidate *c) {
    const sth_plan_input *in = s->w->in;
    if (c->resident_bytes > s->room) return;
    uint64_t ring = s->room - c->resident_bytes, lap = s->w->stream_bytes - c->resident_bytes;
    ring -= ring % in->ring_granularity;
    if (ring == 0) return;
    if (in->ring_mapped_twice)
        try_choice(s, c, (sthi_choice){s->w->reuse ? ring : even_ring(s, lap, ring), 0, STHI_HOMES_EVEN});
    try_holds(s, c, ring);
    if (s->w->order_count <= TINY)
        try_smaller_rings(s, c, ring);
    else
        try_smaller_ring(s, c, ring);
}

/* The same for a small change: with the layout that c had, and one other by chance. */
static void price_change(search *s, candidate *c) {
    const sth_plan_input *in = s->w->in;
    if (!s->w->reuse) {
        price(s, c);
        return;
    }
    if (c->resident_bytes > s->room) return;
    sthi_choice choice = c->choice;
    choice.ring = s->room - c->resident_bytes;
    choice.ring -= choice.ring % in->ring_granularity;
    if (choice.ring == 0) return;
    if (choice.hold > choice.ring) choice.hold = choice.ring;
    try_choice(s, c, choice);
    choice.hold = chance_below(s, 2) ? choice.ring / 64 * chance_below(s, 65) + 1 : choice.hold;
    if (s->w->order_count <= TINY) choice.homes = chance_below(s, 2) ? STHI_HOMES_ROW : STHI_HOMES_TURNING;
    uint32_t i = chance_below(s, s->w->order_count), run = 1 + chance_below(s, s->w->order_count);
    uint64_t ring = whole_grains(s, run_bytes(s, c, i, run));
    if (ring < choice.ring && chance_below(s, 2)) choice.ring = ring;
    try_choice(s, c, choice);
}

static bool better(const candidate *a, const candidate *b) {
    if (a->price_ns != b->price_ns) return a->price_ns < b->price_ns;
    return a->link_ns < b->link_ns;
}

/* Keeps the few best, in order, each with different residents. */
static void keep(search *s, const candidate *c) {
    uint32_t at = s->kept_count;
    for (uint32_t i = 0; i < s->kept_count; i++)
        if (memcmp(s->kept[i].resident, c->resident, s->w->in->unit_count) == 0) at = i;
    if (at == KEPT) at = KEPT - 1;
    if (!isfinite(c->price_ns) || (at < s->kept_count && !better(c, &s->kept[at]))) return;
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
    SPREAD_DEAR,  /* what is read from the disk stays first, then what saves more of the link for its size; tried where
                     units differ in that */
    SPREAD_PRESENT, /* what is PRESENT stays first; tried where some is, and the first lap counts */
    SPREAD_NEAR     /* as SPREAD_TIME, but what is PRESENT goes later, and what is not sooner, by half a ring; tried as
                       SPREAD_PRESENT is */
} spread;

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

enum { DEAREST = 17 }; /* from the disk; below it, sixteenths of its bytes that a use of the unit sends over the link */

/* Not inline: rank_of is called for all units over and over, and hardly ever for this. */
static __attribute__((noinline)) uint64_t dearness(const search *s, uint32_t unit) {
    if (sthi_from_disk(s->w->in, unit)) return DEAREST;
    double saved = (double)sthi_wire_bytes(s->w->in, unit) / (double)s->w->in->units[unit].bytes;
    if (sthi_is_written(s->w->in, unit)) saved -= saved / s->w->unit_uses[unit]; /* one comes all the same */
    return (uint64_t)ceil(16.0 * saved);
}

static bool is_present(const search *s, uint32_t i) {
    return s->w->in->units[s->w->order[i]].flags & STH_UNIT_PRESENT;
}

/* Larger ranks stay before smaller ones; within one rank residents are spread. */
static uint64_t rank_of(const search *s, spread how, uint32_t i) {
    if (how == SPREAD_LARGE) return size_at(s, i);
    if (how == SPREAD_OFTEN) return s->w->unit_uses[s->w->order[i]];
    if (how == SPREAD_DEAR) return dearness(s, s->w->order[i]);
    if (how == SPREAD_PRESENT) return is_present(s, i);
    return 0;
}

/* Bytes of the units that are larger than the ring or of at least this rank. */
static uint64_t bytes_from_rank(const search *s, spread how, uint64_t ring, uint64_t rank) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < s->w->order_count; i++)
        if (size_at(s, i) > ring || rank_of(s, how, i) >= rank) sum += size_at(s, i);
    return sum;
}

/* The rank of which only a part can stay: the largest from which on everything is more than `target`. */
static uint64_t split_rank(const search *s, spread how, uint64_t ring, uint64_t target) {
    uint64_t low = 0, high = 0;
    if (how == SPREAD_LARGE) high = s->w->largest;
    if (how == SPREAD_OFTEN) high = s->w->in->use_count;
    if (how == SPREAD_DEAR) high = DEAREST;
    if (how == SPREAD_PRESENT) high = 1;
    while (low < high) {
        uint64_t middle = high - (high - low) / 2;
        if (bytes_from_rank(s, how, ring, middle) > target)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
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
    double by_time = how == SPREAD_BOTH ? 0.5 : 0;
    if (how == SPREAD_TIME || how == SPREAD_NEAR) by_time = 1;
    if (s->w->compute_ns == 0) by_time = 0;
    for (uint32_t i = 0; i < s->w->order_count; i++) {
        double size = (double)size_at(s, i), share = (1 - by_time) * size / bytes;
        if (by_time > 0) share += by_time * time_at(s, i) / (double)s->w->compute_ns;
        if (is_resident(s, c, i) || rank_of(s, how, i) != rank) continue;
        owed += stream * share;
        double late = how == SPREAD_NEAR ? (double)ring / 2 : 0;
        if (owed >= size / 2 + (is_present(s, i) ? late : -late))
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
    none_resident(s, c);
    uint64_t rank = split_rank(s, how, ring, target), forced = 0;
    for (uint32_t i = 0; i < s->w->order_count; i++)
        if (size_at(s, i) > ring) forced += size_at(s, i);
    if (forced > target) return;
    diffuse(s, c, how, ring, target, rank);
    fill(s, c, target);
    for (int i = 0; i < 4 && exchange(s, c, target); i++) fill(s, c, target);
    c->price_ns = INFINITY;
    price(s, c);
    keep(s, c);
}

/* ---- the coarse pass ---- */

/* What may stream is not all as dear to bring. */
static bool mixed(const search *s) {
    bool disk = s->w->disk_bytes && s->w->disk_bytes < s->w->stream_bytes;
    bool written = s->w->written_bytes && s->w->written_bytes < s->w->stream_bytes;
    return disk || written || s->w->dearest > s->w->cheapest + 1.0 / 16;
}

static void try_spreads(search *s, uint64_t ring) {
    if (s->present_bytes) try_ring(s, ring, SPREAD_PRESENT);
    if (s->present_bytes) try_ring(s, ring, SPREAD_NEAR);
    if (mixed(s)) try_ring(s, ring, SPREAD_DEAR);
    if (!thorough(s)) {
        try_ring(s, ring, SPREAD_TIME);
        if (s->w->reuse || !s->present_bytes) try_ring(s, ring, s->w->reuse ? SPREAD_OFTEN : SPREAD_LARGE);
        return;
    }
    for (int how = 0; how < SPREAD_DEAR; how++)
        if (how != SPREAD_OFTEN || s->w->reuse) try_ring(s, ring, (spread)how);
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
    double low = (double)s->least_ring, high = (double)s->room;
    if (!thorough(s)) {
        low = fmin(2 * (double)s->w->largest, high);
        high = fmin(32 * (double)s->w->largest, high);
    }
    double factor = pow(high / low, 1.0 / rings);
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
    if (s->w->reuse && chance_below(s, 2)) {
        c->anew[chance_below(s, s->w->in->use_count)] ^= 1;
        if (chance_below(s, 2)) return;
    }
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
        if (best->price_ns <= s->floor_ns * 1.0001) return;
        copy_candidate(s, &s->work, best);
        move(s, &s->work);
        if (s->work.resident_bytes > s->room) continue;
        double limit = best->price_ns + 0.1; /* as good as before is welcome: it leads on */
        s->work.price_ns = limit;
        price_change(s, &s->work);
        if (s->work.price_ns < limit) copy_candidate(s, best, &s->work);
    }
}

/* Every set of residents; only those whose copies alone take less than the best step so far cost much. */
static void try_all(search *s) {
    candidate *c = &s->work;
    double ns_per_byte = s->w->cheapest * 1e9 / s->w->in->link_bytes_per_s;
    for (uint32_t set = 0; set < 1u << s->w->order_count && s->kept[0].price_ns > s->floor_ns; set++) {
        for (uint32_t i = 0; i < s->w->order_count; i++) set_resident(s, c, i, set >> i & 1);
        c->price_ns = s->kept[0].price_ns;
        if ((double)(s->w->stream_bytes - c->resident_bytes) * ns_per_byte >= c->price_ns) continue;
        price(s, c);
        if (c->price_ns < s->kept[0].price_ns) copy_candidate(s, &s->kept[0], c);
    }
}

/* ---- the whole ---- */

static void search_fini(search *s) {
    for (uint32_t i = 0; i <= KEPT; i++) {
        candidate *c = i < KEPT ? &s->kept[i] : &s->work;
        sthi_free(c->resident);
        sthi_free(c->anew);
    }
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
    bool ok = true;
    for (uint32_t i = 0; i <= KEPT; i++) {
        candidate *c = i < KEPT ? &s->kept[i] : &s->work;
        ok = (c->resident = sthi_zalloc(s->w->in->unit_count, 1)) != NULL && ok;
        ok = (c->anew = sthi_zalloc(s->w->in->use_count, 1)) != NULL && ok;
    }
    ok = (s->by_size = sthi_zalloc(s->w->order_count, sizeof *s->by_size)) != NULL && ok;
    uint32_t *scratch = ok ? sthi_zalloc(s->w->order_count, sizeof *scratch) : NULL;
    if (!scratch) {
        search_fini(s);
        return sthi_no_memory(NULL, "a plan; free host memory");
    }
    sort_by_size(s, scratch);
    sthi_free(scratch);
    return STH_OK;
}

static void try_smallest(search *s, const sthi_choice *smallest) {
    candidate *c = &s->work;
    none_resident(s, c);
    c->price_ns = INFINITY;
    try_choice(s, c, *smallest);
    if (smallest->ring < s->asked_ring) try_choice(s, c, (sthi_choice){s->asked_ring, 0, STHI_HOMES_ROW});
    keep(s, c);
}

/* Local search from the kept candidates, or all there is for few units. */
static void refine(search *s) {
    bool tiny = s->w->order_count <= TINY;
    s->most_trials = UINT32_MAX;
    if (tiny) try_all(s);
    if (tiny && !s->w->reuse) return;
    s->most_trials = tiny ? s->trials + s->all_trials : s->all_trials;
    for (uint32_t i = 0; i < s->kept_count; i++)
        improve(s, &s->kept[i], (s->most_trials - s->trials) / (i == 0 ? 2 : 3));
    for (uint32_t i = 1; i < s->kept_count; i++)
        if (better(&s->kept[i], &s->kept[0])) copy_candidate(s, &s->kept[0], &s->kept[i]);
}

static uint64_t smallest_unit(const sthi_plan_world *w) {
    uint64_t smallest = w->largest;
    for (uint32_t i = 0; i < w->order_count; i++)
        smallest = sthi_min_u64(smallest, w->in->units[w->order[i]].bytes);
    return smallest;
}

static void search_all(search *s, const sthi_choice *smallest) {
    uint32_t all = s->all_trials, rings = all / 8 < COARSE_RINGS ? all / 8 : COARSE_RINGS;
    try_smallest(s, smallest);
    if (s->present_bytes && s->present_bytes < s->room) try_spreads(s, s->room - s->present_bytes);
    s->most_trials = all / 2;
    if (!s->w->reuse && s->w->in->ring_mapped_twice)
        coarse_turns(s, rings);
    else
        coarse_geometric(s, rings);
    coarse_sizes(s, rings / 6);
    s->most_trials = all * 5 / 8;
    refine_ring(s);
    refine(s);
}

/* For short timelines as many as take some 20 ms, from there on a number that only falls where the whole would take
 * more than half a second. */
uint32_t sthi_plan_trials(const sthi_plan_world *w) {
    uint64_t uses = w->in->use_count, bound = USES_TIMES_TRIALS / uses / (w->reuse ? 3 : 1);
    uint64_t few = sthi_min_u64(MOST_TRIALS_SHORT, SHORT_USES_TIMES_TRIALS / uses);
    uint64_t trials = sthi_max_u64(LEAST_TRIALS, sthi_min_u64(bound, sthi_max_u64(few, MOST_TRIALS)));
    if (w->in->most_simulations) trials = sthi_min_u64(trials, w->in->most_simulations);
    return (uint32_t)sthi_max_u64(LEAST_TRIALS, trials);
}

sth_status sthi_plan_search(const sthi_plan_world *w, sthi_pipe *pipe, uint64_t room,
                            const sthi_choice *smallest, uint64_t least_bytes, uint8_t *resident,
                            uint64_t *out_ring) {
    search s = {.w = w, .pipe = pipe, .room = room, .chance = 20240229, .asked_ring = w->least_ring};
    s.least_ring = sthi_max_u64(smallest_unit(w), s.asked_ring);
    s.all_trials = s.most_trials = sthi_plan_trials(w);
    for (uint32_t i = 0; w->changes && i < w->order_count; i++)
        if (is_present(&s, i)) s.present_bytes += size_at(&s, i);
    s.floor_ns = sthi_plan_least_ns(w, room, least_bytes);
    STHI_TRY(search_init(&s));
    search_all(&s, smallest);
    if (s.kept_count == 0 && s.asked_ring) {
        s.asked_ring = 0;
        s.most_trials = UINT32_MAX;
        try_smallest(&s, smallest);
    }
    sth_status status = STH_OK;
    if (s.kept_count > 0) {
        const candidate *best = &s.kept[0];
        memcpy(resident, best->resident, w->in->unit_count);
        sthi_pipe_build_loads(pipe, w, resident, best->choice.hold, best->anew);
        (void)sthi_pipe_place(pipe, w->in, best->choice.ring, best->choice.homes);
        *out_ring = best->choice.ring;
    } else {
        status = sthi_fail(STH_INTERNAL, NULL, 0, NULL, "the planner found no plan for a sufficient budget");
    }
    search_fini(&s);
    return status;
}
