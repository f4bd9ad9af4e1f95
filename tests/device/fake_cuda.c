/* A stand-in for the CUDA driver library: the functions that src/device/gpu/driver.h declares, over the card that
 * CUDA and HIP share (fake_driver.h). */
#include "device/gpu/driver.h"
#include "fake_driver.h"

typedef struct cu_context_opaque *cu_context;

enum { /* CUdevice_attribute */
       INTEGRATED = 18,
       CAN_MAP_HOST_MEMORY = 19,
       COMPUTE_MAJOR = 75,
       COMPUTE_MINOR = 76,
       HOST_REGISTER_SUPPORTED = 99,
       VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
};

const bool fake_by_number = false;
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

EXPORT gpu_result cuInit(unsigned flags) { FAKE_CALL(FAKE_ANYWHERE, fake_init(flags)); }

static fake_code version(int *out) {
    *out = 12040;
    return FAKE_OK;
}
EXPORT gpu_result cuDriverGetVersion(int *out) { FAKE_CALL(FAKE_ANYWHERE, version(out)); }

static const struct {
    gpu_result code;
    const char *name, *text;
} errors[] = {
    {GPU_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {GPU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {GPU_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {GPU_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {GPU_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {GPU_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {GPU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {GPU_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
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

EXPORT gpu_result cuGetErrorName(gpu_result code, const char **out) {
    FAKE_CALL(FAKE_ANYWHERE, describe(code, out, NULL));
}
EXPORT gpu_result cuGetErrorString(gpu_result code, const char **out) {
    FAKE_CALL(FAKE_ANYWHERE, describe(code, NULL, out));
}

EXPORT gpu_result cuDeviceGetCount(int *out) { FAKE_CALL(FAKE_ANYWHERE, fake_count(out)); }
EXPORT gpu_result cuDeviceGet(gpu_card *out, int ordinal) { FAKE_CALL(FAKE_ANYWHERE, fake_device(out, ordinal)); }
EXPORT gpu_result cuDeviceGetName(char *out, int room, gpu_card device) {
    FAKE_CALL(FAKE_ANYWHERE, fake_name(out, room, device));
}

static fake_code attribute(int *out, int which) {
    switch (which) {
    case COMPUTE_MAJOR: *out = 9; return FAKE_OK;
    case INTEGRATED:
    case COMPUTE_MINOR: *out = 0; return FAKE_OK;
    case CAN_MAP_HOST_MEMORY:
    case HOST_REGISTER_SUPPORTED: *out = 1; return FAKE_OK;
    case VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *out = fake_has_mappings(); return FAKE_OK;
    default: return FAKE_INVALID_VALUE;
    }
}
EXPORT gpu_result cuDeviceGetAttribute(int *out, int which, gpu_card device) {
    (void)device;
    FAKE_CALL(FAKE_ANYWHERE, attribute(out, which));
}

EXPORT gpu_result cuDevicePrimaryCtxRetain(cu_context *out, gpu_card device) {
    FAKE_CALL(FAKE_ANYWHERE, fake_retain((void **)out, device));
}
EXPORT gpu_result cuDevicePrimaryCtxRelease_v2(gpu_card device) {
    FAKE_CALL(FAKE_ANYWHERE | FAKE_ENDS, fake_release(device));
}

static fake_code get_current(cu_context *out) {
    *out = fake_current();
    return FAKE_OK;
}
static fake_code set_current(cu_context context) {
    fake_set_current(context);
    return FAKE_OK;
}
EXPORT gpu_result cuCtxGetCurrent(cu_context *out) { FAKE_CALL(FAKE_ANYWHERE, get_current(out)); }
EXPORT gpu_result cuCtxSetCurrent(cu_context context) { FAKE_CALL(FAKE_ANYWHERE, set_current(context)); }
EXPORT gpu_result cuCtxSynchronize(void) { FAKE_CALL(FAKE_IN_CONTEXT, fake_synchronize()); }

/* ---- memory */

EXPORT gpu_result cuMemGetInfo_v2(size_t *out_free, size_t *out_total) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_memory_info(out_free, out_total));
}
EXPORT gpu_result cuMemAlloc_v2(gpu_address *out, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_alloc((uint64_t *)out, bytes));
}
EXPORT gpu_result cuMemFree_v2(gpu_address p) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_free(p)); }
EXPORT gpu_result cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags == (GPU_HOST_REGISTER_PORTABLE | GPU_HOST_REGISTER_DEVICEMAP)
                                   ? fake_register(p, bytes)
                                   : FAKE_INVALID_VALUE);
}
EXPORT gpu_result cuMemHostUnregister(void *p) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unregister(p)); }
EXPORT gpu_result cuMemHostGetDevicePointer_v2(gpu_address *out, void *p, unsigned flags) {
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
EXPORT gpu_result cuMemGetAllocationGranularity(size_t *out, const gpu_allocation_prop *p, int which) {
    FAKE_CALL(FAKE_ANYWHERE, plain(p) && which == GPU_GRANULARITY_MINIMUM ? granularity(out) : FAKE_INVALID_VALUE);
}
EXPORT gpu_result cuMemAddressReserve(gpu_address *out, size_t bytes, size_t alignment, gpu_address hint,
                                     unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, alignment || hint || flags ? FAKE_INVALID_VALUE : fake_reserve((uint64_t *)out, bytes));
}
EXPORT gpu_result cuMemAddressFree(gpu_address p, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unreserve(p, bytes));
}
EXPORT gpu_result cuMemCreate(gpu_memory *out, size_t bytes, const gpu_allocation_prop *p, unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags || !plain(p) ? FAKE_INVALID_VALUE : fake_create((uint64_t *)out, bytes));
}
EXPORT gpu_result cuMemRelease(gpu_memory memory) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_release_handle(memory));
}
EXPORT gpu_result cuMemMap(gpu_address p, size_t bytes, size_t offset, gpu_memory memory, unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags || offset ? FAKE_INVALID_VALUE : fake_map(p, bytes, memory));
}
EXPORT gpu_result cuMemUnmap(gpu_address p, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unmap(p, bytes));
}
EXPORT gpu_result cuMemSetAccess(gpu_address p, size_t bytes, const gpu_access_desc *access, size_t count) {
    FAKE_CALL(FAKE_IN_CONTEXT, count == 1 && access->flags == GPU_ACCESS_PROT_READWRITE &&
                                       access->location.type == GPU_LOCATION_TYPE_DEVICE
                                   ? fake_access(p, bytes)
                                   : FAKE_INVALID_VALUE);
}

