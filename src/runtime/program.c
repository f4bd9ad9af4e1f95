/* Following the plan: where the next load is in it. Lock held. */
#include "runtime/program.h"

#include "state/state.h"

void sthi_program_reset(sth_runtime *rt) {
    rt->program.on = !rt->share.parked && (rt->planned.plan || rt->options.policy == STH_POLICY_STATIC);
    rt->program.waits = false;
    rt->program.lap = 0;
    rt->program.next_load = 0;
    rt->program.resident_next = 0;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) rt->places.slots[i].uses_left = 0;
    rt->program.kept_next = 0;
}

void sthi_program_skip(sth_runtime *rt) {
    if (!rt->program.on || !rt->planned.plan || !rt->planned.plan->load_count) return;
    uint64_t begin = rt->program.lap * rt->planned.plan->load_count, end = begin + rt->planned.plan->load_count;
    if (rt->program.next_load < begin) rt->program.next_load = begin;
    const sth_plan_load *loads = rt->planned.plan->loads;
    while (rt->program.next_load < end && loads[rt->program.next_load - begin].first_use < rt->program.cursor)
        rt->program.next_load++;
}
