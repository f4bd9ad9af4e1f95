/* A stand-in for the CUDA driver library: the functions that src/device/gpu/driver.h declares, over the card that
 * CUDA and HIP share (fake_driver.h). */
#include "device/gpu/driver.h"
#include "fake_driver.h"

enum { /* hipDeviceAttribute_t */
       CAN_MAP_HOST_MEMORY = 3,
       INTEGRATED = 16,
       VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 89,
       HOST_REGISTER_SUPPORTED = 90
};

const bool fake_by_number = true;
const int fake_native[FAKE_CODES] = {
    [FAKE_OK] = GPU_OK,
    [FAKE_INVALID_VALUE] = GPU_ERROR_INVALID_VALUE,
    [FAKE_OUT_OF_MEMORY] = GPU_ERROR_OUT_OF_MEMORY,
    [FAKE_DEINITIALIZED] = GPU_ERROR_DEINITIALIZED,
    [FAKE_NO_DEVICE] = GPU_ERROR_NO_DEVICE,
    [FAKE_INVALID_DEVICE] = GPU_ERROR_INVALID_DEVICE,
    [FAKE_INVALID_CONTEXT] = GPU_ERROR_INVALID_CONTEXT,
    [FAKE_INVALID_HANDLE] = GPU_ERROR_INVALID_HANDLE,
    [FAKE_NOT_READY] = GPU_ERROR_NOT_READY,
    [FAKE_HOST_REGISTERED] = GPU_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    [FAKE_HOST_NOT_REGISTERED] = GPU_ERROR_HOST_MEMORY_NOT_REGISTERED,
};

/* ---- start-up and devices */

EXPORT gpu_result hipInit(unsigned flags) { FAKE_CALL(FAKE_ANYWHERE, fake_init(flags)); }

static fake_code version(int *out) {
    *out = 60443482;
    return FAKE_OK;
}
EXPORT gpu_result hipDriverGetVersion(int *out) { FAKE_CALL(FAKE_ANYWHERE, version(out)); }

static const struct {
    gpu_result code;
    const char *name, *text;
} errors[] = {
    {GPU_ERROR_INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {GPU_ERROR_OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {GPU_ERROR_DEINITIALIZED, "hipErrorDeinitialized", "driver shutting down"},
    {GPU_ERROR_NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {GPU_ERROR_INVALID_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
    {GPU_ERROR_INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {GPU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {GPU_ERROR_HOST_MEMORY_NOT_REGISTERED, "hipErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
};

static fake_code describe(gpu_result code, const char **name, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *(name ? name : text) = name ? errors[i].name : errors[i].text;
            return FAKE_OK;
        }
    return FAKE_INVALID_VALUE;
}

EXPORT gpu_result hipDrvGetErrorName(gpu_result code, const char **out) {
    FAKE_CALL(FAKE_ANYWHERE, describe(code, out, NULL));
}
EXPORT gpu_result hipDrvGetErrorString(gpu_result code, const char **out) {
    FAKE_CALL(FAKE_ANYWHERE, describe(code, NULL, out));
}

EXPORT gpu_result hipGetDeviceCount(int *out) { FAKE_CALL(FAKE_ANYWHERE, fake_count(out)); }
EXPORT gpu_result hipDeviceGet(gpu_card *out, int ordinal) { FAKE_CALL(FAKE_ANYWHERE, fake_device(out, ordinal)); }
EXPORT gpu_result hipDeviceGetName(char *out, int room, gpu_card device) {
    FAKE_CALL(FAKE_ANYWHERE, fake_name(out, room, device));
}

static fake_code attribute(int *out, int which) {
    switch (which) {
    case INTEGRATED: *out = 0; return FAKE_OK;
    case CAN_MAP_HOST_MEMORY:
    case HOST_REGISTER_SUPPORTED: *out = 1; return FAKE_OK;
    case VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *out = fake_has_mappings(); return FAKE_OK;
    default: return FAKE_INVALID_VALUE;
    }
}
EXPORT gpu_result hipDeviceGetAttribute(int *out, int which, gpu_card device) {
    (void)device;
    FAKE_CALL(FAKE_ANYWHERE, attribute(out, which));
}

EXPORT gpu_result hipGetDevice(int *out) { FAKE_CALL(FAKE_ANYWHERE, fake_get_number(out)); }
EXPORT gpu_result hipSetDevice(int device) { FAKE_CALL(FAKE_ANYWHERE, fake_set_number(device)); }
EXPORT gpu_result hipDeviceSynchronize(void) { FAKE_CALL(FAKE_IN_CONTEXT, fake_synchronize()); }

/* ---- memory */

EXPORT gpu_result hipMemGetInfo(size_t *out_free, size_t *out_total) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_memory_info(out_free, out_total));
}
EXPORT gpu_result hipMalloc(gpu_address *out, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_alloc((uint64_t *)out, bytes));
}
EXPORT gpu_result hipFree(gpu_address p) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_free(p)); }
EXPORT gpu_result hipHostRegister(void *p, size_t bytes, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags == (GPU_HOST_REGISTER_PORTABLE | GPU_HOST_REGISTER_DEVICEMAP)
                                   ? fake_register(p, bytes)
                                   : FAKE_INVALID_VALUE);
}
EXPORT gpu_result hipHostUnregister(void *p) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unregister(p)); }
EXPORT gpu_result hipHostGetDevicePointer(gpu_address *out, void *p, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags ? FAKE_INVALID_VALUE : fake_host_pointer((uint64_t *)out, p));
}

