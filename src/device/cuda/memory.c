/* Memory of a CUDA device: plain allocations, rings through virtual memory management, registered host
 * memory. Keeps no table of its own: a ring's memory handle is released as soon as it is mapped, and
 * goes away with the last mapping. Locks: none. */
#include <inttypes.h>
#include <stdio.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "device/cuda/cuda.h"

static sth_status no_memory(const cuda_device *d, cu_result r, uint64_t bytes) {
    char what[96];
    snprintf(what, sizeof what, "%" PRIu64 " bytes of device memory were asked for", bytes);
    return sthi_cuda_fail(d->driver, r, d->name, what, "lower the budget or free memory on the GPU");
}

static sth_status check_size(const cuda_device *d, uint64_t bytes, uint64_t unit) {
    if (bytes && bytes % unit == 0 && bytes <= SIZE_MAX / 2) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, "cuda", 0, d->name,
                     "%" PRIu64
                     " bytes of device memory were asked for; give a positive multiple of %" PRIu64,
                     bytes, unit);
}

sth_status sthi_cuda_alloc(sth_backend_device *device, uint64_t bytes, sth_devptr *out) {
    cuda_device *d = sthi_cuda_of(device);
    cu_deviceptr p = 0;
    STHI_TRY(sthi_cuda_attach(d));
    STHI_TRY(check_size(d, bytes, 1));
    bool fault = sthi_fault_hit(STHI_FAULT_DEVICE_ALLOC);
    cu_result r = fault ? CU_ERROR_OUT_OF_MEMORY : d->driver->memory_alloc(&p, bytes);
    if (r != CU_OK) return no_memory(d, r, bytes);
    if (p % STHI_ALIGN) {
        (void)d->driver->memory_free(p);
        return sthi_fail(STH_UNSUPPORTED, "cuda", 0, d->name,
                         "the driver gave device memory at 0x%llx, which is no multiple of %u", p,
                         STHI_ALIGN);
    }
    *out = p;
    return STH_OK;
}

/* The driver waits for work that may use the memory. */
void sthi_cuda_free(sth_backend_device *device, sth_devptr p, uint64_t bytes) {
    cuda_device *d = sthi_cuda_of(device);
    (void)bytes;
    if (p == 0 || !sthi_cuda_attach_to_end(d)) return;
    sthi_cuda_ended(d->driver, d->driver->memory_free(p), d->name, "freeing device memory");
}

cu_allocation_prop sthi_cuda_plain_memory(cu_device card) {
    return (cu_allocation_prop){.type = CU_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_LOCATION_TYPE_DEVICE, .id = card}};
}

uint64_t sthi_cuda_ring_granularity(sth_backend_device *device) { return sthi_cuda_of(device)->ring_granularity; }

/* Unmaps the first `mapped` halves and gives the addresses back. */
static void ring_undo(const cuda_device *d, cu_deviceptr p, size_t bytes, int mapped) {
    const cuda_driver *driver = d->driver;
    for (int half = 0; half < mapped; half++)
        sthi_cuda_ended(driver, driver->memory_unmap(p + (size_t)half * bytes, bytes), d->name,
                        "unmapping a ring");
    sthi_cuda_ended(driver, driver->address_free(p, 2 * bytes), d->name, "freeing a ring's addresses");
}

/* Maps `memory` twice from p on. */
static cu_result ring_map(const cuda_device *d, cu_deviceptr p, size_t bytes, cu_memory memory, int *mapped) {
    cu_access_desc access = {{CU_LOCATION_TYPE_DEVICE, d->handle}, CU_ACCESS_PROT_READWRITE};
    for (*mapped = 0; *mapped < 2; (*mapped)++) {
        cu_result r = d->driver->memory_map(p + (size_t)*mapped * bytes, bytes, 0, memory, 0);
        if (r != CU_OK) return r;
    }
    return d->driver->memory_access(p, 2 * bytes, &access, 1);
}

