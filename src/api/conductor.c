/* Exported functions of stagehand/conductor.h: a NULL conductor is one that is switched off and returns at once;
 * then the arguments are checked, and conductor/ does the rest. */
#include "activation/store.h"
#include "api/arguments.h"
#include "conductor/conductor.h"
#include "host/download.h"
#include "load/lanes.h"
#include "state/state.h"

enum { SLOTS_MOST = STH_SLOTS_MOST };
static const uint64_t PIECE_LEAST = 64 << 10;

static sth_status bad(const char *what, const char *why) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, what, "%s %s", what, why);
}

void sth_conductor_options_init(sth_conductor_options *options) {
    if (options) sthi_conductor_options_init(options);
}

static sth_status check_options(const sth_conductor_options *o) {
    if (!o->soft_cap) return bad("soft_cap", "is 0 bytes");
    if (o->hard_cap < o->soft_cap) return bad("hard_cap", "is below soft_cap");
    if (!o->h2d_slots || o->h2d_slots > SLOTS_MOST) return bad("h2d_slots", "is not from 1 to 256");
    if (!o->d2h_slots || o->d2h_slots > SLOTS_MOST) return bad("d2h_slots", "is not from 1 to 256");
    if (o->piece_bytes < PIECE_LEAST || o->piece_bytes % 512)
        return bad("piece_bytes", "is below 64 KiB, or not of 512 bytes");
    return STH_OK;
}

sth_status sth_conductor_create(const sth_conductor_options *options, sth_conductor **out_conductor) {
    sth_conductor_options complete;
    if (!out_conductor) return null_argument("out_conductor");
    sthi_conductor_options_init(&complete);
    if (options) {
        if (options->size != sizeof *options)
            return bad("options", "were not set up by sth_conductor_options_init of this version");
        complete = *options;
    }
    STHI_TRY(check_options(&complete));
    return sthi_conductor_create(&complete, out_conductor);
}

sth_status sth_conductor_shutdown(sth_conductor *conductor) {
    return conductor ? sthi_conductor_shutdown(conductor) : STH_OK;
}

void sth_conductor_destroy(sth_conductor *conductor) { sthi_conductor_destroy(conductor); }

sth_status sth_conductor_register(sth_conductor *conductor, const char *name, uint32_t *out_owner) {
    if (!out_owner) return null_argument("out_owner");
    *out_owner = 0;
    if (!conductor) return STH_OK;
    if (!name || !*name) return bad("name", "of an owner is empty");
    return sthi_conductor_register(conductor, name, out_owner);
}

sth_status sth_conductor_unregister(sth_conductor *conductor, uint32_t owner) {
    return conductor ? sthi_conductor_unregister(conductor, owner) : STH_OK;
}

sth_status sth_conductor_begin_step(sth_conductor *conductor, uint64_t step) {
    return conductor ? sthi_conductor_begin_step(conductor, step) : STH_OK;
}

sth_status sth_conductor_enter(sth_conductor *conductor, sth_phase phase, bool *out_changed) {
    if (!conductor) {
        if (out_changed) *out_changed = false;
        return STH_OK;
    }
    if (phase != STH_PHASE_FORWARD && phase != STH_PHASE_BACKWARD && phase != STH_PHASE_OPTIMIZER)
        return bad("phase", "is not FORWARD, BACKWARD or OPTIMIZER");
    return sthi_conductor_enter(conductor, phase, out_changed);
}

sth_status sth_conductor_end_step(sth_conductor *conductor) {
    return conductor ? sthi_conductor_end_step(conductor) : STH_OK;
}

sth_phase sth_conductor_phase(sth_conductor *conductor) {
    return conductor ? sthi_conductor_phase(conductor) : STH_PHASE_STEP_END;
}

sth_status sth_conductor_reserve(sth_conductor *conductor, uint32_t owner, sth_resource resource, uint64_t bytes,
                                 sth_reserve_mode mode, sth_priority priority, sth_phase scope, sth_grant *out_grant) {
    if (!out_grant) return null_argument("out_grant");
    if (!conductor) {
        *out_grant = (sth_grant){.granted_bytes = bytes};
        return STH_OK;
    }
    if (resource >= STH_RESOURCES || mode >= STH_RESERVE_MODES || priority >= STH_PRIORITIES || scope > STH_PHASE_NONE)
        return bad("resource, mode, priority or scope", "is none that there is");
    if (!bytes || bytes > UINT64_MAX / 1024) return bad("bytes", "is 0, or more than any memory has");
    return sthi_conductor_reserve(conductor, owner, resource, bytes, mode, priority, scope, out_grant);
}

sth_status sth_conductor_release(sth_conductor *conductor, uint64_t id) {
    return conductor ? sthi_conductor_release(conductor, id) : STH_OK;
}

