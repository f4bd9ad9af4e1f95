/* Pinned slabs: taken, on their way to the device, waited for. Lock held, dropped where the line
 * says so. */
#ifndef STHI_LOAD_READ_SLABS_H
#define STHI_LOAD_READ_SLABS_H
#include "state/state.h"

/* The device is done with the slab. */
void sthi_flight_land(sth_runtime *rt, sthi_flight *f);
/* Frees slabs whose copies are done, oldest first, without waiting. */
void sthi_flights_reap(sth_runtime *rt);
/* *out_got: there is one. Fails where none can come any more, as long as the device fails or for good. */
sth_status sthi_slab_try(sth_runtime *rt, sth_slab *out, bool *out_got);
void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream); /* free once `stream` is past it */
/* Waits for the oldest flight, with the lock dropped. When the device does not say that the copy is done
 * the slab stays in the air: it must not be filled again. */
sth_status sthi_flights_wait(sth_runtime *rt, bool *out_any);
void sthi_need_slabs(sth_runtime *rt, int change); /* +1, -1: a caller waits for a slab, or for what is read */
/* Another runtime cannot go on without a slab, and no caller of ours waits for one. */
bool sthi_others_come_first(const sth_runtime *rt);
sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out);             /* dropped to wait */
/* `shift` bytes behind its begin. */
static inline const uint8_t *sthi_slab_bytes(sth_runtime *rt, sth_slab slab, uint32_t shift) {
    return (const uint8_t *)sthi_pool_slab_address(rt->slabs.pool, slab) + shift;
}
#endif
