/* When memory is read. See pace.h. */
#include "core/pace.h"

#include "base/arith.h"

enum { EAGER_STEPS = 8 /* a reading before each of them */ };
#define LOOK_NS (INT64_C(50) * 1000000) /* later not more often than that */

void sthi_pace_inputs(sth_budget_pace *p, uint64_t bytes, bool inside_step) {
    if (inside_step) p->largest = sthi_max_u64(p->largest, bytes); /* learned, but too late for the step's budget */
    p->coming = inside_step ? 0 : bytes;
}

bool sthi_pace_due(sth_budget_pace *p, int64_t now_ns, bool turn, double *out_growth) {
    *out_growth = p->largest ? (double)p->coming / (double)p->largest : 0;
    p->largest = sthi_max_u64(p->largest, p->coming);
    p->coming = 0;
    return p->steps <= EAGER_STEPS || *out_growth > 1 || turn || now_ns - p->looked_ns >= LOOK_NS;
}

void sthi_pace_looked(sth_budget_pace *p, int64_t now_ns) {
    p->steps++;
    p->looked_ns = now_ns;
}

void sthi_pace_hurry(sth_budget_pace *p) { p->steps = EAGER_STEPS; }

void sthi_pace_renew(sth_budget_pace *p) { p->steps = p->largest = 0; }
