#include "load/astray.h"

#include "core/places.h"
#include "state/state.h"

/* The use of the load's lap, counted from that lap's begin, behind which callers let go of it. */
static uint64_t let_go(const sth_runtime *rt, const sth_plan_load *load) {
    uint64_t lap_on = load->last_use < load->first_use ? rt->order.count : 0;
    uint32_t held = rt->order.uses[load->last_use].held;
    return load->last_use + lap_on + (held ? held - 1 : 0);
}

bool sthi_in_the_way(const sth_runtime *rt, const sthi_slot *s, const sthi_request *r) {
    if (s->extent != r->extent || s->offset == r->offset) return false;
    const sth_plan *plan = rt->planned.plan;
    const sthi_extent *ring = &rt->places.extents[r->extent];
    uint32_t index = (uint32_t)(r->sequence % plan->load_count);
    uint64_t until = let_go(rt, &plan->loads[index]);
    for (uint32_t i = 1; i < plan->load_count; i++) {
        bool next_lap = index + i >= plan->load_count;
        const sth_plan_load *later = &plan->loads[(index + i) % plan->load_count];
        if (later->first_use + (next_lap ? (uint64_t)rt->order.count : 0) > until) return false;
        if (sthi_ranges_touch(ring, s->offset, s->bytes, later->ring_offset, rt->units[later->unit].bytes)) return true;
    }
    return false;
}
