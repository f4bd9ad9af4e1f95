/* Which phase follows which, and how long each lasted. A phase may be left out; back goes only BACKWARD ->
 * FORWARD. Invariant: outside of steps `now` is STEP_END, and only sthi_phases_begin leaves it. */
#include "conductor/phases.h"

#include "base/invariant.h"

void sthi_phases_init(sthi_phases *p) { *p = (sthi_phases){.now = STH_PHASE_STEP_END}; }

void sthi_phases_begin(sthi_phases *p, uint64_t step, int64_t now_ns) {
    *p = (sthi_phases){.now = STH_PHASE_STEP_BEGIN, .step = step, .entered_ns = now_ns};
}

bool sthi_phases_may(const sthi_phases *p, sth_phase phase) {
    if (p->now == STH_PHASE_STEP_END || phase == STH_PHASE_STEP_BEGIN || phase >= STH_PHASES) return false;
    return phase >= p->now || (phase == STH_PHASE_FORWARD && p->now == STH_PHASE_BACKWARD);
}

void sthi_phases_enter(sthi_phases *p, sth_phase phase, int64_t now_ns) {
    STHI_INVARIANT(sthi_phases_may(p, phase));
    if (now_ns > p->entered_ns) p->spent_ns[p->now] += now_ns - p->entered_ns;
    p->entered_ns = now_ns;
    p->now = phase;
}

const char *sthi_phase_name(sth_phase phase) {
    static const char *const names[] = {
#define NAME(name) #name,
        STH_PHASE_LIST(NAME)
#undef NAME
    };
    return phase < STH_PHASES ? names[phase] : "NONE";
}
