/* A place's life: events, eviction, what is ordered behind what. Lock held throughout. */
#ifndef STHI_LOAD_SLOTS_H
#define STHI_LOAD_SLOTS_H
#include "state/state.h"

sth_status sthi_open_slot(sth_runtime *rt, uint32_t unit, uint32_t extent, uint64_t offset, sth_stream by,
                          int32_t *out);
/* Makes stream `behind` wait for all that touches the slot: its copy and the uses that have ended. */
sth_status sthi_wait_for_slot(sth_runtime *rt, int32_t slot, sth_stream behind);
void sthi_forget_users(sth_runtime *rt, int32_t slot);
sth_status sthi_evict(sth_runtime *rt, int32_t slot, sth_stream behind);
void sthi_abandon_slot(sth_runtime *rt, int32_t slot);       /* a load that will not be finished */
void sthi_forget_slot(sth_runtime *rt, int32_t slot);        /* nothing touches it */
void sthi_retire_slot(sth_runtime *rt, int32_t slot);        /* waits for all that touches it */
bool sthi_slot_busy(const sthi_slot *slot);                  /* leased, or being filled */
bool sthi_slot_arrived(sth_runtime *rt, int32_t slot);       /* its bytes are there, as far as the host has seen */
bool sthi_slot_idle(sth_runtime *rt, int32_t slot);          /* nothing touches it any more */
bool sthi_range_takeable(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes);
bool sthi_place_takeable(const sth_runtime *rt, uint32_t extent, uint64_t offset, uint64_t bytes);
/* Takeable, and the slot's stream need not wait for it. */
bool sthi_range_free(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes);
/* Evicts whoever has the range and makes the slot's stream wait for all that touches it. */
sth_status sthi_claim_range(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes);
#endif
