/* Life of a runtime: options, create, budget, destroy. */
#include "runtime/runtime.h"

#include <math.h>

#include "base/memory.h"
#include "load/events.h"
#include "load/issue.h"
#include "load/lanes.h"
#include "load/queue.h"
#include "load/room.h"
#include "load/stages.h"
#include "load/staging.h"
#include "load/traces.h"
#include "runtime/budget.h"
#include "runtime/drops.h"
#include "runtime/end.h"
#include "runtime/extents.h"
#include "runtime/geometry.h"
#include "runtime/graph.h"
#include "runtime/news.h"
#include "runtime/plain_image.h"
#include "runtime/publish.h"
#include "runtime/share/give.h"
#include "runtime/share/join.h"
#include "runtime/step.h"
#include "runtime/timing.h"
#include "state/state.h"

enum { CHUNK_MAX = 8 << 20, CHUNK_MIN = 64 << 10, READERS_MOST = 256, CHUNK_MOST = 1 << 30 };

void sthi_runtime_options_init(sth_runtime_options *o) {
    *o = (sth_runtime_options){.size = sizeof *o, .prefetch_window = 3, .reader_threads = STH_READERS_AUTO,
                               .copy_priority = -1, .stages = STH_BUDGET_STAGES,
                               .telemetry_max_bytes = UINT64_C(64) << 20};
}

static sth_status bad_option(const char *name, const char *why) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "options: %s %s", name, why);
}

static sth_status check_numbers(const sth_runtime_options *o) {
    if (o->policy != STH_POLICY_PLANNED && o->policy != STH_POLICY_STATIC) return bad_option("policy", "is unknown");
    if (!(o->link_bytes_per_s >= 0) || !isfinite(o->link_bytes_per_s))
        return bad_option("link_bytes_per_s", "must be finite, and 0 or more");
    if (o->least_room > STHI_BYTES_MOST) return bad_option("least_room", "is more than any memory has");
    if (o->reader_threads > READERS_MOST && o->reader_threads != STH_READERS_AUTO)
        return bad_option("reader_threads", "is above 256");
    if (o->stages < STH_BUDGET_STAGES || o->stages > STH_BUDGET_MOST_STAGES)
        return bad_option("stages", "must be from 3 to 17");
    return STH_OK;
}

static sth_status check_options(const sth_runtime_options *o) {
    STHI_TRY(check_numbers(o));
    if (o->budget == 0 || o->reserved >= o->budget)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "a budget of %llu bytes leaves nothing for units, %llu of them are used already; give more",
                         (unsigned long long)o->budget, (unsigned long long)o->reserved);
    if (!o->allocator.alloc != !o->allocator.free)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "allocator", "give both alloc and free, or neither");
    if (o->policy == STH_POLICY_STATIC && o->high_watermark && o->low_watermark >= o->high_watermark)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "high_watermark",
                         "the high watermark must be greater than the low one");
    return STH_OK;
}

static uint64_t choose_chunk(const sth_runtime_options *o) {
    uint64_t chunk = o->chunk_bytes;
    if (!chunk) chunk = sthi_max_u64(CHUNK_MIN, sthi_min_u64((o->budget - o->reserved) / 64, CHUNK_MAX));
    sthi_round_up(sthi_min_u64(chunk, CHUNK_MOST), STHI_ALIGN, &chunk);
    return chunk;
}

