/* Geometry: from a plan to extents of device memory.
 *
 *   budget = reserved (the caller's) + ring extent + demand extent + resident extents (exactly packed)
 *
 * Residents are packed in the order of their units into extents of about 256 MiB, so that part of the
 * memory can be given back. An extent whose contents the new plan keeps is kept with its bytes; others
 * are freed first, after their last use, which waits for the device: plans change between steps only.
 * An extent with a busy slot in it (leased, or a demand load under way in another thread) cannot be freed; it
 * is closed (no new places), and until a plan frees it its bytes are taken off the budget. A step that ends
 * when nothing keeps it any more plans anew. Lock held throughout. */
#include "runtime/geometry.h"

#include <string.h>

#include "core/plan.h"
#include "load/charge.h"
#include "load/memory.h"
#include "load/pieces.h"
#include "load/queue.h"
#include "load/room.h"
#include "load/slots.h"
#include "load/stages.h"
#include "load/traces.h"
#include "runtime/bundle.h"
#include "runtime/runtime.h"
#include "state/state.h"

enum { EXTENT_TARGET = 256 << 20, ALLOC_TRIES = 6 };
/* Plans are made for a link that is this much slower than it was measured. Rates and compute vary from step to
 * step: of plans that promise the same, the one that needs all of the link is late when they do. */
static const double LINK_MARGIN = 0.9;
/* A new plan costs a reload of what moves: it must predict this share of the old step or less. */
static const double WORTH_IT = 0.98;

static void extent_free(sth_runtime *rt, uint32_t x) {
    sthi_extent *e = &rt->places.extents[x];
    if (rt->options.allocator.alloc && rt->copies.stream) {
        /* Unlike a device's free, this one does not wait for copies that touched what was let go before. */
        (void)STHI_DEV(rt, stream_synchronize, rt->copies.stream);
        (void)STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream);
        if (rt->expand.stream) (void)STHI_DEV(rt, stream_synchronize, rt->expand.stream);
    }
    sthi_forget_traces(rt, x);
    sthi_memory_give(rt, e->base, e->bytes, e->wraps);
    sthi_uncharge(rt, e->bytes);
    if (e->closing) rt->extents.closing_bytes -= e->bytes;
    rt->extents.key[x] = 0;
    sthi_places_drop_extent(&rt->places, x);
    if (rt->extents.ring == x) rt->extents.ring = STH_NONE;
    if (rt->extents.demand == x) rt->extents.demand = STH_NONE;
}

static sth_status extent_alloc(sth_runtime *rt, uint64_t bytes, bool wraps, uint64_t key, uint32_t *out) {
    sth_devptr base = 0;
    STHI_TRY(sthi_charge(rt, bytes));
    sth_status rc = sthi_memory_take(rt, bytes, wraps, &base);
    int32_t x = rc == STH_OK ? sthi_places_add_extent(&rt->places, base, bytes, wraps) : -1;
    if (x < 0) sthi_uncharge(rt, bytes);
    if (rc != STH_OK) return rc;
    if (x < 0) {
        sthi_memory_give(rt, base, bytes, wraps);
        return sthi_fail(STH_INTERNAL, NULL, 0, NULL, "too many extents of device memory");
    }
    rt->extents.key[x] = key;
    rt->graph.edition++;
    rt->extents.peak = sthi_max_u64(rt->extents.peak, sthi_held_bytes(rt));
    *out = (uint32_t)x;
    return wraps ? STH_OK : sthi_memory_follow(rt);
}

/* Frees the extent, or closes it when something in it is busy. */
static void extent_release(sth_runtime *rt, uint32_t x) {
    sthi_extent *e = &rt->places.extents[x];
    rt->graph.edition++;
    for (int32_t id = e->first_slot, next; id != STHI_NO_SLOT; id = next) {
        next = rt->places.slots[id].next;
        if (!sthi_slot_busy(&rt->places.slots[id])) sthi_retire_slot(rt, id);
    }
    if (!e->slots) {
        extent_free(rt, x);
        return;
    }
    if (!e->closing) rt->extents.closing_bytes += e->bytes;
    e->closing = true;
    rt->extents.key[x] = 0;
    if (rt->extents.ring == x) rt->extents.ring = STH_NONE;
    if (rt->extents.demand == x) rt->extents.demand = STH_NONE;
}

