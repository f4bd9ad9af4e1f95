/* Memory of a GPU: plain allocations, rings through virtual memory management, registered host
 * memory. Keeps no table of its own: a ring's memory handle is released as soon as it is mapped, and
 * goes away with the last mapping. Locks: none. */
#include <inttypes.h>
#include <stdio.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "device/gpu/gpu.h"

static sth_status no_memory(const gpu_device *d, gpu_result r, uint64_t bytes) {
    char what[96];
    snprintf(what, sizeof what, "%" PRIu64 " bytes of device memory were asked for", bytes);
    return sthi_gpu_fail(d->vendor, r, d->name, what, "lower the budget or free memory on the GPU");
}

static sth_status check_size(const gpu_device *d, uint64_t bytes, uint64_t unit) {
    if (bytes && bytes % unit == 0 && bytes <= SIZE_MAX / 2) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, d->vendor->name, 0, d->name,
                     "%" PRIu64
                     " bytes of device memory were asked for; give a positive multiple of %" PRIu64,
                     bytes, unit);
}

sth_status sthi_gpu_alloc(sth_backend_device *device, uint64_t bytes, sth_devptr *out) {
    STHI_GPU_CALL(d, device);
    gpu_address p = 0;
    STHI_TRY(sthi_gpu_attach(d));
    STHI_TRY(check_size(d, bytes, 1));
    bool fault = sthi_fault_hit(STHI_FAULT_DEVICE_ALLOC);
    gpu_result r = fault ? GPU_ERROR_OUT_OF_MEMORY : d->driver->memory_alloc(&p, bytes);
    if (r != GPU_OK) return no_memory(d, r, bytes);
    if (p % STHI_ALIGN) {
        (void)d->driver->memory_free(p);
        return sthi_fail(STH_UNSUPPORTED, d->vendor->name, 0, d->name,
                         "the driver gave device memory at 0x%llx, which is no multiple of %u", p,
                         STHI_ALIGN);
    }
    *out = p;
    return STH_OK;
}

/* The driver waits for work that may use the memory. */
void sthi_gpu_free(sth_backend_device *device, sth_devptr p, uint64_t bytes) {
    STHI_GPU_CALL(d, device);
    (void)bytes;
    if (p == 0 || !sthi_gpu_attach_to_end(d)) return;
    sthi_gpu_ended(d->vendor, d->driver->memory_free(p), d->name, "freeing device memory");
}

gpu_allocation_prop sthi_gpu_plain_memory(gpu_card card) {
    return (gpu_allocation_prop){.type = GPU_ALLOCATION_TYPE_PINNED,
                                .location = {.type = GPU_LOCATION_TYPE_DEVICE, .id = card}};
}

uint64_t sthi_gpu_ring_granularity(sth_backend_device *device) { return sthi_gpu_of(device)->ring_granularity; }

/* Unmaps the first `mapped` halves and gives the addresses back. */
static void ring_undo(const gpu_device *d, gpu_address p, size_t bytes, int mapped) {
    const gpu_driver *driver = d->driver;
    for (int half = 0; half < mapped; half++)
        sthi_gpu_ended(d->vendor, driver->memory_unmap(p + (size_t)half * bytes, bytes), d->name,
                        "unmapping a ring");
    sthi_gpu_ended(d->vendor, driver->address_free(p, 2 * bytes), d->name, "freeing a ring's addresses");
}

/* Maps `memory` twice from p on. */
static gpu_result ring_map(const gpu_device *d, gpu_address p, size_t bytes, gpu_memory memory, int *mapped) {
    gpu_access_desc access = {{GPU_LOCATION_TYPE_DEVICE, d->handle}, GPU_ACCESS_PROT_READWRITE};
    for (*mapped = 0; *mapped < 2; (*mapped)++) {
        gpu_result r = d->driver->memory_map(p + (size_t)*mapped * bytes, bytes, 0, memory, 0);
        if (r != GPU_OK) return r;
    }
    return d->driver->memory_access(p, 2 * bytes, &access, 1);
}

sth_status sthi_gpu_ring_alloc(sth_backend_device *device, uint64_t bytes, sth_devptr *out) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_attach(d));
    if (!d->ring_granularity)
        return sthi_fail(STH_UNSUPPORTED, d->vendor->name, 0, d->name,
                         "this GPU or its driver has no virtual memory management, which a ring needs");
    STHI_TRY(check_size(d, bytes, d->ring_granularity));
    if (sthi_fault_hit(STHI_FAULT_DEVICE_ALLOC)) return no_memory(d, GPU_ERROR_OUT_OF_MEMORY, bytes);
    gpu_allocation_prop plain = sthi_gpu_plain_memory(d->handle);
    gpu_address p = 0;
    gpu_memory memory = 0;
    gpu_result r = d->driver->address_reserve(&p, 2 * bytes, 0, 0, 0);
    if (r != GPU_OK)
        return sthi_gpu_fail_as(r == GPU_ERROR_OUT_OF_MEMORY ? STH_OUT_OF_ADDRESS_SPACE : STH_DEVICE_ERROR,
                                 d->vendor, r, d->name, "a ring's addresses cannot be reserved", NULL);
    int mapped = 0;
    r = d->driver->memory_create(&memory, bytes, &plain, 0);
    if (r == GPU_OK) {
        r = ring_map(d, p, bytes, memory, &mapped);
        sthi_gpu_ended(d->vendor, d->driver->memory_release(memory), d->name, "releasing a ring's handle");
    }
    if (r != GPU_OK) {
        ring_undo(d, p, bytes, mapped);
        return no_memory(d, r, bytes);
    }
    *out = p;
    return STH_OK;
}

