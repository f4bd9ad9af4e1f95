/* The smallest budgets, and the errors that say them. They ask the planner, and change nothing.
 * Lock held. */
#include "runtime/budget.h"

#include <stdio.h>

#include "base/memory.h"
#include "core/plan.h"
#include "load/room.h"
#include "runtime/plan_input.h"
#include "state/state.h"

static uint64_t counted_bytes(const sthi_unit *u) { return u->flags & STH_UNIT_ASIDE ? 0 : u->bytes; }

uint32_t sthi_largest_unit(const sth_runtime *rt) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < rt->unit_count; i++)
        if (counted_bytes(&rt->units[i]) > counted_bytes(&rt->units[best])) best = i;
    return best;
}

static uint64_t largest_bytes(const sth_runtime *rt) {
    return rt->unit_count ? counted_bytes(&rt->units[sthi_largest_unit(rt)]) : 0;
}

/* The uses of the order, each let go when the next begins. NULL: memory is out. */
static sth_plan_use *uses_one_at_a_time(const sth_runtime *rt) {
    sth_plan_use *uses = sthi_alloc(rt->order.count * sizeof *uses);
    for (uint32_t t = 0; uses && t < rt->order.count; t++) {
        uses[t] = rt->order.uses[t];
        uses[t].held = 0;
    }
    return uses;
}

/* Bytes for units that the planner and the caller cannot do without. */
static uint64_t least_for_units(const sth_runtime *rt) {
    if (!rt->unit_count) return 0;
    uint64_t smallest = sthi_max_u64(largest_bytes(rt), rt->options.least_room), least = 0;
    if (rt->options.policy == STH_POLICY_STATIC || !rt->order.count) return smallest;
    sth_plan_input in;
    sthi_plan_input(rt, &in);
    sthi_plan_map_once(&in);
    sth_plan_use *uses = uses_one_at_a_time(rt);
    in.uses = uses;
    if (uses && sthi_plan_smallest(&in, &least) == STH_OK) smallest = sthi_max_u64(smallest, least);
    sthi_free(uses);
    return smallest;
}

/* As much as was leased at once in one of the last steps, too. A single one of long ago says nothing of those to
 * come. */
static uint64_t smallest_for_units(const sth_runtime *rt) {
    uint64_t smallest = least_for_units(rt);
    for (uint32_t i = 0; i < STHI_PEAK_STEPS; i++) smallest = sthi_max_u64(smallest, rt->leases.peak[i]);
    return smallest;
}

/* `least`, `enough`: bytes for units, without which it cannot go on, and with which it can. */
static sth_status budget_error(const sth_runtime *rt, uint32_t unit, uint64_t least, uint64_t enough) {
    const sthi_unit *u = &rt->units[unit];
    char need[32], have[32], at_least[32], given[160], room[32], more[120] = "";
    uint64_t beside = rt->options.reserved + sthi_stages_bytes(rt);
    least += beside;
    enough += beside;
    sthi_format_size(rt->options.budget, have, sizeof have);
    if (rt->share.limit < rt->options.budget && rt->share.limit < least)
        snprintf(given, sizeof given, "of the budget of %s the device and its other models leave %llu bytes", have,
                 (unsigned long long)rt->share.limit);
    else
        snprintf(given, sizeof given, "the budget is %s", have);
    if (enough > least)
        snprintf(more, sizeof more, ", and %s (%llu bytes) has room for that wherever the others lie",
                 sthi_format_size(enough, room, sizeof room), (unsigned long long)enough);
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, u->name,
                     "unit '%s' needs %s (%llu bytes) on the device, but %s; the smallest budget that works is at "
                     "least %s (%llu bytes)%s", u->name, sthi_format_size(u->bytes, need, sizeof need),
                     (unsigned long long)u->bytes, given, sthi_format_size(least, at_least, sizeof at_least),
                     (unsigned long long)least, more);
}

sth_status sthi_budget_error(const sth_runtime *rt, uint32_t unit) {
    uint64_t least = smallest_for_units(rt);
    return budget_error(rt, unit, least, least);
}

sth_status sthi_no_place_error(const sth_runtime *rt, uint32_t unit, uint64_t enough) {
    uint64_t beside = rt->options.reserved + sthi_stages_bytes(rt);
    uint64_t least = sthi_max_u64(rt->leases.bytes + rt->units[unit].bytes, largest_bytes(rt));
    if (rt->share.limit >= rt->options.budget && least + beside <= rt->options.budget) /* what is free lies apart */
        least = rt->options.budget + 1 - beside;
    return budget_error(rt, unit, least, sthi_max_u64(enough, smallest_for_units(rt)));
}

uint64_t sthi_smallest_budget(const sth_runtime *rt) {
    return smallest_for_units(rt) + rt->options.reserved + sthi_stages_bytes(rt);
}

uint64_t sthi_least_to_plan(const sth_runtime *rt) {
    return least_for_units(rt) + rt->options.reserved + sthi_stages_bytes(rt);
}

uint64_t sthi_least_to_load(const sth_runtime *rt) {
    return rt->options.reserved + sthi_stages_bytes(rt) + largest_bytes(rt);
}

sth_status sthi_name_refusal(const sth_runtime *rt, sth_status rc) {
    return rc == STH_BUDGET_TOO_SMALL ? sthi_budget_error(rt, sthi_largest_unit(rt)) : rc;
}
