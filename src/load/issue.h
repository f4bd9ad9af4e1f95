/* Requests become places and copies. Lock held. */
#ifndef STHI_LOAD_ISSUE_H
#define STHI_LOAD_ISSUE_H
#include "state/state.h"

/* Distance in uses from now until the unit is used next; a whole step if it is not in the order. */
uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit);
void sthi_interval_end(sth_runtime *rt);           /* closes the copy interval that is being timed */
/* Enqueues a copy to the device, through the conductor where there is one. */
sth_status sthi_copy_bytes(sth_runtime *rt, uint32_t unit, sth_devptr to, const uint8_t *from, uint64_t bytes,
                           sth_stream stream);
sth_stream sthi_copies_on(const sth_runtime *rt, int32_t slot); /* the stream on which its source is read */
/* Issues what is possible; nothing up to the wanted unit waits for others. STH_NONE: nobody waits for any. Lock held */
void sthi_pump_for(sth_runtime *rt, uint32_t wanted);
void sthi_cancel_queue(sth_runtime *rt);           /* lock held */
sth_status sthi_demand_load(sth_runtime *rt, uint32_t unit); /* lock held; may drop it to read */
sth_status sthi_load_home(sth_runtime *rt, uint32_t unit);   /* a resident that is not there. The same */
sth_status sthi_refresh(sth_runtime *rt, int32_t slot);      /* copies a stale slot again. The same */
static inline void sthi_pump(sth_runtime *rt) { sthi_pump_for(rt, STH_NONE); }
#endif
