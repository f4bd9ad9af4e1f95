/* Devices of a GPU's driver: opening, closing, capabilities (gpu.h says which file does what).
 * Locks: none; the driver has its own. */
#include "device/gpu/gpu.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"

int sthi_gpu_count(const gpu_vendor *v) {
    int n = 0;
    if (sthi_gpu_load(v) != STH_OK) return 0;
    gpu_result r = v->driver->device_count(&n);
    if (r == GPU_OK) return n;
    (void)sthi_gpu_fail(v, r, v->name, "the GPUs cannot be counted", NULL);
    return 0;
}

/* A driver too old to know an attribute calls it invalid: then the card cannot do that. */
static gpu_result add_capability(gpu_device *d, int attribute, uint32_t capability) {
    int value = 0;
    gpu_result r = d->driver->device_attribute(&value, attribute, d->handle);
    if (r == GPU_OK && value) d->capabilities |= capability;
    return r == GPU_ERROR_INVALID_VALUE ? GPU_OK : r;
}

static gpu_result ask_capabilities(gpu_device *d) {
    const gpu_vendor *v = d->vendor;
    const struct {
        int attribute;
        uint32_t capability;
    } known[] = {
        {v->attributes.register_host, STH_CAP_PINNED_HOST},
        {v->attributes.map_host, STH_CAP_MAPPED_HOST},
        {v->attributes.integrated, STH_CAP_UNIFIED_MEMORY},
        {v->attributes.mappings, STH_CAP_RING},
    };
    gpu_result r = GPU_OK;
    d->capabilities = STH_CAP_GRAPH_CAPTURE | STH_CAP_EXPAND | STH_CAP_EXPAND_FILES | STH_CAP_EXPAND_LOSSLESS |
                      STH_CAP_SHARED_EVENTS;
    for (size_t i = 0; r == GPU_OK && i < sizeof known / sizeof *known; i++)
        r = add_capability(d, known[i].attribute, known[i].capability);
    gpu_allocation_prop plain = sthi_gpu_plain_memory(d->handle);
    if (r == GPU_OK && d->capabilities & STH_CAP_RING)
        r = d->driver->granularity(&d->ring_granularity, &plain, GPU_GRANULARITY_MINIMUM);
    return r;
}

static sth_status find_card(gpu_device *d) {
    int n = 0;
    gpu_result r = d->driver->device_count(&n);
    if (r != GPU_OK) return sthi_gpu_fail(d->vendor, r, d->vendor->name, "the GPUs cannot be counted", NULL);
    if (d->index >= n)
        return sthi_fail(STH_BACKEND_UNAVAILABLE, d->vendor->name, GPU_ERROR_INVALID_DEVICE, d->vendor->name,
                         "there is no GPU number %d: the driver lists %d, counted from 0; %s", d->index, n,
                         d->vendor->find_advice);
    r = d->driver->device_get(&d->handle, d->index);
    if (r == GPU_OK) r = d->driver->device_name(d->name, sizeof d->name, d->handle);
    if (r == GPU_OK) r = ask_capabilities(d);
    if (r != GPU_OK) return sthi_gpu_fail(d->vendor, r, d->vendor->name, "the GPU cannot be asked what it is", NULL);
    return STH_OK;
}

static sth_status start(gpu_device *d) {
    STHI_TRY(sthi_gpu_load(d->vendor));
    d->driver = d->vendor->driver;
    STHI_TRY(find_card(d));
    gpu_result r = d->vendor->retain(d);
    if (r != GPU_OK)
        return sthi_gpu_fail(d->vendor, r, d->name, "the GPU cannot be used",
                             "other programs may hold all of its memory, or exclusively");
    if (d->vendor->proves_rings && d->capabilities & STH_CAP_RING && !sthi_gpu_rings_work(d)) {
        d->capabilities &= ~(uint32_t)STH_CAP_RING;
        d->ring_granularity = 0;
    }
    return STH_OK;
}

sth_status sthi_gpu_open(const gpu_vendor *v, int index, sth_backend_device **out) {
    gpu_device *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_no_memory_in(v->name, v->name, "a GPU");
    d->vendor = v;
    d->index = index;
    d->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&d->compiling);
    sth_status status = start(d);
    v->put_back();
    if (status == STH_OK) *out = (sth_backend_device *)d;
    else sthi_free(d);
    return status;
}

void sthi_gpu_close(sth_backend_device *device) {
    gpu_device *d = sthi_gpu_of(device);
    if (!d || d->fork_depth != sthi_fork_depth()) return;
    if (sthi_gpu_attach_to_end(d)) (void)sthi_gpu_idle(d);
    sthi_gpu_expand_close(d);
    const gpu_vendor *v = d->vendor;
    sthi_gpu_ended(v, v->release(d), d->name, "giving the GPU back");
    sthi_free(d);
    v->put_back();
}

uint32_t sthi_gpu_capabilities(sth_backend_device *device) { return sthi_gpu_of(device)->capabilities; }

sth_status sthi_gpu_info(sth_backend_device *device, sth_device_info *out) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_attach(d));
    sth_device_info info = {.index = d->index, .capabilities = d->capabilities};
    size_t free_bytes = 0, total = 0;
    gpu_result r = d->driver->memory_info(&free_bytes, &total);
    if (r == GPU_OK) r = d->driver->driver_version(&info.driver_version);
    if (r != GPU_OK)
        return sthi_gpu_fail(d->vendor, r, d->name, "the GPU cannot be asked for its memory", NULL);
    snprintf(info.name, sizeof info.name, "%s", d->name);
    snprintf(info.backend, sizeof info.backend, "%s", d->vendor->name);
    info.memory_total = total;
    info.memory_free = free_bytes;
    *out = info;
    return STH_OK;
}

int64_t sthi_gpu_now_ns(sth_backend_device *device) {
    (void)device;
    return sthi_now_ns();
}
