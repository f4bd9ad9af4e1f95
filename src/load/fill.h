/* A unit's bytes into its slot. Lock held. */
#ifndef STHI_LOAD_FILL_H
#define STHI_LOAD_FILL_H
#include "state/state.h"

sth_status sthi_piece_copy(sth_runtime *rt, int32_t slot, const sthi_piece_of *p, const uint8_t *from);
sth_status sthi_run_claim(sth_runtime *rt, int32_t slot, sthi_piece_of *p);
sth_status sthi_slot_complete(sth_runtime *rt, int32_t slot);
sth_status sthi_slot_fill(sth_runtime *rt, int32_t slot);
#endif
