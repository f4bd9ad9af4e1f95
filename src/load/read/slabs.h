/* Pinned slabs: taken, on their way to the device, waited for. Lock held, dropped where the line says so. */
#ifndef STHI_LOAD_READ_SLABS_H
#define STHI_LOAD_READ_SLABS_H
#include "state/state.h"

void sthi_flight_land(sth_runtime *rt, sthi_flight *f);
void sthi_flights_reap(sth_runtime *rt);
sth_status sthi_slab_try(sth_runtime *rt, sth_slab *out, bool *out_got);
void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream); /* free once `stream` is past it */
sth_status sthi_flights_wait(sth_runtime *rt, bool *out_any);
void sthi_need_slabs(sth_runtime *rt, int change);
bool sthi_others_come_first(const sth_runtime *rt);
sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out);             /* dropped to wait */
/* `shift` bytes behind its begin. */
static inline const uint8_t *sthi_slab_bytes(sth_runtime *rt, sth_slab slab, uint32_t shift) {
    return (const uint8_t *)sthi_pool_slab_address(rt->slabs.pool, slab) + shift;
}
#endif
