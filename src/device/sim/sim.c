/* The simulated device: opening, closing and its table of operations (sim.h says which file does what).
 * Lock: created here, one per device. Does not read the environment and starts no thread of its own. */
#include "device/sim/sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"

static int count(void) { return 1; }

static sth_status check_options(int index, const sth_sim_options *o) {
    if (index != 0)
        return sthi_fail(STH_BACKEND_UNAVAILABLE, "sim", 0, "sim",
                         "there is one simulated device, not a number %d; "
                         "open \"sim\"",
                         index);
    if (o->memory_bytes == 0 || !o->expand_bytes_per_s || o->copy_latency_ns < 0 || o->copy_latency_ns > SIM_LONGEST_NS)
        return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, "sth_sim_options",
                         "memory_bytes is %" PRIu64 " and copy_latency_ns %" PRId64
                         "; memory must be positive, and latency from 0 to an hour",
                         o->memory_bytes, o->copy_latency_ns);
    return STH_OK;
}

static sth_status sim_open(int index, const sth_sim_options *options, sth_backend_device **out) {
    STHI_TRY(check_options(index, options));
    sim_device *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_no_memory_in("sim", "sim", "the simulated device");
    d->capabilities =
        STH_CAP_PINNED_HOST | STH_CAP_MAPPED_HOST | STH_CAP_RING | STH_CAP_EXPAND | STH_CAP_EXPAND_FILES |
        STH_CAP_EXPAND_LOSSLESS |
        STH_CAP_HOST_IS_DEVICE;
    if (options->virtual_time) d->capabilities |= STH_CAP_VIRTUAL_TIME;
    d->options = *options;
    d->fork_depth = sthi_fork_depth();
    d->caller.device = d;
    d->streams = &d->caller;
    d->copy_ns_per_byte = 0.2; /* until a copy has been timed */
    sthi_mutex_init(&d->lock);
    sthi_cond_init(&d->done);
    *out = (sth_backend_device *)d;
    return STH_OK;
}

/* A forked child has no workers, and locks in the state of another thread: there nothing is touched. */
static void sim_close(sth_backend_device *device) {
    sim_device *d = sthi_sim_of(device);
    if (!d || sthi_sim_check_fork(d)) return;
    sthi_sim_streams_fini(d);
    sthi_sim_memory_fini(d);
    sthi_cond_fini(&d->done);
    sthi_mutex_fini(&d->lock);
    sthi_free(d);
}

static uint32_t sim_capabilities(sth_backend_device *device) { return sthi_sim_of(device)->capabilities; }

static sth_status sim_info(sth_backend_device *device, sth_device_info *out) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_check_fork(d));
    sth_device_info info = {.capabilities = d->capabilities, .memory_total = d->options.memory_bytes};
    snprintf(info.name, sizeof info.name, "sim");
    snprintf(info.backend, sizeof info.backend, "sim");
    sthi_lock(&d->lock);
    info.memory_free = d->options.memory_bytes - d->memory_used;
    sthi_unlock(&d->lock);
    *out = info;
    return STH_OK;
}

static int64_t sim_now_ns(sth_backend_device *device) {
    sim_device *d = sthi_sim_of(device);
    if (!d->options.virtual_time) return sthi_now_ns();
    sthi_lock(&d->lock);
    int64_t now = d->now_ns;
    sthi_unlock(&d->lock);
    return now;
}

const sth_backend_ops sthi_sim_ops = {
    .abi = STH_BACKEND_ABI,
    .size = sizeof(sth_backend_ops),
    .backend = "sim",
    .count = count,
    .open = sim_open,
    .close = sim_close,
    .capabilities = sim_capabilities,
    .info = sim_info,
    .now_ns = sim_now_ns,
    .alloc = sthi_sim_alloc,
    .free = sthi_sim_free,
    .ring_granularity = sthi_sim_ring_granularity,
    .ring_alloc = sthi_sim_ring_alloc,
    .ring_free = sthi_sim_ring_free,
    .poison = sthi_sim_poison,
    .host_register = sthi_sim_host_register,
    .host_unregister = sthi_sim_host_unregister,
    .stream_create = sthi_sim_stream_create,
    .stream_destroy = sthi_sim_stream_destroy,
    .stream_synchronize = sthi_sim_stream_synchronize,
    .copy_h2d = sthi_sim_copy_h2d,
    .copy_d2h = sthi_sim_copy_d2h,
    .copy_d2h_foreign = sthi_sim_copy_d2h_foreign,
    .copy_h2d_foreign = sthi_sim_copy_h2d_foreign,
    .expand_ready = sthi_sim_expand_ready,
    .expand = sthi_sim_expand,
    .event_create = sthi_sim_event_create,
    .event_destroy = sthi_sim_event_destroy,
    .event_record = sthi_sim_event_record,
    .stream_wait = sthi_sim_stream_wait,
    .event_query = sthi_sim_event_query,
    .event_synchronize = sthi_sim_event_synchronize,
    .event_elapsed_ns = sthi_sim_event_elapsed_ns,
    .sim_compute = sthi_sim_compute_on,
};
