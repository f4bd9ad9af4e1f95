/* Geometry: from a plan to extents of device memory.
 *
 *   budget = reserved (the caller's) + ring extent + demand extent + resident extents (exactly packed)
 *
 * Residents are packed in the order of their units into extents of about 256 MiB, so that part of
 * the memory can be given back. An extent whose contents the new plan keeps is kept with its bytes;
 * others are freed first, after their last use, which waits for the device: plans change between
 * steps only. Lock held throughout. */
#include "runtime/geometry.h"

#include <string.h>

#include "base/arith.h"
#include "base/invariant.h"
#include "core/plan.h"
#include "load/charge.h"
#include "load/queue.h"
#include "load/room.h"
#include "load/stages.h"
#include "runtime/budget.h"
#include "runtime/bundle.h"
#include "runtime/extents.h"
#include "runtime/plan_input.h"
#include "runtime/planning.h"
#include "runtime/program.h"
#include "state/state.h"

enum { EXTENT_TARGET = 256 << 20, LEAST_EXTENTS = 256, ALLOC_TRIES = 6 };
/* A new plan costs a reload of what moves: it must predict this share of the old step or less. */
static const double WORTH_IT = 0.98;

static uint64_t mix(uint64_t h, uint64_t v) { return (h ^ v) * UINT64_C(0x9E3779B97F4A7C15) + (h >> 29); }

/* One group of residents that share an extent: [begin, end) of the unit numbers. */
typedef struct pack {
    uint32_t begin, end;
    uint64_t bytes, key;
} pack;

static pack next_pack(const sth_runtime *rt, const sth_plan *plan, uint32_t begin) {
    pack p = {.begin = begin, .end = begin, .key = 1};
    uint64_t target = sthi_min_u64(EXTENT_TARGET, sthi_budget_for_units(rt) / LEAST_EXTENTS);
    for (uint32_t i = begin; i < rt->unit_count; i++) {
        if (!plan->resident[i]) continue;
        if (p.bytes && p.bytes + rt->units[i].bytes > target) break;
        p.bytes += rt->units[i].bytes;
        p.key = mix(mix(p.key, i), rt->units[i].bytes);
        p.end = i + 1;
    }
    return p;
}

static bool extent_holds(const sth_runtime *rt, const pack *p, uint32_t *out) {
    for (uint32_t x = 0; x < rt->places.extent_end; x++)
        if (rt->places.extents[x].live && !rt->places.extents[x].closing && rt->extents.key[x] == p->key &&
            rt->places.extents[x].bytes == p->bytes) {
            *out = x;
            return true;
        }
    return false;
}

static uint64_t ring_key(uint64_t bytes, bool wraps) { return mix(mix(2, bytes), wraps); }

static uint64_t demand_key(uint64_t bytes) { return mix(3, bytes); }

/* Marks what the plan keeps with key + keep, frees the rest. */
static void free_unkept(sth_runtime *rt, const sth_plan *plan) {
    bool keep[STHI_EXTENT_CAP] = {false};
    uint32_t x;
    for (pack p = next_pack(rt, plan, 0); p.bytes; p = next_pack(rt, plan, p.end))
        if (extent_holds(rt, &p, &x)) keep[x] = true;
    uint64_t ring = ring_key(plan->ring_bytes, plan->ring_mapped_twice);
    if (rt->extents.ring != STH_NONE && rt->extents.key[rt->extents.ring] == ring) keep[rt->extents.ring] = true;
    if (rt->extents.demand != STH_NONE && rt->extents.key[rt->extents.demand] == demand_key(plan->demand_bytes))
        keep[rt->extents.demand] = true;
    for (x = 0; x < rt->places.extent_end; x++)
        if (rt->places.extents[x].live && !keep[x]) sthi_extent_release(rt, x);
}

static sth_status place_residents(sth_runtime *rt, const sth_plan *plan) {
    for (pack p = next_pack(rt, plan, 0); p.bytes; p = next_pack(rt, plan, p.end)) {
        uint32_t x;
        if (!extent_holds(rt, &p, &x)) STHI_TRY(sthi_extent_alloc(rt, p.bytes, false, p.key, &x));
        uint64_t at = 0;
        for (uint32_t i = p.begin; i < p.end; i++) {
            if (!plan->resident[i]) continue;
            rt->units[i].home.extent = x;
            rt->units[i].home.offset = at;
            at += rt->units[i].bytes;
        }
        STHI_INVARIANT(at == p.bytes);
    }
    return STH_OK;
}

static sth_status allocate(sth_runtime *rt, const sth_plan *plan) {
    bool wraps = plan->ring_mapped_twice;
    STHI_TRY(sthi_stages_alloc(rt));
    if (plan->ring_bytes && rt->extents.ring == STH_NONE)
        STHI_TRY(sthi_extent_alloc(rt, plan->ring_bytes, wraps, ring_key(plan->ring_bytes, wraps),
                                   &rt->extents.ring));
    if (plan->demand_bytes && rt->extents.demand == STH_NONE)
        STHI_TRY(sthi_extent_alloc(rt, plan->demand_bytes, false, demand_key(plan->demand_bytes),
                                   &rt->extents.demand));
    return place_residents(rt, plan);
}

