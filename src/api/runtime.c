/* Exported runtime calls: check the arguments and the process, then hand over to src/runtime. */
#include "api/arguments.h"
#include "runtime/aside.h"
#include "runtime/budget.h"
#include "runtime/epoch.h"
#include "runtime/image.h"
#include "runtime/lease.h"
#include "runtime/plain_image.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"
#include "runtime/verify.h"
#include "state/state.h"
#include "telemetry/timeline.h"

void sth_runtime_options_init(sth_runtime_options *options) {
    if (options) sthi_runtime_options_init(options);
}

sth_status sth_runtime_create(sth_device *device, const sth_runtime_options *options, sth_runtime **out_runtime) {
    if (!device) return null_argument("device");
    if (!options || options->size != sizeof *options)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "options were not set up by sth_runtime_options_init of this version");
    if (!out_runtime) return null_argument("out_runtime");
    sthi_ranges_attach();
    return sthi_runtime_create(device, options, out_runtime);
}

void sth_runtime_destroy(sth_runtime *runtime) { sthi_runtime_destroy(runtime); }

sth_status sth_runtime_add_unit(sth_runtime *runtime, const sth_unit_desc *desc, uint32_t *out_unit) {
    if (!runtime || !desc || !out_unit) return null_argument("runtime, desc or out_unit");
    if (desc->range_count && !desc->ranges) return null_argument("ranges");
    if (desc->tensor_count && !desc->tensors) return null_argument("tensors");
    for (uint32_t i = 0; i < desc->tensor_count; i++)
        if (!desc->tensors[i].name) return null_argument("a tensor's name");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_add_unit(runtime, desc, out_unit);
}

sth_status sth_runtime_seal(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_seal(runtime);
}
sth_status sth_step_begin(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    sthi_mark begun = sthi_timeline_mark("step begin", runtime->name);
    sth_status rc = sthi_step_begin(runtime);
    sthi_timeline_since(begun, STHI_TRACK_CALL, runtime->name, "step begin", 0);
    return rc;
}
sth_status sth_step_pause(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    sthi_mark begun = sthi_timeline_mark("step pause", runtime->name);
    sth_status rc = sthi_step_pause(runtime);
    sthi_timeline_since(begun, STHI_TRACK_CALL, runtime->name, "step pause", 0);
    return rc;
}
sth_status sth_step_end(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    sthi_mark begun = sthi_timeline_mark("step end", runtime->name);
    sth_status rc = sthi_step_end(runtime);
    sthi_timeline_since(begun, STHI_TRACK_CALL, runtime->name, "step end", 0);
    return rc;
}

sth_status sth_step_mark_backward(sth_runtime *runtime, bool backward) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_step_mark_backward(runtime, backward);
}

static sth_status acquire_watched(sth_runtime *runtime, uint32_t unit, sth_stream stream, sth_lease *out_lease) {
    const char *name = unit < runtime->unit_count ? runtime->units[unit].name : "?";
    sthi_mark begun = sthi_timeline_mark("acquire", name);
    sth_status rc = sthi_unit_acquire(runtime, unit, stream, out_lease);
    sthi_timeline_since(begun, STHI_TRACK_CALL, runtime->name, name, 0);
    return rc;
}

sth_status sth_unit_acquire(sth_runtime *runtime, uint32_t unit, sth_stream stream, sth_lease *out_lease) {
    if (!runtime || !out_lease) return null_argument("runtime or out_lease");
    STHI_TRY(sthi_runtime_usable(runtime));
    if (sthi_onlookers()) return acquire_watched(runtime, unit, stream, out_lease);
    return sthi_unit_acquire(runtime, unit, stream, out_lease);
}

void sth_lease_release(sth_runtime *runtime, const sth_lease *lease) {
    if (runtime && lease) sthi_lease_release(runtime, lease);
}

sth_status sth_runtime_poll(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_poll(runtime);
}
sth_status sth_runtime_gather(sth_runtime *runtime, uint64_t bytes) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_gather(runtime, bytes);
}
sth_status sth_unit_mark_written(sth_runtime *runtime, uint32_t unit) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_unit_mark_written(runtime, unit);
}
sth_status sth_unit_set_host(sth_runtime *runtime, uint32_t unit, const void *host, sth_arena *arena) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_unit_set_host(runtime, unit, host, arena);
}

sth_status sth_unit_give_master(sth_runtime *runtime, uint32_t unit, const void *master) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_unit_give_master(runtime, unit, master);
}

sth_status sth_unit_drop_master(sth_runtime *runtime, uint32_t unit) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_unit_drop_master(runtime, unit);
}

sth_status sth_unit_keep_master(sth_runtime *runtime, uint32_t unit, bool *out_kept) {
    STHI_TRY(sthi_runtime_usable(runtime));
    if (!out_kept) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_unit_keep_master needs out_kept");
    return sthi_unit_keep_master(runtime, unit, out_kept);
}

