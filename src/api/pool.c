/* Exported functions of stagehand/pool.h: checks arguments, then calls src/store/pool.c. */
#include "stagehand/pool.h"

#include "base/error.h"
#include "store/pool.h"

static sth_status no_argument(const char *function, const char *what) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "%s needs %s", function, what);
}

static sth_status usable(const sth_pool *pool) {
    if (sthi_pool_is_here(pool)) return STH_OK;
    return sthi_fail_in_child("pool", "the pool");
}

sth_status sth_pool_create(sth_device *device, uint64_t total_bytes, uint64_t slab_bytes, uint64_t alignment,
                           sth_pool **out_pool) {
    if (!out_pool) return no_argument("sth_pool_create", "an address for the result");
    return sthi_pool_create(device, total_bytes, slab_bytes, alignment, out_pool);
}

void sth_pool_destroy(sth_pool *pool) { sthi_pool_destroy(pool); }

void sth_pool_set_wait_handler(sth_pool *pool, sth_pool_wait_fn *handler, void *arg) {
    if (sthi_pool_is_here(pool)) sthi_pool_set_wait_handler(pool, handler, arg);
}

uint64_t sth_pool_slab_bytes(const sth_pool *pool) { return pool ? sthi_pool_slab_bytes(pool) : 0; }
bool sth_pool_is_pinned(const sth_pool *pool) { return pool && sthi_pool_is_pinned(pool); }
const char *sth_pool_warning(const sth_pool *pool) { return pool ? sthi_pool_warning(pool) : ""; }

uint32_t sth_pool_slabs_for(const sth_pool *pool, uint64_t bytes) {
    return pool ? sthi_pool_slabs_for(pool, bytes) : 0;
}

sth_status sth_pool_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs, uint32_t capacity,
                            uint32_t *out_count) {
    if (!pool || !out_slabs || !out_count)
        return no_argument("sth_pool_acquire", "a pool and addresses for the slabs and their number");
    STHI_TRY(usable(pool));
    return sthi_pool_acquire(pool, bytes, out_slabs, capacity, out_count);
}

sth_status sth_pool_try_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs, uint32_t capacity,
                                uint32_t *out_count) {
    if (!pool || !out_slabs || !out_count)
        return no_argument("sth_pool_try_acquire", "a pool and addresses for the slabs and their number");
    STHI_TRY(usable(pool));
    return sthi_pool_try_acquire(pool, bytes, out_slabs, capacity, out_count);
}

void *sth_pool_slab_address(sth_pool *pool, sth_slab slab) {
    if (pool) return usable(pool) == STH_OK ? sthi_pool_slab_address(pool, slab) : NULL;
    no_argument("sth_pool_slab_address", "a pool");
    return NULL;
}

sth_status sth_pool_release(sth_pool *pool, const sth_slab *slabs, uint32_t count) {
    if (!pool || (!slabs && count)) return no_argument("sth_pool_release", "a pool and a list of slabs");
    STHI_TRY(usable(pool));
    return sthi_pool_release(pool, slabs, count);
}

sth_status sth_pool_stats_get(sth_pool *pool, sth_pool_stats *out_stats) {
    if (!pool || !out_stats) return no_argument("sth_pool_stats_get", "a pool and an address for the result");
    STHI_TRY(usable(pool));
    sthi_pool_stats_get(pool, out_stats);
    return STH_OK;
}

void sth_pool_shutdown(sth_pool *pool) {
    if (sthi_pool_is_here(pool)) sthi_pool_shutdown(pool);
}
