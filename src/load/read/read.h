/* One read into a slab, and the rate of all reads. Lock held; dropped meanwhile. */
#ifndef STHI_LOAD_READ_READ_H
#define STHI_LOAD_READ_READ_H
#include "state/state.h"

/* Bytes of the unit's place from its source into a slab, `*out_shift` bytes behind its begin. Dropped meanwhile. */
sth_status sthi_read_slab(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, sth_slab slab,
                          uint32_t *out_shift);
void sthi_read_rate_settle(sth_runtime *rt);       /* at a step's end */
#endif
