/* Copies behind which uses of a pass are enqueued. Lock held. */
#ifndef STHI_LOAD_AWAITED_H
#define STHI_LOAD_AWAITED_H
#include "state/state.h"

/* A use of the slot is enqueued behind its copy. */
void sthi_awaits_copy(sth_runtime *rt, int32_t slot);
/* Before a slot's events are given back. */
void sthi_keep_awaited(sth_runtime *rt, int32_t slot);
/* Waits until they have read their images. */
sth_status sthi_awaited_wait(sth_runtime *rt);
#endif
