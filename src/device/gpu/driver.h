/* What the back ends over a GPU's driver use of it, declared here so that no vendor header is needed to build.
 *
 * HIP's driver calls have CUDA's prototypes, numbers and layouts, as AMD documents them, so one table serves both;
 * addresses and handles are 64 bits here, which is how both pass them on the 64-bit systems that they run on. Which
 * symbols fill the table is in each vendor's folder. */
#ifndef STHI_GPU_DRIVER_H
#define STHI_GPU_DRIVER_H
#include <stddef.h>

typedef int gpu_result;
typedef int gpu_card;
typedef struct gpu_stream_opaque *gpu_stream;
typedef struct gpu_event_opaque *gpu_event;
typedef unsigned long long gpu_address;
typedef struct gpu_module_opaque *gpu_module;
typedef struct gpu_function_opaque *gpu_function;
typedef unsigned long long gpu_memory; /* the handle of memory that can be mapped */

enum { /* CUresult, hipError_t */
       GPU_OK = 0,
       GPU_ERROR_INVALID_VALUE = 1,
       GPU_ERROR_OUT_OF_MEMORY = 2,
       GPU_ERROR_NOT_INITIALIZED = 3,
       GPU_ERROR_DEINITIALIZED = 4,
       GPU_ERROR_NO_DEVICE = 100,
       GPU_ERROR_INVALID_DEVICE = 101,
       GPU_ERROR_INVALID_CONTEXT = 201,
       GPU_ERROR_OPERATING_SYSTEM = 304,
       GPU_ERROR_INVALID_HANDLE = 400,
       GPU_ERROR_NOT_READY = 600,
       GPU_ERROR_CONTEXT_IS_DESTROYED = 709,
       GPU_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
       GPU_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
       GPU_ERROR_NOT_PERMITTED = 800,
       GPU_ERROR_NOT_SUPPORTED = 801,
       GPU_ERROR_CAPTURE_FIRST = 900, /* all that captures of streams refuse */
       GPU_ERROR_CAPTURE_LAST = 908
};

enum {
    GPU_STREAM_FLAG_NON_BLOCKING = 1,
    GPU_EVENT_FLAG_DISABLE_TIMING = 2,
    GPU_HOST_REGISTER_PORTABLE = 1,
    GPU_HOST_REGISTER_DEVICEMAP = 2,
    GPU_ALLOCATION_TYPE_PINNED = 1,
    GPU_LOCATION_TYPE_DEVICE = 1,
    GPU_ACCESS_PROT_READWRITE = 3,
    GPU_GRANULARITY_MINIMUM = 0
};

typedef struct gpu_location {
    int type, id;
} gpu_location;

typedef struct gpu_allocation_prop { /* CUmemAllocationProp, hipMemAllocationProp */
    int type;
    int requested_handle_types;
    gpu_location location;
    void *win32_metadata;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} gpu_allocation_prop;

typedef struct gpu_access_desc { /* CUmemAccessDesc, hipMemAccessDesc */
    gpu_location location;
    int flags;
} gpu_access_desc;

_Static_assert(sizeof(void *) == 8, "addresses and handles of a driver are passed as 64 bits");
_Static_assert(sizeof(gpu_allocation_prop) == 32, "CUmemAllocationProp of the driver has 32 bytes");
_Static_assert(sizeof(gpu_access_desc) == 12, "CUmemAccessDesc of the driver has 12 bytes");

/* X(member, parameters) */
#define GPU_FUNCTIONS(X)                                                                                          \
    X(init, (unsigned flags))                                                                                     \
    X(driver_version, (int *out))                                                                                 \
    X(error_name, (gpu_result, const char **out))                                                                 \
    X(error_text, (gpu_result, const char **out))                                                                 \
    X(device_count, (int *out))                                                                                   \
    X(device_get, (gpu_card * out, int ordinal))                                                                  \
    X(device_name, (char *out, int capacity, gpu_card))                                                           \
    X(device_attribute, (int *out, int attribute, gpu_card))                                                      \
    X(synchronize, (void)) /* all work on the current device */                                                   \
    X(memory_info, (size_t * out_free, size_t * out_total))                                                       \
    X(memory_alloc, (gpu_address * out, size_t bytes))                                                            \
    X(memory_free, (gpu_address))                                                                                 \
    X(host_register, (void *, size_t bytes, unsigned flags))                                                      \
    X(host_unregister, (void *))                                                                                  \
    X(host_device_pointer, (gpu_address * out, void *, unsigned flags))                                           \
    X(copy_h2d, (gpu_address dst, const void *src, size_t bytes, gpu_stream))                                     \
    X(copy_d2h, (void *dst, gpu_address src, size_t bytes, gpu_stream))                                           \
    X(copy_d2d, (gpu_address dst, gpu_address src, size_t bytes, gpu_stream))                                     \
    X(module_load, (gpu_module * out, const void *image))                                                         \
    X(module_unload, (gpu_module))                                                                                \
    X(module_function, (gpu_function * out, gpu_module, const char *name))                                        \
    X(launch, (gpu_function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,                 \
               unsigned block_y, unsigned block_z, unsigned shared_bytes, gpu_stream, void **parameters,          \
               void **extra))                                                                                     \
    X(stream_create, (gpu_stream * out, unsigned flags, int priority))                                            \
    X(stream_destroy, (gpu_stream))                                                                               \
    X(stream_synchronize, (gpu_stream))                                                                           \
    X(stream_wait, (gpu_stream, gpu_event, unsigned flags))                                                       \
    X(event_create, (gpu_event * out, unsigned flags))                                                            \
    X(event_destroy, (gpu_event))                                                                                 \
    X(event_record, (gpu_event, gpu_stream))                                                                      \
    X(event_query, (gpu_event))                                                                                   \
    X(event_synchronize, (gpu_event))                                                                             \
    X(event_elapsed, (float *out_ms, gpu_event a, gpu_event b))                                                   \
    X(granularity, (size_t * out, const gpu_allocation_prop *, int which))                                        \
    X(address_reserve, (gpu_address * out, size_t bytes, size_t alignment, gpu_address hint,                      \
                        unsigned long long flags))                                                                \
    X(address_free, (gpu_address, size_t bytes))                                                                  \
    X(memory_create, (gpu_memory * out, size_t bytes, const gpu_allocation_prop *, unsigned long long flags))     \
    X(memory_release, (gpu_memory))                                                                               \
    X(memory_map, (gpu_address, size_t bytes, size_t offset, gpu_memory, unsigned long long flags))               \
    X(memory_unmap, (gpu_address, size_t bytes))                                                                  \
    X(memory_access, (gpu_address, size_t bytes, const gpu_access_desc *, size_t count))

typedef struct gpu_driver {
#define GPU_MEMBER(member, parameters) gpu_result(*member) parameters;
    GPU_FUNCTIONS(GPU_MEMBER)
#undef GPU_MEMBER
} gpu_driver;
#endif