void sthi_gpu_ring_free(sth_backend_device *device, sth_devptr p, uint64_t bytes) {
    STHI_GPU_CALL(d, device);
    if (p == 0 || !sthi_gpu_attach_to_end(d)) return;
    /* Unlike the driver's free, unmapping does not wait for work that uses the memory. Where that cannot be waited for
     * the ring stays: to unmap it under a kernel would ruin the card for the whole process. */
    if (sthi_gpu_idle(d)) ring_undo(d, p, bytes, 2);
}

static sth_status pin_status(gpu_result r) {
    switch (r) {
    case GPU_ERROR_OUT_OF_MEMORY:
    case GPU_ERROR_OPERATING_SYSTEM:
    case GPU_ERROR_NOT_PERMITTED:
    case GPU_ERROR_NOT_SUPPORTED: return STH_OUT_OF_PINNED_MEMORY;
    case GPU_ERROR_INVALID_VALUE:
    case GPU_ERROR_HOST_MEMORY_ALREADY_REGISTERED: return STH_INVALID_ARGUMENT;
    default: return STH_DEVICE_ERROR;
    }
}

sth_status sthi_gpu_host_register(sth_backend_device *device, void *p, uint64_t bytes, sth_devptr *out_alias) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_attach(d));
    bool mapped = d->capabilities & STH_CAP_MAPPED_HOST;
    unsigned flags = GPU_HOST_REGISTER_PORTABLE | (mapped ? GPU_HOST_REGISTER_DEVICEMAP : 0u);
    bool fault = sthi_fault_hit(STHI_FAULT_PIN);
    gpu_result r = fault ? GPU_ERROR_OUT_OF_MEMORY : d->driver->host_register(p, bytes, flags);
    if (r != GPU_OK) {
        char what[128];
        if (!fault) (void)d->driver->synchronize(); /* under WSL2 the next call tells of the refusal once more */
        snprintf(what, sizeof what, "%" PRIu64 " bytes of host memory at %p could not be pinned", bytes, p);
        return sthi_gpu_fail_as(
            pin_status(r), d->vendor, r, "pinned host memory", what,
            "raise the limit (ulimit -l, the container's memlock, WSL's memory) or pin less");
    }
    gpu_address alias = 0;
    if (mapped && d->driver->host_device_pointer(&alias, p, 0) != GPU_OK)
        alias = 0; /* copies work all the same */
    *out_alias = alias;
    return STH_OK;
}

void sthi_gpu_host_unregister(sth_backend_device *device, void *p, uint64_t bytes) {
    STHI_GPU_CALL(d, device);
    (void)bytes;
    if (!p || !sthi_gpu_attach_to_end(d)) return;
    (void)sthi_gpu_idle(d); /* the driver does not promise to wait for copies under way */
    gpu_result r = d->driver->host_unregister(p);
    if (r == GPU_ERROR_HOST_MEMORY_NOT_REGISTERED)
        (void)sthi_gpu_fail_as(STH_INVALID_ARGUMENT, d->vendor, r, "pinned host memory",
                                "unpinning host memory", NULL);
    else sthi_gpu_ended(d->vendor, r, "pinned host memory", "unpinning host memory");
}

/* Through one name of a word and back through the other. words: [2], which the device may use until it is idle. */
static bool ring_is_one(gpu_device *d, sth_devptr ring, uint64_t words[2]) {
    const gpu_driver *driver = d->driver;
    static const uint64_t marks[2] = {UINT64_C(0x5374616765686e64), UINT64_C(0x72696e6773206f6b)};
    for (int i = 0; i < 2; i++) {
        sth_devptr first = ring, second = ring + d->ring_granularity, to = i ? first : second,
                   from = i ? second : first;
        words[0] = marks[i];
        if (driver->copy_h2d(to, &words[0], sizeof *words, NULL) != GPU_OK || driver->synchronize() != GPU_OK)
            return false;
        if (driver->copy_d2h(&words[1], from, sizeof *words, NULL) != GPU_OK || driver->synchronize() != GPU_OK)
            return false;
        if (words[1] != marks[i]) return false;
    }
    return true;
}

bool sthi_gpu_rings_work(gpu_device *d) {
    sth_devptr ring = 0;
    uint64_t words[2] = {0, 0};
    sth_backend_device *self = (sth_backend_device *)d;
    if (sthi_gpu_ring_alloc(self, d->ring_granularity, &ring) != STH_OK) return false;
    bool works = sthi_gpu_attach(d) == STH_OK && ring_is_one(d, ring, words);
    sthi_gpu_ring_free(self, ring, d->ring_granularity);
    return works;
}