sth_status sthi_cuda_ring_alloc(sth_backend_device *device, uint64_t bytes, sth_devptr *out) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_attach(d));
    if (!d->ring_granularity)
        return sthi_fail(STH_UNSUPPORTED, "cuda", 0, d->name,
                         "this GPU or its driver has no virtual memory management, which a ring needs");
    STHI_TRY(check_size(d, bytes, d->ring_granularity));
    if (sthi_fault_hit(STHI_FAULT_DEVICE_ALLOC)) return no_memory(d, CU_ERROR_OUT_OF_MEMORY, bytes);
    cu_allocation_prop plain = sthi_cuda_plain_memory(d->handle);
    cu_deviceptr p = 0;
    cu_memory memory = 0;
    cu_result r = d->driver->address_reserve(&p, 2 * bytes, 0, 0, 0);
    if (r != CU_OK)
        return sthi_cuda_fail_as(r == CU_ERROR_OUT_OF_MEMORY ? STH_OUT_OF_ADDRESS_SPACE : STH_DEVICE_ERROR,
                                 d->driver, r, d->name, "a ring's addresses cannot be reserved", NULL);
    int mapped = 0;
    r = d->driver->memory_create(&memory, bytes, &plain, 0);
    if (r == CU_OK) {
        r = ring_map(d, p, bytes, memory, &mapped);
        sthi_cuda_ended(d->driver, d->driver->memory_release(memory), d->name, "releasing a ring's handle");
    }
    if (r != CU_OK) {
        ring_undo(d, p, bytes, mapped);
        return no_memory(d, r, bytes);
    }
    *out = p;
    return STH_OK;
}

void sthi_cuda_ring_free(sth_backend_device *device, sth_devptr p, uint64_t bytes) {
    cuda_device *d = sthi_cuda_of(device);
    if (p == 0 || !sthi_cuda_attach_to_end(d)) return;
    /* Unlike cuMemFree, unmapping does not wait for work that uses the memory. Where that cannot be waited for the
     * ring stays: to unmap it under a kernel would end every program in this context. */
    if (sthi_cuda_idle(d)) ring_undo(d, p, bytes, 2);
}

static sth_status pin_status(cu_result r) {
    switch (r) {
    case CU_ERROR_OUT_OF_MEMORY:
    case CU_ERROR_OPERATING_SYSTEM:
    case CU_ERROR_NOT_PERMITTED:
    case CU_ERROR_NOT_SUPPORTED: return STH_OUT_OF_PINNED_MEMORY;
    case CU_ERROR_INVALID_VALUE:
    case CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED: return STH_INVALID_ARGUMENT;
    default: return STH_DEVICE_ERROR;
    }
}

sth_status sthi_cuda_host_register(sth_backend_device *device, void *p, uint64_t bytes, sth_devptr *out_alias) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_attach(d));
    bool mapped = d->capabilities & STH_CAP_MAPPED_HOST;
    unsigned flags = CU_HOST_REGISTER_PORTABLE | (mapped ? CU_HOST_REGISTER_DEVICEMAP : 0u);
    bool fault = sthi_fault_hit(STHI_FAULT_PIN);
    cu_result r = fault ? CU_ERROR_OUT_OF_MEMORY : d->driver->host_register(p, bytes, flags);
    if (r != CU_OK) {
        char what[128];
        snprintf(what, sizeof what, "%" PRIu64 " bytes of host memory at %p could not be pinned", bytes, p);
        return sthi_cuda_fail_as(
            pin_status(r), d->driver, r, "pinned host memory", what,
            "raise the limit (ulimit -l, the container's memlock, WSL's memory) or pin less");
    }
    cu_deviceptr alias = 0;
    if (mapped && d->driver->host_device_pointer(&alias, p, 0) != CU_OK)
        alias = 0; /* copies work all the same */
    *out_alias = alias;
    return STH_OK;
}

void sthi_cuda_host_unregister(sth_backend_device *device, void *p, uint64_t bytes) {
    cuda_device *d = sthi_cuda_of(device);
    (void)bytes;
    if (!p || !sthi_cuda_attach_to_end(d)) return;
    (void)sthi_cuda_idle(d); /* the driver does not promise to wait for copies under way */
    cu_result r = d->driver->host_unregister(p);
    if (r == CU_ERROR_HOST_MEMORY_NOT_REGISTERED)
        (void)sthi_cuda_fail_as(STH_INVALID_ARGUMENT, d->driver, r, "pinned host memory",
                                "unpinning host memory", NULL);
    else sthi_cuda_ended(d->driver, r, "pinned host memory", "unpinning host memory");
}
