/* The pool of pinned slabs; stagehand/pool.h is its manual. */
#ifndef STHI_STORE_POOL_H
#define STHI_STORE_POOL_H
#include "stagehand/pool.h"

sth_status sthi_pool_create(sth_device *device, uint64_t total_bytes, uint64_t slab_bytes, uint64_t alignment,
                            sth_pool **out);
void sthi_pool_destroy(sth_pool *pool);
/* Not NULL, and not that of the process from which this one was forked: its lock may be held there for good. */
bool sthi_pool_is_here(const sth_pool *pool);
void sthi_pool_set_wait_handler(sth_pool *pool, sth_pool_wait_fn *handler, void *arg);
uint64_t sthi_pool_slab_bytes(const sth_pool *pool);
bool sthi_pool_is_pinned(const sth_pool *pool);
const char *sthi_pool_warning(const sth_pool *pool);
uint32_t sthi_pool_slabs_for(const sth_pool *pool, uint64_t bytes);
sth_status sthi_pool_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs, uint32_t capacity,
                             uint32_t *out_count);
sth_status sthi_pool_try_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs, uint32_t capacity,
                                 uint32_t *out_count);
void *sthi_pool_slab_address(sth_pool *pool, sth_slab slab);
sth_status sthi_pool_release(sth_pool *pool, const sth_slab *slabs, uint32_t count);
void sthi_pool_stats_get(sth_pool *pool, sth_pool_stats *out);
void sthi_pool_shutdown(sth_pool *pool);

/* Several runtimes may share a pool. One that cannot go on without a slab says so (hungry +1, later -1), and
 * those that only keep slabs filled ahead of need look and give one back. Any thread. */
void sthi_pool_hungry(sth_pool *pool, int change);
bool sthi_pool_is_hungry(const sth_pool *pool);
/* The device fails to say when the copy out of a held slab ends (+1), or says it after all (-1). Callers that wait for
 * more slabs than can come back get DEVICE_ERROR. Any thread. */
void sthi_pool_lose(sth_pool *pool, int change);
/* DEVICE_ERROR when no slab is free and all are lost, SHUT_DOWN after shutdown. */
sth_status sthi_pool_reachable(sth_pool *pool);
#endif
