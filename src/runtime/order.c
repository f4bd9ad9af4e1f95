/* The order of uses that plans are made for, and how steps change it.
 *
 *   first step      follows the order in which units were added (the guess)
 *   same as order   nothing to do
 *   a prefix of it  (exception, early exit) the order stays
 *   anything else   served on demand; a single odd step changes nothing. When the next one is odd too,
 *                   units that one of the two used and the other did not are marked on demand and leave
 *                   the order; an order seen twice in a row becomes the plan's.
 *
 * Lock held. */
#include "runtime/order.h"

#include "base/memory.h"
#include "runtime/records.h"
#include "state/state.h"

enum { REGULAR_AGAIN = 8, REGULAR_MOST = 1024 };

sth_status sthi_order_set(sth_runtime *rt, const uint32_t *units, const uint32_t *held, uint32_t count) {
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->units[i].first_use = STH_NONE;
    uint32_t kept = 0;
    for (uint32_t t = 0; t < count && kept < rt->order.cap; t++) {
        const sthi_unit *u = &rt->units[units[t]];
        if (!sthi_in_order(u)) continue;
        const sthi_unit_times *seen = &u->times;
        double known = seen->use_count ? seen->compute_ns / (double)seen->use_count : (double)u->bytes / 1000.0;
        rt->order.held[kept] = held ? held[t] : 0;
        rt->order.uses[kept++] = (sth_plan_use){.unit = units[t], .compute_ns = (int64_t)known};
    }
    rt->order.count = kept;
    for (uint32_t t = kept; t-- > 0;) {
        sthi_unit *u = &rt->units[rt->order.uses[t].unit];
        rt->order.next[t] = u->first_use;
        /* Units on demand counted when it was seen. */
        rt->order.held[t] = (uint32_t)sthi_min_u64(rt->order.held[t], kept - t);
        u->first_use = t;
    }
    rt->order.epoch++;
    rt->timing.seen = 0;
    return STH_OK;
}

sth_status sthi_order_guess(sth_runtime *rt) {
    uint32_t *guess = sthi_alloc(rt->unit_count * sizeof *guess);
    if (!guess) return sthi_no_memory(NULL, "the first order");
    uint32_t used = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (!(rt->units[i].flags & STH_UNIT_IDLE)) guess[used++] = i;
    sth_status rc = sthi_order_set(rt, guess, NULL, used);
    sthi_free(guess);
    rt->order.recorded = false;
    rt->order.deviations = 0;
    return rc;
}

void sthi_order_note_held(sth_runtime *rt) {
    uint32_t use = 0;
    for (uint32_t t = 0; t < rt->step.trace_count && use < rt->order.count; t++) {
        if (!sthi_in_order(&rt->units[rt->step.trace[t]])) continue;
        if (rt->step.held[t]) rt->order.held[use] = rt->step.held[t];
        use++;
    }
}

static uint64_t trace_hash(const sth_runtime *rt) {
    uint64_t h = 1469598103934665603u;
    for (uint32_t t = 0; t < rt->step.trace_count; t++) {
        uint32_t unit = rt->step.trace[t];
        if (!(rt->units[unit].flags & STH_UNIT_ON_DEMAND)) h = (h ^ (unit + 1)) * 1099511628211u;
    }
    return h;
}

/* Units that came and went between this step and the last leave the order. */
static bool mark_irregular(sth_runtime *rt) {
    bool changed = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if ((u->flags & STH_UNIT_ON_DEMAND) || sthi_used_in_step(u, rt->step.number) == u->used_before) continue;
        u->flags |= STH_UNIT_ON_DEMAND;
        u->regular_steps = 0;
        if (u->regular_again < REGULAR_MOST) u->regular_again = u->regular_again ? 2 * u->regular_again : REGULAR_AGAIN;
        changed = true;
    }
    return changed;
}

/* Units on demand that have come for a while return to the order; for longer, where they left it before. */
static bool mark_regular(sth_runtime *rt) {
    bool changed = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!(u->flags & STH_UNIT_ON_DEMAND)) continue;
        u->regular_steps = sthi_used_in_step(u, rt->step.number) ? u->regular_steps + 1 : 0;
        if (u->regular_steps < (u->regular_again ? u->regular_again : REGULAR_AGAIN)) continue;
        u->flags &= ~(uint32_t)STH_UNIT_ON_DEMAND;
        changed = true;
    }
    return changed;
}

static sth_status adopt_trace(sth_runtime *rt) {
    rt->planned.why = rt->order.recorded ? "steps use its units in another order" : "the order of a step is known";
    rt->order.recorded = true;
    rt->planned.again = true;
    return sthi_order_set(rt, rt->step.trace, rt->step.held, rt->step.trace_count);
}

sth_status sthi_order_regular(sth_runtime *rt) { return mark_regular(rt) ? adopt_trace(rt) : STH_OK; }

sth_status sthi_order_learn(sth_runtime *rt) {
    rt->stats.deviations++;
    rt->order.deviations++;
    if (rt->step.trace_overflow) sthi_records_grow(rt); /* the next step is recorded whole */
    if (!rt->step.trace_count || rt->step.trace_overflow) return STH_OK;
    if (!rt->order.recorded) return adopt_trace(rt);
    bool changed = rt->order.deviations > 1 && mark_irregular(rt);
    uint64_t hash = trace_hash(rt);
    bool repeats = rt->order.deviations > 1 && hash == rt->order.last_trace;
    rt->order.last_trace = hash;
    return changed || repeats ? adopt_trace(rt) : STH_OK;
}
