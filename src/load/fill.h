/* A unit's bytes into its slot. Lock held. */
#ifndef STHI_LOAD_FILL_H
#define STHI_LOAD_FILL_H
#include "state/state.h"

/* Enqueues the copy of a piece whose range is claimed, and its expansion; `from` are its bytes. */
sth_status sthi_piece_copy(sth_runtime *rt, int32_t slot, const sthi_piece_of *p, const uint8_t *from);
/* Claims a piece of a unit's pinned image, and adds to it what follows as long as the copy waits for nothing more: each
 * copy costs the link some microseconds. */
sth_status sthi_run_claim(sth_runtime *rt, int32_t slot, sthi_piece_of *p);
/* All of the unit is enqueued: records its event. */
sth_status sthi_slot_complete(sth_runtime *rt, int32_t slot);
/* Fills an open slot of the demand stream; the slot is gone when that fails. */
sth_status sthi_slot_fill(sth_runtime *rt, int32_t slot);
#endif
