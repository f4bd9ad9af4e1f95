/* The link's rate, as steps show it. It is measured at seal; others that copy come and go later, and may have been
 * there then. What a copy takes by its own events does not tell: a copy engine that serves others between two copies
 * of ours stamps neither as longer. So steps are compared with what the plan says for the compute times that are
 * known: when several in a row took longer, or less, the rate is sought at which the plan says what they took. Where
 * the link hides behind compute at any such rate it stays as it is. Lock held. */
#include "runtime/link.h"

#include <math.h>

#include "runtime/planning.h"
#include "state/state.h"

enum { IN_A_ROW = 3, LEAST_TIMED = 3, LEAST_PATIENCE = 4, MOST_PATIENCE = 256, HALVINGS = 12 };
static const double UNLIKE = 0.04, ALIKE = 0.03, WIDEST = 16;

/* Their loads and their compute are in no plan. */
static bool used_on_demand(const sth_runtime *rt, const sthi_timed_step *t) {
    for (uint32_t i = 0; i < t->uses; i++)
        if (rt->units[t->use[i].unit].flags & STH_UNIT_ON_DEMAND) return true;
    return false;
}

static bool may_follow(const sth_runtime *rt, const sthi_timed_step *t) {
    uint32_t caps = rt->device->capabilities;
    bool link = !(caps & STH_CAP_HOST_IS_DEVICE) || caps & STH_CAP_VIRTUAL_TIME; /* else the CPU copies */
    return link && rt->options.link_bytes_per_s <= 0 && rt->planned.plan && rt->program.on && t->whole &&
           t->epoch == rt->order.epoch && rt->timing.seen >= LEAST_TIMED && !rt->timing.odd_steps && !rt->step.strays &&
           /* Else the plan's prediction is not of such a step: */
           t->plan == rt->planned.count && t->writes_expected && !rt->writes.fresh && !used_on_demand(rt, t) &&
           rt->planned.plan->prediction.bytes_per_step && !rt->planned.plan->prediction.disk_bytes_per_step;
}

static double predicted(sth_runtime *rt, double link) {
    sth_prediction p;
    return sthi_plan_price(rt, link, &p) == STH_OK ? (double)p.step_ns : 0;
}

static bool unlike(double took, double said) { return took > said * (1 + UNLIKE) || took < said * (1 - UNLIKE); }

/* The least rate at which the plan takes `ns`: the present one where it does, 0 where none does. */
static double rate_that_takes(sth_runtime *rt, double ns) {
    if (!unlike(ns, predicted(rt, rt->link.rate))) return rt->link.rate;
    double low = rt->link.rate / WIDEST, high = rt->link.rate * WIDEST;
    if (predicted(rt, low) < ns || predicted(rt, high) > ns * (1 + ALIKE)) return 0;
    for (int i = 0; i < HALVINGS; i++) {
        double middle = sqrt(low * high);
        *(predicted(rt, middle) > ns ? &low : &high) = middle;
    }
    return high;
}

static void begin_again(sthi_link_watch *w) {
    w->steps = 0;
    w->took_ns = 0;
}

void sthi_link_follow(sth_runtime *rt, const sthi_timed_step *t, double took_ns) {
    sthi_link_watch *w = &rt->link.watch;
    if (w->calm || !may_follow(rt, t)) {
        w->calm -= w->calm > 0;
        begin_again(w);
        return;
    }
    double said = (double)rt->planned.plan->prediction.step_ns;
    bool turned = (took_ns > said) != (w->took_ns > w->steps * said);
    if (!unlike(took_ns, said) || turned) begin_again(w);
    if (!unlike(took_ns, said)) return;
    w->took_ns += took_ns;
    if (++w->steps < IN_A_ROW) return;
    double rate = rate_that_takes(rt, w->took_ns / w->steps);
    begin_again(w);
    if (rate > 0) {
        rt->link.rate = rate;
        w->changed = true; /* or it is the compute times, which the plan has not been priced with yet */
        w->patience = 0;
    } else { /* not the link's doing: looking costs some predictions */
        w->patience = w->patience ? (uint32_t)sthi_min_u64(2 * w->patience, MOST_PATIENCE) : LEAST_PATIENCE;
        w->calm = w->patience;
    }
}
