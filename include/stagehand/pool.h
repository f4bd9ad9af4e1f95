/* stagehand/pool.h - a fixed pool of equal slabs of pinned host memory, the staging room of
 * everything that is read from disk.
 *
 * Life: sth_pool_create() -> acquire, fill, copy, release -> sth_pool_destroy(). All memory is
 * taken at creation: acquire and release never allocate. Callers that wait are served in the
 * order in which they came, and a request for several slabs gets all of them at once or waits.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. In a
 * forked child calls return INVALID_STATE, and what ends something does nothing. */
#ifndef STAGEHAND_POOL_H
#define STAGEHAND_POOL_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_pool sth_pool;

/* One acquired slab. A small value: it names its pool and its use, so that one from another
 * pool, or one that was released, is an error and never somebody else's memory. 0 is no slab. */
typedef uint64_t sth_slab;

typedef struct sth_pool_stats {
    uint32_t total, free, in_use; /* slabs */
    uint32_t peak_in_use;         /* slabs */
    uint64_t wait_count;          /* acquires that had to wait */
    int64_t total_wait_ns;        /* time spent in finished waits */
} sth_pool_stats;

/* Called once by an acquire that has waited for 100 ms, on the waiting thread, with no lock
 * held. */
typedef void sth_pool_wait_fn(void *arg, uint32_t slabs_wanted, uint32_t slabs_free);

/* Makes a pool of total_bytes / slab_bytes slabs. `device` may be NULL: then the memory is not
 * pinned. The pool keeps it open. Every slab begins at a multiple of `alignment` (a power of two
 * up to 1 GiB; at least 512 is used), and slab_bytes is rounded up to it. When the device
 * refuses to pin the memory the pool works with pageable memory and says so: sth_pool_is_pinned,
 * sth_pool_warning. Returns INVALID_ARGUMENT (a size of 0, total not evenly divisible by
 * slab_bytes, a bad alignment), OUT_OF_HOST_MEMORY, also for pinned memory beyond what the
 * system and the control group say is available, which is not asked for then. Threads: any.
 * Blocks: while the driver pins the memory. Allocates: all there is. */
STH_API sth_status sth_pool_create(sth_device *device, uint64_t total_bytes, uint64_t slab_bytes,
                                   uint64_t alignment, sth_pool **out_pool);
/* Shuts down, waits until the last waiting caller has left, and frees. Copies from its slabs
 * must be done. NULL is fine. Threads: one, the last user. Blocks: for callers that are leaving. */
STH_API void sth_pool_destroy(sth_pool *pool);

/* Sets (or with NULL removes) the function that hears of long waits. Threads: any. */
STH_API void sth_pool_set_wait_handler(sth_pool *pool, sth_pool_wait_fn *handler, void *arg);

STH_API uint64_t sth_pool_slab_bytes(const sth_pool *pool);
STH_API bool sth_pool_is_pinned(const sth_pool *pool);
/* Why the memory is not pinned although a device was given; "" where there is nothing to say.
 * Lives as long as the pool. */
STH_API const char *sth_pool_warning(const sth_pool *pool);

/* Slabs that `bytes` need: ceil(bytes / slab_bytes); UINT32_MAX where that is more than a number
 * of slabs can be. Threads: any. Blocks: no. Allocates: no. */
STH_API uint32_t sth_pool_slabs_for(const sth_pool *pool, uint64_t bytes);

/* Takes sth_pool_slabs_for(pool, bytes) slabs, together, into out_slabs[0..capacity), waiting
 * for them if need be. The slabs are not neighbors. On failure nothing is taken and the outputs
 * are not touched. Returns INVALID_ARGUMENT (bytes is 0, capacity too small),
 * OUT_OF_PINNED_MEMORY (more than the whole pool), SHUT_DOWN (also for callers that wait when
 * the pool shuts down), DEVICE_ERROR (runtimes hold the slabs for copies, and the device fails
 * to say when these end; callers that wait get it, too). Threads: any. Blocks: until the slabs
 * are free. Allocates: no. */
STH_API sth_status sth_pool_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs,
                                    uint32_t capacity, uint32_t *out_count);
/* The same without waiting: *out_count is 0 when the slabs are not free now, or others wait for
 * theirs. Threads: any. Blocks: no. Allocates: no. */
STH_API sth_status sth_pool_try_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs,
                                        uint32_t capacity, uint32_t *out_count);

/* First byte of a slab that is held; NULL, with the reason in sth_last_error(), for any other.
 * Threads: any. Blocks: no. Allocates: no. */
STH_API void *sth_pool_slab_address(sth_pool *pool, sth_slab slab);

/* Gives slabs back. All of them or, on an error, none: INVALID_ARGUMENT (a slab of another pool,
 * or one twice in the list), STALE (already released). Threads: any. Blocks: no. Allocates: no. */
STH_API sth_status sth_pool_release(sth_pool *pool, const sth_slab *slabs, uint32_t count);

/* Threads: any. Blocks: no. Allocates: no. */
STH_API sth_status sth_pool_stats_get(sth_pool *pool, sth_pool_stats *out_stats);

/* Ends all waiting: waiting and later acquires return SHUT_DOWN. Slabs that are held stay valid and
 * can still be released. A second call does nothing. Threads: any. Blocks: no. Allocates: no. */
STH_API void sth_pool_shutdown(sth_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