static bool extent_busy(const sth_runtime *rt, const sthi_extent *e) {
    for (int32_t id = e->first_slot; id != STHI_NO_SLOT; id = rt->places.slots[id].next)
        if (sthi_slot_busy(&rt->places.slots[id])) return true;
    return false;
}

static bool extent_idle(sth_runtime *rt, const sthi_extent *e) {
    for (int32_t id = e->first_slot; id != STHI_NO_SLOT; id = rt->places.slots[id].next)
        if (!sthi_slot_idle(rt, id)) return false;
    return true;
}

bool sthi_closing_idle(sth_runtime *rt) {
    if (!rt->extents.closing_bytes) return false;
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && e->closing && extent_idle(rt, e)) return true;
    }
    return false;
}

void sthi_closing_free(sth_runtime *rt) {
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && e->closing && !extent_busy(rt, e)) extent_release(rt, x);
    }
}

void sthi_extents_free_all(sth_runtime *rt) {
    for (uint32_t x = 0; x < rt->places.extent_end; x++)
        if (rt->places.extents[x].live) extent_release(rt, x);
}

static bool ring_may_wrap(const sth_runtime *rt, uint64_t budget) {
    if (!(rt->device->capabilities & STH_CAP_RING)) return false;
    uint64_t g = rt->device->ops->ring_granularity(rt->device->self);
    /* Rounding the ring to the granularity must not cost a budget that is small beside it. */
    return g && budget >= 64 * g;
}

/* What is staged comes no faster than it is read; what is kept in host memory, or is going to be, does. */
static sth_plan_unit plan_unit(const sth_runtime *rt, const sthi_unit *u) {
    uint32_t flags = u->flags & (STH_UNIT_KEEP | STH_UNIT_ON_DEMAND);
    if (!u->direct && !u->kept.image) flags |= STH_UNIT_FROM_DISK;
    if (u->writes.written) flags |= STH_UNIT_WRITTEN;
    uint64_t wire = sthi_min_u64(sthi_source_bytes(rt, u), u->bytes);
    return (sth_plan_unit){.bytes = u->bytes, .flags = flags, .transfer_bytes = wire};
}

/* What callers hold lies anywhere in the ring. Where they ask for no more than the largest unit they hold nothing. */
static uint64_t room_beside_held(const sth_runtime *rt) {
    uint64_t kept = 0, largest = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (u->flags & STH_UNIT_KEEP) kept += u->bytes;
        else largest = sthi_max_u64(largest, u->bytes);
    }
    return rt->options.least_room > kept + largest ? rt->options.least_room - kept : 0;
}

