/* stagehand/runtime.h - stream the units of one model through a device.
 *
 * Life:
 *     sth_runtime_create -> sth_runtime_add_unit (each) -> sth_runtime_seal
 *     every step: sth_step_begin -> { sth_unit_acquire -> your kernels -> sth_lease_release } -> sth_step_end
 *     training:   the same with sth_step_pause behind the backward pass, and sth_step_end before the next forward
 *     sth_runtime_destroy
 *
 * A unit is what is used together: a layer, or a block. Its bytes come from a host image (usually in
 * an arena, see arena.h) or from file ranges. On the device a unit occupies a place; between acquire and
 * release the place holds the unit and nothing else may write there. Copies run on streams of the
 * runtime's own; ordering is done by events on the device, so neither acquire nor release waits for the
 * device. The first step runs on a guessed order and is recorded; from the second on the order is known
 * and planned (plan.h). A step that deviates is served on demand, stays correct, and is planned again.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no, but for the runtime's lock, which a
 * thread that ends a step or changes the plan may hold while the device finishes copies. Allocates: no. In a forked
 * child calls return INVALID_STATE, those without a status and destroy do nothing, and telemetry is the parent's to
 * write. */
#ifndef STAGEHAND_RUNTIME_H
#define STAGEHAND_RUNTIME_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/arena.h"
#include "stagehand/checkpoint.h"
#include "stagehand/device.h"
#include "stagehand/plan.h"
#include "stagehand/pool.h"
#include "stagehand/status.h"
#include "stagehand/store.h"
#include "stagehand/transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_runtime sth_runtime;

/* X(name, spelling): states of a unit. docs/states.md draws the edges. */
#define STH_UNIT_STATE_LIST(X)         \
    X(UNLOADED, "unloaded")            \
    X(HOST_STAGED, "host_staged")      \
    X(PREFETCHING, "prefetching")      \
    X(GPU_READY, "gpu_ready")          \
    X(EVICTING, "evicting")            \
    X(GPU_FREEING, "gpu_freeing")
typedef enum sth_unit_state {
#define STH_UNIT_STATE_ENUM(name, text) STH_UNIT_STATE_##name,
    STH_UNIT_STATE_LIST(STH_UNIT_STATE_ENUM)
#undef STH_UNIT_STATE_ENUM
        STH_UNIT_STATE_COUNT
} sth_unit_state;

typedef enum sth_policy {
    STH_POLICY_PLANNED, /* resident set, ring and copy order from the planner */
    STH_POLICY_STATIC   /* fixed lookahead, watermarks, eviction by distance to next use x size */
} sth_policy;

/* Device memory for places. NULL functions mean the device's own allocator. Called with the
 * runtime's lock held, from any thread that calls into the runtime; must not call back into it. */
typedef struct sth_allocator {
    /* 512-byte aligned */
    sth_status (*alloc)(void *context, uint64_t bytes, sth_devptr *out_address);
    void (*free)(void *context, sth_devptr address, uint64_t bytes);
    void (*trim)(void *context); /* gives back to the device what it keeps unused; NULL: it keeps nothing. Called
                                    when the device refuses memory that only the device can give (a ring) */
    void *context;
} sth_allocator;

#define STH_READERS_AUTO UINT32_MAX

