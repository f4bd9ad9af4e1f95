/* Homes: a plan's extents of device memory.
 *
 *   budget = reserved (the caller's) + ring extent + demand extent + resident extents + spare extents
 *
 * Residents that are on the device stay where they are as far as there is room for the others (core/layout.c); new
 * ones lie in extents of about EXTENT_TARGET, so that part of the memory can be given back. What a plan does not keep
 * is freed first, after its last use, which waits for the device: plans change between steps only. */
#include "runtime/homes.h"

#include "base/invariant.h"
#include "base/memory.h"
#include "core/layout.h"
#include "load/room.h"
#include "load/stages.h"
#include "load/stays.h"
#include "load/together.h"
#include "runtime/extents.h"
#include "runtime/spare.h"
#include "state/state.h"

/* Extents are small, so that few residents move for new ones; neighbors that lie in one are loaded by one copy. */
enum { EXTENT_TARGET = 64 << 20, MANY_EXTENTS = 256, SOME_EXTENTS = 64 };

/* What is laid out in one piece: a bundle of units, or where there are none a unit. */
typedef struct homes {
    sthi_layout layout;
    const sthi_bundles *bundles; /* of the plan; NULL */
    uint32_t *piece;             /* by bundle, or by unit: its number in the layout; STH_NONE: no resident */
} homes;

static bool for_residents(const sth_runtime *rt, uint32_t x) {
    const sthi_extent *e = &rt->places.extents[x];
    return e->live && !e->closing && rt->extents.kind[x] == STHI_EXTENT_RESIDENTS;
}

bool sthi_lies_at_rest(const sth_runtime *rt, const sthi_unit *u) {
    if (u->slot == STHI_NO_SLOT) return false;
    const sthi_slot *s = &rt->places.slots[u->slot];
    return s->complete && for_residents(rt, s->extent);
}

static void homes_fini(homes *h) {
    sthi_free(h->layout.units);
    sthi_free(h->layout.extents);
    sthi_free(h->piece);
}

static bool homes_init(homes *h, const sth_runtime *rt, const sthi_bundles *bundles) {
    uint32_t most = bundles ? bundles->unit_count : rt->unit_count;
    *h = (homes){.layout = {.extent_count = rt->places.extent_end}, .bundles = bundles};
    h->layout.units = sthi_zalloc(most, sizeof *h->layout.units);
    h->layout.extents = sthi_zalloc((size_t)rt->places.extent_end + most, sizeof *h->layout.extents);
    h->piece = sthi_zalloc(most, sizeof *h->piece);
    if (!h->layout.units || !h->layout.extents || !h->piece) {
        homes_fini(h);
        return false;
    }
    for (uint32_t i = 0; i < most; i++) h->piece[i] = STH_NONE;
    return true;
}

static uint32_t *piece_of(const homes *h, uint32_t unit) {
    return &h->piece[h->bundles ? h->bundles->of_unit[unit] : unit];
}

static uint64_t place_in_piece(const homes *h, uint32_t unit) { return h->bundles ? h->bundles->place[unit] : 0; }

/* A piece lies where all of its units do, in their places. */
static void add_unit(homes *h, const sth_runtime *rt, uint32_t unit) {
    const sthi_unit *u = &rt->units[unit];
    const sthi_slot *s = sthi_lies_at_rest(rt, u) ? &rt->places.slots[u->slot] : NULL;
    uint32_t *piece = piece_of(h, unit);
    uint64_t at = place_in_piece(h, unit);
    bool first = *piece == STH_NONE;
    if (first) *piece = h->layout.unit_count++;
    sthi_laid *laid = &h->layout.units[*piece];
    if (first) {
        laid->bytes = h->bundles ? h->bundles->units[h->bundles->of_unit[unit]].bytes : u->bytes;
        laid->extent = s && s->offset >= at ? s->extent : STH_NONE;
        if (laid->extent != STH_NONE) laid->offset = s->offset - at;
    } else if (!s || s->extent != laid->extent || s->offset != laid->offset + at) {
        laid->extent = STH_NONE;
    }
}

/* Extents that hold little each have become many: nothing stays, and there are few again. */
static bool crowded(const sth_runtime *rt) {
    uint32_t count = 0;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) count += rt->places.extents[x].live;
    return count > STHI_EXTENT_CAP / 2;
}

