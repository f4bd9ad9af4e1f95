/* Ranges of device memory and who holds them. Pure: no locks, no device. Lists are short (a ring holds a
 * few slots, an extent of residents some dozens), so linear walks are the fast way. */
#include "core/places.h"

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"

sth_status sthi_places_init(sthi_places *p, uint32_t extent_cap, uint32_t slot_cap) {
    *p = (sthi_places){.extent_cap = extent_cap, .slot_cap = slot_cap, .free_count = slot_cap};
    p->extents = sthi_zalloc(extent_cap, sizeof *p->extents);
    p->slots = sthi_zalloc(slot_cap, sizeof *p->slots);
    p->free_slots = sthi_zalloc(slot_cap, sizeof *p->free_slots);
    if (!p->extents || !p->slots || !p->free_slots) {
        sthi_places_fini(p);
        return sthi_no_memory(NULL, "%u places", slot_cap);
    }
    for (uint32_t i = 0; i < slot_cap; i++) p->free_slots[i] = (int32_t)(slot_cap - 1 - i);
    return STH_OK;
}

void sthi_places_fini(sthi_places *p) {
    sthi_free(p->extents);
    sthi_free(p->slots);
    sthi_free(p->free_slots);
    *p = (sthi_places){0};
}

int32_t sthi_places_add_extent(sthi_places *p, sth_devptr base, uint64_t bytes, bool wraps) {
    STHI_INVARIANT(bytes && p->extent_end <= p->extent_cap);
    for (uint32_t i = 0; i < p->extent_cap; i++) {
        if (p->extents[i].live) continue;
        p->extents[i] = (sthi_extent){
            .base = base, .bytes = bytes, .first_slot = STHI_NO_SLOT, .wraps = wraps, .live = true};
        if (p->extent_end <= i) p->extent_end = i + 1;
        return (int32_t)i;
    }
    return -1;
}

void sthi_places_drop_extent(sthi_places *p, uint32_t extent) {
    STHI_INVARIANT(extent < p->extent_end && p->extents[extent].live);
    STHI_INVARIANT(!p->extents[extent].slots && p->extents[extent].first_slot == STHI_NO_SLOT);
    p->extents[extent].live = false;
}

uint64_t sthi_places_total(const sthi_places *p) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < p->extent_end; i++)
        if (p->extents[i].live) n += p->extents[i].bytes;
    return n;
}

int32_t sthi_slot_open(sthi_places *p, uint32_t unit, uint32_t extent, uint64_t offset, uint64_t bytes) {
    STHI_INVARIANT(p->free_count <= p->slot_cap);
    if (!p->free_count) return STHI_NO_SLOT;
    int32_t id = p->free_slots[--p->free_count];
    sthi_extent *e = &p->extents[extent];
    STHI_INVARIANT(!p->slots[id].live);
    STHI_INVARIANT(e->live && !e->closing);
    STHI_INVARIANT(offset < e->bytes && bytes <= (e->wraps ? e->bytes : e->bytes - offset));
    p->slots[id] = (sthi_slot){.unit = unit, .extent = extent, .offset = offset, .bytes = bytes,
                               .generation = ++p->generation, .prev = STHI_NO_SLOT, .next = e->first_slot,
                               .live = true};
    if (e->first_slot != STHI_NO_SLOT) p->slots[e->first_slot].prev = id;
    e->first_slot = id;
    e->slots++;
    return id;
}

void sthi_slot_close(sthi_places *p, int32_t id) {
    STHI_INVARIANT(sthi_slot_is_open(p, id));
    sthi_slot *s = &p->slots[id];
    sthi_extent *e = &p->extents[s->extent];
    STHI_INVARIANT(!s->leases);
    STHI_INVARIANT(e->live && e->slots);
    STHI_INVARIANT((s->prev == STHI_NO_SLOT) == (e->first_slot == id));
    if (s->prev != STHI_NO_SLOT) p->slots[s->prev].next = s->next;
    else e->first_slot = s->next;
    if (s->next != STHI_NO_SLOT) p->slots[s->next].prev = s->prev;
    e->slots--;
    s->live = false;
    p->free_slots[p->free_count++] = id;
}

