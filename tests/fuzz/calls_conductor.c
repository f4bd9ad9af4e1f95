/* Calls of conductor.h. */
#include "fuzz/calls.h"

static void make(calls *c) {
    sth_conductor_options o;
    sth_conductor_options_init(&o);
    sth_conductor_options_init(NULL);
    if (calls_byte(c) & 1) o.soft_cap = 1 << 20, o.hard_cap = 1 << 21;
    if (calls_once_in(c, 8)) o.soft_cap = calls_extreme(c);
    if (calls_once_in(c, 8)) o.hard_cap = calls_extreme(c);
    if (calls_once_in(c, 8)) o.pinned_cap = calls_extreme(c);
    if (calls_once_in(c, 8)) o.piece_bytes = calls_extreme(c);
    if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
    o.h2d_slots = 1 + calls_number(c, 4);
    o.d2h_slots = 1 + calls_number(c, 4);
    o.event_trace = calls_byte(c) & 1;
    sth_conductor *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_conductor_create(calls_byte(c) % 4 ? &o : NULL, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    c->conductor = rc == STH_OK ? made : NULL;
}

static void reserve(calls *c, sth_conductor *on) {
    sth_grant grant = {0};
    uint64_t bytes = calls_bytes(c, 1 << 17);
    sth_status rc = CALLS_TRY(sth_conductor_reserve(
        on, calls_number(c, 5), (sth_resource)calls_choice(c, STH_RESOURCES), bytes,
        (sth_reserve_mode)calls_choice(c, STH_RESERVE_MODES), (sth_priority)calls_choice(c, STH_PRIORITIES),
        (sth_phase)calls_choice(c, STH_PHASES + 1), calls_or_null(c, &grant)));
    if (rc != STH_OK) return;
    CHECK(grant.granted_bytes <= bytes);
    if (grant.id) c->reservation = grant.id;
}

static void token(calls *c, sth_conductor *on) {
    sth_token got;
    sth_denial reason;
    sth_status rc = CALLS_TRY(sth_conductor_acquire(on, calls_number(c, 5), (sth_direction)calls_choice(c, 2),
                                                    calls_extreme(c), (sth_priority)calls_choice(c, STH_PRIORITIES),
                                                    calls_extreme(c), &got, &reason));
    if (rc == STH_OK && got) c->token = got;
}

static void figures(calls *c, sth_conductor *on) {
    sth_hints hints;
    sth_conductor_stats stats;
    sth_conductor_event event;
    uint64_t id, granted;
    CALLS_TRY(sth_conductor_hints_get(on, calls_or_null(c, &hints)));
    CALLS_TRY(sth_conductor_stats_get(on, calls_or_null(c, &stats)));
    CALLS_TRY(sth_conductor_event_next(on, calls_or_null(c, &event)));
    CALLS_TRY(sth_conductor_changed(on, calls_or_null(c, &id), calls_or_null(c, &granted)));
    (void)sth_conductor_headroom(on, (sth_resource)calls_choice(c, STH_RESOURCES), calls_byte(c) & 1);
    (void)sth_conductor_granted(on, calls_byte(c) % 2 ? c->reservation : calls_extreme(c));
    CHECK(sth_conductor_phase(on) <= STH_PHASE_NONE);
}

void calls_on_conductor(calls *c) {
    sth_conductor *on = calls_or_null(c, c->conductor);
    uint32_t owner;
    bool changed;
    if (!c->conductor && !calls_once_in(c, 8)) {
        make(c);
        return;
    }
    switch (calls_byte(c) % 14) {
    case 0: CALLS_TRY(sth_conductor_register(on, calls_or_null(c, (void *)(uintptr_t)calls_text(c)), &owner)); break;
    case 1: CALLS_TRY(sth_conductor_unregister(on, calls_number(c, 5))); break;
    case 2: CALLS_TRY(sth_conductor_begin_step(on, calls_extreme(c))); break;
    case 3:
    case 4:
        CALLS_TRY(sth_conductor_enter(on, (sth_phase)calls_choice(c, STH_PHASES + 1), calls_or_null(c, &changed)));
        break;
    case 5: CALLS_TRY(sth_conductor_end_step(on)); break;
    case 6:
    case 7: reserve(c, on); break;
    case 8: CALLS_TRY(sth_conductor_release(on, calls_byte(c) % 2 ? c->reservation : calls_extreme(c))); break;
    case 9: token(c, on); break;
    case 10:
        CALLS_TRY(sth_conductor_complete(on, calls_byte(c) % 4 ? c->token : calls_extreme(c), calls_extreme(c),
                                         calls_real(c)));
        CALLS_TRY(sth_conductor_release_token(on, calls_byte(c) % 4 ? c->token : calls_extreme(c)));
        break;
    case 11:
        CALLS_TRY(sth_conductor_set_unmanaged(on, calls_extreme(c)));
        CALLS_TRY(sth_conductor_set_allocated(on, calls_extreme(c)));
        CALLS_TRY(sth_conductor_set_window(on, calls_number(c, 8)));
        break;
    case 12:
        if (calls_once_in(c, 16)) CALLS_TRY(sth_conductor_shutdown(on));
        break;
    default: figures(c, on);
    }
}

void calls_end_conductor(calls *c) { sth_conductor_destroy(c->conductor); }