typedef struct sth_runtime_options {
    size_t size;               /* sizeof(sth_runtime_options), set by init */
    /* bytes on the device for the model: units, ring, `reserved`. Required */
    uint64_t budget;
    uint64_t reserved;         /* the part of the budget that the caller fills itself. Default 0 */
    uint64_t least_room;       /* bytes for units that the caller knows it cannot do without: of those that it leases
                                  while it holds others. Default 0: what the planner needs for the largest one */
    const char *name;          /* of the model, for messages; copied. NULL: "model" */
    sth_policy policy;         /* default STH_POLICY_PLANNED */
    uint32_t prefetch_window;  /* static policy: units prefetched. Default 3 */
    uint64_t high_watermark;   /* static policy: bytes, counted as the budget is. If the next missing unit would take
                                  more, units are evicted down to the low one. 0, or above the budget: the budget */
    uint64_t low_watermark;    /* static policy: bytes, counted as the budget is, less than the high one. 0: 3/4 of the
                                  high one; where neither is given units leave only as places are needed */
    double link_bytes_per_s;   /* 0 = measured at seal, and followed when steps see another rate */
    uint64_t chunk_bytes;      /* copies start in pieces of this size; 0 = chosen from the budget */
    uint32_t reader_threads;   /* for file and pageable sources. Default STH_READERS_AUTO: by the ways in which the
                                  files are read; 0: the caller's thread reads (one all the same with `pool`) */
    uint64_t staging_bytes;    /* pinned slabs for file and pageable sources; 0 = chosen */
    uint64_t ram_budget;       /* bytes of host memory, beside the slabs, in which units of files are kept so that they
                                  are read once only; chosen at seal from what the plan does not keep on the
                                  device. Default 0 */
    sth_pool *pool;            /* slabs to use instead of own ones; must outlive the runtime. NULL = own,
                                  made only when a unit needs staging */
    int copy_priority;         /* stream priority, lower is more urgent. Default -1 */
    uint32_t stages;           /* device buffers in which packed bytes arrive (budget.h), each as large as the largest
                                  segment: STH_BUDGET_STAGES to STH_BUDGET_MOST_STAGES, the default is the former */
    bool read_only;            /* the caller will not write host images between steps without
                                  sth_unit_mark_written: writable units are prefetched across steps */
    /* seal takes no memory: the first step does, or what residency.h offers */
    bool parked;
    sth_allocator allocator;
    const char *telemetry_path; /* JSONL file to append to; NULL = none */
    uint64_t telemetry_max_bytes; /* the file is not grown beyond this. Default 64 MiB */
} sth_runtime_options;
STH_API void sth_runtime_options_init(sth_runtime_options *options);

/* Keeps the device alive. Returns BUDGET_TOO_SMALL when other runtimes of the device
 * (residency.h) leave less than `reserved`. Threads: any. Blocks: for runtimes that give way for
 * it. Allocates: host memory. */
STH_API sth_status sth_runtime_create(sth_device *device, const sth_runtime_options *options,
                                      sth_runtime **out_runtime);

/* Ends the runtime: waits for its copies, frees device memory except places still leased, which
 * go when their leases do. NULL is fine. Threads: one, once. Blocks: for copies in flight. */
STH_API void sth_runtime_destroy(sth_runtime *runtime);

enum {
    /* its host image may change between steps: never copied across them */
    STH_UNIT_WRITABLE = 1u << 8,
    STH_UNIT_WATCHED = 1u << 9,  /* the image hardly ever changes between steps: copied across them, and
                                    compared by a sampled fingerprint before such a copy is used, as those
                                    of WRITABLE units are. A difference that is found with
                                    options.read_only is an error */
    STH_UNIT_ASIDE = 1u << 10,   /* the caller uses parts of it by other means (rows.h): not in the first order, and no
                                    plan or smallest budget counts it, until sth_runtime_set_aside. It may be acquired
                                    all the same, where there is room */
    STH_UNIT_IDLE = 1u << 11     /* nobody uses it at first: it has no part in the first order */
};

/* A tensor of a unit: where it begins in the place. */
typedef struct sth_unit_tensor {
    const char *name;      /* copied */
    uint64_t place_offset; /* bytes */
} sth_unit_tensor;

