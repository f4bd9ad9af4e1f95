/* stagehand/download.h - from the device to host memory: pinned blocks of any size, and a stream of copies
 * into them. It brings gradients to their masters; it knows nothing of what the bytes are.
 *
 * Life: sth_download_create -> { sth_download_take -> sth_download_copy -> sth_download_wait -> read ->
 *       sth_block_release } ... -> sth_download_destroy.
 *
 *   region 0 (touched and registered as one piece)    region 1
 *   | block in use | free | block in use |            | block in use      | free |
 *   A block is the smallest free range that is large enough; ranges that come back join their free
 *   neighbors. Regions stay until the download is destroyed, so that a steady state allocates nothing.
 *
 * Above the pinning limit regions are pageable: copies into them are slower and may block their
 * caller, they are never wrong and never an error.
 *
 * Copies run on a stream of their own, behind the stream that made the bytes. Nothing waits for them but
 * sth_download_wait, sth_download_forget and sth_download_destroy.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. In a forked child
 * calls return INVALID_STATE, and those that return nothing do nothing. */
#ifndef STAGEHAND_DOWNLOAD_H
#define STAGEHAND_DOWNLOAD_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_download sth_download;

typedef struct sth_download_options {
    size_t size;            /* sizeof(sth_download_options), set by init */
    /* memory is taken in pieces that grow up to this size. Default 256 MiB */
    uint64_t region_bytes;
    /* more host memory than this is not pinned. 0 = as much as the system allows */
    uint64_t pinned_limit;
    uint64_t chunk_bytes;   /* larger copies are enqueued in pieces of this size. Default 32 MiB */
    int priority;           /* of the copy stream, lower is more urgent. Default 0 */
} sth_download_options;
STH_API void sth_download_options_init(sth_download_options *options);

/* `options` may be NULL: defaults. Keeps the device alive. Returns INVALID_ARGUMENT,
 * OUT_OF_HOST_MEMORY, or the device's error when it has no stream to give. Allocates: host
 * memory for records. */
STH_API sth_status sth_download_create(sth_device *device, const sth_download_options *options,
                                       sth_download **out_download);

/* Ends the owner's use; NULL is fine. Blocks that are held and tickets that have not ended stay
 * valid, and the memory goes with the last of them. Threads: one, once, while no other thread
 * creates blocks, tickets or reservations. Blocks: for copies under way, and for a region that
 * is being pinned. */
STH_API void sth_download_destroy(sth_download *download);

/* Has memory for `bytes` in all, what is in use included, taken and pinned ahead of need by a
 * thread in the background. Advice: sth_download_take works without. OUT_OF_HOST_MEMORY when the
 * thread cannot start. Allocates: in the background, host memory. */
STH_API sth_status sth_download_reserve(sth_download *download, uint64_t bytes);

/* Host memory, 512-byte aligned, counted: who takes one holds one reference. */
typedef struct sth_block sth_block;

/* A block of at least `bytes` (> 0); its bytes are what they were. OUT_OF_HOST_MEMORY, SHUT_DOWN.
 * Blocks: only where no free range is large enough, while a region is taken, touched and pinned.
 * Allocates: a region, then. */
STH_API sth_status sth_download_take(sth_download *download, uint64_t bytes, sth_block **out_block);
STH_API void *sth_block_address(const sth_block *block);
STH_API uint64_t sth_block_bytes(const sth_block *block); /* asked for, rounded up to 512, or somewhat more */
STH_API bool sth_block_is_pinned(const sth_block *block);
STH_API void sth_block_retain(sth_block *block);
/* Gives one reference back; NULL is fine. With the last one, that of a copy under way included,
 * the memory goes to the free ranges. Safe in destructors on any thread, also after
 * sth_download_destroy. Blocks: after sth_download_destroy, while the region is unpinned that it
 * leaves empty. */
STH_API void sth_block_release(sth_block *block);

/* One copy under way. A small value with a generation: one that has ended is STALE. 0 is no
 * ticket. */
typedef uint64_t sth_ticket;

/* Enqueues the copy of `bytes` (> 0) from device memory `source`, which `stream` writes, to
 * `offset` in the block, behind all that is enqueued on `stream` by now. `source` must stay as
 * it is until the ticket has ended; the copy holds the block. Each ticket is ended once, by
 * sth_download_wait that succeeds or by sth_download_forget. On an error no copy is under way;
 * only where the device has failed so far that even waiting is refused may one still read
 * `source`. Blocks: no; into a pageable block perhaps until the copy is done; on stream 0 of the
 * simulated device, the calling thread, for nothing. Allocates: records, until as many copies
 * were under way at once. */
STH_API sth_status sth_download_copy(sth_download *download, sth_block *block, uint64_t offset,
                                     sth_devptr source, uint64_t bytes, sth_stream stream,
                                     sth_ticket *out_ticket);

/* Waits until the copy is done and ends its ticket. On a device's error the ticket goes on.
 * Threads: one at a time for each ticket. Blocks: until the copy is done. */
STH_API sth_status sth_download_wait(sth_download *download, sth_ticket ticket);
/* Whether the copy is done; the ticket goes on. STALE for one that has ended. */
STH_API sth_status sth_download_done(sth_download *download, sth_ticket ticket, bool *out_done);
/* Ends a ticket that nobody waits for. The source may be given away after it: it waits for the
 * copy, by its event or else by the stream; where the device refuses both, the block stays out
 * of use. Threads: one at a time for each ticket. Blocks: until the copy is done. */
STH_API void sth_download_forget(sth_download *download, sth_ticket ticket);

typedef struct sth_download_stats {
    uint64_t d2h_bytes;       /* enqueued since creation */
    uint64_t copies;          /* the same, counted */
    uint64_t pageable_copies; /* of these, into pageable blocks */
    uint64_t tickets;         /* copies whose tickets have not ended */
    uint64_t blocks_in_use;
    uint64_t bytes_in_use;
    uint64_t pinned_bytes;    /* of regions */
    uint64_t pageable_bytes;  /* of regions */
    uint64_t regions;         /* taken since creation: constant in a steady state */
    uint64_t waits;           /* times sth_download_take took a region itself or waited for one */
} sth_download_stats;
STH_API sth_status sth_download_stats_get(sth_download *download, sth_download_stats *out_stats);

#ifdef __cplusplus
}
#endif
#endif
