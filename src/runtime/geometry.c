/* Geometry: a plan comes into force. Its extents are laid out (homes.c), with less of the budget where the device
 * refuses memory, and its residents are listed; and the other way: all memory in one piece. Lock held throughout. */
#include "runtime/geometry.h"

#include <string.h>

#include "base/arith.h"
#include "base/invariant.h"
#include "core/plan.h"
#include "load/charge.h"
#include "load/queue.h"
#include "load/room.h"
#include "load/slots.h"
#include "load/stages.h"
#include "load/stays.h"
#include "runtime/budget.h"
#include "runtime/bundle.h"
#include "runtime/extents.h"
#include "runtime/homes.h"
#include "runtime/plan_input.h"
#include "runtime/planning.h"
#include "runtime/program.h"
#include "state/state.h"
#include "telemetry/timeline.h"

enum { ALLOC_TRIES = 6 };
/* A new plan must predict this share of the old step or less. */
static const double WORTH_IT = 0.98;
/* Where expansions take more of the device than the rest of this, so much is enough. */
static const double WORTH_LESS_EXPANSION = 0.995;

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

/* What stays from the plan before: residents that lie elsewhere are to come home. */
static void settle_places(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (u->slot == STHI_NO_SLOT) continue;
        sthi_slot *s = &rt->places.slots[u->slot];
        s->resident = u->resident && s->extent == u->home.extent && s->offset == u->home.offset;
        if (u->resident && !s->resident && !sthi_slot_busy(s)) (void)sthi_evict(rt, u->slot, rt->copies.stream);
    }
}

static void adopt(sth_runtime *rt, const sthi_made_plan *m) {
    sth_plan *plan = m->plan;
    STHI_INVARIANT(plan->use_count == rt->order.count && plan->load_count <= rt->order.cap);
    sthi_plan_destroy(rt->planned.plan);
    rt->planned.plan = plan;
    rt->planned.asked = m->asked;
    rt->planned.room = m->room;
    rt->planned.count++;
    rt->link.watch = (sthi_link_watch){0};
    take_bundles(rt, m->bundles);
    rt->stats.resident_bytes = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        if (rt->units[i].encoded.crosses_plain != plan->plain[i]) rt->graph.edition++;
        rt->units[i].encoded.crosses_plain = plan->plain[i];
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
    rt->planned.homes = true;
    list_residents(rt);
    settle_places(rt);
}

/* Frees what the plan does not keep. Busy slots may keep some of that: then there is less, or more, to plan
 * with than the plan was made for, and it is made anew until it fits. There is none on failure. */
