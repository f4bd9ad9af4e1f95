/* Device memory from the device or the caller's allocator. Not charged. Lock held. */
#ifndef STHI_LOAD_MEMORY_H
#define STHI_LOAD_MEMORY_H
#include "state/state.h"

/* wraps: mapped twice in a row. */
sth_status sthi_memory_take(sth_runtime *rt, uint64_t bytes, bool wraps, sth_devptr *out);
/* A framework's allocator hands out memory that work queued on its default stream may still be using: the
 * copies come after that work. */
sth_status sthi_memory_follow(sth_runtime *rt);
void sthi_memory_give(sth_runtime *rt, sth_devptr base, uint64_t bytes, bool wraps);
/* Device memory that is no extent: not charged. */
sth_status sthi_place_alloc(sth_runtime *rt, uint64_t bytes, sth_devptr *out);
void sthi_place_free(sth_runtime *rt, sth_devptr base, uint64_t bytes);
#endif
