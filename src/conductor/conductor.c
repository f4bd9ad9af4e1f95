/* The conductor's shell: one lock round the pure parts, the clock, names of owners, counters of a step.
 * Lock: `lock`, a leaf but for the device's; nothing here calls back into anybody. Does not move bytes. */
#include "conductor/conductor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"

enum { WINDOW = 3 };
static const uint64_t MIB = 1 << 20;

/* ---- life */

void sthi_conductor_options_init(sth_conductor_options *o) {
    *o = (sth_conductor_options){.size = sizeof *o,
                                 .soft_cap = 22000 * MIB,
                                 .hard_cap = 23500 * MIB,
                                 .h2d_slots = 2,
                                 .d2h_slots = 2,
                                 .piece_bytes = 8 * MIB};
}

sth_status sthi_conductor_create(const sth_conductor_options *options, sth_conductor **out) {
    sth_conductor *c = sthi_zalloc(1, sizeof *c);
    sthi_trace_ring *trace = c && options->event_trace ? sthi_zalloc(1, sizeof *trace) : NULL;
    if (!c || (options->event_trace && !trace)) {
        sthi_free(c);
        return sthi_no_memory("conductor", "a conductor's record");
    }
    atomic_init(&c->refs, 1);
    sthi_mutex_init(&c->lock);
    c->fork_depth = sthi_fork_depth();
    c->options = *options;
    c->trace = trace;
    sthi_budget_init(&c->budget, options->soft_cap, options->hard_cap, options->pinned_cap);
    sthi_tokens_init(&c->tokens, options->h2d_slots, options->d2h_slots);
    sthi_phases_init(&c->phases);
    sthi_policy_init(&c->policy, (sth_hints){.max_inflight_h2d = options->h2d_slots,
                                             .max_inflight_d2h = options->d2h_slots,
                                             .prefetch_window_cap = WINDOW});
    *out = c;
    return STH_OK;
}

void sthi_conductor_unref(sth_conductor *c) {
    if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_acq_rel) != 1) return;
    STHI_INVARIANT(c->shut && !c->lanes);
    sthi_mutex_fini(&c->lock);
    sthi_free(c->trace);
    sthi_free(c);
}

bool sthi_conductor_in_child(const sth_conductor *c) { return c->fork_depth != sthi_fork_depth(); }

/* Takes the lock on success. */
static sth_status enter(sth_conductor *c) {
    if (sthi_conductor_in_child(c)) return sthi_fail_in_child("conductor", "the conductor");
    sthi_lock(&c->lock);
    return STH_OK;
}

/* The same, where a conductor that was shut down refuses. */
static sth_status enter_open(sth_conductor *c) {
    STHI_TRY(enter(c));
    if (!c->shut) return STH_OK;
    sthi_unlock(&c->lock);
    return sthi_fail(STH_SHUT_DOWN, NULL, 0, "conductor", "the conductor was shut down; make a new one");
}

static sth_status leave(sth_conductor *c) {
    sthi_unlock(&c->lock);
    return STH_OK;
}

sth_status sthi_conductor_shutdown(sth_conductor *c) {
    STHI_TRY(enter(c));
    c->shut = true;
    return leave(c);
}

void sthi_conductor_destroy(sth_conductor *c) {
    if (!c || sthi_conductor_in_child(c)) return;
    (void)sthi_conductor_shutdown(c);
    sthi_conductor_unref(c);
}

void sthi_conductor_note(sth_conductor *c, sth_conductor_event_kind kind, uint64_t a, uint64_t b, uint64_t x) {
    if (c->trace)
        sthi_trace_put(c->trace, (sth_conductor_event){.ns = sthi_now_ns(), .kind = kind, .a = a, .b = b, .c = x});
}

/* ---- owners */

static uint32_t owner_of(const sth_conductor *c, const char *name) {
    for (uint32_t i = 0; i < STHI_OWNERS; i++)
        if (!strcmp(c->names[i], name)) return i;
    return STHI_OWNERS;
}

sth_status sthi_conductor_register(sth_conductor *c, const char *name, uint32_t *out) {
    STHI_TRY(enter_open(c));
    uint32_t free_one = owner_of(c, ""), same = owner_of(c, name);
    if (same < STHI_OWNERS || free_one == STHI_OWNERS) {
        sthi_unlock(&c->lock);
        if (same < STHI_OWNERS)
            return sthi_fail(STH_INVALID_STATE, NULL, 0, name, "the conductor has an owner '%s' already", name);
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, name, "a conductor has at most %d owners", STHI_OWNERS);
    }
    STHI_INVARIANT(free_one < STHI_OWNERS && !*c->names[free_one]);
    snprintf(c->names[free_one], STHI_OWNER_NAME, "%s", name);
    *out = free_one;
    return leave(c);
}

static bool registered(const sth_conductor *c, uint32_t owner) { return owner < STHI_OWNERS && *c->names[owner]; }

