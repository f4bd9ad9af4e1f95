/* Units that cross the link packed. Lock held. */
#ifndef STHI_LOAD_EXPAND_H
#define STHI_LOAD_EXPAND_H
#include "state/state.h"

/* Copies a piece's packed bytes and expands them; its range is claimed. */
sth_status sthi_expand_piece(sth_runtime *rt, int32_t slot, const sthi_piece_of *piece, const uint8_t *from);
#endif
