/* The arithmetic of a budget that is found. See finder.h. */
#include "core/finder.h"

#include "base/arith.h"

enum {
    RESERVE_SHARE = 32,  /* of the device's memory */
    PUSH_SHARE = 4,      /* of the capacity, by which the first failure pushes: the next step is to fit */
    WORTH_GROWING = 16,  /* a new plan is made for a sixteenth more */
    LOOSE_SHARE = 8,     /* of what comes and goes in a step: what an allocator cannot use */
    EARLY_STEPS = 2,
    PATIENCE = 4,
    PATIENCE_MAX = 256,
    SOON = 64,           /* a shrink so many readings after a growth: that growth was a mistake */
    FORGIVING = 16,      /* times the patience until a margin is halved */
    STRETCH = 64         /* readings: what was not there in one to two of them is gone for good */
};
#define RESERVE_MAX (UINT64_C(1) << 30)

static bool below_ceiling(const sth_memory_reading *r) { return r->ceiling && r->ceiling < r->total; }

/* No neighbor comes below a ceiling. */
static uint64_t reserve_of(const sth_memory_reading *r) {
    if (below_ceiling(r)) return sthi_min_u64(r->ceiling / (2 * RESERVE_SHARE), RESERVE_MAX);
    return sthi_min_u64(r->total / RESERVE_SHARE, RESERVE_MAX);
}

/* ---- what is needed besides the places */

/* The most that was had, less what of it lay there between steps and has gone since. */
static uint64_t others_now(const sthi_finder *f) {
    uint64_t recent = sthi_max_u64(f->steady, sthi_max_u64(f->recent[0], f->recent[1]));
    return f->others - sthi_minus(f->others_steady, recent);
}

/* What of it comes and goes within a step. */
static uint64_t moving(const sthi_finder *f) { return sthi_minus(f->others, f->others_steady); }

/* For a step whose inputs are `growth` times as large as any before: what comes and goes grows with them. */
static uint64_t needed(const sthi_finder *f, double growth) {
    double more = (double)moving(f) * (growth > 1 ? growth - 1 : 0);
    if (!(more < (double)(UINT64_C(1) << 62))) return UINT64_MAX;
    uint64_t others = sthi_plus(others_now(f), (uint64_t)more);
    return sthi_plus(others, (moving(f) + (uint64_t)more) / LOOSE_SHARE);
}

static void see_steady(sthi_finder *f, uint64_t steady) {
    f->steady = steady;
    if (f->readings % STRETCH == STRETCH - 1) {
        f->recent[1] = f->recent[0];
        f->recent[0] = 0;
    }
    f->recent[0] = sthi_max_u64(f->recent[0], steady);
}

static void see_others(sthi_finder *f, const sth_memory_reading *r, uint64_t inside, uint64_t inside_peak) {
    /* What is ours may have changed since the peak: the most of it is never taken for somebody else's. */
    uint64_t ours = sthi_max_u64(inside_peak, f->inside);
    /* A peak that did not move is of an earlier step, unless what was ours in it was not known exactly. */
    bool fresh = f->readings && (r->framework_peak != f->peak || f->blurred);
    uint64_t peak = fresh ? sthi_minus(r->framework_peak, ours) : 0;
    f->peak = r->framework_peak;
    f->blurred = ours != inside;
    uint64_t begun = f->steady, steady = sthi_minus(r->framework_allocated, inside);
    if (peak <= steady) peak = begun = steady;
    see_steady(f, steady);
    if (peak < others_now(f)) return;
    f->others_steady = peak == f->others ? sthi_max_u64(begun, f->others_steady) : begun; /* when its step began */
    f->others = peak;
    f->recent[0] = f->recent[1] = sthi_max_u64(steady, f->others_steady);
}

static void lose_patience(sthi_finder *f) {
    f->patience = f->patience > PATIENCE_MAX / 2 ? PATIENCE_MAX : 2 * f->patience;
}

/* True when the allocator failed since the last reading: what was there for the rest was not enough. */
static bool see_failures(sthi_finder *f, const sth_memory_reading *r, uint64_t capacity, uint64_t ours) {
    bool failed = f->readings && r->failures > f->failures, retried = f->readings && r->retries > f->retries;
    f->failures = r->failures;
    f->retries = r->retries;
    if (failed) {
        f->push = f->push ? sthi_min_u64(sthi_plus(f->push, f->push), capacity) : capacity / PUSH_SHARE;
        uint64_t had = sthi_minus(sthi_min_u64(capacity, f->capacity), ours);
        uint64_t more = sthi_minus(sthi_plus(had, f->push), sthi_plus(needed(f, 0), reserve_of(r)));
        f->margin = sthi_min_u64(sthi_max_u64(sthi_plus(f->margin, f->push), more), capacity);
        f->lacked = had;
        lose_patience(f);
    } else if (f->lacked && others_now(f) > f->lacked) { /* now it is known what it was */
        f->lacked = f->margin = f->push = 0;
    } else if (retried) {
        f->margin = sthi_min_u64(f->margin + reserve_of(r) / 2, sthi_max_u64(f->margin, capacity / 4));
    } else if (f->margin && ++f->quiet >= FORGIVING * f->patience) {
        f->margin /= 2;
        f->push /= 2;
        f->quiet = 0;
    }
    if (failed || retried) f->quiet = 0;
    return failed;
}

/* ---- the cap */

static void shrink(sthi_finder *f, uint64_t cap, sth_budget_why why) {
    if (f->growths && f->grown < SOON) lose_patience(f);
    f->cap = cap;
    f->why = why;
    f->calm = 0;
    f->shrinks++;
}