void sthi_plan_input(const sth_runtime *rt, sth_plan_input *in) {
    for (uint32_t i = 0; i < rt->unit_count; i++) rt->planned.units[i] = plan_unit(rt, &rt->units[i]);
    sth_plan_input_init(in);
    in->units = rt->planned.units;
    in->unit_count = rt->unit_count;
    in->uses = rt->order.uses;
    in->use_count = rt->order.count;
    in->budget = sthi_budget_for_units(rt);
    in->link_bytes_per_s = rt->link.rate > 0 ? rt->link.rate : 1e10; /* parked since it was sealed: not measured yet */
    in->disk_bytes_per_s = rt->reads.rate;
    in->read_ahead_bytes = rt->slabs.count * rt->copies.chunk;
    in->least_ring_bytes = room_beside_held(rt);
    in->chunk_bytes = rt->copies.chunk;
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

/* A plan by units, and the bundles that it was made of; NULL where each unit stands for itself. */
typedef struct made_plan {
    sth_plan *plan;
    sthi_bundles *bundles;
} made_plan;

static void drop_made(made_plan *m) {
    sthi_plan_destroy(m->plan);
    sthi_bundles_destroy(m->bundles);
    *m = (made_plan){0};
}

/* The same input for a link, and a disk, that are slower than they were measured. */
static sth_plan_input with_margin(const sth_plan_input *in) {
    sth_plan_input slower = *in;
    slower.link_bytes_per_s *= LINK_MARGIN;
    slower.disk_bytes_per_s *= LINK_MARGIN;
    return slower;
}

/* A ring that is mapped twice is rounded up to what the device maps: where there is no room for that it is mapped
 * once. */
static sth_status create_and_price(const sth_plan_input *in, sth_plan **out) {
    sth_plan_input tight = with_margin(in);
    sth_plan *plan = NULL;
    sth_status rc = sthi_plan_create(&tight, &plan);
    if (rc == STH_BUDGET_TOO_SMALL && tight.ring_mapped_twice) {
        sthi_plan_map_once(&tight);
        rc = sthi_plan_create(&tight, &plan);
    }
    if (rc == STH_OK) rc = sthi_plan_predict(in, plan, &plan->prediction);
    if (rc != STH_OK) sthi_plan_destroy(plan);
    else *out = plan;
    return rc;
}

static sth_status create_by_bundles(sthi_bundles *b, const sth_plan_input *in, sth_plan **out) {
    sth_plan_input joined;
    sthi_bundles_input(b, in, &joined);
    STHI_TRY(create_and_price(&joined, &b->plan));
    return sthi_bundles_part(b, in, out);
}

/* Bundles may be more than there is room for. What is held together may be more than a plan can give a place of its own
 * within the budget: then some of it comes on demand. */
static sth_status create_plan(sth_runtime *rt, const sth_plan_input *in, made_plan *m) {
    sth_status rc = STH_BUDGET_TOO_SMALL;
    for (int holds = 1; holds >= 0 && rc == STH_BUDGET_TOO_SMALL; holds--) {
        sthi_plan_hold(rt, holds);
        if (m->bundles) rc = create_by_bundles(m->bundles, in, &m->plan);
        if (rc != STH_BUDGET_TOO_SMALL) break;
        rc = create_and_price(in, &m->plan);
        if (rc != STH_OK) continue;
        sthi_bundles_destroy(m->bundles);
        m->bundles = NULL;
    }
    return rc;
}

static sth_status make_plan(sth_runtime *rt, made_plan *out) {
    sth_plan_input in;
    made_plan m = {0};
    sthi_plan_input(rt, &in);
    STHI_TRY(sthi_bundles_make(rt, &in, &m.bundles));
    sth_status rc = create_plan(rt, &in, &m);
    if (rc != STH_OK) drop_made(&m);
    else *out = m;
    return rc;
}

sth_status sthi_plan_price(sth_runtime *rt, double link, sth_prediction *out) {
    sth_plan_input in, joined;
    sthi_plan_input(rt, &in);
    if (link > 0) in.link_bytes_per_s = link;
    if (!rt->planned.bundles) return sthi_plan_predict(&in, rt->planned.plan, out);
    sthi_bundles_input(rt->planned.bundles, &in, &joined);
    return sthi_plan_predict(&joined, rt->planned.bundles->plan, out);
}

static uint64_t mix(uint64_t h, uint64_t v) { return (h ^ v) * UINT64_C(0x9E3779B97F4A7C15) + (h >> 29); }

/* One group of residents that share an extent: [begin, end) of the unit numbers. */
typedef struct pack {
    uint32_t begin, end;
    uint64_t bytes, key;
} pack;

static pack next_pack(const sth_runtime *rt, const sth_plan *plan, uint32_t begin) {
    pack p = {.begin = begin, .end = begin, .key = 1};
    for (uint32_t i = begin; i < rt->unit_count; i++) {
        if (!plan->resident[i]) continue;
        if (p.bytes && p.bytes + rt->units[i].bytes > EXTENT_TARGET) break;
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
        if (rt->places.extents[x].live && !keep[x]) extent_release(rt, x);
}

static sth_status place_residents(sth_runtime *rt, const sth_plan *plan) {
    for (pack p = next_pack(rt, plan, 0); p.bytes; p = next_pack(rt, plan, p.end)) {
        uint32_t x;
        if (!extent_holds(rt, &p, &x)) STHI_TRY(extent_alloc(rt, p.bytes, false, p.key, &x));
        uint64_t at = 0;
        for (uint32_t i = p.begin; i < p.end; i++) {
            if (!plan->resident[i]) continue;
            rt->units[i].home.extent = x;
            rt->units[i].home.offset = at;
            at += rt->units[i].bytes;
        }
    }
    return STH_OK;
}

static sth_status allocate(sth_runtime *rt, const sth_plan *plan) {
    bool wraps = plan->ring_mapped_twice;
    STHI_TRY(sthi_stages_alloc(rt));
    if (plan->ring_bytes && rt->extents.ring == STH_NONE)
        STHI_TRY(extent_alloc(rt, plan->ring_bytes, wraps, ring_key(plan->ring_bytes, wraps),
                              &rt->extents.ring));
    if (plan->demand_bytes && rt->extents.demand == STH_NONE)
        STHI_TRY(extent_alloc(rt, plan->demand_bytes, false, demand_key(plan->demand_bytes),
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

static void adopt(sth_runtime *rt, const made_plan *m) {
    sth_plan *plan = m->plan;
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
static sth_status make_room(sth_runtime *rt, made_plan *m, uint64_t planned_with) {
    for (;;) {
        free_unkept(rt, m->plan);
        uint64_t room = sthi_budget_for_units(rt);
        if (room == planned_with) return STH_OK;
        drop_made(m);
        planned_with = room;
        STHI_TRY(make_plan(rt, m));
    }
}

/* Makes room for the plan and takes it; with less of the budget when the device refuses the memory. */
static sth_status place_plan(sth_runtime *rt, made_plan *m) {
    sthi_error_copy refused = {.status = STH_OK};
    sth_status rc = STH_OK;
    for (int attempt = 0; attempt < ALLOC_TRIES; attempt++) {
        rc = m->plan ? STH_OK : make_plan(rt, m);
        if (rc == STH_OK) rc = make_room(rt, m, sthi_budget_for_units(rt));
        if (rc == STH_OK) rc = allocate(rt, m->plan);
        if (rc != STH_OUT_OF_DEVICE_MEMORY) break;
        if (refused.status == STH_OK) sthi_error_save(&refused);
        uint64_t had = sthi_min_u64(rt->options.budget, rt->share.limit);
        uint64_t left = sthi_max_u64(had - (had - rt->options.reserved) / 5, sthi_least_to_load(rt));
        if (left >= had) break;
        rt->options.budget = rt->share.limit = left; /* others took the memory */
        drop_made(m);
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
static sth_status install(sth_runtime *rt, made_plan m) {
    rt->program.on = false;
    sthi_cancel_queue(rt);
    uint64_t asked = rt->options.budget;
    sth_status rc = place_plan(rt, &m);
    if (rt->options.budget != asked) rt->stats.budget_cuts++;
    if (rc != STH_OK) {
        sthi_extents_free_all(rt); /* what an unfinished plan kept may not fit beside what is busy */
        rt->options.budget = asked;
        drop_made(&m);
        sthi_plan_drop(rt);
        return rc;
    }
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
            if (rt->places.extents[x].live && rt->extents.key[x] != whole.key) extent_release(rt, x);
    } while (whole.bytes != whole_room(rt));
    if (!whole.bytes)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "leases that have not ended hold all of the budget of %llu bytes",
                         (unsigned long long)rt->options.budget);
    uint32_t x;
    STHI_TRY(sthi_stages_alloc(rt));
    if (!extent_holds(rt, &whole, &x)) STHI_TRY(extent_alloc(rt, whole.bytes, false, whole.key, &x));
    sthi_program_reset(rt);
    return STH_OK;
}

static sth_status plan_and_install(sth_runtime *rt) {
    if (rt->options.policy == STH_POLICY_STATIC) return install_static(rt);
    made_plan m = {0};
    STHI_TRY(make_plan(rt, &m));
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
    made_plan m = {0};
    sth_prediction now;
    sthi_plan_hold(rt, true); /* what was seen since the plan was made, too */
    sth_status rc = sthi_plan_price(rt, rt->link.rate, &now);
    if (rc == STH_OUT_OF_HOST_MEMORY) return rc;
    if (rc == STH_OK && (double)now.lower_bound_ns >= WORTH_IT * (double)now.step_ns) {
        rt->planned.plan->prediction = now; /* none can promise enough, and a search takes milliseconds of the step */
        return STH_OK;
    }
    STHI_TRY(make_plan(rt, &m));
    /* None can give places to all that is held. */
    if (rc != STH_OK && !rt->planned.holds) rc = sthi_plan_price(rt, rt->link.rate, &now);
    /* A plan that cannot run was made before it was seen what is held together. */
    if (rc != STH_OK || (double)m.plan->prediction.step_ns < WORTH_IT * (double)now.step_ns) {
        *out_changed = true;
        return install(rt, m);
    }
    rt->planned.plan->prediction = now;
    drop_made(&m);
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

void sthi_program_reset(sth_runtime *rt) {
    rt->program.on = !rt->share.parked && (rt->planned.plan || rt->options.policy == STH_POLICY_STATIC);
    rt->program.waits = false;
    rt->program.lap = 0;
    rt->program.next_load = 0;
    rt->program.resident_next = 0;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) rt->places.slots[i].uses_left = 0;
    rt->program.kept_next = 0;
}

void sthi_program_skip(sth_runtime *rt) {
    if (!rt->program.on || !rt->planned.plan || !rt->planned.plan->load_count) return;
    uint64_t begin = rt->program.lap * rt->planned.plan->load_count, end = begin + rt->planned.plan->load_count;
    if (rt->program.next_load < begin) rt->program.next_load = begin;
    const sth_plan_load *loads = rt->planned.plan->loads;
    while (rt->program.next_load < end && loads[rt->program.next_load - begin].first_use < rt->program.cursor)
        rt->program.next_load++;
}

static sth_status rearrange(sth_runtime *rt, uint64_t bytes) {
    rt->program.on = false;
    rt->planned.again = true;
    sthi_cancel_queue(rt);
    uint64_t kept = 0; /* by extents that leases are in: what is free of them stays of use */
    for (uint32_t x = 0; x < rt->places.extent_end; x++) {
        const sthi_extent *e = &rt->places.extents[x];
        if (e->live && !extent_busy(rt, e)) extent_release(rt, x);
        else if (e->live && !e->closing) kept += e->bytes;
    }
    rt->current.host_waits++;
    STHI_TRY(sthi_stages_alloc(rt)); /* before places take the rest */
    uint64_t room = whole_room(rt), left = room > kept ? room - kept : 0;
    if (left < bytes) return STH_OK; /* the caller looks again and says what is missing */
    uint32_t x;
    sth_status rc = extent_alloc(rt, left, false, mix(4, left), &x);
    if (rc == STH_OUT_OF_DEVICE_MEMORY && left > bytes)
        rc = extent_alloc(rt, bytes, false, mix(4, bytes), &x);
    return rc;
}

sth_status sthi_rearrange(sth_runtime *rt, uint64_t bytes) {
    sthi_hold(rt, rt->options.budget); /* what it frees on the way stays its own */
    sth_status rc = rearrange(rt, bytes);
    sthi_settle(rt);
    return rc;
}
