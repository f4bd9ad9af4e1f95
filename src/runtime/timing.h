/* Timing events become compute times and metrics. Lock held unless the line says otherwise. */
#ifndef STHI_RUNTIME_TIMING_H
#define STHI_RUNTIME_TIMING_H
#include "state/state.h"

sth_status sthi_timing_open(sth_runtime *rt);
void sthi_timing_close(sth_runtime *rt);
void sthi_timing_begin(sth_runtime *rt);
void sthi_timing_turn(sth_runtime *rt); /* from forward to backward, or back, with the next use */
sthi_use_ticket sthi_timing_arrive(sth_runtime *rt, uint32_t unit, sth_stream stream);
/* `waited`: the stream waits for something since it arrived, else the use begins at once. */
void sthi_timing_start(sth_runtime *rt, sthi_use_ticket ticket, int32_t slot, sth_stream stream, bool waited);
void sthi_timing_pause(sth_runtime *rt); /* the step's work ends here, unless another use comes */
/* At shutdown: the callers' streams may be gone, so the step ends behind its last use, on a stream of ours. */
void sthi_timing_end_late(sth_runtime *rt);
void sthi_timing_end(sth_runtime *rt);
void sthi_timing_harvest(sth_runtime *rt, bool wait);
/* Where the device may have nothing to do: in steady steps the times wait for the end of the next step, during which
 * the host waits anyway, or until somebody asks. */
void sthi_timing_harvest_idle(sth_runtime *rt);
void sthi_runtime_settle_times(sth_runtime *rt); /* not held: waits for the copies of steps that have ended */
#endif
