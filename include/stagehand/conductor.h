/* stagehand/conductor.h - one arbiter for device memory, pinned memory and both directions of the link.
 *
 * Life: sth_conductor_create -> sth_conductor_register (each owner), sth_runtime_set_conductor and the like ->
 *       every step: sth_conductor_begin_step -> { sth_conductor_enter } -> sth_conductor_end_step ->
 *       sth_conductor_destroy.
 *
 * It knows phases, reservations, transfer tokens and hints, and it orders the copies of the
 * runtimes that are attached to it. It owns no memory and moves nothing. A reservation takes effect
 * through its owner: ask sth_conductor_changed after each call that may shrink one, and act on it.
 *
 * A NULL conductor is one that is switched off: every call returns at once, STH_OK where it returns a status,
 * with outputs of zeros (sth_conductor_reserve grants all, sth_conductor_acquire gives no token).
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. In a forked child calls
 * return INVALID_STATE, and those that return nothing do nothing. */
#ifndef STAGEHAND_CONDUCTOR_H
#define STAGEHAND_CONDUCTOR_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/activation.h"
#include "stagehand/download.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_conductor sth_conductor;

/* Lists: X(NAME). */
#define STH_PHASE_LIST(X) X(STEP_BEGIN) X(FORWARD) X(BACKWARD) X(OPTIMIZER) X(STEP_END)
/* HARD: all or nothing below the soft cap. SOFT: what there is. BURST: all or nothing below the
 * hard cap. FLOOR: a guaranteed minimum, all or nothing; later grants of the owner use it up
 * first. One that is denied is remembered, and kept free of speculative requests. CEILING: the
 * most that the owner's reservations may come to; always granted, takes nothing. */
#define STH_RESERVE_MODE_LIST(X) X(HARD) X(SOFT) X(BURST) X(FLOOR) X(CEILING)
/* The strongest first. CRITICAL: against the hard cap in any mode. SPECULATIVE, BACKGROUND: SOFT
 * grants shrink when something stronger needs them. */
#define STH_PRIORITY_LIST(X) X(CRITICAL) X(REQUIRED) X(SPECULATIVE) X(BACKGROUND)
#define STH_RESOURCE_LIST(X) X(VRAM) X(PINNED)
#define STH_DIRECTION_LIST(X) X(H2D) X(D2H)
#define STH_GRANT_LIST(X) X(GRANTED) X(PARTIAL) X(DENIED)
/* Why something was denied or given in part. PRIORITY_TOO_LOW: the last free slot is not for
 * BACKGROUND. OWNER_CEILING: the owner's own. TABLE_FULL: 256 reservations, or tokens of one
 * direction, are there. */
#define STH_DENIAL_LIST(X)                                                                          \
    X(NONE) X(H2D_SLOTS_EXHAUSTED) X(D2H_SLOTS_EXHAUSTED) X(PHASE_RULE_SUPPRESSED_SPECULATIVE)      \
    X(VRAM_SOFT_CAP) X(VRAM_HARD_CAP) X(PINNED_CAP) X(OWNER_CEILING) X(PRIORITY_TOO_LOW)            \
    X(NOT_REGISTERED) X(TABLE_FULL) X(SHUT_DOWN)

