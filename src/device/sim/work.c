/* Work for a stream of the simulated device: copies, poison, expansion, computing.
 * Each checks that the device memory it names is live. Lock: the device's. */
#include <math.h>
#include <inttypes.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/expand.h"
#include "device/sim/sim.h"


/* foreign: the device's side of the copy is memory that it did not allocate. */
static sth_status copy(sth_backend_device *device, int link, void *dst, const void *src, uint64_t bytes,
                       sth_stream stream, bool foreign) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    sim_stream *s;
    sth_status status = sthi_sim_stream_find(d, stream, &s);
    if (status == STH_OK && bytes > 0) {
        if (!dst || !src)
            status = sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, "copy", "the host address of a copy is NULL");
        else if (!foreign) status = sthi_sim_check_live(d, (uintptr_t)(link == SIM_H2D ? dst : src), bytes);
        if (status == STH_OK)
            status = sthi_sim_submit(
                d, s, (sim_op){.kind = SIM_OP_COPY, .link = link, .dst = dst, .src = src, .bytes = bytes});
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_copy_h2d(sth_backend_device *device, sth_devptr dst, const void *src, uint64_t bytes,
                             sth_stream stream) {
    return copy(device, SIM_H2D, (void *)(uintptr_t)dst, src, bytes, stream, false);
}

sth_status sthi_sim_copy_d2h(sth_backend_device *device, void *dst, sth_devptr src, uint64_t bytes,
                             sth_stream stream) {
    return copy(device, SIM_D2H, dst, (const void *)(uintptr_t)src, bytes, stream, false);
}

sth_status sthi_sim_copy_d2h_foreign(sth_backend_device *device, void *dst, sth_devptr src, uint64_t bytes,
                                     sth_stream stream) {
    return copy(device, SIM_D2H, dst, (const void *)(uintptr_t)src, bytes, stream, true);
}

sth_status sthi_sim_copy_h2d_foreign(sth_backend_device *device, sth_devptr dst, const void *src, uint64_t bytes,
                                     sth_stream stream) {
    return copy(device, SIM_H2D, (void *)(uintptr_t)dst, src, bytes, stream, true);
}

void sthi_sim_poison(sth_backend_device *device, sth_devptr p, uint64_t bytes, sth_stream stream) {
    sim_device *d = sthi_sim_of(device);
    if (!d->options.poison || bytes == 0 || sthi_sim_enter(d)) return;
    sthi_lock(&d->lock);
    sim_op op = {.kind = SIM_OP_POISON, .dst = (void *)(uintptr_t)p, .bytes = bytes};
    if (sthi_sim_check_live(d, p, bytes) == STH_OK) (void)sthi_sim_submit_to(d, stream, op);
    sthi_unlock(&d->lock);
}

sth_status sthi_sim_expand_ready(sth_backend_device *device) {
    STHI_TRY(sthi_sim_enter(sthi_sim_of(device)));
    if (sthi_sim_of(device)->options.no_expand)
        return sthi_fail(STH_UNSUPPORTED, "sim", 0, "expand", "the simulated device was opened without expansion");
    return STH_OK;
}

sth_status sthi_sim_expand(sth_backend_device *device, const sth_expand *e, sth_stream stream) {
    sim_device *d = sthi_sim_of(device);
    sthi_expand_bytes bytes;
    STHI_TRY(sthi_sim_enter(d));
    STHI_TRY(sthi_expand_check(e, "sim", &bytes));
    sthi_lock(&d->lock);
    sth_status status = sthi_sim_check_live(d, e->place, e->place_bytes);
#define MUST_LIVE(part, name) \
    if (status == STH_OK && bytes.part) status = sthi_sim_check_live(d, e->part, bytes.part);
    STHI_EXPAND_PARTS(MUST_LIVE)
#undef MUST_LIVE
    double takes = fmin((double)e->place_bytes * 1e9 / (double)d->options.expand_bytes_per_s, (double)SIM_LONGEST_NS);
    sim_op op = {.kind = SIM_OP_EXPAND, .expand = *e, .duration_ns = (int64_t)takes};
    if (status == STH_OK) status = sthi_sim_submit_to(d, stream, op);
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_compute_on(sth_backend_device *device, sth_stream stream, int64_t ns) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    if (ns < 0 || ns > SIM_LONGEST_NS)
        return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, "compute",
                         "%" PRId64 " ns of work: give 0 to an hour", ns);
    sthi_lock(&d->lock);
    sth_status status = sthi_sim_submit_to(d, stream, (sim_op){.kind = SIM_OP_COMPUTE, .duration_ns = ns});
    sthi_unlock(&d->lock);
    return status;
}