typedef struct sth_unit_desc {
    const char *name;      /* copied */
    const char *group;     /* block or model part, for reports; may be NULL; copied */
    uint64_t bytes;        /* size of the place; rounded up to 512 */
    /* STH_UNIT_KEEP, STH_UNIT_WRITABLE, STH_UNIT_WATCHED, STH_UNIT_ASIDE, STH_UNIT_IDLE; STH_UNIT_EITHER of LOSSLESS
     * ones whose `master` is pinned: the plan chooses which of both images is copied */
    uint32_t flags;
    /* one source: */
    /* image of the place in host memory, or NULL. Must outlive the runtime */
    const void *host;
    /* the arena that holds `host`, or NULL: then it is staged through slabs */
    sth_arena *arena;
    sth_checkpoint *checkpoint; /* for `ranges`; must outlive the runtime */
    const sth_file_range *ranges; /* copied */
    uint32_t range_count;
    /* for `ranges`, which then name layers (store.h); must outlive the runtime */
    sth_store *store;
    /* Its bytes cross the link packed (transfer.h): then `host`, or what the ranges make, is the
     * packed image. Without STH_CAP_EXPAND, or a compiler for it, the host expands. */
    const sth_segment *segments; /* copied; NULL: not packed */
    uint32_t segment_count;
    uint64_t packed_bytes;       /* size of the packed image */
    const sth_unit_tensor *tensors; /* copied; in the order of the place. For errors, which name the unit alone
                                       without, and for samples of an image, which each of them has */
    uint32_t tensor_count;
    const void *master;          /* image of the place that `host` was encoded from, or NULL: then the unit is not
                                    watched. Must outlive the runtime. When it was written, `host` is encoded again */
} sth_unit_desc;

/* Before seal only. Units are numbered 0, 1, 2, ...; the order is the first guess at the order
 * of use. Returns INVALID_ARGUMENT naming the unit; INVALID_STATE after seal;
 * OUT_OF_HOST_MEMORY. Threads: one at a time. Allocates: host memory. */
STH_API sth_status sth_runtime_add_unit(sth_runtime *runtime, const sth_unit_desc *desc,
                                        uint32_t *out_unit);

/* Plans on the guessed order, allocates device memory, starts loading. If other runtimes of the
 * device (residency.h) leave less than the smallest budget, memory is allocated with the first
 * step. Returns BUDGET_TOO_SMALL (names the unit, its bytes and the smallest budget),
 * OUT_OF_DEVICE_MEMORY, ... On failure the runtime can only be destroyed. Threads: one. Blocks: for
 * device allocation and the link measurement. Allocates: host and device memory, pinned slabs where
 * a unit needs staging. */
STH_API sth_status sth_runtime_seal(sth_runtime *runtime);

/* Steps. Acquiring outside a step begins one. Threads: any, one at a time. Begin drops copies of
 * images that were marked written: they come again in the order of use. Pause is the end of a
 * step as far as writable host images go: none is read any more, and none will be before the
 * next acquire or begin. An acquire goes on with the step, which ends when sth_step_end says so:
 * its order then holds several passes (training: forward, backward, backward). Without an open
 * step pause only waits. Blocks: begin no; pause and end for copies that still read writable
 * host images; end, when a new plan needs other memory, for the work on what it gives back;
 * begin and end for a write to the telemetry file, now and then. Allocates: end, when it plans.
 * A telemetry file that cannot be written is an IO of the end of a step, once, when the step has
 * ended: steps go on, and sth_runtime_stats.telemetry_lost counts the records that the file does
 * not have. */
STH_API sth_status sth_step_begin(sth_runtime *runtime);
STH_API sth_status sth_step_pause(sth_runtime *runtime);
STH_API sth_status sth_step_end(sth_runtime *runtime);

/* Says that uses of the open step are from now on those of a backward, or of a forward again. A
 * step begins with forward; without an open step the call does nothing. Recordings name uses by it
 * (timeline.h); nothing else depends on it. */
STH_API sth_status sth_step_mark_backward(sth_runtime *runtime, bool backward);

/* A counted use of a unit on the device: a small value; copies of it are the same lease. */
typedef struct sth_lease {
    sth_devptr address; /* start of the place */
    uint64_t generation;
    uint32_t slot;
    uint32_t unit;
} sth_lease;

