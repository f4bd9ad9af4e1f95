/* CUDA devices: opening, closing, capabilities and the table of operations (cuda.h says which file does
 * what). The device's primary context is retained, so that addresses, streams and events are shared with
 * PyTorch, and made current on the calling thread by every call: threads of autograd have none.
 * Locks: none; the driver has its own. Does not restore the context that was current before. */
#include "device/cuda/cuda.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"

static int count(void) {
    const cuda_driver *driver;
    int n = 0;
    if (sthi_cuda_load(&driver) != STH_OK) return 0;
    cu_result r = driver->device_count(&n);
    if (r == CU_OK) return n;
    (void)sthi_cuda_fail(driver, r, "cuda", "the GPUs cannot be counted", NULL);
    return 0;
}

/* A driver too old to know an attribute calls it invalid: then the card cannot do that. */
static cu_result add_capability(cuda_device *d, int attribute, uint32_t capability) {
    int value = 0;
    cu_result r = d->driver->device_attribute(&value, attribute, d->handle);
    if (r == CU_OK && value) d->capabilities |= capability;
    return r == CU_ERROR_INVALID_VALUE ? CU_OK : r;
}

static cu_result ask_capabilities(cuda_device *d) {
    static const struct {
        int attribute;
        uint32_t capability;
    } known[] = {
        {CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED, STH_CAP_PINNED_HOST},
        {CU_ATTRIBUTE_CAN_MAP_HOST_MEMORY, STH_CAP_MAPPED_HOST},
        {CU_ATTRIBUTE_INTEGRATED, STH_CAP_UNIFIED_MEMORY},
        {CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, STH_CAP_RING},
    };
    cu_result r = CU_OK;
    d->capabilities = STH_CAP_GRAPH_CAPTURE | STH_CAP_EXPAND | STH_CAP_SHARED_EVENTS;
    for (size_t i = 0; r == CU_OK && i < sizeof known / sizeof *known; i++)
        r = add_capability(d, known[i].attribute, known[i].capability);
    cu_allocation_prop plain = sthi_cuda_plain_memory(d->handle);
    if (r == CU_OK && d->capabilities & STH_CAP_RING)
        r = d->driver->granularity(&d->ring_granularity, &plain, CU_GRANULARITY_MINIMUM);
    return r;
}

static sth_status find_card(cuda_device *d) {
    int n = 0;
    cu_result r = d->driver->device_count(&n);
    if (r != CU_OK) return sthi_cuda_fail(d->driver, r, "cuda", "the GPUs cannot be counted", NULL);
    if (d->index >= n)
        return sthi_fail(STH_BACKEND_UNAVAILABLE, "cuda", CU_ERROR_INVALID_DEVICE, "cuda",
                         "there is no GPU number %d: the driver lists %d, counted from 0; see nvidia-smi and "
                         "CUDA_VISIBLE_DEVICES",
                         d->index, n);
    r = d->driver->device_get(&d->handle, d->index);
    if (r == CU_OK) r = d->driver->device_name(d->name, sizeof d->name, d->handle);
    if (r == CU_OK) r = ask_capabilities(d);
    if (r != CU_OK) return sthi_cuda_fail(d->driver, r, "cuda", "the GPU cannot be asked what it is", NULL);
    return STH_OK;
}

static sth_status start(cuda_device *d) {
    STHI_TRY(sthi_cuda_load(&d->driver));
    STHI_TRY(find_card(d));
    cu_result r = d->driver->primary_retain(&d->context, d->handle);
    if (r != CU_OK)
        return sthi_cuda_fail(d->driver, r, d->name, "the GPU's context cannot be made",
                              "other programs may hold all of its memory, or exclusively; see nvidia-smi");
    return STH_OK;
}

static sth_status cuda_open(int index, const sth_sim_options *sim, sth_backend_device **out) {
    (void)sim;
    cuda_device *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_fail(STH_OUT_OF_HOST_MEMORY, "cuda", 0, "cuda", "no host memory to open a GPU");
    d->index = index;
    d->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&d->compiling);
    sth_status status = start(d);
    if (status == STH_OK) *out = (sth_backend_device *)d;
    else sthi_free(d);
    return status;
}

static void cuda_close(sth_backend_device *device) {
    cuda_device *d = sthi_cuda_of(device);
    if (!d || d->fork_depth != sthi_fork_depth()) return;
    if (sthi_cuda_attach_to_end(d)) (void)sthi_cuda_idle(d);
    sthi_cuda_expand_close(d);
    sthi_cuda_ended(d->driver, d->driver->primary_release(d->handle), d->name, "giving the context back");
    sthi_free(d);
}

