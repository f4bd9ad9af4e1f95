/* Equal slabs over one mapping, with a first-in first-out list of free ones and a first-come first-served
 * queue of callers.
 *
 * Invariants, under `lock`: every slab is either in the ring of free ones once or held once; a held slab's
 * handle carries its present generation, which changes at release, so that an old handle never matches;
 * tickets are served in order, and only the served one takes slabs.
 * Lock: `lock` guards everything but what creation sets for good. It is held for a few list operations,
 * never while pinning, waiting or calling the wait handler. Nothing is allocated after creation.
 * Does not know what the slabs hold, and does not wait for copies. */
#include "store/pool.h"

#include <stdatomic.h>
#include <stdio.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "device/pinning.h"

#define WARN_AFTER_NS 100000000
#define MAX_ALIGNMENT ((uint64_t)1 << 30)

/* A handle: pool number (16 bits), generation (24), index (24). */
#define INDEX_BITS 24u
#define GENERATION_BITS 24u
#define MAX_SLABS ((1u << INDEX_BITS) - 1)
#define GENERATION_MASK ((1u << GENERATION_BITS) - 1)

typedef enum slab_state { SLAB_FREE, SLAB_HELD, SLAB_LEAVING } slab_state;

typedef struct slab {
    uint32_t generation;
    slab_state state; /* LEAVING only within one release call */
} slab;

struct sth_pool {
    /* set by creation for good */
    sth_device *device; /* NULL when not pinned */
    unsigned char *map, *base;
    uint64_t map_bytes, slab_bytes;
    uint32_t count;
    uint16_t number; /* never 0 */
    unsigned fork_depth; /* of the process that made it: in a child no lock may be taken */
    char warning[512];
    atomic_int hungry; /* not guarded by the lock */

    sthi_mutex lock;
    sthi_cond changed; /* slabs were freed, the next ticket is served, shutdown, a waiter left */
    slab *slabs;
    uint32_t *ring; /* indices of free slabs: ring[(first + i) % count], i < free */
    uint32_t first, free;
    uint32_t lost; /* held, and the device does not say that their copies are done */
    uint64_t next_ticket, served; /* callers that wait hold a ticket each */
    uint32_t waiting;
    bool shut_down;
    uint32_t peak;
    uint64_t wait_count;
    int64_t total_wait_ns;
    sth_pool_wait_fn *handler;
    void *handler_arg;
};

/* ---- creation ---- */

static sth_status check_sizes(uint64_t total, uint64_t slab_bytes, uint64_t alignment) {
    if (!total || !slab_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool",
                         "the sizes of a pool and of its slabs are above 0");
    if (total % slab_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool",
                         "a pool of %llu bytes is not evenly divisible into slabs of %llu bytes",
                         (unsigned long long)total, (unsigned long long)slab_bytes);
    if (!alignment || (alignment & (alignment - 1)) || alignment > MAX_ALIGNMENT)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool",
                         "an alignment of %llu bytes is not a power of two up to 1 GiB",
                         (unsigned long long)alignment);
    if (total / slab_bytes > MAX_SLABS)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool",
                         "a pool has at most %u slabs; make them larger", MAX_SLABS);
    return STH_OK;
}

/* Rounds the slabs up to the alignment; the mapping has room to move its base to the alignment. */
static sth_status size_up(sth_pool *pool, uint64_t total, uint64_t slab_bytes, uint64_t alignment) {
    uint64_t slack = alignment > sthi_page_size() ? alignment : 0, bytes;
    pool->count = (uint32_t)(total / slab_bytes);
    if (!sthi_round_up(slab_bytes, alignment, &pool->slab_bytes) ||
        !sthi_mul_u64(pool->slab_bytes, pool->count, &bytes) || !sthi_add_u64(bytes, slack, &bytes) ||
        !sthi_round_up(bytes, sthi_page_size(), &pool->map_bytes))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool", "the size of the pool overflows 64 bits");
    return STH_OK;
}

static sth_status take_memory(sth_pool *pool, uint64_t alignment) {
    pool->slabs = sthi_zalloc(pool->count, sizeof *pool->slabs);
    pool->ring = sthi_zalloc(pool->count, sizeof *pool->ring);
    if (pool->slabs && pool->ring) pool->map = sthi_pages_map((size_t)pool->map_bytes, 1);
    if (!pool->map)
        return sthi_no_memory("pool", "a pool of %llu bytes", (unsigned long long)pool->map_bytes);
    uint64_t off = (uint64_t)(uintptr_t)pool->map & (alignment - 1);
    pool->base = pool->map + (off ? alignment - off : 0);
    for (uint32_t i = 0; i < pool->count; i++) pool->ring[i] = i;
    pool->free = pool->count;
    return STH_OK;
}

