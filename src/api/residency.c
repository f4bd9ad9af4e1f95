/* The public functions of stagehand/residency.h: check the arguments, then hand over to src/runtime. */
#include "stagehand/residency.h"

#include "api/arguments.h"
#include "core/pace.h"
#include "runtime/runtime.h"
#include "runtime/share/cap.h"
#include "runtime/share/give.h"
#include "runtime/share/protect.h"
#include "runtime/share/reserved.h"
#include "runtime/share/turns.h"
#include "state/state.h"

sth_status sth_residency_set_cap(sth_device *device, uint64_t bytes) {
    return device ? sthi_residency_set_cap(device, bytes) : null_argument("device");
}

sth_status sth_residency_get(sth_device *device, sth_residency_info *out_info) {
    if (!device || !out_info) return null_argument("device or out_info");
    sthi_residency_get(device, out_info);
    return STH_OK;
}

sth_status sth_runtime_keep_begin(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_keep_begin(runtime);
}
void sth_runtime_keep_end(sth_runtime *runtime) {
    if (sthi_runtime_is_here(runtime)) sthi_runtime_keep_end(runtime);
}

sth_status sth_runtime_reserve(sth_runtime *runtime, sth_resident_priority priority) {
    STHI_TRY(sthi_runtime_usable(runtime));
    if (priority < STH_PRIORITY_NONE || priority > STH_PRIORITY_PRIMARY)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "priority", "%d is no priority", (int)priority);
    return sthi_runtime_reserve(runtime, priority);
}
void sth_runtime_release(sth_runtime *runtime) {
    if (sthi_runtime_is_here(runtime)) sthi_runtime_release(runtime);
}

sth_status sth_runtime_guest_begin(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_guest_begin(runtime);
}
sth_status sth_runtime_guest_end(sth_runtime *runtime, uint64_t *out_left) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_guest_end(runtime, out_left);
}

sth_status sth_runtime_lend(sth_runtime *runtime, uint64_t bytes) {
    STHI_TRY(sthi_runtime_usable(runtime));
    sthi_runtime_lend(runtime, bytes);
    return STH_OK;
}

bool sth_runtime_is_parked(sth_runtime *runtime) {
    return runtime && runtime->share.parked && !runtime->share.lent;
}

sth_status sth_runtime_set_reserved(sth_runtime *runtime, uint64_t bytes) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_runtime_set_reserved(runtime, bytes);
}

sth_status sth_runtime_soften(sth_runtime *runtime, uint64_t bytes) {
    STHI_TRY(sthi_runtime_usable(runtime));
    sthi_runtime_soften(runtime, bytes);
    return STH_OK;
}
uint64_t sth_runtime_reserved(sth_runtime *runtime) {
    return sthi_runtime_is_here(runtime) ? sthi_runtime_reserved(runtime) : 0;
}

sth_status sth_residency_turn_begin(sth_device *device) {
    return device ? sthi_turn_begin(device) : null_argument("device");
}
bool sth_residency_turn_is_first(sth_device *device) { return device && sthi_turn_is_first(device); }
bool sth_residency_turn_wait(sth_device *device) { return device && sthi_turn_wait(device); }
void sth_residency_turn_end(sth_device *device) {
    if (device) sthi_turn_end(device);
}

sth_status sth_residency_find_budget(sth_device *device, const sth_memory_reading *reading,
                                     sth_budget_verdict *out_verdict) {
    if (!device || !reading || !out_verdict) return null_argument("device, reading or out_verdict");
    sthi_residency_find_budget(device, reading, out_verdict);
    return STH_OK;
}

sth_status sth_runtime_find_budget(sth_runtime *runtime, const sth_memory_reading *reading, uint64_t spare,
                                   sth_budget_verdict *out_verdict) {
    STHI_TRY(sthi_runtime_usable(runtime));
    if (!reading || !out_verdict) return null_argument("reading or out_verdict");
    sthi_runtime_find_budget(runtime, reading, spare, out_verdict);
    return STH_OK;
}

bool sth_residency_above_ceiling(sth_device *device, const sth_memory_reading *reading) {
    return device && reading && sthi_residency_above_ceiling(device, reading);
}

uint64_t sth_runtime_budget_without(sth_runtime *runtime, uint64_t bytes, uint64_t spare, uint64_t *out_freed) {
    uint64_t freed = 0, less = 0;
    if (sthi_runtime_is_here(runtime)) less = sthi_runtime_budget_without(runtime, bytes, spare, &freed);
    if (out_freed) *out_freed = freed;
    return less;
}

void sth_budget_pace_inputs(sth_budget_pace *pace, uint64_t bytes, bool inside_step) {
    if (pace) sthi_pace_inputs(pace, bytes, inside_step);
}
bool sth_budget_pace_due(sth_budget_pace *pace, int64_t now_ns, bool turn, double *out_growth) {
    double growth = 0;
    bool due = pace && sthi_pace_due(pace, now_ns, turn, &growth);
    if (out_growth) *out_growth = growth;
    return due;
}
void sth_budget_pace_looked(sth_budget_pace *pace, int64_t now_ns) {
    if (pace) sthi_pace_looked(pace, now_ns);
}
void sth_budget_pace_hurry(sth_budget_pace *pace) {
    if (pace) sthi_pace_hurry(pace);
}
void sth_budget_pace_renew(sth_budget_pace *pace) {
    if (pace) sthi_pace_renew(pace);
}

void sth_residency_forget(sth_device *device) {
    if (device) sthi_residency_forget(device);
}

const char *sth_budget_why_text(sth_budget_why why) {
    static const char *const texts[] = {
#define STH_BUDGET_WHY_TEXT(name, text) text,
        STH_BUDGET_WHY_LIST(STH_BUDGET_WHY_TEXT)
#undef STH_BUDGET_WHY_TEXT
    };
    return (size_t)why < sizeof texts / sizeof *texts ? texts[why] : "";
}
