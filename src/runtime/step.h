/* Steps, with the lock held. */
#ifndef STHI_RUNTIME_STEP_H
#define STHI_RUNTIME_STEP_H
#include "state/state.h"

sth_status sthi_step_begin_locked(sth_runtime *rt, bool implicit);
/* What became of a plan. Where leases, or others, hold the memory for one: on demand until they let go, and a plan at
 * the next step's end. */
sth_status sthi_without_plan(sth_runtime *rt, sth_status rc);
/* Plans, where nothing is leased; no step is open. */
sth_status sthi_plan_again(sth_runtime *rt);
sth_status sthi_step_end_locked(sth_runtime *rt);
sth_status sthi_step_pause_locked(sth_runtime *rt);
void sthi_step_resume(sth_runtime *rt);            /* a use has come: the step is not paused any more */
#endif