sth_status sthi_runtime_create(sth_device *device, const sth_runtime_options *options, sth_runtime **out) {
    STHI_TRY(check_options(options));
    sth_runtime *rt = sthi_zalloc(1, sizeof *rt);
    if (!rt) return sthi_no_memory(NULL, "a runtime");
    rt->options = *options;
    rt->options.budget = sthi_min_u64(options->budget, STHI_BYTES_MOST);
    rt->share.limit = rt->share.asked = rt->options.budget;
    rt->copies.chunk = choose_chunk(&rt->options);
    atomic_init(&rt->refs, 1);
    atomic_init(&rt->leases.dropped, STHI_NO_SLOT);
    rt->extents.ring = rt->extents.demand = STH_NONE;
    rt->graph.edition = 1;
    rt->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&rt->lock);
    sthi_cond_init(&rt->changed);
    sthi_cond_init(&rt->readers.work);
    sthi_device_retain(device);
    rt->device = device;
    rt->name = sthi_strdup(options->name ? options->name : "model");
    rt->options.name = NULL; /* the caller's string */
    sth_status rc = sthi_residency_join(rt);
    if (rc == STH_OK) rc =
        sthi_telemetry_create(options->telemetry_path, options->telemetry_max_bytes, &rt->telemetry.file);
    rt->options.telemetry_path = NULL; /* the caller's string */
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_create, options->copy_priority, &rt->copies.stream);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_create, options->copy_priority, &rt->copies.demand_stream);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        sthi_runtime_destroy(rt);
        return sthi_error_restore(&why);
    }
    *out = rt;
    return STH_OK;
}

static void end_copies(sth_runtime *rt) {
    sthi_lanes_close(rt);
    sthi_expand_close(rt); /* it waits for copies, which are enqueued before it */
    if (rt->copies.stream) STHI_DEV(rt, stream_destroy, rt->copies.stream); /* waits for what is enqueued */
    if (rt->copies.demand_stream) STHI_DEV(rt, stream_destroy, rt->copies.demand_stream);
    rt->copies.stream = rt->copies.demand_stream = 0;
    sthi_staging_close(rt);
    sthi_forget_traces(rt, STH_NONE);
    for (int i = 0; i < 2; i++) sthi_event_give(rt, rt->copies.masters[i].event);
    for (int i = 0; i < STHI_AWAITED; i++) sthi_event_give(rt, rt->copies.awaited[i].event);
}

/* All but the records, and the places that are leased. */
static void shut_down(sth_runtime *rt) {
    sthi_publish_close(rt);
    if (rt->step.open) sthi_timing_end_late(rt);
    rt->step.open = false;
    sthi_drain_drops(rt);
    sthi_cancel_queue(rt);
    sthi_timing_harvest(rt, true);
    sthi_extents_free_all(rt);
    sthi_stages_free(rt);
    sthi_timing_close(rt);
    sthi_telemetry_destroy(rt->telemetry.file, true);
    rt->telemetry.file = NULL;
    end_copies(rt);
}

sth_status sthi_runtime_not_here(const sth_runtime *rt) {
    if (!rt) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "runtime", "runtime is NULL");
    return sthi_fail_in_child(rt->name, "the runtime");
}

void sthi_runtime_destroy(sth_runtime *rt) {
    if (!rt || sthi_is_child(rt->fork_depth)) return;
    sthi_lock(&rt->lock);
    rt->shut = true;
    rt->program.on = false;
    sthi_cond_broadcast(&rt->changed);
    while (rt->callers) sthi_cond_wait(&rt->changed, &rt->lock);
    sthi_unlock(&rt->lock);
    sthi_masters_close(rt);
    sthi_residency_retire(rt);
    sthi_staging_stop(rt);
    sthi_lock(&rt->lock);
    shut_down(rt);
    sthi_unlock_and_say(rt);
    sthi_runtime_unref(rt);
}

sth_status sthi_runtime_synchronize(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    if (rt->shut || !rt->sealed) {
        sthi_unlock(&rt->lock);
        return rt->shut ? sthi_shut_down(rt) : STH_OK;
    }
    sth_status busy = sthi_graph_free(rt);
    if (busy != STH_OK) {
        sthi_unlock(&rt->lock);
        return busy;
    }
    rt->callers++;
    sthi_drain_drops(rt);
    sthi_cancel_queue(rt);
    while (rt->reads.masters) sthi_cond_wait(&rt->changed, &rt->lock);
    /* What was prefetched of writable units may be out of date after this. */
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!(u->flags & STH_UNIT_WRITABLE)) continue;
        u->writes.changed = rt->writes.marked = true; /* as far as is known */
        if (u->slot != STHI_NO_SLOT && !rt->places.slots[u->slot].leases) rt->places.slots[u->slot].stale = true;
    }
    sth_stream copy = rt->copies.stream, demand = rt->copies.demand_stream; /* expansions read nothing of the host's */
    sthi_unlock(&rt->lock);
    sth_status rc = STHI_DEV(rt, stream_synchronize, copy);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_synchronize, demand);
    sthi_lock(&rt->lock);
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

