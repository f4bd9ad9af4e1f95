/* Units of files that stay in host memory. Lock held. */
#ifndef STHI_LOAD_READ_KEEP_H
#define STHI_LOAD_READ_KEEP_H
#include "state/state.h"

void sthi_keep_choose(sth_runtime *rt);              /* at seal, with the first plan */
/* A chunk has been read: it is copied to the unit's image where it has one. Dropped meanwhile. */
void sthi_keep_chunk(sth_runtime *rt, sthi_unit *u, uint64_t begin, uint64_t bytes, const uint8_t *from);
void sthi_keep_settle(sth_runtime *rt);              /* at a step's end: what has been pinned since */
void sthi_keep_close(sth_runtime *rt);               /* no copy is under way any more */
#endif