/* On success the caller calls homes_fini. */
static sth_status lay_out(const sth_runtime *rt, const sth_plan *plan, const sthi_bundles *bundles, homes *h) {
    if (!homes_init(h, rt, bundles)) return sthi_no_memory(NULL, "the homes of residents; free host memory");
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (plan->resident[i] && rt->units[i].bytes) add_unit(h, rt, i);
    for (uint32_t x = 0; x < rt->places.extent_end; x++)
        h->layout.extents[x] = for_residents(rt, x) ? rt->places.extents[x].bytes : 0;
    for (uint32_t i = 0; crowded(rt) && i < h->layout.unit_count; i++) h->layout.units[i].extent = STH_NONE;
    uint64_t room = sthi_budget_for_units(rt);
    uint64_t spare = sthi_spare_fitting(rt, sthi_spare_room(rt, plan));
    uint64_t beside = plan->ring_bytes + plan->demand_bytes + sthi_stays_planned(rt, plan) + spare;
    STHI_INVARIANT(beside <= room);
    h->layout.room = room - beside;
    uint64_t joined = sthi_most_together(rt->options.budget);
    if (plan->ring_bytes) joined = sthi_min_u64(joined, room / SOME_EXTENTS); /* else no resident will make way */
    h->layout.target = sthi_min_u64(EXTENT_TARGET, sthi_max_u64(room / MANY_EXTENTS, joined));
    sth_status rc = sthi_layout_find(&h->layout);
    if (rc != STH_OK) homes_fini(h);
    return rc;
}

static bool is_ring_of(const sth_runtime *rt, const sth_plan *plan, uint32_t x) {
    const sthi_extent *e = &rt->places.extents[x];
    return x == rt->extents.ring && e->bytes == plan->ring_bytes && e->wraps == plan->ring_mapped_twice;
}

sth_status sthi_homes_clear(sth_runtime *rt, const sth_plan *plan, const sthi_bundles *bundles) {
    homes h;
    STHI_TRY(lay_out(rt, plan, bundles, &h));
    sthi_spare_fit(rt, sthi_spare_room(rt, plan));
    if (!sthi_stays_as(rt, plan)) sthi_stays_free(rt);
    for (uint32_t x = 0; x < h.layout.extent_count; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        bool demand = x == rt->extents.demand && e->bytes == plan->demand_bytes;
        bool stays = h.layout.extents[x] || demand || is_ring_of(rt, plan, x) ||
                     rt->extents.kind[x] == STHI_EXTENT_SPARE;
        if (e->live && !stays) sthi_extent_release(rt, x);
    }
    homes_fini(&h);
    return STH_OK;
}

/* `made`: the numbers of the new extents. */
static void give_homes(sth_runtime *rt, const sth_plan *plan, const homes *h, const uint32_t *made) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        if (!plan->resident[i] || !rt->units[i].bytes) continue;
        const sthi_laid *laid = &h->layout.units[*piece_of(h, i)];
        bool old = laid->extent < h->layout.extent_count;
        rt->units[i].home = (sthi_place){old ? laid->extent : made[laid->extent - h->layout.extent_count],
                                         laid->offset + place_in_piece(h, i)};
    }
}

static sth_status place_residents(sth_runtime *rt, const sth_plan *plan, const sthi_bundles *bundles) {
    homes h;
    STHI_TRY(lay_out(rt, plan, bundles, &h));
    uint32_t *made = sthi_zalloc(h.layout.new_count, sizeof *made);
    sth_status rc = made ? STH_OK : sthi_no_memory(NULL, "the homes of residents; free host memory");
    for (uint32_t i = 0; i < h.layout.new_count && rc == STH_OK; i++)
        rc = sthi_extent_alloc(rt, h.layout.extents[h.layout.extent_count + i], false, STHI_EXTENT_RESIDENTS, &made[i]);
    if (rc == STH_OK) give_homes(rt, plan, &h, made);
    sthi_free(made);
    homes_fini(&h);
    return rc;
}

sth_status sthi_homes_allocate(sth_runtime *rt, const sth_plan *plan, const sthi_bundles *bundles) {
    STHI_TRY(sthi_stages_alloc(rt));
    if (!rt->expand.packed) STHI_TRY(sthi_stays_alloc(rt, plan));
    if (plan->ring_bytes && rt->extents.ring == STH_NONE)
        STHI_TRY(sthi_extent_alloc(rt, plan->ring_bytes, plan->ring_mapped_twice, STHI_EXTENT_RING, &rt->extents.ring));
    if (plan->demand_bytes && rt->extents.demand == STH_NONE)
        STHI_TRY(sthi_extent_alloc(rt, plan->demand_bytes, false, STHI_EXTENT_DEMAND, &rt->extents.demand));
    return place_residents(rt, plan, bundles);
}
