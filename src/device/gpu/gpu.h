/* A back end over a GPU's driver, for any vendor whose driver is CUDA's in shape.
 *
 *   driver.h    the driver's calls, types and numbers
 *   load.c      finding the driver's library; errors in its words
 *   enter.c     making the device current for a call
 *   gpu.c       opening, closing, what a card can do, the table of operations
 *   memory.c    device memory, rings, registered host memory
 *   stream.c    streams, copies, events
 *   kernels.h   the kernels' text; compile.c has it compiled at run time; expand.c launches them
 *
 * What differs stands in a gpu_vendor, in the folder of each: names of libraries and symbols, how a device is made
 * current, the compiler and its options, and the words of advice. */
#ifndef STHI_GPU_H
#define STHI_GPU_H
#include <stdatomic.h>

#include "base/thread.h"
#include "device/gpu/driver.h"
#include "stagehand/backend.h"
#include "stagehand/checkpoint.h"

struct sth_event {
    gpu_event handle;
    bool timing;
    atomic_bool recorded;
};

/* A function that is looked up in a library, and where its address goes. */
typedef struct gpu_symbol {
    const char *name;
    void *slot; /* of a function pointer */
} gpu_symbol;

/* A library that is loaded at run time. */
typedef struct gpu_library {
    const char *what;     /* "the CUDA driver" */
    const char *domain;   /* of errors */
    const char *variable; /* of the environment: an absolute path in place of all below */
    const char *const *names; /* by which the loader may find it, NULL at the end */
    const char *loaded_as; /* part of its path where the process has it loaded already; NULL: the loader knows */
    /* Packages that bring it along: where a library that the process has loaded has `package` in its path, what stands
     * before that and one of `below` is a folder to look in. NULL at the end of each; may be NULL. */
    const char *const *packages, *const *below;
    const char *advice;   /* where it is missing */
    const char *too_old;  /* where a function is */
    const gpu_symbol *symbols;
    size_t symbol_count;
} gpu_library;

typedef struct gpu_device gpu_device;

/* The run-time compiler, NVRTC's in shape. */
typedef struct gpu_program_opaque *gpu_program;
typedef struct gpu_compiler {
    int (*create)(gpu_program *, const char *source, const char *name, int, const char *const *, const char *const *);
    int (*compile)(gpu_program, int, const char *const *options);
    int (*destroy)(gpu_program *);
    int (*code_size)(gpu_program, size_t *);
    int (*code)(gpu_program, char *);
    int (*log_size)(gpu_program, size_t *);
    int (*log)(gpu_program, char *);
} gpu_compiler;

typedef struct gpu_vendor {
    const char *name; /* of the back end, and the domain of its errors */
    const sth_backend_ops *ops;
    const gpu_library *library;
    gpu_driver *driver; /* filled by loading */
    struct {
        int register_host, map_host, integrated, mappings;
    } attributes;
    /* Two mappings of one memory are tried when a device is opened, for not every driver of this vendor's has them. */
    bool proves_rings;
    const char *start_advice, *find_advice; /* where the driver does not start, or has no such card */

    /* How the threads of the process come by the device, which other libraries in it share. */
    gpu_result (*retain)(gpu_device *);
    gpu_result (*release)(gpu_device *);
    gpu_result (*make_current)(const gpu_device *);
    void (*put_back)(void); /* makes current what make_current has found on this thread, where that was another */

    /* The kernels, for this card; the caller frees *out. */
    sth_status (*compile)(const gpu_device *, const char *source, char **out);
    const char *prelude; /* goes before the kernels' text */
} gpu_vendor;

/* X(name, function in kernels.h). Which encoding has which: kernel_of in expand.c. */
#define GPU_KERNEL_LIST(X)          \
    X(INT8, sthi_expand_int8)       \
    X(FP8, sthi_expand_fp8)         \
    X(INT4, sthi_expand_int4)       \
    X(FOUR_BITS, sthi_expand_four_bits) \
    X(LOSSLESS, sthi_expand_lossless)
