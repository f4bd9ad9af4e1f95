/* stagehand/backend.h - what a device is made of: the table of calls that a back end fills.
 *
 * For those who bring a device of their own; users of devices need only stagehand/device.h.
 *
 * Life: the library takes a table -> open() for each sth_device_open() -> any of the calls below, from any
 * thread -> close(), when nothing of the device is left.
 *
 * Rules that every back end keeps; the library relies on each (tests/device/contract.c checks them):
 *  - Threads: every entry may be called from any thread, several at once. The call itself sets the
 *    driver's state of the thread (a current context). Using one event from two threads at once, and
 *    ending an object while it is used, are for the caller to avoid.
 *  - Blocks: enqueueing calls never wait for the device, except where the line says so.
 *  - Order: work on one stream runs in the order of its calls; streams are ordered only by events. Stream 0 is
 *    the caller's default stream; it is never created nor destroyed.
 *  - Waiting on an event, or asking for one, that was never recorded is INVALID_STATE, not a no-op.
 *  - A recording replaces the event's earlier one. Waits already enqueued keep the recording that they met, also
 *    when the event is recorded again or destroyed.
 *  - Failure: a call that fails sets the thread's record with sth_error_set(status, the back end's name, the
 *    driver's code, object, message) and returns that status; it has changed nothing, and outputs are set only on
 *    success. A void call that cannot do what was asked (a double free, an unknown range) changes nothing and
 *    sets the record.
 *  - Ownership: what alloc, ring_alloc, stream_create and event_create give is the caller's until the call that
 *    ends it. The library gives back all of it, and its registrations, before close.
 *  - free, ring_free, host_unregister and stream_destroy wait for the work already enqueued that may touch what
 *    they end. Ending 0 or NULL does nothing.
 *  - After fork() calls in the child return INVALID_STATE, and what ends something does nothing there.
 *  - Nothing aborts the program, nothing is printed, and no entry calls back into the library but for sth_error_set.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_BACKEND_H
#define STAGEHAND_BACKEND_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when a table that was right becomes wrong: when an entry changes its meaning, moves or
 * goes. New entries come at the end, are optional, and leave it as it is: `size` says which of
 * them a table has. */
#define STH_BACKEND_ABI 1

typedef struct sth_backend_device sth_backend_device; /* a device that is open; the back end's own */
typedef struct sth_event sth_event;                   /* the back end's own */

/* Packed bytes and the place that they expand into, both in device memory. stagehand/transfer.h
 * defines their meaning. */
typedef struct sth_expand {
    int encoding;                    /* sth_transfer */
    int dtype;                       /* sth_dtype of the values */
    uint64_t rows, cols, stride;     /* elements, elements, bytes from one packed row to the next; LOSSLESS, for
                                        devices with STH_CAP_EXPAND_LOSSLESS alone: 1 row of `stride` bytes */
    sth_devptr codes, scales, zeros; /* 0: there are none */
    sth_devptr place;
    uint64_t place_bytes;
    /* The definition, on the CPU: for devices whose memory the CPU sees. Addresses are read as
     * the CPU's. */
    void (*reference)(const struct sth_expand *);
    /* FILE_INT4 and FILE_NVFP4, for devices with STH_CAP_EXPAND_FILES alone; as in sth_segment. */
    sth_devptr up, down, smooth; /* 0: there is none */
    uint64_t pitch;
    uint32_t rank, group, hadamard;
    float factor;
} sth_expand;

/* One back end. Entries are required, or belong to a capability: they are there if any device of
 * the back end has it, and are only called on devices whose capabilities() says so. Optional
 * ones may be NULL. */
