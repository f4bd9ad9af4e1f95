/* The planner's input: units, the order of uses, the budget for units and the rates that are known
 * now. Lock held. */
#include "runtime/plan_input.h"

#include "core/plan.h"
#include "load/pieces.h"
#include "load/room.h"
#include "load/stays.h"
#include "runtime/homes.h"
#include "state/state.h"

enum {
    CHANGE_PAYS_WITHIN = 2, /* steps */
    HURRIED_USES = 80000,   /* simulated in all while the device waits: some 11 ms */
    MANY_USES = 500,
    STEP_USES = 200000,     /* between steps: the host is that much ahead of the device */
    GUESSED_UNITS = 4,      /* the ring has room for so many, but takes no more than such a part of the budget */
    GUESSED_SHARE = 4
};

static bool ring_may_wrap(const sth_runtime *rt, uint64_t budget) {
    if (!(rt->device->capabilities & STH_CAP_RING)) return false;
    uint64_t g = rt->device->ops->ring_granularity(rt->device->self);
    /* Rounding the ring to the granularity must not cost a budget that is small beside it. */
    return g && budget >= 64 * g;
}

/* What is staged comes no faster than it is read; what is kept in host memory, or is going to be, does. */
static sth_plan_unit plan_unit(const sth_runtime *rt, const sthi_unit *u) {
    bool aside = u->flags & STH_UNIT_ASIDE; /* in no use: the planner passes it by */
    uint32_t flags = aside ? 0 : u->flags & (STH_UNIT_KEEP | STH_UNIT_ON_DEMAND);
    if (!u->direct && !u->kept.image) flags |= STH_UNIT_FROM_DISK;
    if (u->writes.written) flags |= STH_UNIT_WRITTEN;
    if (sthi_lies_at_rest(rt, u)) flags |= STH_UNIT_PRESENT;
    if (sthi_may_cross_plain(rt, u)) flags |= STH_UNIT_EITHER;
    if (sthi_packed_on_link(rt, u) && !u->encoded.plain) flags |= STH_UNIT_EXPANDED;
    uint64_t wire = sthi_min_u64(sthi_wire_bytes_packed(rt, u), u->bytes);
    return (sth_plan_unit){.bytes = u->bytes, .flags = flags, .transfer_bytes = wire,
                           .packed_bytes = aside ? 0 : sthi_stays_bytes(rt, (uint32_t)(u - rt->units))};
}

/* What callers hold lies anywhere in the ring. Where they ask for no more than the largest unit they hold nothing. */
static uint64_t room_beside_held(const sth_runtime *rt) {
    uint64_t kept = 0, largest = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (u->flags & STH_UNIT_ASIDE) continue;
        if (u->flags & STH_UNIT_KEEP) kept += u->bytes;
        else largest = sthi_max_u64(largest, u->bytes);
    }
    return rt->options.least_room > kept + largest ? rt->options.least_room - kept : 0;
}

/* Units of no more than so many bytes hold half of all bytes. */
static uint64_t middle_size(const sth_runtime *rt) {
    uint64_t low = 0, high = STHI_BYTES_MOST;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2, below = 0;
        for (uint32_t i = 0; i < rt->unit_count; i++)
            if (rt->units[i].bytes <= middle) below += rt->units[i].bytes;
        if (2 * below >= rt->planned.all_bytes) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* A step that leaves a guessed order loads on demand, into the ring: there the next copies have to go on beside the use
 * of the one before. */
static uint64_t room_for_guesses(const sth_runtime *rt, uint64_t budget) {
    return rt->order.recorded ? 0 : sthi_min_u64(GUESSED_UNITS * middle_size(rt), budget / GUESSED_SHARE);
}

static bool used_again(const sth_runtime *rt) {
    for (uint32_t t = 0; t < rt->order.count; t++)
        if (rt->order.next[t] != STH_NONE) return true;
    return false;
}

/* 0: as many as are worth it. Where units are used again there is more to try, and a step is longer. */
static uint32_t simulations(const sth_runtime *rt) {
    if (!rt->order.recorded || !rt->order.count) return 0;
    bool again = used_again(rt);
    uint32_t few = (uint32_t)sthi_min_u64(rt->order.count, MANY_USES); /* bundles are fewer than their units */
    if (!rt->planned.hurry) return again ? 0 : STEP_USES / few;
    return (again ? 3 : 1) * HURRIED_USES / few;
}

void sthi_plan_input(const sth_runtime *rt, sth_plan_input *in) {
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->planned.units[i] = plan_unit(rt, &rt->units[i]);
    sthi_plan_input_init(in);
    in->units = rt->planned.units;
    in->unit_count = rt->unit_count;
    in->uses = rt->order.uses;
    in->use_count = rt->order.count;
    in->budget = sthi_budget_for_units(rt);
    in->link_bytes_per_s = rt->link.rate > 0 ? rt->link.rate : 1e10; /* parked since it was sealed: not measured yet */
    if (rt->expand.rate.bytes_per_s > 0) in->expand_bytes_per_s = rt->expand.rate.bytes_per_s;
    in->disk_bytes_per_s = rt->reads.rate;
    in->read_ahead_bytes = rt->slabs.count * rt->copies.chunk;
    in->least_ring_bytes = sthi_max_u64(room_beside_held(rt), room_for_guesses(rt, in->budget));
    in->chunk_bytes = rt->copies.chunk;
    in->change_steps = CHANGE_PAYS_WITHIN;
    in->most_simulations = simulations(rt);
    in->copy_overhead_ns = 0; /* the rate was measured with copies of the length that the runtime issues */
    in->ring_mapped_twice = ring_may_wrap(rt, in->budget);
    in->ring_granularity = in->ring_mapped_twice ? rt->device->ops->ring_granularity(rt->device->self) : STHI_ALIGN;
}

void sthi_plan_hold(sth_runtime *rt, bool holds) {
    for (uint32_t t = 0; t < rt->order.count; t++) rt->order.uses[t].held = holds ? rt->order.held[t] : 0;
    rt->planned.holds = holds;
}

void sthi_plan_map_once(sth_plan_input *in) {
    in->ring_mapped_twice = false;
    in->ring_granularity = STHI_ALIGN;
}