static bool pins(const sth_device *device) { return device && device->capabilities & STH_CAP_PINNED_HOST; }

/* Pinned memory is there at once and cannot be swapped out: too much of it ends processes instead of failing. */
static sth_status check_room(const sth_pool *pool) {
    uint64_t available = sthi_memory_available();
    if (pool->map_bytes <= available) return STH_OK;
    return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, "pool",
                     "a pinned pool of %llu bytes is more than the %llu bytes of host memory that are available; "
                     "ask for less",
                     (unsigned long long)pool->map_bytes, (unsigned long long)available);
}

/* Pinning makes copies faster and lets them run beside the host; without it everything still works. */
static void pin(sth_pool *pool, sth_device *device) {
    if (!pins(device)) return;
    sth_devptr alias;
    if (sthi_pin(device, pool->map, pool->map_bytes, &alias) == STH_OK) {
        sthi_device_retain(device);
        pool->device = device;
        return;
    }
    snprintf(
        pool->warning, sizeof pool->warning,
        "the pool of %llu bytes could not be pinned and uses pageable memory, from which copies are slower "
        "(%.300s)",
        (unsigned long long)pool->map_bytes, sthi_error_last()->message);
}

static uint16_t next_number(void) {
    static atomic_uint last;
    uint16_t number;
    do number = (uint16_t)(atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1);
    while (!number);
    return number;
}

static void free_memory(sth_pool *pool) {
    if (pool->device) {
        sthi_unpin(pool->device, pool->map, pool->map_bytes);
        sthi_device_release(pool->device);
    }
    sthi_pages_unmap(pool->map, (size_t)pool->map_bytes);
    sthi_free(pool->slabs);
    sthi_free(pool->ring);
    sthi_free(pool);
}

sth_status sthi_pool_create(sth_device *device, uint64_t total_bytes, uint64_t slab_bytes, uint64_t alignment,
                            sth_pool **out) {
    STHI_TRY(check_sizes(total_bytes, slab_bytes, alignment));
    alignment = sthi_max_u64(alignment, STHI_ALIGN);
    sth_pool *pool = sthi_zalloc(1, sizeof *pool);
    if (!pool) return sthi_no_memory("pool", "a pool");
    sth_status status = size_up(pool, total_bytes, slab_bytes, alignment);
    if (status == STH_OK && pins(device)) status = check_room(pool);
    if (status == STH_OK) status = take_memory(pool, alignment);
    if (status != STH_OK) {
        free_memory(pool);
        return status;
    }
    pin(pool, device);
    pool->number = next_number();
    pool->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&pool->lock);
    sthi_cond_init(&pool->changed);
    *out = pool;
    return STH_OK;
}

bool sthi_pool_is_here(const sth_pool *pool) { return pool && !sthi_is_child(pool->fork_depth); }

void sthi_pool_destroy(sth_pool *pool) {
    if (!sthi_pool_is_here(pool)) return;
    sthi_pool_shutdown(pool);
    sthi_lock(&pool->lock);
    while (pool->waiting) sthi_cond_wait(&pool->changed, &pool->lock);
    sthi_unlock(&pool->lock);
    sthi_cond_fini(&pool->changed);
    sthi_mutex_fini(&pool->lock);
    free_memory(pool);
}

/* ---- handles ---- */

static sth_slab make_handle(const sth_pool *pool, uint32_t index) {
    return (uint64_t)pool->number << (INDEX_BITS + GENERATION_BITS) |
           (uint64_t)pool->slabs[index].generation << INDEX_BITS | index;
}

/* Index of a slab that is held, with `lock` held. */
static sth_status resolve(const sth_pool *pool, sth_slab handle, uint32_t *out) {
    uint32_t index = (uint32_t)(handle & MAX_SLABS);
    uint32_t generation = (uint32_t)(handle >> INDEX_BITS) & GENERATION_MASK;
    if (handle >> (INDEX_BITS + GENERATION_BITS) != pool->number || index >= pool->count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool", "slab %#llx is not of this pool",
                         (unsigned long long)handle);
    const slab *s = &pool->slabs[index];
    if (s->state == SLAB_LEAVING && s->generation == generation)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool", "slab %u is twice in the list", index);
    if (s->state != SLAB_HELD || s->generation != generation)
        return sthi_fail(STH_STALE, NULL, 0, "pool", "slab %u was released before", index);
    *out = index;
    return STH_OK;
}

