/* stagehand/device.h - devices: what they are, what they can do, and how to open one.
 *
 * Life: sth_device_open() -> pass it to sth_runtime_create() -> sth_device_close().
 * A device may serve several runtimes; they keep it alive.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_DEVICE_H
#define STAGEHAND_DEVICE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_device sth_device;

/* A stream of the device: CUstream or hipStream_t as an integer; 0 is the default stream. On the
 * simulated device 0 is the calling thread itself: waiting on it blocks the caller. */
typedef uint64_t sth_stream;
/* An address in device memory. */
typedef uint64_t sth_devptr;

/* Capabilities of a device. Ask for these, never for a vendor's name. */
enum {
    STH_CAP_PINNED_HOST = 1u << 0,   /* host memory can be registered for asynchronous copies */
    STH_CAP_MAPPED_HOST = 1u << 1,   /* registered host memory is readable by kernels */
    STH_CAP_RING = 1u << 2,          /* memory can be mapped twice in a row (see device ring) */
    STH_CAP_PEER_TO_PEER = 1u << 3,
    STH_CAP_GRAPH_CAPTURE = 1u << 4,
    /* host and device share one memory: offloading gains nothing */
    STH_CAP_UNIFIED_MEMORY = 1u << 5,
    STH_CAP_VIRTUAL_TIME = 1u << 6,  /* time is computed, not spent */
    STH_CAP_EXPAND = 1u << 7,        /* may expand packed bytes by kernels (transfer.h); whether a compiler for them is
                                        at hand is found out when they are first needed */
    STH_CAP_HOST_IS_DEVICE = 1u << 8,/* no card: host memory stands for device memory, the CPU reads and writes it, and
                                        a framework's tensors on the device are those on the host */
    /* events and streams may be used by every device opened on the same card */
    STH_CAP_SHARED_EVENTS = 1u << 9,
    STH_CAP_EXPAND_FILES = 1u << 10, /* with EXPAND: also what files hold in 4 bits (FILE_INT4, FILE_NVFP4) */
    STH_CAP_EXPAND_LOSSLESS = 1u << 11 /* with EXPAND: also LOSSLESS */
};

/* Options of the simulated device. All other back ends ignore them. */
typedef struct sth_sim_options {
    size_t size;                /* sizeof(sth_sim_options), set by sth_sim_options_init */
    uint64_t memory_bytes;      /* capacity; allocations beyond it fail. Default 8 GiB */
    /* host-to-device and device-to-host rate, each. 0 = as fast as memcpy */
    uint64_t link_bytes_per_s;
    int64_t copy_latency_ns;    /* added to each copy; up to an hour. Default 2000 */
    /* no threads and no sleeping: copies happen when their time has come */
    bool virtual_time;
    /* overwrite freed and evicted memory with 0xFF bytes (NaN). Default true */
    bool poison;
    /* as a card without a run-time compiler: packed bytes are expanded by the host */
    bool no_expand;
    uint64_t pin_limit_bytes;   /* registering more host memory than this fails. 0 = no limit */
    uint64_t expand_bytes_per_s; /* at which packed bytes become those of places. Default 1.024e12 */
} sth_sim_options;
STH_API void sth_sim_options_init(sth_sim_options *options);

typedef struct sth_device_info {
    char name[128];         /* "sim", or what the driver calls the card */
    char backend[16];       /* "sim", "cuda", "hip" */
    int index;              /* ordinal within the back end */
    uint32_t capabilities;  /* STH_CAP_ bits */
    uint64_t memory_total;  /* bytes */
    uint64_t memory_free;   /* bytes, at the time of the call */
    int driver_version;     /* as the driver reports it; 0 for sim */
} sth_device_info;

