/* Units that the caller uses by other means for a while: no order, plan or smallest budget counts them (order.c,
 * plan_input.c, budget.c look at the flag). What changes is known for no step, so that the order is a guess again. Lock
 * not held. */
#include "runtime/aside.h"

#include "load/issue.h"
#include "runtime/drops.h"
#include "runtime/news.h"
#include "runtime/order.h"
#include "runtime/share/give.h"
#include "runtime/step.h"
#include "state/state.h"

static sth_status check(const sth_runtime *rt, const uint32_t *units, uint32_t count) {
    if (rt->shut) return sthi_shut_down(rt);
    if (!rt->sealed || sthi_stepping(rt))
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is %s: units are put aside between steps",
                         rt->name, rt->sealed ? "inside a step" : "not sealed");
    for (uint32_t i = 0; i < count; i++)
        if (units[i] >= rt->unit_count)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "unit", "there is no unit %u: there are %u", units[i],
                             rt->unit_count);
    return STH_OK;
}

static sth_status set_aside(sth_runtime *rt, const uint32_t *units, uint32_t count, bool aside) {
    STHI_TRY(check(rt, units, count));
    sthi_drain_drops(rt);
    if (rt->step.open) STHI_TRY(sthi_step_end_locked(rt));
    for (uint32_t i = 0; i < count; i++) {
        sthi_unit *u = &rt->units[units[i]];
        u->flags &= ~(uint32_t)(STH_UNIT_ASIDE | STH_UNIT_ON_DEMAND);
        if (aside) u->flags |= STH_UNIT_ASIDE;
        u->used_before = false;
        u->regular_steps = 0;
    }
    STHI_TRY(sthi_order_guess(rt));
    (void)sthi_without_plan(rt, STH_BUDGET_TOO_SMALL); /* the one in force is for another order */
    rt->planned.why = aside ? "units were put aside" : "units that were aside are back";
    STHI_TRY(sthi_plan_again(rt));
    sthi_pump(rt);
    return STH_OK;
}

sth_status sthi_runtime_set_aside(sth_runtime *rt, const uint32_t *units, uint32_t count, bool aside) {
    sthi_lock(&rt->lock);
    sth_status rc = set_aside(rt, units, count, aside);
    sthi_unlock_and_say(rt);
    return rc;
}