typedef enum sth_phase {
#define STH_PHASE_ENUM(name) STH_PHASE_##name,
    STH_PHASE_LIST(STH_PHASE_ENUM)
#undef STH_PHASE_ENUM
        STH_PHASES,
    STH_PHASE_NONE = STH_PHASES /* no scope */
} sth_phase;
typedef enum sth_reserve_mode {
#define STH_MODE_ENUM(name) STH_RESERVE_##name,
    STH_RESERVE_MODE_LIST(STH_MODE_ENUM)
#undef STH_MODE_ENUM
        STH_RESERVE_MODES
} sth_reserve_mode;
typedef enum sth_priority {
#define STH_PRIORITY_ENUM(name) STH_PRIORITY_##name,
    STH_PRIORITY_LIST(STH_PRIORITY_ENUM)
#undef STH_PRIORITY_ENUM
        STH_PRIORITIES
} sth_priority;
typedef enum sth_resource {
#define STH_RESOURCE_ENUM(name) STH_RESOURCE_##name,
    STH_RESOURCE_LIST(STH_RESOURCE_ENUM)
#undef STH_RESOURCE_ENUM
        STH_RESOURCES
} sth_resource;
typedef enum sth_direction {
#define STH_DIRECTION_ENUM(name) STH_DIRECTION_##name,
    STH_DIRECTION_LIST(STH_DIRECTION_ENUM)
#undef STH_DIRECTION_ENUM
        STH_DIRECTIONS
} sth_direction;
typedef enum sth_grant_status {
#define STH_GRANT_ENUM(name) STH_GRANT_##name,
    STH_GRANT_LIST(STH_GRANT_ENUM)
#undef STH_GRANT_ENUM
        STH_GRANT_STATUSES
} sth_grant_status;
typedef enum sth_denial {
#define STH_DENIAL_ENUM(name) STH_DENIAL_##name,
    STH_DENIAL_LIST(STH_DENIAL_ENUM)
#undef STH_DENIAL_ENUM
        STH_DENIALS
} sth_denial;

enum { STH_SLOTS_MOST = 256 }; /* tokens of one direction at once */

typedef struct sth_conductor_options {
    size_t size;          /* sizeof(sth_conductor_options), set by init */
    uint64_t soft_cap;    /* bytes of device memory. Default 22000 MiB */
    uint64_t hard_cap;    /* not below soft_cap. Default 23500 MiB */
    uint64_t pinned_cap;  /* bytes of pinned host memory; 0: no cap. Default 0 */
    uint32_t h2d_slots;   /* tokens at once, 1 to STH_SLOTS_MOST. Default 2 */
    uint32_t d2h_slots;   /* the same. Default 2 */
    /* larger copies are split while others have copies under way. Default 8 MiB */
    uint64_t piece_bytes;
    bool event_trace;     /* keep the newest 4096 events for sth_conductor_event_next */
} sth_conductor_options;
STH_API void sth_conductor_options_init(sth_conductor_options *options);

/* `options` may be NULL: defaults. INVALID_ARGUMENT naming the member, OUT_OF_HOST_MEMORY.
 * Allocates: host memory, some 40 KiB, and 160 more with event_trace. */
STH_API sth_status sth_conductor_create(const sth_conductor_options *options,
                                        sth_conductor **out_conductor);
/* From now on everything is denied with SHUT_DOWN, and attached runtimes go their own way. */
STH_API sth_status sth_conductor_shutdown(sth_conductor *conductor);
/* Shuts it down and gives it back; runtimes that are attached keep what they need. NULL is fine.
 * Threads: one, once. */
STH_API void sth_conductor_destroy(sth_conductor *conductor);

/* ---- owners */

/* An owner of reservations and tokens, by name (copied, 47 bytes). INVALID_STATE when the name
 * is taken, OUT_OF_HOST_MEMORY when 64 are there. */
STH_API sth_status sth_conductor_register(sth_conductor *conductor, const char *name,
                                          uint32_t *out_owner);
/* Ends the owner, its reservations and its tokens. A second call does nothing. */
STH_API sth_status sth_conductor_unregister(sth_conductor *conductor, uint32_t owner);

/* ---- phases */

/* A step begins, whatever the last phase was: hints and counters begin again, what was shrunk
 * grows back. */
STH_API sth_status sth_conductor_begin_step(sth_conductor *conductor, uint64_t step);
/* FORWARD, BACKWARD or OPTIMIZER. The phase that is there already: nothing, *out_changed is false.
 * Reservations for the phase that ends are released. INVALID_STATE outside of a step and when it
 * goes backwards (only BACKWARD -> FORWARD may). out_changed may be NULL. */