/* Makes `stream` wait until the unit is in its place and keeps it there. Returns
 * BUDGET_TOO_SMALL when what is leased leaves no room (names the unit and the smallest budget),
 * IO, CORRUPT_DATA, CHANGED_DATA from its source, SHUT_DOWN, DEVICE_ERROR. Threads: any. Blocks:
 * only while the unit's bytes come from disk or pageable memory and are not read yet (counted as
 * host waits); on stream 0 of the simulated device, which is the calling thread, until the
 * unit's copy is done. Allocates: no. */
STH_API sth_status sth_unit_acquire(sth_runtime *runtime, uint32_t unit, sth_stream stream,
                                    sth_lease *out_lease);

/* Ends a lease. Only queues: the next call of acquire, poll, begin or end records the events
 * behind the work enqueued by then and refills the place, so streams that used the unit must
 * stay until then. Safe where locks are not (destructors, any thread), also after
 * sth_runtime_destroy. A lease may be released once. Threads: any. Blocks: no; takes no lock. */
STH_API void sth_lease_release(sth_runtime *runtime, const sth_lease *lease);

/* Handles queued releases and issues the copies that have become possible. Blocks: no. */
STH_API sth_status sth_runtime_poll(sth_runtime *runtime);

/* Gathers what is free: all device memory of the places becomes one piece, in which units that
 * are leased one after the other, and held together, fit where their sum does. For when acquire
 * says that there is no room though there should be. They come on demand then; the plan is made
 * again when the step ends. Does nothing while anything is leased. bytes: at least needed of it.
 * Returns OUT_OF_DEVICE_MEMORY, SHUT_DOWN, DEVICE_ERROR. Threads: any. Blocks: for the work on
 * what is there. */
STH_API sth_status sth_runtime_gather(sth_runtime *runtime, uint64_t bytes);

/* The unit's host image was changed: its copy on the device is renewed before the next use.
 * Plans count with units for which this is said between steps again and again, as an optimizer's
 * (docs/runtime.md). */
STH_API sth_status sth_unit_mark_written(sth_runtime *runtime, uint32_t unit);

/* The unit's bytes are at `host` from now on, as large as its place, in `arena` (NULL: pageable,
 * where the runtime stages something already). After seal. A unit of a checkpoint is not read
 * from its files any more, and is WATCHED. `host` is the master of a packed unit with a host
 * image; the caller keeps that memory. The old image is not read any more when the call returns;
 * its arena is freed. The copy on the device is renewed before its next use. Returns
 * INVALID_ARGUMENT, SHUT_DOWN, and UNSUPPORTED for a unit that is packed in its file, and when
 * the image would have to be staged and the runtime has no slabs; all then stays as it was.
 * Threads: any. Blocks: for copies and reads under way. */
STH_API sth_status sth_unit_set_host(sth_runtime *runtime, uint32_t unit, const void *host,
                                     sth_arena *arena);

/* Plain images beside packed ones, so that host memory holds a plain one only while it is looked at.
 * After seal. All return INVALID_ARGUMENT, INVALID_STATE and SHUT_DOWN. Threads: any.
 *
 * give: a packed unit with a host image has its plain image at `master` from now on, which holds
 * what the packed one says, bit for bit: as if it had been added with that master, WATCHED. Nothing
 * is copied again for it. The memory is the caller's, until it is said to have been dropped or the
 * runtime ends. INVALID_STATE: it has one.
 *
 * drop: the master is to go once the packed image says all that it holds; nobody writes it from now
 * on. Where they differ the image is encoded again before its next use. Values that have no room in
 * it keep their master. INVALID_STATE: it has none.
 *
 * keep: it is not to go any more, since somebody looks at it again. *out_kept: whether the runtime
 * has it still; where not, both hold the same, and it may be given. Blocks: for a comparison under
 * way. */