/* ---- acquire ---- */

uint32_t sthi_pool_slabs_for(const sth_pool *pool, uint64_t bytes) {
    uint64_t slabs = bytes / pool->slab_bytes + (bytes % pool->slab_bytes != 0);
    return slabs > UINT32_MAX ? UINT32_MAX : (uint32_t)slabs;
}

static sth_status check_request(const sth_pool *pool, uint64_t bytes, uint32_t capacity, uint32_t need) {
    if (!bytes) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool", "a request for 0 bytes");
    if (need > pool->count)
        return sthi_fail(STH_OUT_OF_PINNED_MEMORY, NULL, 0, "pool",
                         "%llu bytes need %u slabs and the pool has %u; make the pool larger",
                         (unsigned long long)bytes, need, pool->count);
    if (need > capacity)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pool",
                         "%u slabs are needed, the caller has room for %u", need, capacity);
    return STH_OK;
}

static sth_status fail_shut_down(void) {
    return sthi_fail(STH_SHUT_DOWN, NULL, 0, "pool", "the pool has been shut down; make a new one");
}

/* So many slabs cannot come back as long as the device fails: whoever waited for them would wait for ever. */
static bool out_of_reach(const sth_pool *pool, uint32_t need) { return need > pool->count - pool->lost; }

/* `lock` is held. */
static sth_status check_reach(const sth_pool *pool, uint32_t need) {
    if (pool->shut_down) return fail_shut_down();
    if (!out_of_reach(pool, need)) return STH_OK;
    return sthi_fail(STH_DEVICE_ERROR, NULL, 0, "pool",
                     "%u of the pool's %u slabs are in copies, and the device fails to say when these copies end; "
                     "look at the device's own log, and open the device again",
                     pool->lost, pool->count);
}

/* With `lock` held and at least `need` slabs free. */
static void take(sth_pool *pool, uint32_t need, sth_slab *out_slabs) {
    for (uint32_t i = 0; i < need; i++) {
        uint32_t index = pool->ring[pool->first];
        pool->first = pool->first + 1 == pool->count ? 0 : pool->first + 1;
        pool->slabs[index].state = SLAB_HELD;
        out_slabs[i] = make_handle(pool, index);
    }
    pool->free -= need;
    uint32_t in_use = pool->count - pool->free;
    if (in_use > pool->peak) pool->peak = in_use;
}

static bool ready(const sth_pool *pool, uint64_t ticket, uint32_t need) {
    return pool->shut_down || (pool->served == ticket && (pool->free >= need || out_of_reach(pool, need)));
}

/* Tells the handler of a long wait; `lock` is held on entry and exit but not during the call. */
static void warn(sth_pool *pool, uint32_t need) {
    sth_pool_wait_fn *handler = pool->handler;
    void *arg = pool->handler_arg;
    uint32_t free = pool->free;
    if (!handler) return;
    sthi_unlock(&pool->lock);
    handler(arg, need, free);
    sthi_lock(&pool->lock);
}

/* Returns once it is this caller's turn and its slabs are free or out of reach, or at shutdown. `lock` is held. */
static void wait_turn(sth_pool *pool, uint32_t need) {
    uint64_t ticket = pool->next_ticket++;
    int64_t start = sthi_now_ns(), left = WARN_AFTER_NS;
    pool->waiting++;
    pool->wait_count++;
    sthi_pool_hungry(pool, 1); /* runtimes give back slabs that they fill ahead of need */
    while (!ready(pool, ticket, need) && left > 0) {
        sthi_cond_wait_for(&pool->changed, &pool->lock, left);
        left = start + WARN_AFTER_NS - sthi_now_ns();
    }
    if (!ready(pool, ticket, need)) warn(pool, need);
    while (!ready(pool, ticket, need)) sthi_cond_wait(&pool->changed, &pool->lock);
    sthi_pool_hungry(pool, -1);
    pool->waiting--;
    pool->served++;
    pool->total_wait_ns += sthi_now_ns() - start;
    sthi_cond_broadcast(&pool->changed);
}

/* Whether a caller must wait: for slabs, or for those who came before. */
static bool must_wait(const sth_pool *pool, uint32_t need) {
    return !pool->shut_down && !out_of_reach(pool, need) && (pool->waiting || pool->free < need);
}

sth_status sthi_pool_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs, uint32_t capacity,
                             uint32_t *out_count) {
    uint32_t need = sthi_pool_slabs_for(pool, bytes);
    STHI_TRY(check_request(pool, bytes, capacity, need));
    sthi_lock(&pool->lock);
    if (must_wait(pool, need)) wait_turn(pool, need);
    sth_status status = check_reach(pool, need);
    if (status == STH_OK) take(pool, need, out_slabs);
    sthi_unlock(&pool->lock);
    if (status == STH_OK) *out_count = need;
    return status;
}

