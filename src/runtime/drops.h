/* Leases that have ended: their uses' ends are recorded, their places let go. */
#ifndef STHI_RUNTIME_DROPS_H
#define STHI_RUNTIME_DROPS_H
#include "state/state.h"

/* The slot is leased for this use of the trace, STH_NONE if it has no room, before which so many were regular.
 * Lock held. */
void sthi_hold_begin(sth_runtime *rt, sthi_slot_sync *y, uint32_t use, uint32_t regular_before);
/* A lease of the slot has ended. No lock. */
void sthi_drop_push(sth_runtime *rt, int32_t slot);
void sthi_drain_drops(sth_runtime *rt);            /* lock held */
#endif
