/* Packed units, expanded on the host. Lock not held. */
#ifndef STHI_LOAD_READ_UNPACK_H
#define STHI_LOAD_READ_UNPACK_H
#include "state/state.h"

/* Not held. The expanded bytes [begin, begin + bytes) of a packed unit. */
sth_status sthi_expand_on_host(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *out);
#endif