enum {
#define GPU_KERNEL_ENUM(name, function) GPU_KERNEL_##name,
    GPU_KERNEL_LIST(GPU_KERNEL_ENUM)
#undef GPU_KERNEL_ENUM
        GPU_KERNELS
};

struct gpu_device {
    uint32_t capabilities; /* STH_CAP_ bits */
    const gpu_vendor *vendor;
    const gpu_driver *driver;
    int index;
    gpu_card handle;
    void *context; /* the vendor's own */
    unsigned fork_depth;
    sthi_mutex compiling;
    bool compiled;
    gpu_module module;        /* NULL: nothing was compiled */
    gpu_function kernels[GPU_KERNELS];
    size_t ring_granularity; /* 0: the card has no virtual memory management */
    char name[128];
};

static inline gpu_device *sthi_gpu_of(sth_backend_device *d) { return (gpu_device *)d; }
static inline void sthi_gpu_leave(gpu_device **d) { (*d)->vendor->put_back(); }
/* Begins a call: what was current on its thread before is so again at the end of the scope. */
#define STHI_GPU_CALL(d, device) gpu_device *d __attribute__((cleanup(sthi_gpu_leave))) = sthi_gpu_of(device)
/* F32, BF16 and F16 as the kernels number them. */
static inline int sthi_gpu_dtype_index(int dtype) {
    if (dtype == STH_DTYPE_F32) return 0;
    return dtype == STH_DTYPE_BF16 ? 1 : 2;
}
static inline gpu_stream sthi_gpu_stream(sth_stream s) { return (gpu_stream)(uintptr_t)s; }

/* load.c */
/* Finds a library and its functions. BACKEND_UNAVAILABLE. The caller has a lock; nothing is written on failure. */
sth_status sthi_gpu_library_load(const gpu_library *);
sth_status sthi_gpu_load(const gpu_vendor *); /* loads and starts the driver once per process */
/* Fails with the driver's own words; `what` says what was tried, `advice` (may be NULL) what to do. */
sth_status sthi_gpu_fail(const gpu_vendor *, gpu_result, const char *object, const char *what, const char *advice);
sth_status sthi_gpu_fail_as(sth_status, const gpu_vendor *, gpu_result, const char *object, const char *what,
                            const char *advice);
/* For what ends something: a driver that has shut down has ended it already. */
void sthi_gpu_ended(const gpu_vendor *, gpu_result, const char *object, const char *what);

/* enter.c */
/* Makes the device current, until the STHI_GPU_CALL around ends. Every call but open, close and capabilities begins
 * with one. */
sth_status sthi_gpu_attach(const gpu_device *d); /* fails in a forked child */
/* For calls that end something: false, and no error, in a child or when the driver has shut down. */
bool sthi_gpu_attach_to_end(const gpu_device *d);
/* Waits for all work of the device, before something ends that it may use. False: it may still be going on. */
bool sthi_gpu_idle(const gpu_device *d);
sth_status sthi_gpu_enter(const gpu_device *d); /* and at the fault point for device calls */

/* gpu.c: what the entries of a vendor's table begin with, and those that are the same for all. */
int sthi_gpu_count(const gpu_vendor *);
sth_status sthi_gpu_open(const gpu_vendor *, int index, sth_backend_device **out);
void sthi_gpu_close(sth_backend_device *);
uint32_t sthi_gpu_capabilities(sth_backend_device *);
sth_status sthi_gpu_info(sth_backend_device *, sth_device_info *out);
int64_t sthi_gpu_now_ns(sth_backend_device *);

