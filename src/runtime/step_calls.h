/* Steps and passes as the caller marks them. Lock not held. */
#ifndef STHI_RUNTIME_STEP_CALLS_H
#define STHI_RUNTIME_STEP_CALLS_H
#include "state/state.h"

sth_status sthi_step_pause(sth_runtime *rt);
sth_status sthi_step_mark_backward(sth_runtime *rt, bool backward);
sth_status sthi_step_begin(sth_runtime *rt);
sth_status sthi_runtime_flush_telemetry(sth_runtime *rt);
sth_status sthi_step_end(sth_runtime *rt);
sth_status sthi_pass_end(sth_runtime *rt);
#endif