sth_status sthi_conductor_unregister(sth_conductor *c, uint32_t owner) {
    STHI_TRY(enter(c));
    if (registered(c, owner)) {
        sthi_budget_release_owner(&c->budget, owner);
        sthi_tokens_release_owner(&c->tokens, owner);
        *c->names[owner] = 0;
    }
    return leave(c);
}

/* ---- phases */

sth_status sthi_conductor_begin_step(sth_conductor *c, uint64_t step) {
    STHI_TRY(enter_open(c));
    if (c->phases.now < STH_PHASES) sthi_budget_phase_ended(&c->budget, c->phases.now);
    sthi_phases_begin(&c->phases, step, sthi_now_ns());
    sthi_policy_step(&c->policy);
    sthi_budget_grow_back(&c->budget);
    c->grants = c->denials = c->partials = 0;
    c->shrinks_before = c->budget.shrinks;
    sthi_conductor_note(c, STH_CONDUCTOR_PHASE, STH_PHASE_STEP_BEGIN, step, 0);
    return leave(c);
}

/* Locked; the phase may be entered. */
static void move_to(sth_conductor *c, sth_phase phase) {
    sth_phase before = c->phases.now;
    sthi_phases_enter(&c->phases, phase, sthi_now_ns());
    sthi_budget_phase_ended(&c->budget, before);
    sthi_policy_phase(&c->policy, phase, c->allocated, c->options.soft_cap);
    sthi_policy_check(&c->policy, sthi_tokens_busy(&c->tokens));
    sthi_conductor_note(c, STH_CONDUCTOR_PHASE, phase, c->phases.step, 0);
}

sth_status sthi_conductor_enter(sth_conductor *c, sth_phase phase, bool *out_changed) {
    STHI_TRY(enter_open(c));
    sth_phase now = c->phases.now;
    bool may = sthi_phases_may(&c->phases, phase), changes = phase != now;
    if (may && changes) move_to(c, phase);
    sthi_unlock(&c->lock);
    if (out_changed) *out_changed = may && changes;
    if (may) return STH_OK;
    const char *name = sthi_phase_name(phase);
    if (now == STH_PHASE_STEP_END)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, name, "no step is open: begin one before entering %s", name);
    return sthi_fail(STH_INVALID_STATE, NULL, 0, name, "a step in %s cannot enter %s: end it and begin the next",
                     sthi_phase_name(now), name);
}

sth_status sthi_conductor_end_step(sth_conductor *c) {
    return sthi_conductor_enter(c, STH_PHASE_STEP_END, NULL);
}

sth_phase sthi_conductor_phase(sth_conductor *c) {
    if (enter(c) != STH_OK) return STH_PHASE_STEP_END;
    sth_phase now = c->phases.now;
    sthi_unlock(&c->lock);
    return now;
}

/* ---- reservations */

static void count(sth_conductor *c, const sth_grant *g, uint32_t owner, uint64_t bytes) {
    if (g->status == STH_GRANT_DENIED) c->denials++;
    else c->grants++;
    c->partials += g->status == STH_GRANT_PARTIAL;
    if (g->status == STH_GRANT_DENIED) sthi_conductor_note(c, STH_CONDUCTOR_DENY, g->reason, bytes, owner);
    else sthi_conductor_note(c, STH_CONDUCTOR_GRANT, g->id, g->granted_bytes, owner);
}

sth_status sthi_conductor_reserve(sth_conductor *c, uint32_t owner, sth_resource resource, uint64_t bytes,
                                  sth_reserve_mode mode, sth_priority priority, sth_phase scope, sth_grant *out) {
    STHI_TRY(enter(c));
    *out = (sth_grant){.status = STH_GRANT_DENIED};
    if (c->shut) out->reason = STH_DENIAL_SHUT_DOWN;
    else if (!registered(c, owner)) out->reason = STH_DENIAL_NOT_REGISTERED;
    else *out = sthi_budget_reserve(&c->budget, owner, resource, bytes, mode, priority, scope);
    count(c, out, owner, bytes);
    return leave(c);
}

sth_status sthi_conductor_release(sth_conductor *c, uint64_t id) {
    STHI_TRY(enter(c));
    sthi_conductor_note(c, STH_CONDUCTOR_RELEASE, id, sthi_budget_release(&c->budget, id), 0);
    return leave(c);
}

uint64_t sthi_conductor_granted(sth_conductor *c, uint64_t id) {
    if (enter(c) != STH_OK) return 0;
    uint64_t bytes = sthi_budget_granted(&c->budget, id);
    sthi_unlock(&c->lock);
    return bytes;
}

sth_status sthi_conductor_changed(sth_conductor *c, uint64_t *out_id, uint64_t *out_granted) {
    STHI_TRY(enter(c));
    if (sthi_budget_changed(&c->budget, out_id, out_granted))
        sthi_conductor_note(c, STH_CONDUCTOR_SHRINK, *out_id, *out_granted, 0);
    return leave(c);
}

uint64_t sthi_conductor_headroom(sth_conductor *c, sth_resource resource, bool hard) {
    if (enter(c) != STH_OK) return 0;
    uint64_t bytes = c->shut ? 0 : sthi_budget_headroom(&c->budget, resource, hard);
    sthi_unlock(&c->lock);
    return bytes;
}

