/* The conductor from the inside: the pure parts under one lock, and the lanes that runtimes copy through.
 *
 *   budget.c   reservations                     tokens.c   slots of each direction, rates
 *   phases.c   which phase follows which        policy.c   rules -> hints
 *   trace.c    the newest events                arbiter.c  lanes and flights: order, pieces, what may wait
 *   conductor.c  life, and the calls of stagehand/conductor.h */
#ifndef STHI_CONDUCTOR_CONDUCTOR_H
#define STHI_CONDUCTOR_CONDUCTOR_H
#include <stdatomic.h>

#include "base/thread.h"
#include "conductor/budget.h"
#include "conductor/phases.h"
#include "conductor/policy.h"
#include "conductor/tokens.h"
#include "conductor/trace.h"

enum { STHI_OWNER_NAME = 48 };

struct sth_conductor {
    atomic_int refs; /* 1 for the owner, 1 per lane */
    sthi_mutex lock; /* all below; under it only the device's */
    unsigned fork_depth;
    bool shut;
    sth_conductor_options options;
    char names[STHI_OWNERS][STHI_OWNER_NAME]; /* "": free */
    sthi_budget budget;
    sthi_tokens tokens;
    sthi_phases phases;
    sthi_policy policy;
    sthi_trace_ring *trace;   /* NULL: none is kept */
    struct sthi_lane *lanes;  /* open ones */
    uint64_t allocated, window;
    uint64_t grants, denials, partials, shrinks_before; /* of this step */
    uint64_t flights, flight_bytes[STH_DIRECTIONS], ordered, split, deferred;
};

void sthi_conductor_unref(sth_conductor *c);
bool sthi_conductor_in_child(const sth_conductor *c);
/* Locked. */
void sthi_conductor_note(sth_conductor *c, sth_conductor_event_kind kind, uint64_t a, uint64_t b, uint64_t x);

void sthi_conductor_options_init(sth_conductor_options *options);
sth_status sthi_conductor_create(const sth_conductor_options *options, sth_conductor **out);
sth_status sthi_conductor_shutdown(sth_conductor *c);
void sthi_conductor_destroy(sth_conductor *c);
sth_status sthi_conductor_register(sth_conductor *c, const char *name, uint32_t *out);
sth_status sthi_conductor_unregister(sth_conductor *c, uint32_t owner);
sth_status sthi_conductor_begin_step(sth_conductor *c, uint64_t step);
sth_status sthi_conductor_enter(sth_conductor *c, sth_phase phase, bool *out_changed);
sth_status sthi_conductor_end_step(sth_conductor *c);
sth_phase sthi_conductor_phase(sth_conductor *c);
sth_status sthi_conductor_reserve(sth_conductor *c, uint32_t owner, sth_resource resource, uint64_t bytes,
                                  sth_reserve_mode mode, sth_priority priority, sth_phase scope, sth_grant *out);
sth_status sthi_conductor_release(sth_conductor *c, uint64_t id);
uint64_t sthi_conductor_granted(sth_conductor *c, uint64_t id);
sth_status sthi_conductor_changed(sth_conductor *c, uint64_t *out_id, uint64_t *out_granted);
uint64_t sthi_conductor_headroom(sth_conductor *c, sth_resource resource, bool hard);
sth_status sthi_conductor_set_unmanaged(sth_conductor *c, sth_resource resource, uint64_t bytes);
sth_status sthi_conductor_acquire(sth_conductor *c, uint32_t owner, sth_direction direction, uint64_t bytes,
                                  sth_priority priority, uint64_t block, sth_token *out, sth_denial *out_reason);
sth_status sthi_conductor_complete(sth_conductor *c, sth_token token, uint64_t bytes, double ms);
sth_status sthi_conductor_release_token(sth_conductor *c, sth_token token);
sth_status sthi_conductor_hints_get(sth_conductor *c, sth_hints *out);
sth_status sthi_conductor_set_window(sth_conductor *c, uint32_t window);
sth_status sthi_conductor_set_allocated(sth_conductor *c, uint64_t bytes);
sth_status sthi_conductor_stats_get(sth_conductor *c, sth_conductor_stats *out);
sth_status sthi_conductor_event_next(sth_conductor *c, sth_conductor_event *out);
#endif
