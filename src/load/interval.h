/* Copy intervals: copies that wait for no place in between are timed as one. Lock held. */
#ifndef STHI_LOAD_INTERVAL_H
#define STHI_LOAD_INTERVAL_H
#include "state/state.h"

/* Records a timing event, making it first if need be; false when that failed: the figure is dropped. */
bool sthi_timing_record(sth_runtime *rt, sth_event **event, sth_stream stream);
/* Copy intervals: a run of copies that do not wait for a place in between is timed as one. */
void sthi_interval_begin(sth_runtime *rt, uint32_t unit, sth_stream stream);
void sthi_interval_end(sth_runtime *rt);           /* closes the copy interval that is being timed */
/* A unit's share of the interval before it. */
void sthi_interval_join(sth_runtime *rt, uint32_t unit);
#endif