/* Opens "sim" (also "cpu"), "cuda", "cuda:1", "hip", or a device of another back end
 * (backend.h). `sim` may be NULL (defaults) and is read only for the simulated device. The CUDA
 * driver is libcuda.so.1 as the loader finds it, or the absolute path in the environment
 * variable STAGEHAND_CUDA_LIBRARY; the HIP runtime is the libamdhip64.so that the process has
 * loaded, or as the loader finds it, or the absolute path in STAGEHAND_HIP_LIBRARY. Returns
 * BACKEND_UNAVAILABLE with the reason when the driver or the card is missing. Threads: any.
 * Blocks: for driver start-up. Allocates: host memory. */
STH_API sth_status sth_device_open(const char *name, const sth_sim_options *sim,
                                   sth_device **out_device);

/* Gives back a reference; NULL is fine. The last one closes the device.
 * Threads: any. Blocks: the last one, until the device's streams are idle. */
STH_API void sth_device_close(sth_device *device);

/* Threads: any. Blocks: no. Allocates: no. */
STH_API sth_status sth_device_info_get(sth_device *device, sth_device_info *out_info);

/* Number of devices of a back end ("sim", "cuda", "hip"); 0 with a reason in sth_last_error()
 * when the driver is missing. Threads: any. Blocks: for driver start-up. */
STH_API int sth_device_count(const char *backend);

/* Name of the i-th back end: those compiled in, then those registered or loaded (backend.h),
 * those that the environment names included. NULL past the end. Threads: any. Blocks: while
 * files are read. */
STH_API const char *sth_backend_name(int i);

/* Measures host-to-device bandwidth with pinned memory (or pageable where `pinned` is false):
 * `bytes` per copy, median of `repeats`. Result in bytes per second.
 * Threads: any. Blocks: for the duration of the copies. Allocates: host and device memory. */
STH_API sth_status sth_device_measure_h2d(sth_device *device, uint64_t bytes, int repeats,
                                          bool pinned, double *out_bytes_per_s);

/* Bytes per second, with pinned memory. */
typedef struct sth_link_rates {
    double up, down; /* from the host to the device and back, each alone */
    double both;     /* of copies up and down at the same time, the two together */
    double pin;      /* of pinning memory that holds values; 0: it took no time that shows */
} sth_link_rates;

/* Measures the link in both directions and the rate of pinning: `bytes` (2 or more) per copy,
 * medians of `repeats` (1 to 10000). Returns as sth_device_measure_h2d does; UNSUPPORTED and
 * OUT_OF_PINNED_MEMORY where memory cannot be pinned. *out_rates is set on success alone.
 * Threads: any. Blocks: for the duration of the copies. Allocates: host and device memory, `bytes`
 * of each. */
STH_API sth_status sth_device_measure_link(sth_device *device, uint64_t bytes, int repeats,
                                           sth_link_rates *out_rates);

/* Plain device memory, 512-byte aligned, counted against the device's capacity. Returns
 * OUT_OF_DEVICE_MEMORY with the bytes asked and free. Threads: any. Blocks: free does, for
 * enqueued work that may touch the memory. Allocates: device memory. */
STH_API sth_status sth_device_alloc(sth_device *device, uint64_t bytes, sth_devptr *out_address);
STH_API void sth_device_free(sth_device *device, sth_devptr address, uint64_t bytes);

/* Counted ownership, for objects that must outlive their maker: sth_device_open returns one
 * reference, sth_device_close gives one back, and the device goes with the last. Arenas and
 * runtimes keep their own. */
STH_API void sth_device_retain(sth_device *device);

/* Simulated device only: the next `ns` (up to an hour) of work on `stream` (compute). In real
 * time on stream 0 this spends the time on the calling thread; in virtual time it advances the
 * clock. Returns UNSUPPORTED on other devices. Blocks: in real time on stream 0, for `ns`. */
STH_API sth_status sth_sim_compute(sth_device *device, sth_stream stream, int64_t ns);

/* The device's own clock in nanoseconds: wall time, or virtual time where STH_CAP_VIRTUAL_TIME. */
STH_API int64_t sth_device_now_ns(sth_device *device);

#ifdef __cplusplus
}
#endif
#endif