sth_status sthi_pool_try_acquire(sth_pool *pool, uint64_t bytes, sth_slab *out_slabs, uint32_t capacity,
                                 uint32_t *out_count) {
    uint32_t need = sthi_pool_slabs_for(pool, bytes);
    STHI_TRY(check_request(pool, bytes, capacity, need));
    sthi_lock(&pool->lock);
    sth_status status = check_reach(pool, need);
    bool now = status == STH_OK && !must_wait(pool, need);
    if (now) take(pool, need, out_slabs);
    sthi_unlock(&pool->lock);
    if (status == STH_OK) *out_count = now ? need : 0;
    return status;
}

/* ---- release ---- */

static void put_back(sth_pool *pool, uint32_t index) {
    slab *s = &pool->slabs[index];
    s->state = SLAB_FREE;
    s->generation = (s->generation + 1) & GENERATION_MASK;
    pool->ring[(uint32_t)(((uint64_t)pool->first + pool->free) % pool->count)] = index;
    pool->free++;
}

static sth_status release_locked(sth_pool *pool, const sth_slab *slabs, uint32_t count) {
    sth_status status = STH_OK;
    uint32_t marked = 0, index;
    while (marked < count && (status = resolve(pool, slabs[marked], &index)) == STH_OK) {
        pool->slabs[index].state = SLAB_LEAVING;
        marked++;
    }
    for (uint32_t i = 0; i < marked; i++) {
        index = (uint32_t)(slabs[i] & MAX_SLABS);
        if (status == STH_OK) put_back(pool, index);
        else pool->slabs[index].state = SLAB_HELD;
    }
    if (status == STH_OK && pool->waiting) sthi_cond_broadcast(&pool->changed);
    return status;
}

sth_status sthi_pool_release(sth_pool *pool, const sth_slab *slabs, uint32_t count) {
    sthi_lock(&pool->lock);
    sth_status status = release_locked(pool, slabs, count);
    sthi_unlock(&pool->lock);
    return status;
}

sth_status sthi_pool_reachable(sth_pool *pool) {
    sthi_lock(&pool->lock);
    sth_status status = check_reach(pool, 1);
    sthi_unlock(&pool->lock);
    return status;
}

void sthi_pool_lose(sth_pool *pool, int change) {
    sthi_lock(&pool->lock);
    pool->lost = (uint32_t)((int)pool->lost + change);
    if (pool->waiting) sthi_cond_broadcast(&pool->changed);
    sthi_unlock(&pool->lock);
}

/* ---- the rest ---- */

void *sthi_pool_slab_address(sth_pool *pool, sth_slab handle) {
    uint32_t index = 0;
    sthi_lock(&pool->lock);
    sth_status status = resolve(pool, handle, &index);
    sthi_unlock(&pool->lock);
    return status == STH_OK ? pool->base + (uint64_t)index * pool->slab_bytes : NULL;
}

void sthi_pool_set_wait_handler(sth_pool *pool, sth_pool_wait_fn *handler, void *arg) {
    sthi_lock(&pool->lock);
    pool->handler = handler;
    pool->handler_arg = arg;
    sthi_unlock(&pool->lock);
}

void sthi_pool_stats_get(sth_pool *pool, sth_pool_stats *out) {
    sthi_lock(&pool->lock);
    *out = (sth_pool_stats){
        .total = pool->count,
        .free = pool->free,
        .in_use = pool->count - pool->free,
        .peak_in_use = pool->peak,
        .wait_count = pool->wait_count,
        .total_wait_ns = pool->total_wait_ns,
    };
    sthi_unlock(&pool->lock);
}

void sthi_pool_shutdown(sth_pool *pool) {
    sthi_lock(&pool->lock);
    pool->shut_down = true;
    sthi_cond_broadcast(&pool->changed);
    sthi_unlock(&pool->lock);
}

uint64_t sthi_pool_slab_bytes(const sth_pool *pool) { return pool->slab_bytes; }
bool sthi_pool_is_pinned(const sth_pool *pool) { return pool->device != NULL; }
const char *sthi_pool_warning(const sth_pool *pool) { return pool->warning; }

void sthi_pool_hungry(sth_pool *pool, int change) { atomic_fetch_add(&pool->hungry, change); }
bool sthi_pool_is_hungry(const sth_pool *pool) { return atomic_load(&pool->hungry) > 0; }
