/* What is copied at once, of plain and of packed units. Lock held. */
#ifndef STHI_LOAD_PIECES_H
#define STHI_LOAD_PIECES_H
#include "quant/segment.h"
#include "state/state.h"

/* It crosses the link packed, and the device expands it. */
bool sthi_packed_on_link(const sth_runtime *rt, const sthi_unit *u);
uint64_t sthi_wire_bytes_packed(const sth_runtime *rt, const sthi_unit *u); /* the same, where it crosses packed */
bool sthi_may_cross_plain(const sth_runtime *rt, const sthi_unit *u); /* as well as packed */
uint64_t sthi_source_bytes(const sth_runtime *rt, const sthi_unit *u); /* that cross the link */
/* The piece that begins at a byte of the place. */
sthi_piece_of sthi_next_piece(const sth_runtime *rt, const sthi_unit *u, uint64_t begin);
/* Where its part of the place ends. */
static inline uint64_t sthi_segment_end(const sth_segment *s) { return s->place_offset + sthi_segment_place_bytes(s); }
#endif