static bool plain(const gpu_allocation_prop *p) {
    return p->type == GPU_ALLOCATION_TYPE_PINNED && p->location.type == GPU_LOCATION_TYPE_DEVICE &&
           p->requested_handle_types == 0 && !p->win32_metadata;
}
static fake_code granularity(size_t *out) {
    *out = FAKE_PAGE_UNIT;
    return FAKE_OK;
}
EXPORT gpu_result hipMemGetAllocationGranularity(size_t *out, const gpu_allocation_prop *p, int which) {
    FAKE_CALL(FAKE_ANYWHERE, plain(p) && which == GPU_GRANULARITY_MINIMUM ? granularity(out) : FAKE_INVALID_VALUE);
}
EXPORT gpu_result hipMemAddressReserve(gpu_address *out, size_t bytes, size_t alignment, gpu_address hint,
                                     unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, alignment || hint || flags ? FAKE_INVALID_VALUE : fake_reserve((uint64_t *)out, bytes));
}
EXPORT gpu_result hipMemAddressFree(gpu_address p, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unreserve(p, bytes));
}
EXPORT gpu_result hipMemCreate(gpu_memory *out, size_t bytes, const gpu_allocation_prop *p, unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags || !plain(p) ? FAKE_INVALID_VALUE : fake_create((uint64_t *)out, bytes));
}
EXPORT gpu_result hipMemRelease(gpu_memory memory) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_release_handle(memory));
}
EXPORT gpu_result hipMemMap(gpu_address p, size_t bytes, size_t offset, gpu_memory memory, unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags || offset ? FAKE_INVALID_VALUE : fake_map(p, bytes, memory));
}
EXPORT gpu_result hipMemUnmap(gpu_address p, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unmap(p, bytes));
}
EXPORT gpu_result hipMemSetAccess(gpu_address p, size_t bytes, const gpu_access_desc *access, size_t count) {
    FAKE_CALL(FAKE_IN_CONTEXT, count == 1 && access->flags == GPU_ACCESS_PROT_READWRITE &&
                                       access->location.type == GPU_LOCATION_TYPE_DEVICE
                                   ? fake_access(p, bytes)
                                   : FAKE_INVALID_VALUE);
}

/* ---- work */

EXPORT gpu_result hipMemcpyHtoDAsync(gpu_address dst, const void *src, size_t bytes, gpu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_h2d(dst, src, bytes, stream));
}
EXPORT gpu_result hipMemcpyDtoHAsync(void *dst, gpu_address src, size_t bytes, gpu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_d2h(dst, src, bytes, stream));
}
EXPORT gpu_result hipMemcpyDtoDAsync(gpu_address dst, gpu_address src, size_t bytes, gpu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_d2d(dst, src, bytes, stream));
}
EXPORT gpu_result hipModuleLoadData(gpu_module *out, const void *image) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_module_load((void **)out, image));
}
EXPORT gpu_result hipModuleUnload(gpu_module module) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_module_unload(module));
}
EXPORT gpu_result hipModuleGetFunction(gpu_function *out, gpu_module module, const char *name) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_module_function((void **)out, module, name));
}
EXPORT gpu_result hipModuleLaunchKernel(gpu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                        unsigned by, unsigned bz,
                                unsigned shared, gpu_stream stream, void **p, void **extra) {
    const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    FAKE_CALL(FAKE_IN_CONTEXT, fake_launch(f, grid, block, shared, stream, p, extra));
}

EXPORT gpu_result hipStreamCreateWithPriority(gpu_stream *out, unsigned flags, int priority) {
    (void)priority;
    FAKE_CALL(FAKE_IN_CONTEXT,
              flags == GPU_STREAM_FLAG_NON_BLOCKING ? fake_stream_create((void **)out) : FAKE_INVALID_VALUE);
}
EXPORT gpu_result hipStreamDestroy(gpu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_stream_destroy(s)); }
EXPORT gpu_result hipStreamSynchronize(gpu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT, fake_stream_synchronize(s)); }
EXPORT gpu_result hipStreamWaitEvent(gpu_stream s, gpu_event e, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags ? FAKE_INVALID_VALUE : fake_stream_wait(s, e));
}
EXPORT gpu_result hipEventCreateWithFlags(gpu_event *out, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags & ~(unsigned)GPU_EVENT_FLAG_DISABLE_TIMING
                                   ? FAKE_INVALID_VALUE
                                   : fake_event_create((void **)out, !(flags & GPU_EVENT_FLAG_DISABLE_TIMING)));
}
EXPORT gpu_result hipEventDestroy(gpu_event e) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_event_destroy(e)); }
EXPORT gpu_result hipEventRecord(gpu_event e, gpu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_record(e, s)); }
EXPORT gpu_result hipEventQuery(gpu_event e) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_query(e)); }
EXPORT gpu_result hipEventSynchronize(gpu_event e) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_synchronize(e)); }
EXPORT gpu_result hipEventElapsedTime(float *out_ms, gpu_event a, gpu_event b) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_event_elapsed(out_ms, a, b));
}
