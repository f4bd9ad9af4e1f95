/* Units that cross the link packed. Lock held. */
#ifndef STHI_LOAD_EXPAND_H
#define STHI_LOAD_EXPAND_H
#include "state/state.h"

bool sthi_packed_on_link(const sth_runtime *rt, const sthi_unit *u);
uint64_t sthi_source_bytes(const sth_runtime *rt, const sthi_unit *u); /* that cross the link */
sthi_piece_of sthi_next_piece(const sth_runtime *rt, const sthi_unit *u, uint64_t begin);
uint64_t sthi_stages_bytes(const sth_runtime *rt);
uint64_t sthi_held_bytes(const sth_runtime *rt);   /* of the device, now, without `reserved` */
sth_status sthi_expand_open(sth_runtime *rt);      /* at seal; decides whether the device expands */
sth_status sthi_stages_alloc(sth_runtime *rt);     /* where there are none */
void sthi_stages_free(sth_runtime *rt);
void sthi_expand_close(sth_runtime *rt);
/* Copies a piece's packed bytes and expands them; its range is claimed. */
sth_status sthi_expand_piece(sth_runtime *rt, int32_t slot, const sthi_piece_of *piece, const uint8_t *from);
/* Not held. The expanded bytes [begin, begin + bytes) of a packed unit. */
sth_status sthi_expand_on_host(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *out);
sth_status sthi_repack(sth_runtime *rt, uint32_t unit); /* where its master was written */
#endif