uint64_t sth_conductor_granted(sth_conductor *conductor, uint64_t id) {
    return conductor ? sthi_conductor_granted(conductor, id) : 0;
}

sth_status sth_conductor_changed(sth_conductor *conductor, uint64_t *out_id, uint64_t *out_granted) {
    if (!out_id || !out_granted) return null_argument("out_id or out_granted");
    *out_id = *out_granted = 0;
    return conductor ? sthi_conductor_changed(conductor, out_id, out_granted) : STH_OK;
}

uint64_t sth_conductor_headroom(sth_conductor *conductor, sth_resource resource, bool hard) {
    if (!conductor || resource >= STH_RESOURCES) return 0;
    return sthi_conductor_headroom(conductor, resource, hard);
}

sth_status sth_conductor_set_unmanaged(sth_conductor *conductor, uint64_t bytes) {
    return conductor ? sthi_conductor_set_unmanaged(conductor, STH_RESOURCE_VRAM, bytes) : STH_OK;
}

sth_status sth_conductor_set_unmanaged_pinned(sth_conductor *conductor, uint64_t bytes) {
    return conductor ? sthi_conductor_set_unmanaged(conductor, STH_RESOURCE_PINNED, bytes) : STH_OK;
}

sth_status sth_conductor_acquire(sth_conductor *conductor, uint32_t owner, sth_direction direction, uint64_t bytes,
                                 sth_priority priority, uint64_t block, sth_token *out_token, sth_denial *out_reason) {
    if (!out_token || !out_reason) return null_argument("out_token or out_reason");
    *out_token = 0;
    *out_reason = STH_DENIAL_NONE;
    if (!conductor) return STH_OK;
    if (direction >= STH_DIRECTIONS || priority >= STH_PRIORITIES)
        return bad("direction or priority", "is none that there is");
    return sthi_conductor_acquire(conductor, owner, direction, bytes, priority, block, out_token, out_reason);
}

sth_status sth_conductor_complete(sth_conductor *conductor, sth_token token, uint64_t bytes, double ms) {
    return conductor ? sthi_conductor_complete(conductor, token, bytes, ms) : STH_OK;
}

sth_status sth_conductor_release_token(sth_conductor *conductor, sth_token token) {
    return conductor ? sthi_conductor_release_token(conductor, token) : STH_OK;
}

sth_status sth_conductor_hints_get(sth_conductor *conductor, sth_hints *out_hints) {
    if (!out_hints) return null_argument("out_hints");
    *out_hints = (sth_hints){0};
    return conductor ? sthi_conductor_hints_get(conductor, out_hints) : STH_OK;
}

sth_status sth_conductor_set_window(sth_conductor *conductor, uint32_t window) {
    return conductor ? sthi_conductor_set_window(conductor, window) : STH_OK;
}

sth_status sth_conductor_set_allocated(sth_conductor *conductor, uint64_t bytes) {
    return conductor ? sthi_conductor_set_allocated(conductor, bytes) : STH_OK;
}

sth_status sth_conductor_stats_get(sth_conductor *conductor, sth_conductor_stats *out_stats) {
    if (!out_stats) return null_argument("out_stats");
    if (conductor) return sthi_conductor_stats_get(conductor, out_stats);
    *out_stats = (sth_conductor_stats){.phase = STH_PHASE_STEP_END};
    return STH_OK;
}

sth_status sth_conductor_event_next(sth_conductor *conductor, sth_conductor_event *out_event) {
    if (!out_event) return null_argument("out_event");
    if (conductor) return sthi_conductor_event_next(conductor, out_event);
    return sthi_fail(STH_NOT_FOUND, NULL, 0, "conductor", "a conductor that is switched off has no events");
}

/* ---- who passes through it */

sth_status sth_runtime_set_conductor(sth_runtime *runtime, sth_conductor *conductor) {
    return runtime ? sthi_runtime_set_conductor(runtime, conductor) : null_argument("runtime");
}

sth_status sth_activation_set_conductor(sth_activation *activation, sth_conductor *conductor) {
    return activation ? sthi_activation_set_conductor(activation, conductor) : null_argument("activation");
}

sth_status sth_download_set_conductor(sth_download *download, sth_conductor *conductor) {
    return download ? sthi_download_set_conductor(download, conductor) : null_argument("download");
}

sth_status sth_runtime_set_max_inflight(sth_runtime *runtime, uint32_t units) {
    return runtime ? sthi_runtime_set_max_inflight(runtime, units) : null_argument("runtime");
}

sth_status sth_runtime_set_prefetch_window(sth_runtime *runtime, uint32_t units) {
    return runtime ? sthi_runtime_set_prefetch_window(runtime, units) : null_argument("runtime");
}