static sth_status make_room(sth_runtime *rt, sthi_made_plan *m, uint64_t planned_with) {
    for (;;) {
        STHI_TRY(sthi_homes_clear(rt, m->plan, m->bundles));
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
        if (rc == STH_OK) rc = sthi_homes_allocate(rt, m->plan, m->bundles);
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
    rt->planned.homes = false;
    rt->program.resident_count = rt->program.resident_next = 0;
}

void sthi_plan_put_away(sth_runtime *rt) {
    sthi_planned *p = &rt->planned;
    if (p->plan) {
        sthi_made_drop(&p->before);
        p->before = (sthi_made_plan){p->plan, p->bundles, p->asked, p->room};
        p->plan = NULL;
        p->bundles = NULL;
    }
    sthi_plan_drop(rt);
}

/* Installs a plan that was made for the budget in force; owns it from here on. */
static sth_status install(sth_runtime *rt, sthi_made_plan m) {
    STHI_INVARIANT(m.plan && rt->graph.state == STHI_GRAPH_IDLE);
    rt->program.on = rt->planned.homes = false;
    sthi_cancel_queue(rt);
    uint64_t asked = rt->options.budget;
    sthi_mark begun = sthi_timeline_mark("lay memory out", rt->name);
    sth_status rc = place_plan(rt, &m);
    sthi_timeline_since(begun, STHI_TRACK_CALL, rt->name, "lay memory out", 0);
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

static bool is_whole(const sth_runtime *rt, uint32_t x, uint64_t bytes) {
    const sthi_extent *e = &rt->places.extents[x];
    return e->live && !e->closing && e->bytes == bytes;
}

/* Static policy: all of the budget is one extent, places are found as they are needed. */
static sth_status install_static(sth_runtime *rt) {
    sthi_cancel_queue(rt);
    uint64_t whole;
    do { /* freeing may change how much room there is */
        whole = whole_room(rt);
        for (uint32_t x = 0; x < rt->places.extent_end; x++)
            if (rt->places.extents[x].live && !is_whole(rt, x, whole)) sthi_extent_release(rt, x);
    } while (whole != whole_room(rt));
    if (!whole)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "leases that have not ended hold all of the budget of %llu bytes; drop tensors over weights",
                         (unsigned long long)rt->options.budget);
    uint32_t x = 0;
    STHI_TRY(sthi_stages_alloc(rt));
    while (x < rt->places.extent_end && !is_whole(rt, x, whole)) x++;
    if (x == rt->places.extent_end) STHI_TRY(sthi_extent_alloc(rt, whole, false, STHI_EXTENT_OTHER, &x));
    sthi_program_reset(rt);
    return STH_OK;
}

static sth_status plan_and_install(sth_runtime *rt) {
    if (rt->options.policy == STH_POLICY_STATIC) return install_static(rt);
    sthi_made_plan m = {0};
    STHI_TRY(sthi_plan_make(rt, &m));
    return install(rt, m);
}

static sth_status install_before(sth_runtime *rt) {
    sthi_made_plan m = {0};
    if (rt->options.policy == STH_POLICY_STATIC) return plan_and_install(rt);
    sthi_plan_put_away(rt);
    bool taken = sthi_plan_before(rt, &m);
    sth_status rc = taken ? install(rt, m) : plan_and_install(rt);
    return taken && rc == STH_BUDGET_TOO_SMALL ? plan_and_install(rt) : rc;
}

static sth_status install_within(sth_runtime *rt, uint64_t bytes, bool as_before) {
    sthi_hold(rt, bytes);
    sth_status rc = as_before ? install_before(rt) : plan_and_install(rt);
    bool full = rc == STH_BUDGET_TOO_SMALL || rc == STH_OUT_OF_DEVICE_MEMORY;
    bool all = !rt->leases.bytes && !rt->extents.closing_bytes; /* else another may fit soon */
    rt->planned.refused = full && all ? rc : STH_OK;
    sthi_settle(rt);
    return rc;
}

sth_status sthi_geometry_install(sth_runtime *rt) { return install_within(rt, rt->options.budget, false); }

static sth_status install_in_haste(sth_runtime *rt, uint64_t bytes, bool as_before) {
    rt->planned.hurry = true;
    sth_status rc = install_within(rt, bytes, as_before);
    rt->planned.hurry = false;
    return rc;
}

sth_status sthi_geometry_install_in_haste(sth_runtime *rt, uint64_t bytes) {
    return install_in_haste(rt, bytes, false);
}

sth_status sthi_geometry_come_back(sth_runtime *rt) { return install_in_haste(rt, rt->options.budget, true); }

static sth_status improve(sth_runtime *rt, bool *out_changed) {
    sthi_made_plan m = {0};
    sth_prediction now;
    STHI_INVARIANT(!rt->step.open && !rt->leases.bytes);
    sthi_plan_hold(rt, true); /* what was seen since the plan was made, too */
    sth_status rc = sthi_plan_price(rt, rt->link.rate, &now);
    if (rc == STH_OUT_OF_HOST_MEMORY) return rc;
    bool expands = rc == STH_OK && (double)now.expand_ns > (1 - WORTH_LESS_EXPANSION) * (double)now.step_ns;
    double worth = expands ? WORTH_LESS_EXPANSION : WORTH_IT;
    if (rc == STH_OK && (double)now.lower_bound_ns >= worth * (double)now.step_ns) {
        rt->planned.plan->prediction = now; /* none can promise enough, and a search takes milliseconds of the step */
        return STH_OK;
    }
    STHI_TRY(sthi_plan_make(rt, &m));
    /* None can give places to all that is held. */
    if (rc != STH_OK && !rt->planned.holds) rc = sthi_plan_price(rt, rt->link.rate, &now);
    /* A plan that cannot run was made before it was seen what is held together. */
    if (rc != STH_OK || (double)m.plan->prediction.step_ns < worth * (double)now.step_ns) {
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
    rt->program.on = rt->planned.homes = false;
    rt->planned.again = true;
    sthi_cancel_queue(rt);
    sthi_stays_free(rt);
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
    sth_status rc = sthi_extent_alloc(rt, left, false, STHI_EXTENT_OTHER, &x);
    if (rc == STH_OUT_OF_DEVICE_MEMORY && left > bytes)
        rc = sthi_extent_alloc(rt, bytes, false, STHI_EXTENT_OTHER, &x);
    return rc;
}

sth_status sthi_rearrange(sth_runtime *rt, uint64_t bytes) {
    sthi_hold(rt, rt->options.budget); /* what it frees on the way stays its own */
    sth_status rc = rearrange(rt, bytes);
    sthi_settle(rt);
    return rc;
}
