/* Room for what a runtime records: slots, orders, traces, and their times. Lock held. */
#include "runtime/records.h"

#include <string.h>

#include "base/memory.h"
#include "runtime/timing.h"
#include "state/state.h"

enum { EVENT_CAP = 4096, USES_MAX = 1 << 24 };

sth_status sthi_records_open(sth_runtime *rt) {
    uint32_t slots = 2 * rt->unit_count + 256, units = rt->unit_count;
    uint64_t uses = sthi_max_u64(8 * (uint64_t)units, 1024);
    rt->order.cap = rt->step.trace_cap = (uint32_t)sthi_min_u64(uses, USES_MAX);
    rt->events.cap = EVENT_CAP;
    STHI_TRY(sthi_places_init(&rt->places, STHI_EXTENT_CAP, slots));
    rt->sync = sthi_zalloc(slots, sizeof *rt->sync);
    rt->extents.kind = sthi_zalloc(STHI_EXTENT_CAP, sizeof *rt->extents.kind);
    rt->planned.units = sthi_zalloc(units, sizeof *rt->planned.units);
    rt->order.uses = sthi_zalloc(rt->order.cap, sizeof *rt->order.uses);
    rt->order.next = sthi_zalloc(rt->order.cap, sizeof *rt->order.next);
    rt->order.held = sthi_zalloc(rt->order.cap, sizeof *rt->order.held);
    rt->planned.load_uses = sthi_zalloc(rt->order.cap, sizeof *rt->planned.load_uses);
    rt->program.residents = sthi_zalloc(units, sizeof *rt->program.residents);
    rt->step.trace = sthi_zalloc(rt->step.trace_cap, sizeof *rt->step.trace);
    rt->step.held = sthi_zalloc(rt->step.trace_cap, sizeof *rt->step.held);
    rt->events.free = sthi_zalloc(rt->events.cap, sizeof *rt->events.free);
    if (!rt->sync || !rt->extents.kind || !rt->planned.units || !rt->order.uses || !rt->order.next || !rt->order.held ||
        !rt->planned.load_uses || !rt->program.residents || !rt->step.trace || !rt->step.held ||
        !rt->events.free)
        return sthi_no_memory(NULL, "the records of %u units", units);
    for (uint32_t i = 0; i < slots; i++) {
        atomic_init(&rt->sync[i].drops, 0);
        rt->sync[i].timed_use = rt->sync[i].use = STH_NONE;
    }
    return sthi_timing_open(rt);
}

static bool grow(void *array, uint32_t count, size_t each) {
    void **at = array;
    void *grown = sthi_realloc(*at, count, each);
    if (grown) *at = grown;
    return grown != NULL;
}

void sthi_records_grow(sth_runtime *rt) {
    uint32_t cap = (uint32_t)sthi_min_u64(4 * (uint64_t)rt->step.trace_cap, USES_MAX), old = rt->order.cap;
    /* What has grown when one fails is larger than it says, no more. */
    if (!grow(&rt->order.uses, cap, sizeof *rt->order.uses) || !grow(&rt->order.next, cap, sizeof *rt->order.next) ||
        !grow(&rt->order.held, cap, sizeof *rt->order.held) ||
        !grow(&rt->planned.load_uses, cap, sizeof *rt->planned.load_uses) ||
        !grow(&rt->step.trace, cap, sizeof *rt->step.trace) || !grow(&rt->step.held, cap, sizeof *rt->step.held))
        return;
    memset(rt->planned.load_uses + old, 0, (cap - old) * sizeof *rt->planned.load_uses);
    rt->order.cap = rt->step.trace_cap = cap;
}
