/* Calls every function of a conductor that is switched off, each a thousand times: count_disabled.py counts the
 * instructions. Prints what it called. */
#include <stdio.h>

#include "stagehand/conductor.h"

enum { TIMES = 1000 };
#define EACH(name, call)                            \
    do {                                            \
        printf(#name " %d\n", TIMES);               \
        for (int i = 0; i < TIMES; i++) (void)call; \
    } while (0)

int main(void) {
    sth_conductor *off = NULL;
    uint32_t owner;
    uint64_t id, bytes;
    bool changed;
    sth_grant grant;
    sth_token token;
    sth_denial reason;
    sth_hints hints;
    EACH(sth_conductor_register, sth_conductor_register(off, "weights", &owner));
    EACH(sth_conductor_unregister, sth_conductor_unregister(off, 0));
    EACH(sth_conductor_begin_step, sth_conductor_begin_step(off, 1));
    EACH(sth_conductor_enter, sth_conductor_enter(off, STH_PHASE_FORWARD, &changed));
    EACH(sth_conductor_end_step, sth_conductor_end_step(off));
    EACH(sth_conductor_phase, sth_conductor_phase(off));
    EACH(sth_conductor_reserve, sth_conductor_reserve(off, 0, STH_RESOURCE_VRAM, 4096, STH_RESERVE_HARD,
                                                      STH_PRIORITY_REQUIRED, STH_PHASE_NONE, &grant));
    EACH(sth_conductor_release, sth_conductor_release(off, 1));
    EACH(sth_conductor_granted, sth_conductor_granted(off, 1));
    EACH(sth_conductor_changed, sth_conductor_changed(off, &id, &bytes));
    EACH(sth_conductor_headroom, sth_conductor_headroom(off, STH_RESOURCE_VRAM, true));
    EACH(sth_conductor_set_unmanaged, sth_conductor_set_unmanaged(off, 1));
    EACH(sth_conductor_set_unmanaged_pinned, sth_conductor_set_unmanaged_pinned(off, 1));
    EACH(sth_conductor_acquire, sth_conductor_acquire(off, 0, STH_DIRECTION_H2D, 4096, STH_PRIORITY_REQUIRED, 0,
                                                      &token, &reason));
    EACH(sth_conductor_complete, sth_conductor_complete(off, 1, 4096, 1.0));
    EACH(sth_conductor_release_token, sth_conductor_release_token(off, 1));
    EACH(sth_conductor_hints_get, sth_conductor_hints_get(off, &hints));
    EACH(sth_conductor_set_window, sth_conductor_set_window(off, 3));
    EACH(sth_conductor_set_allocated, sth_conductor_set_allocated(off, 1));
    return 0;
}
