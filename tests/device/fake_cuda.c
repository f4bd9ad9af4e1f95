/* A stand-in for the CUDA driver library: the functions that src/device/cuda/driver.h declares, over the card that
 * CUDA and HIP share (fake_driver.h). */
#include "device/cuda/driver.h"
#include "fake_driver.h"

const int fake_native[FAKE_CODES] = {
    [FAKE_OK] = CU_OK,
    [FAKE_INVALID_VALUE] = CU_ERROR_INVALID_VALUE,
    [FAKE_OUT_OF_MEMORY] = CU_ERROR_OUT_OF_MEMORY,
    [FAKE_DEINITIALIZED] = CU_ERROR_DEINITIALIZED,
    [FAKE_NO_DEVICE] = CU_ERROR_NO_DEVICE,
    [FAKE_INVALID_DEVICE] = CU_ERROR_INVALID_DEVICE,
    [FAKE_INVALID_CONTEXT] = CU_ERROR_INVALID_CONTEXT,
    [FAKE_INVALID_HANDLE] = CU_ERROR_INVALID_HANDLE,
    [FAKE_NOT_READY] = CU_ERROR_NOT_READY,
    [FAKE_HOST_REGISTERED] = CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    [FAKE_HOST_NOT_REGISTERED] = CU_ERROR_HOST_MEMORY_NOT_REGISTERED,
};

/* ---- start-up and devices */

EXPORT cu_result cuInit(unsigned flags) { FAKE_CALL(FAKE_ANYWHERE, fake_init(flags)); }

static fake_code version(int *out) {
    *out = 12040;
    return FAKE_OK;
}
EXPORT cu_result cuDriverGetVersion(int *out) { FAKE_CALL(FAKE_ANYWHERE, version(out)); }

static const struct {
    cu_result code;
    const char *name, *text;
} errors[] = {
    {CU_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CU_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CU_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CU_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CU_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
};

static fake_code describe(cu_result code, const char **name, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *(name ? name : text) = name ? errors[i].name : errors[i].text;
            return FAKE_OK;
        }
    return FAKE_INVALID_VALUE;
}

EXPORT cu_result cuGetErrorName(cu_result code, const char **out) {
    FAKE_CALL(FAKE_ANYWHERE, describe(code, out, NULL));
}
EXPORT cu_result cuGetErrorString(cu_result code, const char **out) {
    FAKE_CALL(FAKE_ANYWHERE, describe(code, NULL, out));
}

EXPORT cu_result cuDeviceGetCount(int *out) { FAKE_CALL(FAKE_ANYWHERE, fake_count(out)); }
EXPORT cu_result cuDeviceGet(cu_device *out, int ordinal) { FAKE_CALL(FAKE_ANYWHERE, fake_device(out, ordinal)); }
EXPORT cu_result cuDeviceGetName(char *out, int room, cu_device device) {
    FAKE_CALL(FAKE_ANYWHERE, fake_name(out, room, device));
}

static fake_code attribute(int *out, int which) {
    *out = which == CU_ATTRIBUTE_COMPUTE_MAJOR ? 9 : which == CU_ATTRIBUTE_CAN_MAP_HOST_MEMORY ||
           which == CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED ||
           (which == CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED && fake_has_mappings());
    return FAKE_OK;
}
EXPORT cu_result cuDeviceGetAttribute(int *out, int which, cu_device device) {
    (void)device;
    FAKE_CALL(FAKE_ANYWHERE, attribute(out, which));
}

EXPORT cu_result cuDevicePrimaryCtxRetain(cu_context *out, cu_device device) {
    FAKE_CALL(FAKE_ANYWHERE, fake_retain((void **)out, device));
}
EXPORT cu_result cuDevicePrimaryCtxRelease_v2(cu_device device) {
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
EXPORT cu_result cuCtxGetCurrent(cu_context *out) { FAKE_CALL(FAKE_ANYWHERE, get_current(out)); }
EXPORT cu_result cuCtxSetCurrent(cu_context context) { FAKE_CALL(FAKE_ANYWHERE, set_current(context)); }
EXPORT cu_result cuCtxSynchronize(void) { FAKE_CALL(FAKE_IN_CONTEXT, fake_synchronize()); }

/* ---- memory */

EXPORT cu_result cuMemGetInfo_v2(size_t *out_free, size_t *out_total) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_memory_info(out_free, out_total));
}
EXPORT cu_result cuMemAlloc_v2(cu_deviceptr *out, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_alloc((uint64_t *)out, bytes));
}
EXPORT cu_result cuMemFree_v2(cu_deviceptr p) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_free(p)); }
EXPORT cu_result cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags == (CU_HOST_REGISTER_PORTABLE | CU_HOST_REGISTER_DEVICEMAP) ? fake_register(p, bytes)
                                                                                                 : FAKE_INVALID_VALUE);
}
EXPORT cu_result cuMemHostUnregister(void *p) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unregister(p)); }
EXPORT cu_result cuMemHostGetDevicePointer_v2(cu_deviceptr *out, void *p, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags ? FAKE_INVALID_VALUE : fake_host_pointer((uint64_t *)out, p));
}

