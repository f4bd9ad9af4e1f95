/* The back-end interface. A back end includes this header and base/, nothing else of ours; the rest of
 * the library reaches devices only through the sthi_dev_* calls below.
 *
 * Rules that every back end keeps (tests/contract checks them on all):
 *  - enqueueing calls never wait for the device, except where the comment says so;
 *  - work on one stream runs in order; streams are ordered only by events;
 *  - waiting on an event that was never recorded is an error here, not a no-op;
 *  - a void call that cannot do what was asked (a double free, an unknown range) changes nothing and
 *    says so in sth_last_error();
 *  - free, ring_free and stream_destroy wait for the work already enqueued that may touch what they end;
 *  - close waits for what is enqueued; owners end their memory, registrations, streams and events before;
 *  - after fork, calls in the child return INVALID_STATE and the child's close does nothing;
 *  - every call sets the device's context for the calling thread itself. */
#ifndef STHI_DEVICE_H
#define STHI_DEVICE_H
#include "base/thread.h"
#include "core/account.h"
#include "stagehand/device.h"

typedef struct sthi_event sthi_event; /* back end's own */

/* Packed bytes and the place that they expand into, both in device memory. What they mean is in stagehand/transfer.h. */
typedef struct sthi_expand {
    int encoding;            /* sth_transfer */
    int dtype;               /* sth_dtype of the values */
    uint64_t rows, cols, stride;
    sth_devptr codes, scales, zeros; /* 0: there are none */
    sth_devptr place;
    uint64_t place_bytes;
    /* The definition, on the CPU: for devices whose memory the CPU sees. */
    void (*reference)(const struct sthi_expand *);
} sthi_expand;

typedef struct sthi_device_ops {
    const char *backend;
    int (*count)(void);
    sth_status (*open)(int index, const sth_sim_options *sim, sth_device **out); /* sim: never NULL */
    void (*close)(sth_device *);
    sth_status (*info)(sth_device *, sth_device_info *out);
    int64_t (*now_ns)(sth_device *);

    /* memory */
    sth_status (*alloc)(sth_device *, uint64_t bytes, sth_devptr *out); /* 512-byte aligned */
    void (*free)(sth_device *, sth_devptr, uint64_t bytes);
    uint64_t (*ring_granularity)(sth_device *);                    /* bytes; 0: no rings */
    /* [p, p+n) and [p+n, p+2n) are the same memory; n is a multiple of the granularity. */
    sth_status (*ring_alloc)(sth_device *, uint64_t bytes, sth_devptr *out);
    void (*ring_free)(sth_device *, sth_devptr, uint64_t bytes);   /* waits for the device */
    /* Bytes in [p, p+n) are dead: sim overwrites them when poisoning, in stream order. Others: NULL. */
    void (*poison)(sth_device *, sth_devptr, uint64_t bytes, sth_stream);
    /* Pins host memory; *out_alias is the address by which kernels see it, 0 where they cannot. */
    sth_status (*host_register)(sth_device *, void *p, uint64_t bytes, sth_devptr *out_alias);
    void (*host_unregister)(sth_device *, void *p, uint64_t bytes);

    /* streams: sth_stream 0 is the caller's default stream and is never created or destroyed */
    sth_status (*stream_create)(sth_device *, int priority, sth_stream *out);
    void (*stream_destroy)(sth_device *, sth_stream);
    sth_status (*stream_synchronize)(sth_device *, sth_stream);    /* waits */

    /* copies. Host memory must stay as it is until the copy has run; pageable memory may block. */
    sth_status (*copy_h2d)(sth_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
    sth_status (*copy_d2h)(sth_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
    /* The same from memory that a framework allocated, where the device refuses what it does not know; on the
     * simulated device a tensor of the host's. Others: NULL, copy_d2h and copy_h2d take any address. */
    sth_status (*copy_d2h_foreign)(sth_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
    sth_status (*copy_h2d_foreign)(sth_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);

    /* Expansion, where STH_CAP_EXPAND; else NULL. expand_ready makes what expand needs (it may compile, once), and says
     * why there will be none: UNSUPPORTED, BACKEND_UNAVAILABLE. expand enqueues. */
    sth_status (*expand_ready)(sth_device *);
    sth_status (*expand)(sth_device *, const sthi_expand *, sth_stream);

    /* events */
    sth_status (*event_create)(sth_device *, bool timing, sthi_event **out);
    void (*event_destroy)(sth_device *, sthi_event *);
    sth_status (*event_record)(sth_device *, sthi_event *, sth_stream);
    sth_status (*stream_wait)(sth_device *, sth_stream, sthi_event *);
    sth_status (*event_query)(sth_device *, sthi_event *, bool *out_done);
    sth_status (*event_synchronize)(sth_device *, sthi_event *);   /* waits */
    /* Nanoseconds from a to b; both recorded with timing and done, else INVALID_STATE. */
    sth_status (*event_elapsed_ns)(sth_device *, sthi_event *a, sthi_event *b, int64_t *out);

    sth_status (*sim_compute)(sth_device *, sth_stream, int64_t ns); /* NULL where not simulated */
} sthi_device_ops;

/* Every back end's device struct begins with this. */
struct sth_device {
    const sthi_device_ops *ops;
    uint32_t capabilities;
    /* From here on set by sthi_device_open. */
    _Atomic int refs;
    sthi_mutex account_lock;    /* a leaf: guards the account */
    sthi_cond account_changed;  /* memory was given back, a step ended, an asker is through with a member */
    sthi_account account;       /* what the runtimes on this device occupy */
    uint64_t default_cap;
};

extern const sthi_device_ops sthi_sim_ops;
extern const sthi_device_ops sthi_cuda_ops;

/* device.c: back ends by name ("cuda:1"), and measurements that need only the table. */
const sthi_device_ops *sthi_backend_at(int i); /* NULL past the end */
void sthi_sim_options_init(sth_sim_options *options);
/* Splits "cuda:1" into a back end and an index; "cpu" is another name of "sim". */
sth_status sthi_backend_find(const char *name, const sthi_device_ops **out, int *out_index);
void sthi_device_retain(sth_device *d);
void sthi_device_release(sth_device *d); /* closes with the last reference; NULL is fine */
sth_status sthi_device_open(const char *name, const sth_sim_options *sim, sth_device **out);
sth_status sthi_device_measure_h2d(sth_device *d, uint64_t bytes, int repeats, bool pinned, double *out);
#endif