static void grow(sthi_finder *f, uint64_t cap) {
    f->cap = cap;
    f->why = STH_BUDGET_FULL;
    f->grown = 0;
    f->growths++;
}

void sthi_finder_observe(sthi_finder *f, const sth_memory_reading *r, uint64_t inside, uint64_t inside_peak,
                         uint64_t outside, sth_budget_verdict *out) {
    uint64_t capacity = sthi_plus(sthi_plus(r->free, r->framework_reserved), outside), reserve = reserve_of(r);
    if (below_ceiling(r)) capacity = sthi_min_u64(capacity, r->ceiling);
    uint64_t before = others_now(f), had = f->capacity;
    if (!f->patience) f->patience = PATIENCE;
    inside_peak = sthi_max_u64(inside_peak, inside);
    see_others(f, r, inside, inside_peak);
    bool failed = see_failures(f, r, capacity, inside + outside);
    uint64_t seen = sthi_plus(needed(f, 0), f->margin);
    uint64_t need = sthi_plus(needed(f, r->growth), f->margin);
    uint64_t cap = sthi_minus(capacity, sthi_plus(need, reserve));
    uint64_t moved = sthi_max_u64(sthi_minus(inside_peak, f->inside), sthi_minus(f->inside, inside));
    moved = sthi_max_u64(moved, inside_peak - inside);
    /* One that cannot even begin waits for no calm. One that is there has what it needs at least. */
    bool starves = r->least && !r->budget && f->cap < sthi_plus(sthi_plus(inside, outside), r->least);
    f->calm++;
    f->grown++;
    if (!f->readings) {
        f->cap = cap;
        f->why = STH_BUDGET_FULL;
    } else if (cap < f->cap && sthi_minus(capacity, sthi_plus(need, reserve / 2)) < f->cap) {
        bool fell = had > capacity && had - capacity > sthi_minus(others_now(f), before);
        sth_budget_why why = fell ? STH_BUDGET_NEIGHBOUR : STH_BUDGET_PEAK;
        if (need > seen) why = STH_BUDGET_EXPECTED;
        shrink(f, cap, failed ? STH_BUDGET_FAILED : why);
    } else if (cap >= sthi_plus(f->cap, f->cap / WORTH_GROWING) && cap > f->cap &&
               (f->calm >= f->patience || starves)) {
        grow(f, cap);
    }
    *out = (sth_budget_verdict){.cap = f->cap, .capacity = capacity, .others = others_now(f), .margin = f->margin,
                                .reserve = reserve, .growths = f->growths, .shrinks = f->shrinks,
                                .reset_peak = moved > f->inside / 64};
    f->capacity = capacity;
    f->inside = inside;
    f->outside = outside;
    f->readings++;
}

void sthi_finder_follow(sthi_finder *mine, const sthi_finder *ran) {
    mine->capacity = ran->capacity;
    mine->inside = ran->inside;
    mine->outside = ran->outside;
    mine->steady = ran->steady;
    mine->peak = ran->peak;
    mine->blurred = false;
    mine->failures = ran->failures;
    mine->retries = ran->retries;
}

/* ---- one runtime's part */

/* In its first step nobody knows what else it needs. Two, where what another does may come in the second; models that
 * take turns have one step in a turn. */
static bool is_early(const sth_memory_reading *r) { return r->steps < (r->phase ? 1 : EARLY_STEPS); }

static uint64_t target(const sthi_finder *f, const sth_memory_reading *r, uint64_t cap, sth_budget_why *out_why) {
    bool early = is_early(r);
    uint64_t most = early ? cap / 2 : cap;
    if (r->want <= most) {
        *out_why = STH_BUDGET_FITS;
        return r->want;
    }
    *out_why = early ? STH_BUDGET_FIRST : f->why;
    if (most >= r->least) return most;
    if (!early) *out_why = STH_BUDGET_LEAST;
    return sthi_max_u64(most, early ? sthi_min_u64(r->least, cap) : r->least);
}

void sthi_finder_share(const sthi_finder *f, const sth_memory_reading *r, sth_budget_verdict *v) {
    uint64_t cap = r->limit ? sthi_min_u64(r->limit, f->cap) : f->cap;
    v->budget = target(f, r, cap, &v->why);
    if (r->phase && r->runs && is_early(r)) v->cap = cap / 2; /* the others make room, too */
    bool little = v->budget > r->budget && v->budget < r->want && v->budget - r->budget < r->budget / WORTH_GROWING;
    if (little) v->budget = r->budget;
    v->reset_peak = v->reset_peak || v->budget != r->budget;
}

void sthi_finder_settle(const sth_memory_reading *r, uint64_t least, bool leased, sth_budget_verdict *v) {
    if (v->budget < r->budget && least > v->budget) {
        v->budget = sthi_min_u64(least, r->budget);
        v->why = STH_BUDGET_LEAST;
    }
    if (leased) v->budget = sthi_min_u64(v->budget, r->budget);
    v->trim = v->budget < r->budget && (v->why == STH_BUDGET_NEIGHBOUR || v->why == STH_BUDGET_FAILED);
}

bool sthi_finder_above_ceiling(const sthi_finder *f, const sth_memory_reading *r, uint64_t occupied) {
    uint64_t weights = sthi_max_u64(occupied, r->budget);
    uint64_t unused = sthi_minus(r->framework_reserved, r->framework_allocated);
    return r->ceiling && sthi_plus(sthi_plus(weights, others_now(f)), unused) > r->ceiling;
}

uint64_t sthi_finder_without(uint64_t has, uint64_t over, uint64_t least) {
    uint64_t less = sthi_max_u64(sthi_minus(has, over), least);
    return less < has ? less : 0;
}
