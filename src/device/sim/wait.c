/* Waiting for operations of the simulated device, by either way of keeping time.
 * Lock: the device's, held by the caller; a wait in real time lets it go meanwhile. */
#include "base/error.h"
#include "device/sim/sim.h"

static bool has_older(const sim_device *d, const sim_stream *only, uint64_t seq) {
    for (const sim_stream *s = d->streams; s; s = s->next)
        if ((!only || s == only) && s->head && s->head->seq <= seq) return true;
    return false;
}

sth_status sthi_sim_drain(sim_device *d, const sim_stream *only) {
    uint64_t seq = d->next_seq;
    while (has_older(d, only, seq)) {
        if (d->options.virtual_time) STHI_TRY(sthi_sim_step(d));
        else sthi_cond_wait(&d->done, &d->lock);
    }
    if (d->options.virtual_time) sthi_sim_advance(d, d->now_ns);
    return STH_OK;
}
