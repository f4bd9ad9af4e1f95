/* Watermarks of the static policy: where the next missing unit would take those on the device above the high one, units
 * are evicted down to the low one, far and large first.
 *
 * Both count as the budget does, the caller's reserved part included. A unit that is leased, that is being copied, or
 * that the lookahead is about to use stays. Does not find places (places.c) nor fetch (feed.c, issue.c). Lock held. */
#include "load/watermarks.h"

#include "load/distance.h"
#include "load/room.h"
#include "load/slots.h"
#include "state/state.h"

typedef struct marks {
    uint64_t high, low; /* bytes of units */
} marks;

static marks marks_of(const sth_runtime *rt) {
    const sth_runtime_options *o = &rt->options;
    uint64_t all = sthi_min_u64(o->budget, rt->share.limit);
    uint64_t high = o->high_watermark ? sthi_min_u64(o->high_watermark, all) : all, low = high / 4 * 3;
    if (o->low_watermark && o->low_watermark < high) low = o->low_watermark;
    return (marks){sthi_units_within(rt, high), sthi_units_within(rt, low)};
}

static uint64_t used_bytes(const sth_runtime *rt) {
    uint64_t used = 0;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        for (int32_t id = e->live && !e->closing ? e->first_slot : STHI_NO_SLOT; id != STHI_NO_SLOT;
             id = rt->places.slots[id].next)
            used += rt->places.slots[id].bytes;
    }
    return used;
}

/* Bytes of the first of the next few units of the order that is not on the device. */
static uint64_t next_missing(const sth_runtime *rt) {
    uint32_t ahead = rt->options.prefetch_window ? rt->options.prefetch_window : 1;
    for (uint32_t k = 0; k < ahead && k < rt->order.count; k++) {
        const sthi_unit *u = &rt->units[rt->order.uses[(rt->program.cursor + k) % rt->order.count].unit];
        if (u->slot == STHI_NO_SLOT) return u->bytes;
    }
    return 0;
}

static int32_t victim_of(const sth_runtime *rt) {
    int32_t victim = STHI_NO_SLOT;
    double best = -1;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        int32_t id = rt->units[i].slot;
        if (id == STHI_NO_SLOT || rt->places.slots[id].leases || !rt->places.slots[id].complete) continue;
        uint32_t far = sthi_distance(rt, i);
        if (far <= rt->options.prefetch_window) continue;
        double score = (double)far * (double)rt->units[i].bytes;
        if (score > best) best = score, victim = id;
    }
    return victim;
}

static bool none_given(const sth_runtime *rt) { return !rt->options.high_watermark && !rt->options.low_watermark; }

bool sthi_above_high(const sth_runtime *rt) { return !none_given(rt) && used_bytes(rt) > marks_of(rt).high; }

void sthi_watermark_evictions(sth_runtime *rt) {
    if (none_given(rt)) return;
    marks m = marks_of(rt);
    uint64_t used = used_bytes(rt);
    if (used + next_missing(rt) <= m.high) return;
    while (used > m.low) {
        int32_t victim = victim_of(rt);
        if (victim == STHI_NO_SLOT) return;
        used -= rt->places.slots[victim].bytes;
        if (sthi_evict(rt, victim, rt->copies.stream) != STH_OK) return;
    }
}