sth_status sthi_conductor_set_unmanaged(sth_conductor *c, sth_resource resource, uint64_t bytes) {
    STHI_TRY(enter(c));
    sthi_budget_set_unmanaged(&c->budget, resource, bytes);
    return leave(c);
}

/* ---- tokens */

sth_status sthi_conductor_acquire(sth_conductor *c, uint32_t owner, sth_direction direction, uint64_t bytes,
                                  sth_priority priority, uint64_t block, sth_token *out, sth_denial *out_reason) {
    STHI_TRY(enter(c));
    *out = 0;
    if (c->shut) *out_reason = STH_DENIAL_SHUT_DOWN;
    else if (!registered(c, owner)) *out_reason = STH_DENIAL_NOT_REGISTERED;
    else {
        sthi_policy_check(&c->policy, sthi_tokens_busy(&c->tokens));
        *out_reason = sthi_tokens_acquire(&c->tokens, &c->policy.now, owner, direction, priority, out);
    }
    if (*out) sthi_conductor_note(c, STH_CONDUCTOR_TOKEN, *out, bytes, block);
    else sthi_conductor_note(c, STH_CONDUCTOR_TOKEN_DENIED, *out_reason, bytes, block);
    return leave(c);
}

sth_status sthi_conductor_complete(sth_conductor *c, sth_token token, uint64_t bytes, double ms) {
    STHI_TRY(enter(c));
    sth_direction direction;
    bool alive = sthi_tokens_alive(&c->tokens, token, &direction);
    if (alive) sthi_tokens_measured(&c->tokens, direction, bytes, ms * 1e6);
    sthi_unlock(&c->lock);
    if (alive) return STH_OK;
    return sthi_fail(STH_STALE, NULL, 0, "token", "token %#" PRIx64 " was released, or is none of this conductor",
                     token);
}

sth_status sthi_conductor_release_token(sth_conductor *c, sth_token token) {
    STHI_TRY(enter(c));
    if (sthi_tokens_release(&c->tokens, token)) sthi_conductor_note(c, STH_CONDUCTOR_TOKEN_FREED, token, 0, 0);
    return leave(c);
}

/* ---- hints and figures */

sth_status sthi_conductor_hints_get(sth_conductor *c, sth_hints *out) {
    STHI_TRY(enter(c));
    *out = c->policy.now;
    return leave(c);
}

sth_status sthi_conductor_set_window(sth_conductor *c, uint32_t window) {
    STHI_TRY(enter(c));
    c->policy.base.prefetch_window_cap = window;
    /* Within a step hints only tighten. */
    if (c->phases.now == STH_PHASE_STEP_END || window < c->policy.now.prefetch_window_cap)
        c->policy.now.prefetch_window_cap = window;
    return leave(c);
}

sth_status sthi_conductor_set_allocated(sth_conductor *c, uint64_t bytes) {
    STHI_TRY(enter(c));
    c->allocated = bytes;
    return leave(c);
}

sth_status sthi_conductor_stats_get(sth_conductor *c, sth_conductor_stats *out) {
    STHI_TRY(enter(c));
    *out = (sth_conductor_stats){
        .step = c->phases.step,
        .phase = c->phases.now,
        .vram_granted = sthi_budget_committed(&c->budget, STH_RESOURCE_VRAM),
        .pinned_granted = sthi_budget_committed(&c->budget, STH_RESOURCE_PINNED),
        .vram_unmanaged = c->budget.unmanaged[STH_RESOURCE_VRAM],
        .pinned_unmanaged = c->budget.unmanaged[STH_RESOURCE_PINNED],
        .vram_allocated = c->allocated,
        .vram_headroom = sthi_budget_headroom(&c->budget, STH_RESOURCE_VRAM, false),
        .pinned_headroom = sthi_budget_headroom(&c->budget, STH_RESOURCE_PINNED, false),
        .h2d_inflight = c->tokens.used[STH_DIRECTION_H2D],
        .d2h_inflight = c->tokens.used[STH_DIRECTION_D2H],
        .grants = c->grants,
        .denials = c->denials,
        .partials = c->partials,
        .shrinks = c->budget.shrinks - c->shrinks_before,
        .flights = c->flights,
        .ordered = c->ordered,
        .split = c->split,
        .deferred = c->deferred,
    };
    memcpy(out->phase_ns, c->phases.spent_ns, sizeof out->phase_ns);
    memcpy(out->bytes_per_s, c->tokens.rate, sizeof out->bytes_per_s);
    memcpy(out->flight_bytes, c->flight_bytes, sizeof out->flight_bytes);
    return leave(c);
}

sth_status sthi_conductor_event_next(sth_conductor *c, sth_conductor_event *out) {
    STHI_TRY(enter(c));
    bool found = c->trace && sthi_trace_take(c->trace, out);
    sthi_unlock(&c->lock);
    return found ? STH_OK : sthi_fail(STH_NOT_FOUND, NULL, 0, "conductor", "no event is left");
}
