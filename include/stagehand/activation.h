/* stagehand/activation.h - spills what a forward saves to host memory, and brings it back for backward.
 *
 * Life: sth_activation_create -> for each pass (a forward and its backward):
 *       sth_activation_pass, { sth_activation_save, room }, { sth_activation_ask, room, restore } -> destroy.
 *
 * The store never holds device memory: its caller does, under the number of a record, and does what the
 * store says. A record is one storage, whatever sees it.
 *
 *        save           spill               dropped               restore            arrive
 *   ---> KEPT ------> SPILLING ----------> SPILLED <----------- RESTORING ------> RESTORED
 *         |^  asked for   |                  ^ the device's copy is dropped           |
 *         |+--------------+                  +----------------------------------------+
 *         +-------------> DROPPED <---------------------------> RESTORED
 *           recomputable,         recomputed; its bytes are dropped
 *           dropped
 *   Any of them ends by sth_activation_release.
 *
 * Order on the device is by events alone; nothing waits on the host but what is said to. Device memory may be
 * dropped when the store says so: by then its copy is done, or the caller's stream waits for it, so that
 * whatever that stream does with the memory next comes after the copy.
 *
 * Choice: above `high` the record is spilled that was saved first and is needed last, until what
 * stays is below `low`; before all others those that the caller can compute again. Records that
 * were spilled in one pass are spilled as soon as they are saved in the next one. Order: records
 * come back in the order in which the last pass asked for them; in the first, last saved is first.
 *
 * Unless a function says otherwise: Threads: any, at once, one at a time for each record. Blocks: no; on stream
 * 0 of the simulated device, which is the calling thread, for the copies that the stream waits for.
 * Allocates: records, until as many were alive at once. In a forked child calls return INVALID_STATE, and
 * those that return nothing do nothing. */
#ifndef STAGEHAND_ACTIVATION_H
#define STAGEHAND_ACTIVATION_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_activation sth_activation;

/* A small value with a generation: one that was released is STALE. 0 is no record. */
typedef uint64_t sth_record;

#define STH_ACTIVATION_STATE_LIST(X) \
    X(RELEASED, "released")          \
    X(KEPT, "kept")                  \
    X(SPILLING, "spilling")          \
    X(SPILLED, "spilled")            \
    X(RESTORING, "restoring")        \
    X(RESTORED, "restored")          \
    X(DROPPED, "dropped")
typedef enum sth_activation_state {
#define STH_ACTIVATION_ENUM(name, text) STH_ACTIVATION_##name,
    STH_ACTIVATION_STATE_LIST(STH_ACTIVATION_ENUM)
#undef STH_ACTIVATION_ENUM
        STH_ACTIVATION_STATES
} sth_activation_state;

enum { STH_ACTIVATION_CLASSES = 16 };

typedef struct sth_activation_options {
    size_t size;            /* sizeof(sth_activation_options), set by init */
    uint64_t high, low;     /* watermarks, bytes of device memory. Defaults 20000 and 16000 MiB */
    /* Classes of host slabs: sizes in bytes, growing, and how many of each there are at most.
     * class_count 0: the pool finds its sizes itself and grows as it is used. Default 0 */
    uint64_t class_bytes[STH_ACTIVATION_CLASSES];
    uint32_t class_slabs[STH_ACTIVATION_CLASSES];
    uint32_t class_count;
    /* copies to the host under way at once; 0: nothing is spilled, only dropped. Default 1 */
    uint32_t max_d2h;
    uint32_t max_h2d;       /* records that come back ahead of need; 0: on demand only. Default 1 */
    uint64_t ahead_bytes;   /* of these, at most. Default 1 GiB */
    /* of the bytes on the host, checked when they come back; waits for copies */
    bool checksums;
    int priority;           /* of the copy streams, lower is more urgent. Default 0 */
} sth_activation_options;
STH_API void sth_activation_options_init(sth_activation_options *options);

/* Keeps the device alive. INVALID_ARGUMENT, OUT_OF_HOST_MEMORY, or the device's error. */
STH_API sth_status sth_activation_create(sth_device *device, const sth_activation_options *options,
                                         sth_activation **out_activation);
/* Ends it, and every record in it; NULL is fine. Threads: one, once. Blocks: for copies under
 * way. */