/* Between steps. On failure the old budget stays in force. */
static sth_status change_budget(sth_runtime *rt, uint64_t budget) {
    uint64_t old = rt->options.budget;
    sthi_drain_drops(rt);
    sthi_closing_free(rt); /* what only leases kept that have ended is room for the plan */
    rt->options.budget = budget;
    if (rt->share.parked) { /* it counts when the runtime comes back */
        uint64_t has = sthi_held_bytes(rt) + rt->options.reserved;
        if (rt->share.lent && has > budget) (void)sthi_give_way(rt, has - budget);
        return STH_OK;
    }
    sth_status rc = rt->sealed ? sthi_geometry_install(rt) : STH_OK;
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        rt->options.budget = old;
        if (sthi_geometry_install(rt) != STH_OK) rt->planned.again = true;
        (void)sthi_error_restore(&why);
    } else if (budget > old && rt->share.limit < budget) {
        rt->share.settled = false; /* idle others may give way to it: its next step asks them */
    }
    if (rc == STH_OK && rt->sealed) sthi_news_plan(rt, "the budget changed");
    rt->stats.replans++;
    sthi_pump(rt);
    return rc;
}

static sth_status set_budget(sth_runtime *rt, uint64_t budget) {
    uint64_t smallest = rt->sealed ? sthi_smallest_budget(rt) : rt->options.reserved + 1;
    if (rt->shut) return sthi_shut_down(rt);
    if (rt->step.open && !rt->step.implicit)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, "budget",
                         "the budget changes between steps, and a step is open");
    if (budget < smallest)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "a budget of %llu bytes is too small; the smallest that works is %llu bytes",
                         (unsigned long long)budget, (unsigned long long)smallest);
    if (rt->step.open) STHI_TRY(sthi_step_end_locked(rt));
    sth_status rc = change_budget(rt, budget);
    sthi_publish(rt);
    return rc;
}

sth_status sthi_runtime_set_budget(sth_runtime *rt, uint64_t budget) {
    budget = sthi_min_u64(budget, STHI_BYTES_MOST);
    sthi_lock(&rt->lock);
    sth_status rc = set_budget(rt, budget);
    if (rc == STH_OK) rt->share.asked = budget;
    sthi_unlock_and_say(rt);
    return rc;
}

uint64_t sthi_runtime_missing_budget(sth_runtime *rt, int64_t now_ns) {
    sthi_lock(&rt->lock);
    uint64_t missing = rt->share.asked - sthi_min_u64(rt->share.asked, rt->options.budget);
    bool due = !rt->shut && !rt->share.parked && sthi_backoff_due(&rt->share.again, now_ns);
    if (due && !missing) sthi_backoff_reset(&rt->share.again);
    if (!due || rt->leases.bytes) missing = 0;
    sthi_unlock(&rt->lock);
    return missing;
}

sth_status sthi_runtime_ask_again(sth_runtime *rt, int64_t now_ns) {
    sthi_lock(&rt->lock);
    sth_status rc = set_budget(rt, rt->share.asked);
    sthi_backoff_asked(&rt->share.again, now_ns, rt->options.budget < rt->share.asked);
    sthi_unlock_and_say(rt);
    /* Where even less is there than before, the budget that was in force is again. */
    return rc == STH_BUDGET_TOO_SMALL || rc == STH_OUT_OF_DEVICE_MEMORY ? STH_OK : rc;
}