static bool plain(const cu_allocation_prop *p) {
    return p->type == CU_ALLOCATION_TYPE_PINNED && p->location.type == CU_LOCATION_TYPE_DEVICE &&
           p->requested_handle_types == 0 && !p->win32_metadata;
}
static fake_code granularity(size_t *out) {
    *out = FAKE_PAGE_UNIT;
    return FAKE_OK;
}
EXPORT cu_result cuMemGetAllocationGranularity(size_t *out, const cu_allocation_prop *p, int which) {
    FAKE_CALL(FAKE_ANYWHERE, plain(p) && which == CU_GRANULARITY_MINIMUM ? granularity(out) : FAKE_INVALID_VALUE);
}
EXPORT cu_result cuMemAddressReserve(cu_deviceptr *out, size_t bytes, size_t alignment, cu_deviceptr hint,
                                     unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, alignment || hint || flags ? FAKE_INVALID_VALUE : fake_reserve((uint64_t *)out, bytes));
}
EXPORT cu_result cuMemAddressFree(cu_deviceptr p, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unreserve(p, bytes));
}
EXPORT cu_result cuMemCreate(cu_memory *out, size_t bytes, const cu_allocation_prop *p, unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags || !plain(p) ? FAKE_INVALID_VALUE : fake_create((uint64_t *)out, bytes));
}
EXPORT cu_result cuMemRelease(cu_memory memory) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_release_handle(memory)); }
EXPORT cu_result cuMemMap(cu_deviceptr p, size_t bytes, size_t offset, cu_memory memory, unsigned long long flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags || offset ? FAKE_INVALID_VALUE : fake_map(p, bytes, memory));
}
EXPORT cu_result cuMemUnmap(cu_deviceptr p, size_t bytes) {
    FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_unmap(p, bytes));
}
EXPORT cu_result cuMemSetAccess(cu_deviceptr p, size_t bytes, const cu_access_desc *access, size_t count) {
    FAKE_CALL(FAKE_IN_CONTEXT, count == 1 && access->flags == CU_ACCESS_PROT_READWRITE &&
                                       access->location.type == CU_LOCATION_TYPE_DEVICE
                                   ? fake_access(p, bytes)
                                   : FAKE_INVALID_VALUE);
}

/* ---- work */

EXPORT cu_result cuMemcpyHtoDAsync_v2(cu_deviceptr dst, const void *src, size_t bytes, cu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_h2d(dst, src, bytes, stream));
}
EXPORT cu_result cuMemcpyDtoHAsync_v2(void *dst, cu_deviceptr src, size_t bytes, cu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_d2h(dst, src, bytes, stream));
}
EXPORT cu_result cuMemcpyDtoDAsync_v2(cu_deviceptr dst, cu_deviceptr src, size_t bytes, cu_stream stream) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_copy_d2d(dst, src, bytes, stream));
}
EXPORT cu_result cuModuleLoadData(cu_module *out, const void *image) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_module_load((void **)out, image));
}
EXPORT cu_result cuModuleUnload(cu_module module) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_module_unload(module)); }
EXPORT cu_result cuModuleGetFunction(cu_function *out, cu_module module, const char *name) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_module_function((void **)out, module, name));
}
EXPORT cu_result cuLaunchKernel(cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                unsigned shared, cu_stream stream, void **p, void **extra) {
    const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    FAKE_CALL(FAKE_IN_CONTEXT, fake_launch(f, grid, block, shared, stream, p, extra));
}

EXPORT cu_result cuStreamCreateWithPriority(cu_stream *out, unsigned flags, int priority) {
    (void)priority;
    FAKE_CALL(FAKE_IN_CONTEXT, flags == CU_STREAM_FLAG_NON_BLOCKING ? fake_stream_create((void **)out) : FAKE_INVALID_VALUE);
}
EXPORT cu_result cuStreamDestroy_v2(cu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_stream_destroy(s)); }
EXPORT cu_result cuStreamSynchronize(cu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT, fake_stream_synchronize(s)); }
EXPORT cu_result cuStreamWaitEvent(cu_stream s, cu_event e, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags ? FAKE_INVALID_VALUE : fake_stream_wait(s, e));
}
EXPORT cu_result cuEventCreate(cu_event *out, unsigned flags) {
    FAKE_CALL(FAKE_IN_CONTEXT, flags & ~(unsigned)CU_EVENT_FLAG_DISABLE_TIMING
                                   ? FAKE_INVALID_VALUE
                                   : fake_event_create((void **)out, !(flags & CU_EVENT_FLAG_DISABLE_TIMING)));
}
EXPORT cu_result cuEventDestroy_v2(cu_event e) { FAKE_CALL(FAKE_IN_CONTEXT | FAKE_ENDS, fake_event_destroy(e)); }
EXPORT cu_result cuEventRecord(cu_event e, cu_stream s) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_record(e, s)); }
EXPORT cu_result cuEventQuery(cu_event e) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_query(e)); }
EXPORT cu_result cuEventSynchronize(cu_event e) { FAKE_CALL(FAKE_IN_CONTEXT, fake_event_synchronize(e)); }
EXPORT cu_result cuEventElapsedTime(float *out_ms, cu_event a, cu_event b) {
    FAKE_CALL(FAKE_IN_CONTEXT, fake_event_elapsed(out_ms, a, b));
}