/* ---- work */

EXPORT gpu_result cuMemcpyHtoDAsync_v2(gpu_address dst, const void *src, size_t bytes, gpu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_h2d(dst, src, bytes, stream));
}
EXPORT gpu_result cuMemcpyDtoHAsync_v2(void *dst, gpu_address src, size_t bytes, gpu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_d2h(dst, src, bytes, stream));
}
EXPORT gpu_result cuMemcpyDtoDAsync_v2(gpu_address dst, gpu_address src, size_t bytes, gpu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_d2d(dst, src, bytes, stream));
}
EXPORT gpu_result cuModuleLoadData(gpu_module *out, const void *image) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_module_load((void **)out, image));
}
EXPORT gpu_result cuModuleUnload(gpu_module module) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_module_unload(module));
}
EXPORT gpu_result cuModuleGetFunction(gpu_function *out, gpu_module module, const char *name) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_module_function((void **)out, module, name));
}
EXPORT gpu_result cuLaunchKernel(gpu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, gpu_stream stream, void **p, void **extra) {
    const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    FAKE_CALL(FAKE_IN_CONTEXT, fake_launch(f, grid, block, shared, stream, p, extra));
}

EXPORT gpu_result cuStreamCreateWithPriority(gpu_stream *out, unsigned flags, int priority) {
    (void)priority;
    FAKE_CALL(FAKE_IN_CONTEXT,
              flags == GPU_STREAM_FLAG_NON_BLOCKING ? fake_stream_create((void **)out) : FAKE_INVALID_VALUE);
}
EXPORT gpu_result cuStreamDestroy_v2(gpu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_stream_destroy(s)); }
EXPORT gpu_result cuStreamSynchronize(gpu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT, fake_stream_synchronize(s)); }
EXPORT gpu_result cuStreamWaitEvent(gpu_stream s, gpu_event e, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags ? FAKE_INVALID_VALUE : fake_stream_wait(s, e));
}
EXPORT gpu_result cuEventCreate(gpu_event *out, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags & ~(unsigned)GPU_EVENT_FLAG_DISABLE_TIMING
                                   ? FAKE_INVALID_VALUE
                                   : fake_event_create((void **)out, !(flags & GPU_EVENT_FLAG_DISABLE_TIMING)));
}
EXPORT gpu_result cuEventDestroy_v2(gpu_event e) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_event_destroy(e)); }
EXPORT gpu_result cuEventRecord(gpu_event e, gpu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_record(e, s)); }
EXPORT gpu_result cuEventQuery(gpu_event e) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_query(e)); }
EXPORT gpu_result cuEventSynchronize(gpu_event e) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_synchronize(e)); }
EXPORT gpu_result cuEventElapsedTime(float *out_ms, gpu_event a, gpu_event b) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_event_elapsed(out_ms, a, b));
}
