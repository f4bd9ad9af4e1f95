/* What we use of the CUDA driver API, declared here so that no vendor header is needed to build.
 *
 * Names, prototypes and numbers follow NVIDIA's documentation of the driver API; the versioned symbols
 * (_v2) are those that have 64-bit sizes and addresses. All of them exist from CUDA 11 on. */
#ifndef STHI_CUDA_DRIVER_H
#define STHI_CUDA_DRIVER_H
#include <stddef.h>

typedef int cu_result;
typedef int cu_device;
typedef struct cu_context_opaque *cu_context;
typedef struct cu_stream_opaque *cu_stream;
typedef struct cu_event_opaque *cu_event;
typedef unsigned long long cu_deviceptr;
typedef struct cu_module_opaque *cu_module;
typedef struct cu_function_opaque *cu_function;
typedef unsigned long long cu_memory; /* CUmemGenericAllocationHandle */

enum { /* CUresult */
       CU_OK = 0,
       CU_ERROR_INVALID_VALUE = 1,
       CU_ERROR_OUT_OF_MEMORY = 2,
       CU_ERROR_NOT_INITIALIZED = 3,
       CU_ERROR_DEINITIALIZED = 4,
       CU_ERROR_NO_DEVICE = 100,
       CU_ERROR_INVALID_DEVICE = 101,
       CU_ERROR_INVALID_CONTEXT = 201,
       CU_ERROR_OPERATING_SYSTEM = 304,
       CU_ERROR_INVALID_HANDLE = 400,
       CU_ERROR_NOT_READY = 600,
       CU_ERROR_CONTEXT_IS_DESTROYED = 709,
       CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
       CU_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
       CU_ERROR_NOT_PERMITTED = 800,
       CU_ERROR_NOT_SUPPORTED = 801
};

enum { /* CUdevice_attribute */
       CU_ATTRIBUTE_INTEGRATED = 18,
       CU_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
       CU_ATTRIBUTE_COMPUTE_MAJOR = 75,
       CU_ATTRIBUTE_COMPUTE_MINOR = 76,
       CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
       CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
};

enum {
    CU_STREAM_FLAG_NON_BLOCKING = 1,
    CU_EVENT_FLAG_DISABLE_TIMING = 2,
    CU_HOST_REGISTER_PORTABLE = 1,
    CU_HOST_REGISTER_DEVICEMAP = 2,
    CU_ALLOCATION_TYPE_PINNED = 1,
    CU_LOCATION_TYPE_DEVICE = 1,
    CU_ACCESS_PROT_READWRITE = 3,
    CU_GRANULARITY_MINIMUM = 0
};

typedef struct cu_location {
    int type, id;
} cu_location;

typedef struct cu_allocation_prop { /* CUmemAllocationProp */
    int type;
    int requested_handle_types;
    cu_location location;
    void *win32_metadata;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} cu_allocation_prop;

typedef struct cu_access_desc { /* CUmemAccessDesc */
    cu_location location;
    int flags;
} cu_access_desc;

_Static_assert(sizeof(cu_allocation_prop) == 32, "CUmemAllocationProp of the driver has 32 bytes");
_Static_assert(sizeof(cu_access_desc) == 12, "CUmemAccessDesc of the driver has 12 bytes");