bool sthi_ranges_touch(const sthi_extent *e, uint64_t a, uint64_t an, uint64_t b, uint64_t bn) {
    if (!an || !bn) return false;
    if (!e->wraps) return a < b + bn && b < a + an;
    uint64_t ab = b >= a ? b - a : b + e->bytes - a; /* way from a forward to b */
    uint64_t ba = ab ? e->bytes - ab : 0;
    return ab < an || ba < bn;
}

int32_t sthi_places_touching(const sthi_places *p, uint32_t extent, uint64_t offset, uint64_t bytes,
                             int32_t except, int32_t after) {
    const sthi_extent *e = &p->extents[extent];
    STHI_INVARIANT(e->live);
    STHI_INVARIANT(after == STHI_NO_SLOT || (p->slots[after].live && p->slots[after].extent == extent));
    int32_t id = after == STHI_NO_SLOT ? e->first_slot : p->slots[after].next;
    for (; id != STHI_NO_SLOT; id = p->slots[id].next) {
        const sthi_slot *s = &p->slots[id];
        if (id != except && sthi_ranges_touch(e, offset, bytes, s->offset, s->claimed)) return id;
    }
    return STHI_NO_SLOT;
}

/* Sum of the costs of all slots that [offset, offset+bytes) touches; negative when one may not go. */
static double range_cost(const sthi_places *p, uint32_t extent, uint64_t offset, uint64_t bytes,
                         sthi_slot_cost cost, void *context) {
    double sum = 0;
    int32_t id = STHI_NO_SLOT;
    while ((id = sthi_places_touching(p, extent, offset, bytes, STHI_NO_SLOT, id)) != STHI_NO_SLOT) {
        double c = cost(context, &p->slots[id]);
        if (c < 0) return -1;
        sum += c;
    }
    return sum;
}

void sthi_places_choose_in(const sthi_places *p, uint32_t extent, uint64_t bytes, sthi_slot_cost cost, void *context,
                           sthi_place *out, double *best) {
    const sthi_extent *e = &p->extents[extent];
    if (!e->live || e->closing || e->bytes < bytes) return;
    /* Sliding a range down never makes it dearer until its start meets the end of a slot or 0:
     * those are all the starts that need a look. */
    uint64_t start = 0;
    for (int32_t id = e->first_slot;; id = p->slots[id].next) {
        double c = sthi_range_inside(start, bytes, e->bytes) ? range_cost(p, extent, start, bytes, cost, context) : -1;
        if (c >= 0 && (*best < 0 || c < *best)) {
            *best = c;
            *out = (sthi_place){extent, start};
        }
        if (id == STHI_NO_SLOT) return;
        start = (p->slots[id].offset + p->slots[id].claimed) % e->bytes;
    }
}

bool sthi_places_choose(const sthi_places *p, uint64_t bytes, sthi_slot_cost cost, void *context,
                        sthi_place *out) {
    double best = -1;
    for (uint32_t x = 0; x < p->extent_end; x++) sthi_places_choose_in(p, x, bytes, cost, context, out, &best);
    return best >= 0;
}

bool sthi_places_check(const sthi_places *p, const char **out_why) {
    for (uint32_t x = 0; x < p->extent_end; x++) {
        const sthi_extent *e = &p->extents[x];
        if (!e->live) continue;
        uint32_t count = 0;
        int32_t before = STHI_NO_SLOT;
        for (int32_t id = e->first_slot; id != STHI_NO_SLOT; before = id, id = p->slots[id].next, count++) {
            const sthi_slot *s = &p->slots[id];
            *out_why = "a slot is listed in an extent that is not its own";
            if (!s->live || s->extent != x) return false;
            *out_why = "a slot's list does not lead back";
            if (s->prev != before) return false;
            *out_why = "a slot reaches past its extent";
            if (s->offset >= e->bytes || s->bytes > e->bytes || s->claimed > s->bytes) return false;
            if (!e->wraps && s->offset + s->bytes > e->bytes) return false;
            *out_why = "claimed ranges overlap";
            if (sthi_places_touching(p, x, s->offset, s->claimed, id, STHI_NO_SLOT) != STHI_NO_SLOT)
                return false;
            *out_why = "a slot is complete but not all of it is claimed";
            if (s->complete && s->claimed != s->bytes) return false;
            *out_why = "a slot is leased before its copy was issued";
            if (s->leases && !s->complete) return false;
        }
        *out_why = "an extent's list and count differ";
        if (count != e->slots) return false;
    }
    *out_why = "";
    return true;
}
