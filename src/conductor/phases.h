/* The phases of a step. Pure: time is an argument. */
#ifndef STHI_CONDUCTOR_PHASES_H
#define STHI_CONDUCTOR_PHASES_H
#include "stagehand/conductor.h"

typedef struct sthi_phases {
    sth_phase now; /* STEP_END outside of steps */
    uint64_t step;
    int64_t entered_ns;
    int64_t spent_ns[STH_PHASES]; /* in this step, or the last one */
} sthi_phases;

void sthi_phases_init(sthi_phases *p);
void sthi_phases_begin(sthi_phases *p, uint64_t step, int64_t now_ns);
/* Whether the phase may be entered from where the step is; the same phase may. STEP_END: the end of a step. */
bool sthi_phases_may(const sthi_phases *p, sth_phase phase);
/* Only where it may. */
void sthi_phases_enter(sthi_phases *p, sth_phase phase, int64_t now_ns);
const char *sthi_phase_name(sth_phase phase);
#endif
