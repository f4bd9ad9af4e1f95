/* The CUDA back end, shared by its own files.
 *
 *   driver.h    the driver's types, numbers and symbols
 *   load.c      finding the driver library; errors in its words
 *   cuda.c      opening, closing, what a card can do, the table of operations
 *   memory.c    device memory, rings, registered host memory
 *   stream.c    streams, copies, events
 *   kernels.h   the kernels' text; compile.c compiles it at run time; expand.c launches them
 *   library.c   finding libraries of the toolkit
 *   cublas.h, dense.c, dense_kernels.h  products of matrices, for the executor */
#ifndef STHI_CUDA_H
#define STHI_CUDA_H
#include <stdatomic.h>

#include "base/thread.h"
#include "device/cuda/driver.h"
#include "stagehand/backend.h"

struct sth_event {
    cu_event handle;
    bool timing;
    atomic_bool recorded;
};

typedef struct cuda_device {
    uint32_t capabilities; /* STH_CAP_ bits */
    const cuda_driver *driver;
    int index;
    cu_device handle;
    cu_context context; /* the primary one, which PyTorch uses too */
    unsigned fork_depth;
    sthi_mutex compiling;
    bool compiled;
    cu_module module;        /* NULL: nothing was compiled */
    cu_function kernels[3][3]; /* [int8, fp8, int4][f32, bf16, f16] */
    size_t ring_granularity; /* 0: the card has no virtual memory management */
    char name[128];
} cuda_device;

static inline cuda_device *sthi_cuda_of(sth_backend_device *d) { return (cuda_device *)d; }
static inline cu_stream sthi_cuda_stream(sth_stream s) { return (cu_stream)(uintptr_t)s; }

/* load.c */
sth_status sthi_cuda_load(const cuda_driver **out); /* loads and starts the driver once per process */
/* Fails with the driver's own words; `what` says what was tried, `advice` (may be NULL) what to do. */
sth_status sthi_cuda_fail(const cuda_driver *, cu_result, const char *object, const char *what,
                          const char *advice);
sth_status sthi_cuda_fail_as(sth_status, const cuda_driver *, cu_result, const char *object, const char *what,
                             const char *advice);
/* For what ends something: a driver that has shut down has ended it already. */
void sthi_cuda_ended(const cuda_driver *, cu_result, const char *object, const char *what);

/* cuda.c: makes the device's context current. Every call but info, open and close begins with one. */
sth_status sthi_cuda_attach(const cuda_device *d); /* fails in a forked child */
/* For calls that end something: false, and no error, in a child or when the driver has shut down. */
bool sthi_cuda_attach_to_end(const cuda_device *d);
/* Waits for all work of the context, before something ends that it may use. False: it may still be going on. */
bool sthi_cuda_idle(const cuda_device *d);
sth_status sthi_cuda_enter(const cuda_device *d); /* and at the fault point for device calls */

/* memory.c */
sth_status sthi_cuda_alloc(sth_backend_device *, uint64_t bytes, sth_devptr *out);
void sthi_cuda_free(sth_backend_device *, sth_devptr, uint64_t bytes);
uint64_t sthi_cuda_ring_granularity(sth_backend_device *);
sth_status sthi_cuda_ring_alloc(sth_backend_device *, uint64_t bytes, sth_devptr *out);
void sthi_cuda_ring_free(sth_backend_device *, sth_devptr, uint64_t bytes);
sth_status sthi_cuda_host_register(sth_backend_device *, void *p, uint64_t bytes, sth_devptr *out_alias);
void sthi_cuda_host_unregister(sth_backend_device *, void *p, uint64_t bytes);
/* Properties of plain device memory on this card. */
cu_allocation_prop sthi_cuda_plain_memory(cu_device);

/* compile.c: compiles and loads the kernels. The context is current. */
sth_status sthi_cuda_compile(cuda_device *d);
/* CUDA C++ for the card at hand; sthi_f16(float) is there, a product and a sum are never contracted. *out_image is freed by
 * the caller. */
sth_status sthi_cuda_compile_text(const cuda_device *d, const char *text, char **out_image);

/* expand.c */
sth_status sthi_cuda_expand_ready(sth_backend_device *);
sth_status sthi_cuda_expand(sth_backend_device *, const sth_expand *, sth_stream);
void sthi_cuda_expand_close(cuda_device *d);

/* stream.c */
sth_status sthi_cuda_stream_create(sth_backend_device *, int priority, sth_stream *out);
void sthi_cuda_stream_destroy(sth_backend_device *, sth_stream);
sth_status sthi_cuda_stream_synchronize(sth_backend_device *, sth_stream);
sth_status sthi_cuda_copy_h2d(sth_backend_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
sth_status sthi_cuda_copy_d2h(sth_backend_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
sth_status sthi_cuda_event_create(sth_backend_device *, bool timing, sth_event **out);
void sthi_cuda_event_destroy(sth_backend_device *, sth_event *);
sth_status sthi_cuda_event_record(sth_backend_device *, sth_event *, sth_stream);
sth_status sthi_cuda_stream_wait(sth_backend_device *, sth_stream, sth_event *);
sth_status sthi_cuda_event_query(sth_backend_device *, sth_event *, bool *out_done);
sth_status sthi_cuda_event_synchronize(sth_backend_device *, sth_event *);
sth_status sthi_cuda_event_elapsed_ns(sth_backend_device *, sth_event *a, sth_event *b, int64_t *out);
#endif