/* Residents by their first use; those that the order does not use come last. */
static void list_residents(sth_runtime *rt) {
    rt->program.resident_count = rt->program.resident_next = 0;
    for (uint32_t t = 0; t < rt->order.count; t++) {
        uint32_t unit = rt->order.uses[t].unit;
        if (rt->units[unit].resident && rt->units[unit].first_use == t)
            rt->program.residents[rt->program.resident_count++] = unit;
    }
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (rt->units[i].resident && rt->units[i].first_use == STH_NONE)
            rt->program.residents[rt->program.resident_count++] = i;
}

/* The bundles of the plan in force; NULL: there are none. */
static void take_bundles(sth_runtime *rt, sthi_bundles *b) {
    sthi_bundles_destroy(rt->planned.bundles);
    rt->planned.bundles = b;
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->units[i].bundle = b ? b->of_unit[i] : STH_NONE;
}

static void adopt(sth_runtime *rt, const sthi_made_plan *m) {
    sth_plan *plan = m->plan;
    STHI_INVARIANT(plan->use_count == rt->order.count && plan->load_count <= rt->order.cap);
    sthi_plan_destroy(rt->planned.plan);
    rt->planned.plan = plan;
    rt->planned.count++;
    rt->link.watch = (sthi_link_watch){0};
    take_bundles(rt, m->bundles);
    rt->stats.resident_bytes = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        rt->units[i].resident = plan->resident[i];
        if (plan->resident[i]) rt->stats.resident_bytes += rt->units[i].bytes;
    }
    memset(rt->planned.load_uses, 0, rt->order.cap * sizeof *rt->planned.load_uses);
    for (uint32_t t = 0; t < plan->use_count; t++)
        if (plan->use_load[t] != STH_NONE) rt->planned.load_uses[plan->use_load[t]]++;
    rt->planned.kept_end = 0;
    for (uint32_t i = 0; i < plan->load_count; i++)
        if (plan->loads[i].last_use < plan->loads[i].first_use && plan->loads[i].last_use >= rt->planned.kept_end)
            rt->planned.kept_end = plan->loads[i].last_use + 1;
    list_residents(rt);
}

/* Frees what the plan does not keep. Busy slots may keep some of that: then there is less, or more, to plan
 * with than the plan was made for, and it is made anew until it fits. There is none on failure. */
static sth_status make_room(sth_runtime *rt, sthi_made_plan *m, uint64_t planned_with) {
    for (;;) {
        free_unkept(rt, m->plan);
        uint64_t room = sthi_budget_for_units(rt);
        if (room == planned_with) return STH_OK;
        sthi_made_drop(m);
        planned_with = room;
        STHI_TRY(sthi_plan_make(rt, m));
    }
}

/* Makes room for the plan and takes it; with less of the budget when the device refuses the memory. */
static sth_status place_plan(sth_runtime *rt, sthi_made_plan *m) {
    sthi_error_copy refused = {.status = STH_OK};
    sth_status rc = STH_OK;
    for (int attempt = 0; attempt < ALLOC_TRIES; attempt++) {
        rc = m->plan ? STH_OK : sthi_plan_make(rt, m);
        if (rc == STH_OK) rc = make_room(rt, m, sthi_budget_for_units(rt));
        if (rc == STH_OK) rc = allocate(rt, m->plan);
        if (rc != STH_OUT_OF_DEVICE_MEMORY) break;
        if (refused.status == STH_OK) sthi_error_save(&refused);
        uint64_t had = sthi_min_u64(rt->options.budget, rt->share.limit);
        uint64_t left = sthi_max_u64(had - (had - rt->options.reserved) / 5, sthi_least_to_load(rt));
        if (left >= had) break;
        rt->options.budget = rt->share.limit = left; /* others took the memory */
        sthi_made_drop(m);
    }
    return rc != STH_OK && refused.status != STH_OK ? sthi_error_restore(&refused) : rc;
}

void sthi_plan_drop(sth_runtime *rt) {
    sthi_plan_destroy(rt->planned.plan);
    rt->planned.plan = NULL;
    take_bundles(rt, NULL);
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->units[i].resident = false;
    rt->program.resident_count = rt->program.resident_next = 0;
}

/* Installs a plan that was made for the budget in force; owns it from here on. */
static sth_status install(sth_runtime *rt, sthi_made_plan m) {
    STHI_INVARIANT(m.plan && rt->graph.state == STHI_GRAPH_IDLE);
    rt->program.on = false;
    sthi_cancel_queue(rt);
    uint64_t asked = rt->options.budget;
    sth_status rc = place_plan(rt, &m);
    if (rt->options.budget != asked) rt->stats.budget_cuts++;
    if (rc != STH_OK) {
        sthi_extents_free_all(rt); /* what an unfinished plan kept may not fit beside what is busy */
        rt->options.budget = asked;
        sthi_made_drop(&m);
        sthi_plan_drop(rt);
        return rc;
    }
    STHI_INVARIANT(sthi_held_bytes(rt) + rt->options.reserved <= rt->options.budget);
    adopt(rt, &m);
    sthi_program_reset(rt);
    rt->planned.refused = STH_OK;
    return STH_OK;
}