STH_API sth_status sth_unit_give_master(sth_runtime *runtime, uint32_t unit, const void *master);
STH_API sth_status sth_unit_drop_master(sth_runtime *runtime, uint32_t unit);
STH_API sth_status sth_unit_keep_master(sth_runtime *runtime, uint32_t unit, bool *out_kept);

/* The units whose master went since it was asked last, at most `capacity`. Starts the thread that
 * compares masters which are to go: to be called before each step while there are such.
 * Threads: any. Blocks: with `wait` for that thread, which ends when nothing is left that may be
 * the same. Allocates: a thread. */
STH_API sth_status sth_runtime_dropped_masters(sth_runtime *runtime, bool wait, uint32_t *units,
                                               uint32_t capacity, uint32_t *out_count);

/* Code of the caller's has run that may have written host images without saying so: WRITABLE and
 * WATCHED units are compared again at their next use. The begin of a step implies it. Threads:
 * any. Blocks: no. */
STH_API sth_status sth_runtime_fence(sth_runtime *runtime);

/* Code of the caller's is about to run that may write host images, as behind a forward: waits
 * until the copies behind which uses are enqueued have read theirs. Copies for uses to come are
 * left alone; they are compared at their use. The end of a step, and a pause, imply it. With
 * options.read_only it does nothing. Threads: any. Blocks: for copies in flight. */
STH_API sth_status sth_runtime_pass_end(sth_runtime *runtime);

/* Waits until every copy issued so far has read its host image: after it images may be written.
 * Drops what was prefetched of writable units. Blocks: for copies in flight. */
STH_API sth_status sth_runtime_synchronize(sth_runtime *runtime);

/* Between steps. Returns BUDGET_TOO_SMALL (and keeps the old budget) or INVALID_STATE inside a
 * step. If a larger budget is not free, the next step asks idle runtimes of the device for it
 * (residency.h). Blocks: for copies in flight. Allocates: device memory, and scratch. */
STH_API sth_status sth_runtime_set_budget(sth_runtime *runtime, uint64_t budget);

/* If the device refuses a part of the budget, because others have the memory, the runtime plans
 * with less (sth_runtime_stats.budget_cuts). The caller asks for the rest again when the device has
 * it, before a step: missing_budget says how many bytes that is, and 0 where nothing is missing, a
 * lease is held, or the last time is too short ago: half a second, and twice as long after each
 * refusal, up to 64 s. now_ns: on any steady clock. ask_again returns STH_OK also where less is
 * had; INVALID_STATE inside a step, SHUT_DOWN, and errors of the device. Blocks, Allocates:
 * ask_again as set_budget. */
STH_API uint64_t sth_runtime_missing_budget(sth_runtime *runtime, int64_t now_ns);
STH_API sth_status sth_runtime_ask_again(sth_runtime *runtime, int64_t now_ns);

/* These units are aside from now on (STH_UNIT_ASIDE), or no more. Between steps, or in one that is
 * paused, which ends. The order is guessed again: that in which units were added. Places follow at
 * once where nothing is leased, else with the plan of a later step's end. If the budget does not
 * hold units that come back, the next plan fails. Returns INVALID_ARGUMENT, INVALID_STATE inside a
 * step or before seal, SHUT_DOWN; what sth_step_end returns. Threads: any. Blocks: as sth_step_end.
 * Allocates: as it does. */
STH_API sth_status sth_runtime_set_aside(sth_runtime *runtime, const uint32_t *units,
                                         uint32_t count, bool aside);

/* Reads the unit back from the device and compares it with its source, byte by byte.
 * *out_equal is the verdict; *out_hash (may be NULL) the XXH3-64 of the bytes on the device.
 * Blocks: for copies and reading. Allocates: host memory of twice the unit. */
STH_API sth_status sth_unit_verify(sth_runtime *runtime, uint32_t unit, bool *out_equal,
                                   uint64_t *out_hash);

