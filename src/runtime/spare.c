/* Spare room: units that data decides about (experts that a router picks, an early exit) are in no order, so a plan
 * gives them one place on demand. What it leaves of the budget is filled with them, in extents of a part of it, as they
 * are asked for. Where it is full those leave that are used least.
 *
 * The heat of a unit is the number of steps that used it, each worth half after HALF_STEPS more: frequency and recency
 * in one number. A byte is worth the heat of its unit.
 *
 * Extents stay when a plan changes, as far as the plan leaves room for them. Residents and the ring go first: a byte of
 * theirs is used in every step. */
#include "runtime/spare.h"

#include <math.h>

#include "core/plan.h"
#include "load/stays.h"
#include "load/room.h"
#include "runtime/extents.h"

enum {
    HALF_STEPS = 64,
    PARTS = 16,     /* extents that the room is divided into, at most */
    UNITS_IN = 4    /* that one extent has room for, at least, where there is so much */
};

static bool is_spare(const sth_runtime *rt, uint32_t x) {
    const sthi_extent *e = &rt->places.extents[x];
    return e->live && !e->closing && rt->extents.kind[x] == STHI_EXTENT_SPARE;
}

static double heat_now(const sth_runtime *rt, const sthi_unit *u) {
    uint32_t ago = (uint32_t)rt->step.number - u->heat_step;
    return u->heat * exp2(-(double)ago / HALF_STEPS);
}

void sthi_spare_used(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    if (sthi_used_in_step(u, rt->step.number)) return; /* counted */
    u->heat = (float)heat_now(rt, u) + 1;
    u->heat_step = (uint32_t)rt->step.number;
}

static uint64_t spare_bytes(const sth_runtime *rt) {
    uint64_t bytes = 0;
    for (uint32_t x = 0; x < rt->places.extent_end; x++)
        if (is_spare(rt, x)) bytes += rt->places.extents[x].bytes;
    return bytes;
}

/* Bytes of units that may come here and have no room yet. */
static uint64_t wanted(const sth_runtime *rt) {
    uint64_t bytes = 0, has = spare_bytes(rt);
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (sthi_unplanned(&rt->units[i]) && rt->units[i].last_step) bytes += rt->units[i].bytes;
    return bytes > has ? bytes - has : 0;
}

/* What the budget has beside all extents. */
static uint64_t left(const sth_runtime *rt) {
    uint64_t room = sthi_budget_for_units(rt), held = sthi_places_total(&rt->places) - rt->extents.closing_bytes;
    return room > held ? room - held : 0;
}

/* A new extent, if the plan in force leaves room for the unit, and others on the device do. */
static bool grow(sth_runtime *rt, uint64_t bytes, uint32_t *out) {
    if (!rt->planned.plan || !rt->planned.homes) return false; /* the room is in use, one way or another */
    if (rt->extents.spare_refused == rt->planned.count) return false;
    uint64_t room = sthi_budget_for_units(rt), most = left(rt);
    if (most < bytes) return false; /* full, as a rule: units are not counted for that */
    uint64_t want = wanted(rt), part = sthi_max_u64(room / PARTS, UNITS_IN * bytes) / STHI_ALIGN * STHI_ALIGN;
    part = sthi_min_u64(sthi_min_u64(part, most), sthi_max_u64(want, bytes)) / STHI_ALIGN * STHI_ALIGN;
    if (part < bytes) return false;
    bool got = sthi_extent_alloc(rt, part, false, STHI_EXTENT_SPARE, out) == STH_OK;
    if (!got) rt->extents.spare_refused = rt->planned.count; /* until there is another plan */
    return got;
}

static double nothing_goes(void *context, const sthi_slot *s) {
    (void)context, (void)s;
    return -1;
}

static double coldest_goes(void *context, const sthi_slot *s) {
    const sth_runtime *rt = context;
    if (s->leases || !s->complete) return -1;
    return (double)s->bytes * heat_now(rt, &rt->units[s->unit]);
}

static bool choose(sth_runtime *rt, uint64_t bytes, sthi_slot_cost cost, sthi_place *out) {
    double best = -1;
    for (uint32_t x = 0; x < rt->places.extent_end; x++)
        if (is_spare(rt, x)) sthi_places_choose_in(&rt->places, x, bytes, cost, rt, out, &best);
    return best >= 0;
}

bool sthi_spare_place(sth_runtime *rt, uint32_t unit, sthi_place *out) {
    uint64_t bytes = rt->units[unit].bytes;
    uint32_t x;
    if (choose(rt, bytes, nothing_goes, out)) return true;
    if (grow(rt, bytes, &x)) {
        *out = (sthi_place){x, 0};
        return true;
    }
    return choose(rt, bytes, coldest_goes, out);
}

uint64_t sthi_spare_room(const sth_runtime *rt, const sth_plan *plan) {
    uint64_t needs = plan->ring_bytes + plan->demand_bytes + sthi_stays_planned(rt, plan);
    uint64_t room = sthi_budget_for_units(rt);
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (plan->resident[i]) needs += rt->units[i].bytes;
    return room > needs ? room - needs : 0;
}

/* Extents stay from the first on, as far as they fit. Returns their bytes. */
static uint64_t fit(const sth_runtime *rt, uint64_t room, uint32_t x, uint64_t kept) {
    return is_spare(rt, x) && kept + rt->places.extents[x].bytes <= room ? kept + rt->places.extents[x].bytes : kept;
}

uint64_t sthi_spare_fitting(const sth_runtime *rt, uint64_t room) {
    uint64_t kept = 0;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) kept = fit(rt, room, x, kept);
    return kept;
}

void sthi_spare_fit(sth_runtime *rt, uint64_t room) {
    uint64_t kept = 0;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        uint64_t with = fit(rt, room, x, kept);
        if (is_spare(rt, x) && with == kept) sthi_extent_release(rt, x);
        kept = with;
    }
}
