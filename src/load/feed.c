/* Feed: decides what is loaded next and puts it into the queue, in the order in which it will be issued.
 * Planned: the plan's loads, lap after lap, merged by the place of their first use with residents and with what the lap
 * before should have left, where they are not there. Static: the next few units of the order, which goes round. Only
 * decides; issue.c acts. Lock held. */
#include "load/feed.h"

#include "base/invariant.h"
#include "load/queue.h"
#include "load/read/jobs.h"
#include "load/slots.h"
#include "load/watermarks.h"
#include "state/state.h"

static bool may_prefetch(const sth_runtime *rt, uint32_t unit, uint64_t lap) {
    const sthi_unit *u = &rt->units[unit];
    if (!u->writes.written && (rt->options.read_only || !(u->flags & STH_UNIT_WRITABLE))) return true;
    /* Its master may be written until its step has begun. */
    return rt->step.open && !rt->step.paused && lap == rt->program.lap;
}

static void push(sth_runtime *rt, sthi_request r) {
    STHI_INVARIANT(rt->queue.tail - rt->queue.head < STHI_REQUEST_CAP);
    STHI_INVARIANT(r.extent == STH_NONE || rt->places.extents[r.extent].live);
    r.slot = STHI_NO_SLOT;
    r.staged = !rt->units[r.unit].direct;
    rt->queue.requests[rt->queue.tail++ % STHI_REQUEST_CAP] = r;
    if (r.staged) sthi_readers_wake(rt);
}

/* Position of the next planned load, counted in uses from the start of the current lap. */
static bool next_planned(sth_runtime *rt, uint64_t *out_at) {
    uint32_t loads = rt->planned.plan->load_count;
    uint64_t laps = rt->graph.state == STHI_GRAPH_CAPTURING ? 1 : 2; /* a graph loads nothing for what comes after it */
    if (!loads || rt->program.next_load >= (rt->program.lap + laps) * loads) return false;
    uint64_t lap = rt->program.next_load / loads;
    const sth_plan_load *load = &rt->planned.plan->loads[rt->program.next_load % loads];
    if (!may_prefetch(rt, load->unit, lap)) return false;
    *out_at = (lap - rt->program.lap) * rt->order.count + load->first_use;
    return true;
}

static bool next_resident(sth_runtime *rt, uint64_t *out_at) {
    while (rt->program.resident_next < rt->program.resident_count &&
           rt->units[rt->program.residents[rt->program.resident_next]].slot != STHI_NO_SLOT)
        rt->program.resident_next++;
    if (rt->program.resident_next == rt->program.resident_count) return false;
    const sthi_unit *u = &rt->units[rt->program.residents[rt->program.resident_next]];
    if (!may_prefetch(rt, rt->program.residents[rt->program.resident_next], rt->program.lap)) return false;
    *out_at = u->first_use == STH_NONE ? rt->order.count : u->first_use;
    return true;
}

static void push_resident(sth_runtime *rt) {
    uint32_t unit = rt->program.residents[rt->program.resident_next++];
    push(rt, (sthi_request){.unit = unit, .extent = rt->units[unit].home.extent,
                            .offset = rt->units[unit].home.offset, .resident = true});
}

static void push_planned(sth_runtime *rt) {
    uint32_t index = (uint32_t)(rt->program.next_load % rt->planned.plan->load_count);
    const sth_plan_load *load = &rt->planned.plan->loads[index];
    push(rt, (sthi_request){.unit = load->unit, .extent = rt->extents.ring, .offset = load->ring_offset,
                            .uses = rt->planned.load_uses[index], .planned = true, .sequence = rt->program.next_load,
                            .lap = rt->program.next_load / rt->planned.plan->load_count});
    rt->program.next_load++;
}

/* Uses at the begin of a lap that the load is to serve, which was issued in the lap before. */
static uint32_t kept_uses(const sth_runtime *rt, uint32_t index) {
    uint32_t uses = 0;
    const sth_plan *plan = rt->planned.plan;
    for (uint32_t t = 0; t <= plan->loads[index].last_use; t++) uses += plan->use_load[t] == index;
    return uses;
}