/* X(member, symbol, parameters) */
#define CUDA_SYMBOLS(X)                                                                                      \
    X(init, cuInit, (unsigned flags))                                                                        \
    X(driver_version, cuDriverGetVersion, (int *out))                                                        \
    X(error_name, cuGetErrorName, (cu_result, const char **out))                                             \
    X(error_text, cuGetErrorString, (cu_result, const char **out))                                           \
    X(device_count, cuDeviceGetCount, (int *out))                                                            \
    X(device_get, cuDeviceGet, (cu_device * out, int ordinal))                                               \
    X(device_name, cuDeviceGetName, (char *out, int capacity, cu_device))                                    \
    X(device_attribute, cuDeviceGetAttribute, (int *out, int attribute, cu_device))                          \
    X(primary_retain, cuDevicePrimaryCtxRetain, (cu_context * out, cu_device))                               \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (cu_device))                                            \
    X(context_get, cuCtxGetCurrent, (cu_context * out))                                                      \
    X(context_set, cuCtxSetCurrent, (cu_context))                                                            \
    X(context_synchronize, cuCtxSynchronize, (void))                                                         \
    X(memory_info, cuMemGetInfo_v2, (size_t * out_free, size_t * out_total))                                 \
    X(memory_alloc, cuMemAlloc_v2, (cu_deviceptr * out, size_t bytes))                                       \
    X(memory_free, cuMemFree_v2, (cu_deviceptr))                                                             \
    X(host_register, cuMemHostRegister_v2, (void *, size_t bytes, unsigned flags))                           \
    X(host_unregister, cuMemHostUnregister, (void *))                                                        \
    X(host_device_pointer, cuMemHostGetDevicePointer_v2, (cu_deviceptr * out, void *, unsigned flags))       \
    X(copy_h2d, cuMemcpyHtoDAsync_v2, (cu_deviceptr dst, const void *src, size_t bytes, cu_stream))          \
    X(copy_d2h, cuMemcpyDtoHAsync_v2, (void *dst, cu_deviceptr src, size_t bytes, cu_stream))                \
    X(copy_d2d, cuMemcpyDtoDAsync_v2, (cu_deviceptr dst, cu_deviceptr src, size_t bytes, cu_stream))         \
    X(module_load, cuModuleLoadData, (cu_module * out, const void *image))                                   \
    X(module_unload, cuModuleUnload, (cu_module))                                                            \
    X(module_function, cuModuleGetFunction, (cu_function * out, cu_module, const char *name))                \
    X(launch, cuLaunchKernel,                                                                                \
      (cu_function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,   \
       unsigned block_z, unsigned shared_bytes, cu_stream, void **parameters, void **extra))                 \
    X(stream_create, cuStreamCreateWithPriority, (cu_stream * out, unsigned flags, int priority))            \
    X(stream_destroy, cuStreamDestroy_v2, (cu_stream))                                                       \
    X(stream_synchronize, cuStreamSynchronize, (cu_stream))                                                  \
    X(stream_wait, cuStreamWaitEvent, (cu_stream, cu_event, unsigned flags))                                 \
    X(event_create, cuEventCreate, (cu_event * out, unsigned flags))                                         \
    X(event_destroy, cuEventDestroy_v2, (cu_event))                                                          \
    X(event_record, cuEventRecord, (cu_event, cu_stream))                                                    \
    X(event_query, cuEventQuery, (cu_event))                                                                 \
    X(event_synchronize, cuEventSynchronize, (cu_event))                                                     \
    X(event_elapsed, cuEventElapsedTime, (float *out_ms, cu_event a, cu_event b))                            \
    X(granularity, cuMemGetAllocationGranularity, (size_t * out, const cu_allocation_prop *, int which))     \
    X(address_reserve, cuMemAddressReserve,                                                                  \
      (cu_deviceptr * out, size_t bytes, size_t alignment, cu_deviceptr hint, unsigned long long flags))     \
    X(address_free, cuMemAddressFree, (cu_deviceptr, size_t bytes))                                          \
    X(memory_create, cuMemCreate,                                                                            \
      (cu_memory * out, size_t bytes, const cu_allocation_prop *, unsigned long long flags))                 \
    X(memory_release, cuMemRelease, (cu_memory))                                                             \
    X(memory_map, cuMemMap,                                                                                  \
      (cu_deviceptr, size_t bytes, size_t offset, cu_memory, unsigned long long flags))                      \
    X(memory_unmap, cuMemUnmap, (cu_deviceptr, size_t bytes))                                                \
    X(memory_access, cuMemSetAccess, (cu_deviceptr, size_t bytes, const cu_access_desc *, size_t count))

typedef struct cuda_driver {
#define CUDA_MEMBER(member, symbol, parameters) cu_result(*member) parameters;
    CUDA_SYMBOLS(CUDA_MEMBER)
#undef CUDA_MEMBER
} cuda_driver;
#endif
