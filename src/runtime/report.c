/* What a runtime says about itself. Lock taken by each call. */
#include "runtime/report.h"

#include "load/pieces.h"
#include "load/read/source.h"
#include "load/room.h"
#include "runtime/planning.h"
#include "runtime/timing.h"
#include "state/state.h"

static double mean_ms(double sum_ns, uint64_t count) { return count ? sum_ns / (double)count / 1e6 : 0; }

void sthi_unit_stats(sth_runtime *rt, uint32_t unit, sth_unit_stats *out) {
    sthi_lock(&rt->lock);
    const sthi_unit *u = &rt->units[unit];
    *out = (sth_unit_stats){.name = u->name, .group = u->group, .bytes = u->bytes,
                            .transfer_bytes = sthi_source_bytes(rt, u), .state = u->state,
                            .resident = u->resident, .copies = u->copies,
                            .h2d_ms = mean_ms(u->times.h2d_ns, u->times.h2d_count),
                            .compute_ms = mean_ms(u->times.compute_ns, u->times.use_count),
                            .stall_ms = mean_ms(u->times.stall_ns, u->times.use_count),
                            .image_hash = u->fingerprint};
    sthi_unlock(&rt->lock);
}

static uint64_t in_flight(sth_runtime *rt) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) {
        const sthi_slot *s = &rt->places.slots[i];
        bool done = true;
        if (!s->live) continue;
        if (!s->complete) bytes += s->claimed;
        else if (STHI_DEV(rt, event_query, rt->sync[i].ready, &done) == STH_OK && !done) bytes += s->bytes;
    }
    return bytes;
}

void sthi_runtime_stats(sth_runtime *rt, sth_runtime_stats *out) {
    sthi_lock(&rt->lock);
    *out = rt->stats;
    out->budget = rt->options.budget;
    out->device_bytes = sthi_held_bytes(rt);
    out->stage_bytes = rt->expand.stages ? sthi_stages_bytes(rt) : 0;
    out->packed_bytes = rt->expand.packed_bytes;
    out->expand_error = rt->expand.error;
    out->device_peak = rt->extents.peak;
    out->limit = rt->share.limit;
    out->parked = rt->share.parked && !rt->share.lent;
    out->telemetry_lost = rt->telemetry.file ? sthi_telemetry_lost(rt->telemetry.file) : 0;
    out->leased_bytes = rt->leases.bytes;
    out->in_flight_bytes = rt->shut ? 0 : in_flight(rt);
    out->planned = rt->order.recorded && rt->program.on;
    out->disk_bytes_per_s = rt->reads.rate;
    out->link_bytes_per_s = rt->link.rate;
    out->ram_pinned_bytes = rt->sources.kept_arena ? sthi_arena_pinned_bytes(rt->sources.kept_arena) : 0;
    if (rt->slabs.pool) {
        sth_pool_stats pool;
        sthi_pool_stats_get(rt->slabs.pool, &pool);
        out->staging_bytes = pool.total * sthi_pool_slab_bytes(rt->slabs.pool);
        out->staging_pinned = sthi_pool_is_pinned(rt->slabs.pool);
    }
    sthi_unlock(&rt->lock);
}

sth_status sthi_runtime_prediction(sth_runtime *rt, sth_prediction *out) {
    sthi_lock(&rt->lock);
    sth_status rc;
    if (!rt->planned.plan) {
        rc = sthi_fail(STH_NOT_FOUND, NULL, 0, NULL,
                       "no plan is in force: the policy is static, or seal is to come");
    } else {
        bool same = rt->planned.plan->use_count == rt->order.count;
        rc = same ? sthi_plan_price(rt, rt->link.rate, out) : STH_INVALID_ARGUMENT;
        if (rc == STH_INVALID_ARGUMENT) { /* made for another order, or before it was seen what is held together */
            *out = rt->planned.plan->prediction;
            rc = STH_OK;
        }
    }
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_runtime_step_metrics(sth_runtime *rt, uint32_t i, sth_step_metrics *out) {
    sthi_lock(&rt->lock);
    sth_status rc = STH_OK;
    if (rt->shut) rc = sthi_shut_down(rt);
    else if (rt->sealed && i == 0) sthi_timing_harvest(rt, false); /* later ones would shift those that were read */
    if (rc == STH_OK) rc = sthi_telemetry_get(rt->telemetry.file, i, out);
    sthi_unlock(&rt->lock);
    return rc;
}

uint32_t sthi_runtime_file_count(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    uint32_t n = sthi_sources_count(rt);
    sthi_unlock(&rt->lock);
    return n;
}

sth_status sthi_runtime_file_way(sth_runtime *rt, uint32_t i, sth_file_way *out) {
    sthi_lock(&rt->lock);
    bool found = sthi_sources_describe(rt, i, out);
    sthi_unlock(&rt->lock);
    return found ? STH_OK : sthi_fail(STH_NOT_FOUND, NULL, 0, NULL, "no file %u is streamed from", i);
}