/* The next use at the begin of the lap that a load of the lap before should serve, and whose unit is not there: this is
 * the plan's first lap, or it was written. Not inline: every use comes by, and hardly any has a need of it. */
static __attribute__((noinline)) bool next_kept(sth_runtime *rt, uint64_t *out_at) {
    for (; rt->program.kept_next < rt->planned.kept_end; rt->program.kept_next++) {
        uint32_t t = rt->program.kept_next, unit = rt->order.uses[t].unit, index = rt->planned.plan->use_load[t];
        if (t < rt->program.cursor || rt->units[unit].first_use != t || index == STH_NONE) continue;
        const sth_plan_load *load = &rt->planned.plan->loads[index];
        bool here = rt->units[unit].slot != STHI_NO_SLOT || sthi_queued(rt, unit);
        if (load->first_use <= load->last_use || here) continue;
        *out_at = t;
        return true;
    }
    return false;
}

static void push_kept(sth_runtime *rt) {
    uint32_t t = rt->program.kept_next++, index = rt->planned.plan->use_load[t];
    push(rt, (sthi_request){.unit = rt->order.uses[t].unit, .extent = rt->extents.ring,
                            .offset = rt->planned.plan->loads[index].ring_offset, .kept = true,
                            .uses = kept_uses(rt, index), .lap = rt->program.lap});
}

static void feed_planned(sth_runtime *rt) {
    STHI_INVARIANT(rt->planned.plan->use_count == rt->order.count && rt->planned.kept_end <= rt->order.count);
    while (rt->queue.tail - rt->queue.head < STHI_REQUEST_CAP) {
        uint64_t load_at = UINT64_MAX, resident_at = UINT64_MAX, kept_at;
        bool load = next_planned(rt, &load_at), resident = next_resident(rt, &resident_at);
        bool kept = rt->program.kept_next < rt->planned.kept_end && next_kept(rt, &kept_at);
        if (kept && kept_at <= sthi_min_u64(load_at, resident_at)) {
            /* What comes behind it may lie in its place. */
            if (!may_prefetch(rt, rt->order.uses[kept_at].unit, rt->program.lap)) return;
            push_kept(rt);
        } else if (resident && resident_at <= load_at) {
            push_resident(rt);
        } else if (load) {
            push_planned(rt);
        } else {
            return;
        }
    }
}

/* Requests and copies of which the end was not seen yet. */
static uint32_t under_way(sth_runtime *rt) {
    uint32_t count = (uint32_t)(rt->queue.tail - rt->queue.head);
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        int32_t slot = rt->units[i].slot;
        count += slot != STHI_NO_SLOT && rt->places.slots[slot].complete && !sthi_slot_arrived(rt, slot);
    }
    return count;
}

static void feed_static(sth_runtime *rt) {
    if (sthi_above_high(rt)) return;
    for (uint32_t k = 0; k < rt->options.prefetch_window && k < rt->order.count; k++) {
        uint32_t at = rt->program.cursor + k;
        uint32_t next = at >= rt->order.count; /* at the end the lookahead goes on into the next step */
        uint32_t unit = rt->order.uses[at - next * rt->order.count].unit;
        if (rt->queue.tail - rt->queue.head == STHI_REQUEST_CAP) return;
        if (rt->program.max_inflight && under_way(rt) >= rt->program.max_inflight) return;
        if (rt->units[unit].slot != STHI_NO_SLOT || sthi_queued(rt, unit)) continue;
        if (!may_prefetch(rt, unit, rt->program.lap + next)) return;
        push(rt, (sthi_request){.unit = unit, .extent = STH_NONE});
    }
}

void sthi_feed(sth_runtime *rt) {
    if (!rt->program.on) return;
    STHI_INVARIANT(!rt->share.parked && rt->program.cursor <= rt->order.count);
    if (rt->options.policy == STH_POLICY_STATIC) feed_static(rt);
    else if (rt->planned.plan) feed_planned(rt);
}