STH_API sth_status sth_conductor_enter(sth_conductor *conductor, sth_phase phase,
                                       bool *out_changed);
/* INVALID_STATE without a step. */
STH_API sth_status sth_conductor_end_step(sth_conductor *conductor);
/* STEP_END outside of steps. */
STH_API sth_phase sth_conductor_phase(sth_conductor *conductor);

/* ---- reservations */

typedef struct sth_grant {
    sth_grant_status status;
    sth_denial reason;      /* NONE when GRANTED */
    uint64_t granted_bytes;
    uint64_t id;            /* 0 where there is nothing to release */
} sth_grant;

/* Reserves `bytes` (> 0) of a resource. scope: released when that phase ends; STH_PHASE_NONE: by
 * its owner. INVALID_ARGUMENT; that there is no room is in the grant, not in the status. */
STH_API sth_status sth_conductor_reserve(sth_conductor *conductor, uint32_t owner,
                                         sth_resource resource, uint64_t bytes,
                                         sth_reserve_mode mode, sth_priority priority,
                                         sth_phase scope, sth_grant *out_grant);
/* Ends a reservation; one that has ended is fine. */
STH_API sth_status sth_conductor_release(sth_conductor *conductor, uint64_t id);
/* Bytes that the reservation is worth now; 0 where it has ended. */
STH_API uint64_t sth_conductor_granted(sth_conductor *conductor, uint64_t id);
/* One reservation whose bytes changed, or that a phase's end released, since it was last told;
 * 0: none. */
STH_API sth_status sth_conductor_changed(sth_conductor *conductor, uint64_t *out_id,
                                         uint64_t *out_granted);
/* Bytes that an owner without reservations could get below the soft cap, or the hard one. */
STH_API uint64_t sth_conductor_headroom(sth_conductor *conductor, sth_resource resource, bool hard);
/* Device memory in use that no reservation covers. Speculative reservations shrink when it leaves
 * too little. */
STH_API sth_status sth_conductor_set_unmanaged(sth_conductor *conductor, uint64_t bytes);
/* The same of pinned host memory, such as what attached runtimes have pinned. */
STH_API sth_status sth_conductor_set_unmanaged_pinned(sth_conductor *conductor, uint64_t bytes);

/* ---- transfer tokens */

/* A slot of one direction. 0 is none. */
typedef uint64_t sth_token;

/* A token for a transfer that somebody else carries out; block is for the trace. *out_token is 0
 * when *out_reason is not NONE. INVALID_ARGUMENT. */
STH_API sth_status sth_conductor_acquire(sth_conductor *conductor, uint32_t owner,
                                         sth_direction direction, uint64_t bytes,
                                         sth_priority priority, uint64_t block,
                                         sth_token *out_token, sth_denial *out_reason);
/* The transfer is over: its rate goes into the estimate. The token goes on. STALE. */
STH_API sth_status sth_conductor_complete(sth_conductor *conductor, sth_token token, uint64_t bytes,
                                          double ms);
/* Frees the slot. A second call does nothing. */
STH_API sth_status sth_conductor_release_token(sth_conductor *conductor, sth_token token);

/* ---- hints */

typedef struct sth_hints {
    uint32_t max_inflight_h2d, max_inflight_d2h;
    uint32_t prefetch_window_cap;
    bool suppress_speculative;
} sth_hints;
/* In force now. Within a step numbers only fall and suppress_speculative only becomes true. */
STH_API sth_status sth_conductor_hints_get(sth_conductor *conductor, sth_hints *out_hints);
/* The prefetch window at the beginning of a step: the widest of the runtimes'. Default 3. */
STH_API sth_status sth_conductor_set_window(sth_conductor *conductor, uint32_t window);
/* Device memory in use, for rule 1: speculation stops in BACKWARD above 80 % of the soft cap. */
STH_API sth_status sth_conductor_set_allocated(sth_conductor *conductor, uint64_t bytes);

