/* Hints. Invariant: between two sthi_policy_step no number in `now` grows and suppress_speculative is not taken
 * back; rules only go through tighten(). */
#include "conductor/policy.h"

enum { BUSY_CHECKS = 3 };
static const double PRESSURE = 0.8; /* of the soft cap */

void sthi_policy_init(sthi_policy *p, sth_hints base) { *p = (sthi_policy){.base = base, .now = base}; }

void sthi_policy_step(sthi_policy *p) {
    p->now = p->base;
    p->busy = 0;
}

static void at_most(uint32_t *value, uint32_t limit) {
    if (*value > limit) *value = limit;
}

static void tighten(sthi_policy *p, sth_hints to) {
    at_most(&p->now.max_inflight_h2d, to.max_inflight_h2d);
    at_most(&p->now.max_inflight_d2h, to.max_inflight_d2h);
    at_most(&p->now.prefetch_window_cap, to.prefetch_window_cap);
    p->now.suppress_speculative |= to.suppress_speculative;
}

void sthi_policy_phase(sthi_policy *p, sth_phase phase, uint64_t allocated, uint64_t soft_cap) {
    sth_hints to = p->now;
    bool pressed = (double)allocated > PRESSURE * (double)soft_cap;
    if (phase == STH_PHASE_BACKWARD && pressed) {
        to.suppress_speculative = true;
        to.prefetch_window_cap = 1;
    }
    if (phase == STH_PHASE_OPTIMIZER) {
        to.suppress_speculative = true;
        to.max_inflight_h2d = 1;
    }
    tighten(p, to);
}

void sthi_policy_check(sthi_policy *p, bool all_busy) {
    p->busy = all_busy ? p->busy + 1 : 0;
    if (p->busy <= BUSY_CHECKS || p->now.prefetch_window_cap <= 1) return;
    sth_hints to = p->now;
    to.prefetch_window_cap--;
    tighten(p, to);
}