sth_status sth_runtime_dropped_masters(sth_runtime *runtime, bool wait, uint32_t *units, uint32_t capacity,
                                       uint32_t *out_count) {
    STHI_TRY(sthi_runtime_usable(runtime));
    if ((!units && capacity) || !out_count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_runtime_dropped_masters needs addresses for the results");
    return sthi_runtime_dropped_masters(runtime, wait, units, capacity, out_count);
}

sth_status sth_runtime_fence(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_fence(runtime);
}

sth_status sth_runtime_pass_end(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_pass_end(runtime);
}

sth_status sth_runtime_synchronize(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_synchronize(runtime);
}
sth_status sth_runtime_set_budget(sth_runtime *runtime, uint64_t budget) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_set_budget(runtime, budget);
}
uint64_t sth_runtime_missing_budget(sth_runtime *runtime, int64_t now_ns) {
    return sthi_runtime_is_here(runtime) ? sthi_runtime_missing_budget(runtime, now_ns) : 0;
}
sth_status sth_runtime_ask_again(sth_runtime *runtime, int64_t now_ns) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_ask_again(runtime, now_ns);
}

sth_status sth_runtime_set_aside(sth_runtime *runtime, const uint32_t *units, uint32_t count, bool aside) {
    if (!runtime || (count && !units)) return null_argument("runtime or units");
    STHI_TRY(sthi_runtime_usable(runtime));
    return count ? sthi_runtime_set_aside(runtime, units, count, aside) : STH_OK;
}

sth_status sth_unit_verify(sth_runtime *runtime, uint32_t unit, bool *out_equal, uint64_t *out_hash) {
    if (!runtime || !out_equal) return null_argument("runtime or out_equal");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_unit_verify(runtime, unit, out_equal, out_hash);
}

uint32_t sth_runtime_unit_count(sth_runtime *runtime) { return runtime ? runtime->unit_count : 0; }

sth_status sth_unit_stats_get(sth_runtime *runtime, uint32_t unit, sth_unit_stats *out_stats) {
    if (!runtime || !out_stats) return null_argument("runtime or out_stats");
    STHI_TRY(sthi_runtime_usable(runtime));
    STHI_TRY(sthi_check_unit(runtime, unit));
    sthi_unit_stats(runtime, unit, out_stats);
    return STH_OK;
}

sth_status sth_runtime_step_metrics(sth_runtime *runtime, uint32_t i, sth_step_metrics *out_metrics) {
    if (!runtime || !out_metrics) return null_argument("runtime or out_metrics");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_step_metrics(runtime, i, out_metrics);
}

void sth_runtime_count_guards(sth_runtime *runtime, uint64_t promotions, uint64_t nans, uint64_t infs) {
    if (!sthi_runtime_is_here(runtime)) return;
    sthi_lock(&runtime->lock);
    runtime->current.dtype_promotions += (double)promotions;
    runtime->current.nan_count += (double)nans;
    runtime->current.inf_count += (double)infs;
    sthi_unlock(&runtime->lock);
}

void sth_runtime_count_mapped(sth_runtime *runtime, uint64_t bytes) {
    if (!sthi_runtime_is_here(runtime)) return;
    sthi_lock(&runtime->lock);
    runtime->stats.mapped_bytes += bytes;
    runtime->current.h2d_bytes += (double)bytes;
    sthi_unlock(&runtime->lock);
}

void sth_runtime_count_d2h(sth_runtime *runtime, uint64_t bytes) {
    if (!sthi_runtime_is_here(runtime)) return;
    sthi_lock(&runtime->lock);
    runtime->stats.d2h_bytes += bytes;
    runtime->current.d2h_bytes += (double)bytes;
    sthi_unlock(&runtime->lock);
}

sth_status sth_runtime_stats_get(sth_runtime *runtime, sth_runtime_stats *out_stats) {
    if (!runtime || !out_stats) return null_argument("runtime or out_stats");
    STHI_TRY(sthi_runtime_usable(runtime));
    sthi_runtime_stats(runtime, out_stats);
    return STH_OK;
}

sth_status sth_runtime_flush_telemetry(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_flush_telemetry(runtime);
}

uint32_t sth_runtime_file_count(sth_runtime *runtime) {
    return sthi_runtime_is_here(runtime) ? sthi_runtime_file_count(runtime) : 0;
}

sth_status sth_runtime_file_way(sth_runtime *runtime, uint32_t i, sth_file_way *out_way) {
    if (!runtime || !out_way) return null_argument("runtime or out_way");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_file_way(runtime, i, out_way);
}

sth_status sth_runtime_prediction(sth_runtime *runtime, sth_prediction *out_prediction) {
    if (!runtime || !out_prediction) return null_argument("runtime or out_prediction");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_prediction(runtime, out_prediction);
}

uint64_t sth_runtime_smallest_budget(sth_runtime *runtime) {
    if (!sthi_runtime_is_here(runtime)) return 0;
    sthi_lock(&runtime->lock);
    uint64_t n = sthi_smallest_budget(runtime);
    sthi_unlock(&runtime->lock);
    return n;
}