static uint64_t whole_room(const sth_runtime *rt) {
    return sthi_budget_for_units(rt) / STHI_ALIGN * STHI_ALIGN;
}

/* Static policy: all of the budget is one extent, places are found as they are needed. */
static sth_status install_static(sth_runtime *rt) {
    sthi_cancel_queue(rt);
    pack whole = {0};
    do { /* freeing may change how much room there is */
        whole.bytes = whole_room(rt);
        whole.key = mix(5, whole.bytes);
        for (uint32_t x = 0; x < rt->places.extent_end; x++)
            if (rt->places.extents[x].live && rt->extents.key[x] != whole.key) sthi_extent_release(rt, x);
    } while (whole.bytes != whole_room(rt));
    if (!whole.bytes)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "leases that have not ended hold all of the budget of %llu bytes",
                         (unsigned long long)rt->options.budget);
    uint32_t x;
    STHI_TRY(sthi_stages_alloc(rt));
    if (!extent_holds(rt, &whole, &x)) STHI_TRY(sthi_extent_alloc(rt, whole.bytes, false, whole.key, &x));
    sthi_program_reset(rt);
    return STH_OK;
}

static sth_status plan_and_install(sth_runtime *rt) {
    if (rt->options.policy == STH_POLICY_STATIC) return install_static(rt);
    sthi_made_plan m = {0};
    STHI_TRY(sthi_plan_make(rt, &m));
    return install(rt, m);
}

sth_status sthi_geometry_install_within(sth_runtime *rt, uint64_t bytes) {
    sthi_hold(rt, bytes);
    sth_status rc = plan_and_install(rt);
    bool full = rc == STH_BUDGET_TOO_SMALL || rc == STH_OUT_OF_DEVICE_MEMORY;
    bool all = !rt->leases.bytes && !rt->extents.closing_bytes; /* else another may fit soon */
    rt->planned.refused = full && all ? rc : STH_OK;
    sthi_settle(rt);
    return rc;
}

sth_status sthi_geometry_install(sth_runtime *rt) {
    return sthi_geometry_install_within(rt, rt->options.budget);
}

static sth_status improve(sth_runtime *rt, bool *out_changed) {
    sthi_made_plan m = {0};
    sth_prediction now;
    STHI_INVARIANT(!rt->step.open && !rt->leases.bytes);
    sthi_plan_hold(rt, true); /* what was seen since the plan was made, too */
    sth_status rc = sthi_plan_price(rt, rt->link.rate, &now);
    if (rc == STH_OUT_OF_HOST_MEMORY) return rc;
    if (rc == STH_OK && (double)now.lower_bound_ns >= WORTH_IT * (double)now.step_ns) {
        rt->planned.plan->prediction = now; /* none can promise enough, and a search takes milliseconds of the step */
        return STH_OK;
    }
    STHI_TRY(sthi_plan_make(rt, &m));
    /* None can give places to all that is held. */
    if (rc != STH_OK && !rt->planned.holds) rc = sthi_plan_price(rt, rt->link.rate, &now);
    /* A plan that cannot run was made before it was seen what is held together. */
    if (rc != STH_OK || (double)m.plan->prediction.step_ns < WORTH_IT * (double)now.step_ns) {
        *out_changed = true;
        return install(rt, m);
    }
    rt->planned.plan->prediction = now;
    sthi_made_drop(&m);
    return STH_OK;
}

sth_status sthi_geometry_improve(sth_runtime *rt, bool *out_changed) {
    *out_changed = false;
    if (rt->options.policy == STH_POLICY_STATIC || !rt->planned.plan) return STH_OK;
    sthi_hold(rt, rt->options.budget);
    sth_status rc = improve(rt, out_changed);
    sthi_settle(rt);
    return rc;
}

static sth_status rearrange(sth_runtime *rt, uint64_t bytes) {
    rt->program.on = false;
    rt->planned.again = true;
    sthi_cancel_queue(rt);
    uint64_t kept = 0; /* by extents that leases are in: what is free of them stays of use */
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && !sthi_extent_busy(rt, e)) sthi_extent_release(rt, x);
        else if (e->live && !e->closing) kept += e->bytes;
    }
    rt->current.host_waits++;
    STHI_TRY(sthi_stages_alloc(rt)); /* before places take the rest */
    uint64_t room = whole_room(rt), left = room > kept ? room - kept : 0;
    if (left < bytes) return STH_OK; /* the caller looks again and says what is missing */
    uint32_t x;
    sth_status rc = sthi_extent_alloc(rt, left, false, mix(4, left), &x);
    if (rc == STH_OUT_OF_DEVICE_MEMORY && left > bytes)
        rc = sthi_extent_alloc(rt, bytes, false, mix(4, bytes), &x);
    return rc;
}

sth_status sthi_rearrange(sth_runtime *rt, uint64_t bytes) {
    sthi_hold(rt, rt->options.budget); /* what it frees on the way stays its own */
    sth_status rc = rearrange(rt, bytes);
    sthi_settle(rt);
    return rc;
}
