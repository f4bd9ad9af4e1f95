/* Step times over budgets: a plan for each of some budgets between the smallest and all. Pure: no I/O, no clock. */
#include "core/curve.h"

#include "base/arith.h"
#include "base/error.h"
#include "core/plan.h"

/* Bytes with which nothing streams: units that are used, and the room for those on demand. */
static uint64_t all_bytes(const sth_plan_input *in, uint64_t least) {
    uint64_t all = 0, demand = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        if (in->units[i].flags & STH_UNIT_ON_DEMAND) demand = sthi_max_u64(demand, in->units[i].bytes);
        else all += in->units[i].bytes;
    }
    uint64_t held = in->held_at_once ? in->held_at_once : 1;
    return sthi_max_u64(all + held * demand, least);
}

/* The budgets, ascending; the one of the input among them where it lies between. Returns how many. */
static uint32_t choose(const sth_plan_input *in, uint64_t least, uint32_t count, sth_curve_point *points) {
    uint64_t all = all_bytes(in, least);
    uint32_t n = 0;
    bool own = in->budget <= least || in->budget >= all; /* it is there already, or not wanted */
    for (uint32_t i = 0; i < count; i++) {
        uint64_t budget = i + 1 == count ? all : least + (uint64_t)((double)(all - least) * i / (count - 1));
        budget = budget / STHI_ALIGN * STHI_ALIGN;
        if (i == 0 || budget < least) budget = least;
        if (!own && in->budget <= budget) {
            own = true;
            if (in->budget < budget) points[n++].budget = in->budget;
        }
        if (!n || points[n - 1].budget < budget) points[n++].budget = budget;
    }
    return n;
}

sth_status sthi_plan_curve(const sth_plan_input *in, uint32_t count, sthi_plan_maker make, sth_curve_point *points,
                           uint32_t *out_count) {
    uint64_t least;
    if (count < 2 || count > 1000)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "count", "a curve has 2 to 1000 points, not %u", count);
    STHI_TRY(sthi_plan_smallest(in, &least));
    uint32_t n = choose(in, least, count, points);
    for (uint32_t i = 0; i < n; i++) {
        sth_plan_input at = *in;
        sth_plan *plan;
        at.budget = points[i].budget;
        STHI_TRY(make(&at, &plan));
        points[i].prediction = plan->prediction;
        sthi_plan_destroy(plan);
        if (i && points[i - 1].prediction.step_ns < points[i].prediction.step_ns)
            points[i].prediction = points[i - 1].prediction;
    }
    *out_count = n;
    return STH_OK;
}