typedef struct sth_unit_stats {
    const char *name, *group; /* live as long as the runtime */
    uint64_t bytes;
    uint64_t transfer_bytes; /* that cross the link for a load */
    sth_unit_state state;
    bool resident;       /* in the current plan */
    uint64_t copies;     /* loads completed or under way since seal */
    double h2d_ms;       /* mean time of a copy */
    double compute_ms;   /* mean time from use to end of use */
    double stall_ms;     /* mean time a use waited for its copy */
    /* of samples of the host image that was copied last; WRITABLE and WATCHED units alone */
    uint64_t image_hash;
} sth_unit_stats;
STH_API uint32_t sth_runtime_unit_count(sth_runtime *runtime);
STH_API sth_status sth_unit_stats_get(sth_runtime *runtime, uint32_t unit,
                                      sth_unit_stats *out_stats);

/* X(field, unit, meaning): one record per step; the JSONL line has these keys in this order. */
#define STH_STEP_METRICS_LIST(X)                                             \
    X(step, "index", "number of the step, from 0")                          \
    X(h2d_bytes, "bytes", "host to device")                                 \
    X(d2h_bytes, "bytes", "device to host")                                 \
    X(copy_time_ms, "ms", "time with at least one copy under way")          \
    X(compute_time_ms, "ms", "compute between uses, stalls left out")       \
    X(stall_time_ms, "ms", "the compute stream waited for copies")          \
    X(stall_count, "count", "uses that waited more than 50 us")             \
    X(evictions, "count", "units whose place was given to another")         \
    X(prefetch_hits, "count", "uses whose bytes were there in time")        \
    X(prefetch_misses, "count", "uses that waited")                         \
    X(vram_used_mb, "MiB", "places allocated at the end of the step")       \
    X(vram_reserved_mb, "MiB", "budget")                                    \
    X(host_pool_free, "slabs", "pinned slabs free at the end of the step")  \
    X(host_pool_in_use, "slabs", "pinned slabs in use")                     \
    X(dtype_promotions, "count", "guard violations")                        \
    X(nan_count, "elements", "NaN in guarded outputs")                      \
    X(inf_count, "elements", "Inf in guarded outputs")                      \
    X(host_waits, "count", "times the host waited in the step")             \
    X(file_bytes, "bytes", "read from files")                               \
    X(file_cached_bytes, "bytes", "of them, found in the page cache")       \
    X(step_time_ms, "ms", "from the first use to the end of the step")      \
    X(predicted_ms, "ms", "what the plan predicted")                        \
    X(overlap_ratio, "ratio", "share of copy time during which compute ran") \
    X(link_gb_s, "GB/s", "rate of the copies in copy_time_ms")

typedef struct sth_step_metrics {
#define STH_STEP_METRICS_FIELD(field, unit, text) double field;
    STH_STEP_METRICS_LIST(STH_STEP_METRICS_FIELD)
#undef STH_STEP_METRICS_FIELD
} sth_step_metrics;

/* Writes to the telemetry file what is gathered for it, after waiting for the device to end the
 * steps that have ended. Returns IO as sth_step_end does, SHUT_DOWN. Threads: any. Blocks: for
 * the device and a write. Allocates: no. */
STH_API sth_status sth_runtime_flush_telemetry(sth_runtime *runtime);

/* The i-th newest finished step still in the window of 100; NOT_FOUND past the end. 0 is the newest,
 * and looks which steps the device has ended since: ask for 0 first, then upwards. The others stay
 * in their places until the next step ends or 0 is asked for again. */
STH_API sth_status sth_runtime_step_metrics(sth_runtime *runtime, uint32_t i,
                                            sth_step_metrics *out_metrics);
/* Adds counts that only the caller can know to the current step's record. */
STH_API void sth_runtime_count_guards(sth_runtime *runtime, uint64_t promotions, uint64_t nans,
                                      uint64_t infs);