/* memory.c */
sth_status sthi_gpu_alloc(sth_backend_device *, uint64_t bytes, sth_devptr *out);
void sthi_gpu_free(sth_backend_device *, sth_devptr, uint64_t bytes);
uint64_t sthi_gpu_ring_granularity(sth_backend_device *);
sth_status sthi_gpu_ring_alloc(sth_backend_device *, uint64_t bytes, sth_devptr *out);
void sthi_gpu_ring_free(sth_backend_device *, sth_devptr, uint64_t bytes);
sth_status sthi_gpu_host_register(sth_backend_device *, void *p, uint64_t bytes, sth_devptr *out_alias);
void sthi_gpu_host_unregister(sth_backend_device *, void *p, uint64_t bytes);
/* Properties of plain device memory on this card. */
gpu_allocation_prop sthi_gpu_plain_memory(gpu_card);

/* Whether memory that is mapped twice is one memory. */
bool sthi_gpu_rings_work(gpu_device *d);

/* compile.c: compiles and loads the kernels. The device is current. */
sth_status sthi_gpu_compile(gpu_device *d);
/* For a vendor's compile: one try with these options. code, code_size: which of the compiler's outputs. */
sth_status sthi_gpu_compile_with(const gpu_compiler *, const gpu_library *, const char *source, int option_count,
                                 const char *const *options, char **out);

/* expand.c */
sth_status sthi_gpu_expand_ready(sth_backend_device *);
sth_status sthi_gpu_expand(sth_backend_device *, const sth_expand *, sth_stream);
void sthi_gpu_expand_close(gpu_device *d);

/* stream.c */
sth_status sthi_gpu_stream_create(sth_backend_device *, int priority, sth_stream *out);
void sthi_gpu_stream_destroy(sth_backend_device *, sth_stream);
sth_status sthi_gpu_stream_synchronize(sth_backend_device *, sth_stream);
sth_status sthi_gpu_copy_h2d(sth_backend_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
sth_status sthi_gpu_copy_d2h(sth_backend_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
sth_status sthi_gpu_event_create(sth_backend_device *, bool timing, sth_event **out);
void sthi_gpu_event_destroy(sth_backend_device *, sth_event *);
sth_status sthi_gpu_event_record(sth_backend_device *, sth_event *, sth_stream);
sth_status sthi_gpu_stream_wait(sth_backend_device *, sth_stream, sth_event *);
sth_status sthi_gpu_event_query(sth_backend_device *, sth_event *, bool *out_done);
sth_status sthi_gpu_event_synchronize(sth_backend_device *, sth_event *);
sth_status sthi_gpu_event_elapsed_ns(sth_backend_device *, sth_event *a, sth_event *b, int64_t *out);

/* The entries of a vendor's table, but for its name, count and open. */
#define STHI_GPU_ENTRIES                                                                                    \
    .abi = STH_BACKEND_ABI, .size = sizeof(sth_backend_ops), .close = sthi_gpu_close,                        \
    .capabilities = sthi_gpu_capabilities, .info = sthi_gpu_info, .now_ns = sthi_gpu_now_ns,                 \
    .alloc = sthi_gpu_alloc, .free = sthi_gpu_free, .ring_granularity = sthi_gpu_ring_granularity,           \
    .ring_alloc = sthi_gpu_ring_alloc, .ring_free = sthi_gpu_ring_free,                                      \
    .host_register = sthi_gpu_host_register, .host_unregister = sthi_gpu_host_unregister,                    \
    .stream_create = sthi_gpu_stream_create, .stream_destroy = sthi_gpu_stream_destroy,                      \
    .stream_synchronize = sthi_gpu_stream_synchronize, .copy_h2d = sthi_gpu_copy_h2d,                        \
    .copy_d2h = sthi_gpu_copy_d2h, .expand_ready = sthi_gpu_expand_ready, .expand = sthi_gpu_expand,         \
    .event_create = sthi_gpu_event_create, .event_destroy = sthi_gpu_event_destroy,                          \
    .event_record = sthi_gpu_event_record, .stream_wait = sthi_gpu_stream_wait,                              \
    .event_query = sthi_gpu_event_query, .event_synchronize = sthi_gpu_event_synchronize,                    \
    .event_elapsed_ns = sthi_gpu_event_elapsed_ns
#endif