typedef struct sth_backend_ops {
    uint32_t abi;         /* STH_BACKEND_ABI */
    size_t size;          /* sizeof(sth_backend_ops), as the back end was compiled */
    /* the name before the ":" in "cuda:1": lower-case letters, digits, "_", "-"; up to 15 */
    const char *backend;

    /* ---- opening: required */

    /* How many devices there are. 0 with the reason in the record where the driver is missing.
     * Blocks: for driver start-up. */
    int (*count)(void);
    /* Opens the index-th device, counted from 0. sim: the simulated device's options, never
     * NULL; others ignore them. Each call gives a device of its own. BACKEND_UNAVAILABLE where
     * there is none. Blocks: for start-up. */
    sth_status (*open)(int index, const sth_sim_options *sim, sth_backend_device **out);
    /* Blocks: until all that is enqueued has run. */
    void (*close)(sth_backend_device *);
    /* STH_CAP_ bits. The same at every call; also in a child after fork(). */
    uint32_t (*capabilities)(sth_backend_device *);
    sth_status (*info)(sth_backend_device *, sth_device_info *out);
    /* The device's clock in nanoseconds; never goes back. */
    int64_t (*now_ns)(sth_backend_device *);

    /* ---- memory: required */

    /* Aligned to 512 bytes, at least 1 byte, not cleared. OUT_OF_DEVICE_MEMORY with the bytes
     * asked for. */
    sth_status (*alloc)(sth_backend_device *, uint64_t bytes, sth_devptr *out);
    /* bytes: as allocated. Blocks: for work enqueued on any stream. */
    void (*free)(sth_backend_device *, sth_devptr, uint64_t bytes);

    /* ---- streams: required */

    /* Ordered with no other stream, the default one included. priority: lower is more urgent, 0
     * the default; a hint. */
    sth_status (*stream_create)(sth_backend_device *, int priority, sth_stream *out);
    void (*stream_destroy)(sth_backend_device *, sth_stream);           /* Blocks: for its work */
    sth_status (*stream_synchronize)(sth_backend_device *, sth_stream); /* Blocks: for its work */

    /* ---- copies: required. 0 bytes: nothing happens. Host memory must stay as it is until the
     * copy has run; a copy from or to host memory that is not registered may block. */

    sth_status (*copy_h2d)(sth_backend_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
    sth_status (*copy_d2h)(sth_backend_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);

    /* ---- events: required */

    /* timing: may be given to event_elapsed_ns. */
    sth_status (*event_create)(sth_backend_device *, bool timing, sth_event **out);
    void (*event_destroy)(sth_backend_device *, sth_event *);
    sth_status (*event_record)(sth_backend_device *, sth_event *, sth_stream);
    /* what follows on the stream waits */
    sth_status (*stream_wait)(sth_backend_device *, sth_stream, sth_event *);
    sth_status (*event_query)(sth_backend_device *, sth_event *, bool *out_done);
    /* Blocks: until it has happened */
    sth_status (*event_synchronize)(sth_backend_device *, sth_event *);
    /* Nanoseconds from a to b; both recorded with timing and done, else INVALID_STATE. */
    sth_status (*event_elapsed_ns)(sth_backend_device *, sth_event *a, sth_event *b, int64_t *out);

    /* ---- registered host memory: STH_CAP_PINNED_HOST */

    /* Pins host memory for asynchronous copies by every device; whole pages. *out_alias is the
     * address by which kernels see it, 0 without STH_CAP_MAPPED_HOST. OUT_OF_PINNED_MEMORY at a
     * limit, INVALID_ARGUMENT where some of it is registered already. */
    sth_status (*host_register)(sth_backend_device *, void *p, uint64_t bytes, sth_devptr *out_alias);
    void (*host_unregister)(sth_backend_device *, void *p, uint64_t bytes); /* as registered */

    /* ---- rings: STH_CAP_RING. [p, p+n) and [p+n, p+2n) are the same memory. */

    /* bytes; n is a multiple of it; 0 on a device without rings */
    uint64_t (*ring_granularity)(sth_backend_device *);
    sth_status (*ring_alloc)(sth_backend_device *, uint64_t bytes, sth_devptr *out);
    /* Blocks: for the device */
    void (*ring_free)(sth_backend_device *, sth_devptr, uint64_t bytes);

    /* ---- expansion of packed bytes: STH_CAP_EXPAND */

    /* Makes what expand needs, and says why there will be none: UNSUPPORTED,
     * BACKEND_UNAVAILABLE. Blocks: while it compiles, once. */
    sth_status (*expand_ready)(sth_backend_device *);
    /* enqueues; *e is copied */
    sth_status (*expand)(sth_backend_device *, const sth_expand *, sth_stream);

    /* ---- STH_CAP_GRAPH_CAPTURE has no entries: with it, copies and events may be enqueued on a
     * stream that is being captured. STH_CAP_PEER_TO_PEER has none yet: it says that the copies
     * above take addresses of other devices. */

    /* ---- optional, of no capability */

    /* Bytes in [p, p+n) are dead: overwrites them in stream order, so that late readers are
     * found. */
    void (*poison)(sth_backend_device *, sth_devptr, uint64_t bytes, sth_stream);
    /* Copies whose device side is memory that a framework allocated, for devices that refuse in
     * copy_d2h and copy_h2d what they did not allocate. NULL: copy_d2h and copy_h2d take any
     * address. */
    sth_status (*copy_d2h_foreign)(sth_backend_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
    sth_status (*copy_h2d_foreign)(sth_backend_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
    /* Simulated devices: the stream is busy for so long. */
    sth_status (*sim_compute)(sth_backend_device *, sth_stream, int64_t ns);
} sth_backend_ops;

/* Takes a back end that is compiled into the program: its devices are then "name", "name:1"
 * wherever a device is named. The table is checked and copied; what its entries point to must
 * stay for the life of the process. The same table again: nothing happens. Returns
 * INVALID_ARGUMENT with the entry that is missing, UNSUPPORTED for another version of the table,
 * INVALID_STATE where the name is taken. */
STH_API sth_status sth_backend_register(const sth_backend_ops *table);

/* ---- back ends in shared objects */

/* The functions that the library hands to a shared object, which therefore need not link with it. */
typedef struct sth_backend_host {
    uint32_t abi;  /* STH_BACKEND_ABI of the library */
    size_t size;   /* sizeof(sth_backend_host) in the library; members come at the end */
    /* sth_error_set */
    sth_status (*error_set)(sth_status status, const char *domain, long native_code, const char *object,
                            const char *message);
} sth_backend_host;

/* A shared object exports a function of this type under this name. *host stays for the life of
 * the process. It returns its table, which stays too and is the same at every call; or NULL,
 * with the reason through host->error_set, where it cannot serve host->abi. It is called under a
 * lock: it must not call the library. */
typedef const sth_backend_ops *sth_backend_entry(const sth_backend_host *host);
sth_backend_entry stagehand_backend; /* the shared object's, where it is one */
#define STH_BACKEND_ENTRY "stagehand_backend"

/* Loads a back end from a shared object, for the life of the process. path holds a "/": nothing
 * is looked for by name, nor in the current directory. NULL: the absolute paths that the
 * environment variable STAGEHAND_BACKENDS names, with ":" between them; this also happens when a
 * device is asked for that nobody knows. The same file again: nothing happens. *out_name (may be
 * NULL) is the back end's name, for the life of the process; untouched for the environment.
 * Returns BACKEND_UNAVAILABLE with the loader's reason, INVALID_ARGUMENT for a bare name or, in
 * the environment, a relative path; and as sth_backend_register. Threads: any. Blocks: while
 * files are read. Allocates: host memory. */
STH_API sth_status sth_backend_load(const char *path, const char **out_name);

/* ---- decorators and traces. docs/backends.md lists what may stand before a device's name, such
 * as "check+sim". */

typedef struct sth_replay_report {
    size_t size;         /* sizeof(sth_replay_report), set by the caller */
    uint64_t calls;      /* that were made */
    uint64_t skipped;    /* that use what was not made here because its call failed, or run out of it, or end what the
                            trace never knew */
    uint64_t different;  /* calls whose status is not the one in the trace */
    char first_different[256]; /* line, call and both statuses; "" where there is none */
} sth_replay_report;

/* Makes the calls of a trace, which "trace(file=PATH)+..." wrote, on another device: same calls,
 * same order, on one thread. Host memory has the sizes that it had, not the bytes; an expansion by
 * the CPU leaves its place as it is. Objects that the trace leaves alive are ended. Failing calls
 * are counted, not an error; returns CORRUPT_DATA with the line where the file is no trace,
 * NOT_FOUND or IO where it cannot be read, OUT_OF_HOST_MEMORY. Threads: any. Blocks: for all of it.
 * Allocates: host memory, and what the calls do. */
STH_API sth_status sth_trace_replay(const char *path, sth_device *device,
                                    sth_replay_report *out_report);

#ifdef __cplusplus
}
#endif
#endif