/* Adds bytes that crossed the link by mapped host memory (embedding rows). */
STH_API void sth_runtime_count_mapped(sth_runtime *runtime, uint64_t bytes);
/* Adds bytes that the caller brought from the device to the host (gradients; see download.h). */
STH_API void sth_runtime_count_d2h(sth_runtime *runtime, uint64_t bytes);

typedef struct sth_runtime_stats {
    uint64_t budget;           /* bytes */
    uint64_t device_bytes;     /* allocated for places now */
    uint64_t device_peak;      /* highest value of device_bytes since seal */
    uint64_t limit;            /* the part of the budget that other runtimes of the device (residency.h) left for
                                  the plan in force */
    uint64_t yields;           /* times memory was given to another runtime */
    uint64_t leased_bytes;     /* of units in use now */
    uint64_t resident_bytes;   /* of units resident in the plan */
    uint64_t in_flight_bytes;  /* copies issued and not yet seen done */
    uint64_t h2d_bytes;        /* since seal, by copies */
    uint64_t mapped_bytes;     /* since seal, by mapped host memory */
    uint64_t d2h_bytes;        /* since seal, as counted by the caller */
    uint64_t copies;           /* loads issued since seal */
    /* of them, by one copy with the load before: neighboring small units */
    uint64_t joined_copies;
    uint64_t demand_loads;     /* loads that no plan had issued in time */
    uint64_t evictions;
    uint64_t host_waits;       /* times the host waited inside a step */
    uint64_t steps;            /* steps ended */
    uint64_t replans;          /* plans made after the first */
    uint64_t deviations;       /* steps that left the planned order */
    uint64_t budget_cuts;      /* times the budget was lowered because the device refused memory */
    uint64_t file_bytes;       /* read from files since seal, in steps that have ended */
    uint64_t file_cached_bytes; /* of them, found in the page cache */
    uint64_t ram_bytes;        /* host memory for units that are kept there (options.ram_budget) */
    uint64_t ram_pinned_bytes; /* of them, pinned */
    double disk_bytes_per_s;   /* at which reads came lately, all together; 0: not known yet */
    uint64_t staging_bytes;    /* pinned slabs */
    uint64_t stage_bytes;      /* device memory in which packed bytes arrive */
    uint64_t packed_bytes;     /* device memory of units that stay there packed */
    /* why the host expands packed bytes; "": it does not. Lives as long as the runtime */
    const char *expand_error;
    bool staging_pinned;       /* false: the pinning limit made them pageable */
    /* nothing of it is on the device, but what is leased; see residency.h */
    bool parked;
    bool planned;              /* a recorded order is in force */
    double link_bytes_per_s;   /* that plans count with */
    /* records of steps that the telemetry file does not and will not have */
    uint64_t telemetry_lost;
} sth_runtime_stats;
STH_API sth_status sth_runtime_stats_get(sth_runtime *runtime, sth_runtime_stats *out_stats);

/* The files that units stream from, numbered from 0: how each is read, why, and what was read.
 * NOT_FOUND past the end. Threads: any. Blocks: no. */
STH_API uint32_t sth_runtime_file_count(sth_runtime *runtime);
STH_API sth_status sth_runtime_file_way(sth_runtime *runtime, uint32_t i, sth_file_way *out_way);

/* The prediction of the plan in force, with the compute times known by now, and for the units
 * that are written between steps by now. Allocates: scratch, freed before it returns. */
STH_API sth_status sth_runtime_prediction(sth_runtime *runtime, sth_prediction *out_prediction);
/* Bytes of pinned memory, of arenas and slabs, that this runtime reads from are reported by
 * arena.h. */

/* Smallest budget that can work for the units added so far, by what was leased at once in one of
 * the last steps. Allocates: scratch, freed before it returns. */
STH_API uint64_t sth_runtime_smallest_budget(sth_runtime *runtime);

#ifdef __cplusplus
}
#endif
#endif