static uint32_t cuda_capabilities(sth_backend_device *device) { return sthi_cuda_of(device)->capabilities; }

static sth_status cuda_info(sth_backend_device *device, sth_device_info *out) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_attach(d));
    sth_device_info info = {.index = d->index, .capabilities = d->capabilities};
    size_t free_bytes = 0, total = 0;
    cu_result r = d->driver->memory_info(&free_bytes, &total);
    if (r == CU_OK) r = d->driver->driver_version(&info.driver_version);
    if (r != CU_OK)
        return sthi_cuda_fail(d->driver, r, d->name, "the GPU cannot be asked for its memory", NULL);
    snprintf(info.name, sizeof info.name, "%s", d->name);
    snprintf(info.backend, sizeof info.backend, "cuda");
    info.memory_total = total;
    info.memory_free = free_bytes;
    *out = info;
    return STH_OK;
}

static int64_t cuda_now_ns(sth_backend_device *device) {
    (void)device;
    return sthi_now_ns();
}

/* Asks first, for that is quicker than setting; setting does not need the answer. */
static cu_result make_current(const cuda_device *d) {
    cu_context current = NULL;
    if (d->driver->context_get(&current) == CU_OK && current == d->context) return CU_OK;
    return d->driver->context_set(d->context);
}

sth_status sthi_cuda_attach(const cuda_device *d) {
    if (d->fork_depth != sthi_fork_depth())
        return sthi_fail(
            STH_INVALID_STATE, "cuda", 0, d->name,
            "the device was opened before this process was forked, and CUDA does not survive that; "
            "start workers with the spawn method");
    cu_result r = make_current(d);
    if (r == CU_OK) return STH_OK;
    return sthi_cuda_fail(d->driver, r, d->name, "the GPU's context cannot be made current", NULL);
}

bool sthi_cuda_attach_to_end(const cuda_device *d) {
    if (d->fork_depth != sthi_fork_depth()) return false;
    cu_result r = make_current(d);
    sthi_cuda_ended(d->driver, r, d->name, "making the GPU's context current");
    return r == CU_OK;
}

bool sthi_cuda_idle(const cuda_device *d) {
    cu_result r = d->driver->context_synchronize();
    if (r == CU_OK) return true;
    sthi_cuda_ended(d->driver, r, d->name, "waiting for work that may use what ends");
    return d->driver->context_synchronize() == CU_OK; /* the first may have told of work that failed before */
}

sth_status sthi_cuda_enter(const cuda_device *d) {
    STHI_TRY(sthi_cuda_attach(d));
    if (sthi_fault_hit(STHI_FAULT_DEVICE_CALL))
        return sthi_fail(STH_DEVICE_ERROR, "cuda", 0, d->name,
                         "a fault point made this device call fail on purpose");
    return STH_OK;
}

const sth_backend_ops sthi_cuda_ops = {
    .abi = STH_BACKEND_ABI,
    .size = sizeof(sth_backend_ops),
    .backend = "cuda",
    .count = count,
    .open = cuda_open,
    .close = cuda_close,
    .capabilities = cuda_capabilities,
    .info = cuda_info,
    .now_ns = cuda_now_ns,
    .alloc = sthi_cuda_alloc,
    .free = sthi_cuda_free,
    .ring_granularity = sthi_cuda_ring_granularity,
    .ring_alloc = sthi_cuda_ring_alloc,
    .ring_free = sthi_cuda_ring_free,
    .host_register = sthi_cuda_host_register,
    .host_unregister = sthi_cuda_host_unregister,
    .stream_create = sthi_cuda_stream_create,
    .stream_destroy = sthi_cuda_stream_destroy,
    .stream_synchronize = sthi_cuda_stream_synchronize,
    .copy_h2d = sthi_cuda_copy_h2d,
    .copy_d2h = sthi_cuda_copy_d2h,
    .expand_ready = sthi_cuda_expand_ready,
    .expand = sthi_cuda_expand,
    .event_create = sthi_cuda_event_create,
    .event_destroy = sthi_cuda_event_destroy,
    .event_record = sthi_cuda_event_record,
    .stream_wait = sthi_cuda_stream_wait,
    .event_query = sthi_cuda_event_query,
    .event_synchronize = sthi_cuda_event_synchronize,
    .event_elapsed_ns = sthi_cuda_event_elapsed_ns,
};