STH_API void sth_activation_destroy(sth_activation *activation);
/* From now on nothing is spilled or brought back ahead of need. Records go on; host memory goes
 * with them. */
STH_API sth_status sth_activation_close(sth_activation *activation);

STH_API sth_status sth_activation_set_marks(sth_activation *activation, uint64_t high,
                                            uint64_t low);
/* Marks that follow what passes take, for callers that know the peak of the device's memory: bytes
 * used between two calls of relieve are in that peak alone. Plain data of the caller's; pass `high`
 * and sth_watermark_low() to sth_activation_set_marks(). Callers read members; the calls below write.
 * Threads: one at a time. Blocks: no. A call with NULL does nothing. */
typedef struct sth_watermark {
    uint64_t high, band; /* bytes; band: high - low */
    bool follows;        /* below the budget */
    uint64_t budget;     /* bytes */
    uint64_t ceiling;    /* bytes: a higher mark was too high, for */
    uint32_t patience;   /* so many passes more */
} sth_watermark;
/* follows: with a budget, below which the mark stays; else it does not move. */
STH_API void sth_watermark_init(sth_watermark *mark, uint64_t high, uint64_t low, bool follows,
                                uint64_t budget);
/* A pass has ended whose peak is `peak` bytes; 0: not known. moved: something was spilled or
 * dropped so far. Above the budget, less 1/128, the mark comes down by the excess; below it goes
 * up by half of the rest, and for 100 passes not above one that was too high. It stays between 1/8
 * of the budget and all of it. Returns whether the marks are to be set. */
STH_API bool sth_watermark_follow(sth_watermark *mark, uint64_t peak, bool moved);
/* Others leave `most` bytes. given: the mark before any limit. Returns whether the marks are to be
 * set. */
STH_API bool sth_watermark_limit(sth_watermark *mark, const sth_watermark *given, uint64_t most);
STH_API uint64_t sth_watermark_low(const sth_watermark *mark);

/* The most host memory to pin, in bytes. Memory taken from now on above it is pageable: slower,
 * never wrong. 0: as much as the system allows. */
STH_API sth_status sth_activation_set_pinned_limit(sth_activation *activation, uint64_t bytes);
STH_API sth_status sth_activation_set_caps(sth_activation *activation, uint32_t max_d2h,
                                           uint32_t max_h2d);

/* A new pass begins: what was seen of the last, if it came to a backward, is the prediction for
 * this one. step: the user's number, for messages. */
STH_API sth_status sth_activation_pass(sth_activation *activation, uint64_t step);

/* A storage of `bytes` (> 0) is saved: a record, KEPT. passing: a backward computed it again and
 * needs it at once: it is not spilled. Call sth_activation_relieve after it. OUT_OF_HOST_MEMORY. */
STH_API sth_status sth_activation_save(sth_activation *activation, uint64_t bytes, bool passing,
                                       sth_record *out_record);

/* The caller can compute the record's bytes again, cheaply, from what else it keeps: it is
 * dropped where others are spilled, and before them. INVALID_STATE where it is not KEPT or
 * `passing`. */
STH_API sth_status sth_activation_recomputable(sth_activation *activation, sth_record record);

/* held: somebody besides the caller has the record's memory. A copy might miss what is written
 * there later, and dropping it would free nothing: the record is not chosen until this is called
 * again with false. Records begin not held; a caller that cannot know asks when a record is
 * chosen. INVALID_STATE where it is not KEPT. */
STH_API sth_status sth_activation_set_held(sth_activation *activation, sth_record record,
                                           bool held);

typedef enum sth_relief {
    STH_RELIEF_NONE,   /* there is room, or nothing more can be done */
    STH_RELIEF_SPILL,  /* call sth_activation_spill for the record, or sth_activation_set_held */
    /* drop the device's copy of the record's bytes; it is SPILLED or DROPPED now */
    STH_RELIEF_LET_GO,
    STH_RELIEF_DROP    /* call sth_activation_drop for the record, or sth_activation_set_held */
} sth_relief;
/* Gives the next action that makes room for `need` more bytes; call it until it gives NONE. used:
 * bytes in use on the device, where the caller knows; 0: the records' own. stream: the one that
 * uses the memory. Blocks: with checksums, for a copy. */