/* ---- what it did */

typedef struct sth_conductor_stats {
    uint64_t step;
    sth_phase phase;
    uint64_t vram_granted, pinned_granted;   /* bytes committed to owners */
    uint64_t vram_unmanaged, vram_allocated; /* as told */
    uint64_t vram_headroom;                  /* below the soft cap */
    uint64_t pinned_unmanaged;               /* as told */
    uint64_t pinned_headroom;                /* below pinned_cap; huge where there is none */
    uint32_t h2d_inflight, d2h_inflight;     /* tokens */
    uint64_t grants, denials, partials, shrinks; /* in this step */
    int64_t phase_ns[STH_PHASES];            /* in this step */
    double bytes_per_s[STH_DIRECTIONS];      /* measured; 0: not yet */
    /* runs of copies that passed through, since creation */
    uint64_t flights;
    uint64_t flight_bytes[STH_DIRECTIONS];
    /* that waited behind another, were cut, were put off */
    uint64_t ordered, split, deferred;
} sth_conductor_stats;
STH_API sth_status sth_conductor_stats_get(sth_conductor *conductor,
                                           sth_conductor_stats *out_stats);

/* X(NAME, spelling, what a, b and c are) */
#define STH_CONDUCTOR_EVENT_LIST(X)                                  \
    X(PHASE, "phase", "phase, step, 0")                              \
    X(GRANT, "grant", "reservation, bytes, owner")                   \
    X(DENY, "deny", "reason, bytes, owner")                          \
    X(SHRINK, "shrink", "reservation, bytes left, 0")                \
    X(RELEASE, "release", "reservation, bytes, 0")                   \
    X(TOKEN, "token", "token, bytes, block")                         \
    X(TOKEN_DENIED, "token_denied", "reason, bytes, block")          \
    X(TOKEN_FREED, "token_freed", "token, 0, 0")                     \
    X(ORDERED, "ordered", "bytes, direction, 0")                     \
    X(DEFERRED, "deferred", "bytes, direction, 0")
typedef enum sth_conductor_event_kind {
#define STH_EVENT_ENUM(name, text, what) STH_CONDUCTOR_##name,
    STH_CONDUCTOR_EVENT_LIST(STH_EVENT_ENUM)
#undef STH_EVENT_ENUM
        STH_CONDUCTOR_EVENTS
} sth_conductor_event_kind;
typedef struct sth_conductor_event {
    int64_t ns; /* monotonic wall time */
    sth_conductor_event_kind kind;
    uint64_t a, b, c;
} sth_conductor_event;
/* The oldest event that was not read; NOT_FOUND when there is none, as with a NULL conductor. */
STH_API sth_status sth_conductor_event_next(sth_conductor *conductor,
                                            sth_conductor_event *out_event);

/* ---- who passes through it. NULL detaches. Attaching again, or to another, replaces. Runtimes
 * on one card are ordered among each other when they share an sth_device, on CUDA and HIP also
 * when each has its own. Returns the device's error, OUT_OF_HOST_MEMORY; the runtime then goes
 * its own way. Allocates: host memory. */
STH_API sth_status sth_runtime_set_conductor(sth_runtime *runtime, sth_conductor *conductor);
STH_API sth_status sth_activation_set_conductor(sth_activation *activation,
                                                sth_conductor *conductor);
STH_API sth_status sth_download_set_conductor(sth_download *download, sth_conductor *conductor);

/* Static policy: units prefetched from now on; 0 is none. */
STH_API sth_status sth_runtime_set_prefetch_window(sth_runtime *runtime, uint32_t units);
/* Static policy: of them at most so many are under way at once, from their request to the end of
 * their copy; 0: no limit, as at first. A unit that is waited for is loaded in any case. */
STH_API sth_status sth_runtime_set_max_inflight(sth_runtime *runtime, uint32_t units);

#ifdef __cplusplus
}
#endif
#endif