STH_API sth_status sth_activation_relieve(sth_activation *activation, uint64_t used, uint64_t need,
                                          sth_stream stream, sth_record *out_record,
                                          sth_relief *out_relief);

/* KEPT -> SPILLING: enqueues the copy of the record's bytes from `source` behind `stream`. On an
 * error the record stays KEPT and is not chosen again; OUT_OF_HOST_MEMORY and the device's.
 * `source` must stay until the record is to be dropped. Blocks: while host memory is taken and
 * pinned. Allocates: host memory. */
STH_API sth_status sth_activation_spill(sth_activation *activation, sth_record record,
                                        sth_devptr source, sth_stream stream);

/* KEPT -> DROPPED, of a recomputable record: its bytes there are dropped. INVALID_STATE. */
STH_API sth_status sth_activation_drop(sth_activation *activation, sth_record record);

/* Backward asks for a record: its place in the order is noted. *out_state is its state now; one
 * that was SPILLING is KEPT again. SPILLED ones are to be restored, DROPPED ones recomputed,
 * others to be made to arrive. */
STH_API sth_status sth_activation_ask(sth_activation *activation, sth_record record,
                                      sth_activation_state *out_state);
/* The record to bring back next, ahead of need, within the caps and `high`; 0 for none. used: as
 * above. */
STH_API sth_status sth_activation_ahead(sth_activation *activation, uint64_t used,
                                        sth_record *out_record);
/* SPILLED -> RESTORING: enqueues the copy to `target`, memory that was allocated on `stream`,
 * behind it. CHANGED_DATA when the checksum differs. On DEVICE_ERROR a copy to `target` may be
 * under way, where the device could not be waited for: it has to stay until
 * sth_activation_destroy. */
STH_API sth_status sth_activation_restore(sth_activation *activation, sth_record record,
                                          sth_devptr target, sth_stream stream);
/* RESTORING -> RESTORED: `stream` waits for the copy. Again, for another stream, is fine. */
STH_API sth_status sth_activation_arrive(sth_activation *activation, sth_record record,
                                         sth_stream stream);
/* DROPPED -> RESTORED: the caller holds the bytes again. */
STH_API sth_status sth_activation_recomputed(sth_activation *activation, sth_record record);
/* Nobody asks for the record any more but another backward. RESTORING, RESTORED -> SPILLED or
 * DROPPED: the device's copy may be dropped; `stream` waits for its copy if need be. One that
 * is KEPT is the first to be spilled. */
STH_API sth_status sth_activation_let_go(sth_activation *activation, sth_record record,
                                         sth_stream stream);
/* Ends a record, in any case; the caller's references may be dropped: `stream` waits for
 * copies under way. On an error they could not be waited for: what the caller holds has to stay
 * until sth_activation_destroy. */
STH_API sth_status sth_activation_release(sth_activation *activation, sth_record record,
                                          sth_stream stream);
STH_API sth_status sth_activation_state_get(sth_activation *activation, sth_record record,
                                            sth_activation_state *out_state);

typedef struct sth_activation_stats {
    /* records since creation; ahead: restored before asked for */
    uint64_t saved, spilled, restored, ahead;
    uint64_t recalled;                        /* asked for while they were being spilled */
    uint64_t dropped, recomputed;             /* records, and times */
    uint64_t spill_bytes, restore_bytes;
    uint64_t pool_hits, pool_misses;          /* a miss took new memory, or fell back */
    /* of these, memory that is not the pool's and not pinned */
    uint64_t fallbacks;
    uint64_t host_bytes, pinned_bytes;        /* of slabs now, in use or free */
    uint64_t slab_bytes;                      /* of these, in use */
    uint64_t records;                         /* alive */
    /* on the device, of records: kept, being spilled, restored */
    uint64_t kept_bytes;
    uint64_t peak_bytes;                      /* most of these since the last pass began */
    uint64_t link_bytes_per_s;                /* of copies to the host, as measured; 0: not yet */
    /* times a stream was made to wait so that memory could go */
    uint64_t waits;
} sth_activation_stats;
STH_API sth_status sth_activation_stats_get(sth_activation *activation,
                                            sth_activation_stats *out_stats);

#ifdef __cplusplus
}
#endif
#endif
