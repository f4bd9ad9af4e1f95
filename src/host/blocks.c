/* Host blocks. Regions are large mappings, touched and registered once; each is cut into blocks, in use or
 * free, that are linked by address. Free blocks also stand in bins by the power of two of their size; the
 * smallest that is large enough serves, and its rest stays free. A block that comes back joins its free
 * neighbours.
 *
 * Invariants, under `lock`: the blocks of a region follow each other without gaps and cover it; no two
 * neighbours are both free; a free block stands in one bin, one in use in none; `capacity` is the sum of the
 * regions. Regions grow with what there is already, so that small models take little.
 * Lock: `lock` guards all of it; held for list operations, never while memory is touched or pinned: one
 * thread at a time does that (`growing`), others that need a region wait for it.
 * Life: the owner and each block in use hold a reference; the last one ends the record.
 * Does not copy, and does not shrink while the owner is there. */
#include "host/blocks.h"

#include <stdatomic.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "device/pinning.h"

enum { BINS = 56, SMALLEST_REGION = 1 << 20, TOUCH_SLICE = 8 << 20, MAX_TOUCHERS = 4 };

typedef struct region {
    struct region *next;
    uint8_t *base;
    uint64_t bytes;
    bool pinned;
    sth_block *first; /* in the order of addresses */
} region;

struct sth_block {
    sthi_blocks *owner;
    region *region;
    uint8_t *address;
    uint64_t bytes;
    atomic_int refs;              /* of a block in use */
    bool free;
    sth_block *before, *after;    /* neighbours in the region */
    sth_block *previous, *next;   /* in a bin; next also in the list of spare records */
};

struct sthi_blocks {
    sth_device *device;
    uint64_t region_bytes, pinned_limit;
    unsigned fork_depth;
    atomic_int refs;
    sthi_mutex lock;
    sthi_cond changed; /* a region came, or could not; a block came back; closed */
    region *regions;
    sth_block *bins[BINS];
    sth_block *spare;
    uint64_t capacity, pinned, in_use, in_use_count, regions_taken, waits;
    uint64_t target; /* capacity that was asked for ahead */
    bool growing, closed;
    bool reserving, joinable; /* the thread in the background runs; it is to be joined */
    sthi_thread reserver;
};

/* ---- bins */

static unsigned bin_of(uint64_t bytes) {
    unsigned bin = 63u - (unsigned)__builtin_clzll(bytes / STHI_ALIGN);
    return bin < BINS ? bin : BINS - 1;
}

static void bin_add(sthi_blocks *b, sth_block *block) {
    sth_block **head = &b->bins[bin_of(block->bytes)];
    block->free = true;
    block->previous = NULL;
    block->next = *head;
    if (*head) (*head)->previous = block;
    *head = block;
}

static void bin_remove(sthi_blocks *b, sth_block *block) {
    if (block->previous) block->previous->next = block->next;
    else b->bins[bin_of(block->bytes)] = block->next;
    if (block->next) block->next->previous = block->previous;
    block->free = false;
}

/* The smallest free block of at least `bytes`, the one at the lowest address among equals, so that the same
 * sequence of uses finds the same blocks. */
static sth_block *best_fit(sthi_blocks *b, uint64_t bytes) {
    sth_block *best = NULL;
    for (unsigned bin = bin_of(bytes); bin < BINS && !best; bin++)
        for (sth_block *c = b->bins[bin]; c; c = c->next) {
            if (c->bytes < bytes) continue;
            if (!best || c->bytes < best->bytes || (c->bytes == best->bytes && c->address < best->address))
                best = c;
        }
    return best;
}

/* ---- blocks */

static sth_block *record_take(sthi_blocks *b) {
    sth_block *block = b->spare;
    if (block) b->spare = block->next;
    else block = sthi_alloc(sizeof *block);
    return block;
}

static void record_drop(sthi_blocks *b, sth_block *block) {
    block->next = b->spare;
    b->spare = block;
}

/* Cuts a block to `bytes`; without memory for a record of the rest it stays as it is. */
static void cut(sthi_blocks *b, sth_block *block, uint64_t bytes) {
    if (block->bytes == bytes) return;
    sth_block *rest = record_take(b);
    if (!rest) return;
    *rest = (sth_block){.owner = b,
                        .region = block->region,
                        .address = block->address + bytes,
                        .bytes = block->bytes - bytes,
                        .before = block,
                        .after = block->after};
    if (block->after) block->after->before = rest;
    block->after = rest;
    block->bytes = bytes;
    bin_add(b, rest);
}

/* `block` takes its neighbour `after` in; neither stands in a bin. */
static void join_next(sthi_blocks *b, sth_block *block) {
    sth_block *gone = block->after;
    block->bytes += gone->bytes;
    block->after = gone->after;
    if (gone->after) gone->after->before = block;
    record_drop(b, gone);
}

static void put_back(sthi_blocks *b, sth_block *block) {
    b->in_use -= block->bytes;
    b->in_use_count--;
    if (block->after && block->after->free) {
        bin_remove(b, block->after);
        join_next(b, block);
    }
    if (block->before && block->before->free) {
        block = block->before;
        bin_remove(b, block);
        join_next(b, block);
    }
    bin_add(b, block);
}

/* ---- regions */

typedef struct touch_job {
    uint8_t *base;
    uint64_t bytes;
    size_t page;
    atomic_uint_fast64_t next;
} touch_job;

static void *touch_slices(void *arg) {
    touch_job *job = arg;
    for (;;) {
        uint64_t at = atomic_fetch_add(&job->next, TOUCH_SLICE);
        if (at >= job->bytes) return NULL;
        uint64_t end = at + sthi_min_u64(TOUCH_SLICE, job->bytes - at);
        for (; at < end; at += job->page) *(volatile uint8_t *)(job->base + at) = 0;
    }
}

/* Memory that has been touched is pinned several times faster than memory that has not. */
static void touch(uint8_t *base, uint64_t bytes) {
    touch_job job = {.base = base, .bytes = bytes, .page = sthi_page_size()};
    atomic_init(&job.next, 0);
    sthi_thread helpers[MAX_TOUCHERS];
    uint64_t wanted = sthi_min_u64(bytes / (2 * TOUCH_SLICE), (uint64_t)sthi_cpu_count() - 1);
    int started = 0;
    while (started < (int)sthi_min_u64(wanted, MAX_TOUCHERS) &&
           sthi_thread_start(&helpers[started], "sth-touch", touch_slices, &job) == STH_OK)
        started++;
    touch_slices(&job);
    for (int i = 0; i < started; i++) sthi_thread_join(helpers[i]);
}

static void region_end(sthi_blocks *b, region *r) {
    if (r->pinned) sthi_unpin(b->device, r->base, r->bytes);
    sthi_pages_unmap(r->base, r->bytes);
    sthi_free(r);
}

/* A region with one block that is all of it; NULL when host memory is out. No lock is held. */
static region *region_make(sthi_blocks *b, uint64_t bytes, bool pin) {
    region *r = sthi_zalloc(1, sizeof *r);
    sth_block *all = r ? sthi_zalloc(1, sizeof *all) : NULL;
    if (all) r->base = sthi_pages_map(bytes, 1);
    if (!all || !r->base) {
        sthi_free(all);
        sthi_free(r);
        return NULL;
    }
    r->bytes = bytes;
    r->first = all;
    all->owner = b;
    all->region = r;
    all->address = r->base;
    all->bytes = bytes;
    sth_devptr alias;
    if (pin) {
        touch(r->base, bytes);
        r->pinned = sthi_may_pin(bytes) && sthi_pin(b->device, r->base, bytes, &alias) == STH_OK;
    }
    return r;
}

/* Locked. How large the next region is that a block of `need` bytes goes into: what is expected to be
 * missing, or else as much again as there is. */
static uint64_t next_size(const sthi_blocks *b, uint64_t need) {
    uint64_t more = b->target > b->capacity ? b->target - b->capacity : b->capacity;
    uint64_t size = sthi_max_u64(need, sthi_min_u64(sthi_max_u64(more, SMALLEST_REGION), b->region_bytes));
    return sthi_round_up(size, sthi_page_size(), &size) ? size : 0;
}

/* Locked, lets go meanwhile. Takes one more region; false when host memory is out. */
static bool grow(sthi_blocks *b, uint64_t need) {
    uint64_t size = next_size(b, need), least = 0;
    bool fits = size && sthi_round_up(need, sthi_page_size(), &least);
    bool may_pin = b->device->capabilities & STH_CAP_PINNED_HOST;
    uint64_t limit = b->pinned_limit ? b->pinned_limit : UINT64_MAX;
    uint64_t room = limit - sthi_min_u64(b->pinned, limit);
    if (size > room && least <= room) size = least; /* there is room for this one block */
    if (size > room) may_pin = false;
    uint64_t available = sthi_memory_available(); /* a region is touched: more than there is ends processes */
    if (size > available) size = least;
    if (size > available) fits = false;
    b->growing = true;
    sthi_unlock(&b->lock);
    region *r = fits ? region_make(b, size, may_pin) : NULL;
    if (!r && fits && least < size) r = region_make(b, least, may_pin);
    sthi_lock(&b->lock);
    b->growing = false;
    if (r) {
        r->next = b->regions;
        b->regions = r;
        b->capacity += r->bytes;
        if (r->pinned) b->pinned += r->bytes;
        b->regions_taken++;
        bin_add(b, r->first);
    }
    sthi_cond_broadcast(&b->changed);
    return r != NULL;
}

/* Locked. Takes a region out whose only block is free; NULL when there is none. */
static region *take_empty(sthi_blocks *b) {
    for (region **link = &b->regions; *link; link = &(*link)->next) {
        region *r = *link;
        if (!r->first->free || r->first->after) continue;
        *link = r->next;
        bin_remove(b, r->first);
        record_drop(b, r->first);
        b->capacity -= r->bytes;
        if (r->pinned) b->pinned -= r->bytes;
        return r;
    }
    return NULL;
}

/* ---- life */

sth_status sthi_blocks_create(sth_device *device, uint64_t region_bytes, uint64_t pinned_limit,
                              sthi_blocks **out) {
    sthi_blocks *b = sthi_zalloc(1, sizeof *b);
    if (!b) return sthi_no_memory("blocks", "the record of blocks");
    sthi_device_retain(device);
    b->device = device;
    b->region_bytes = region_bytes;
    b->pinned_limit = pinned_limit;
    b->fork_depth = sthi_fork_depth();
    atomic_init(&b->refs, 1);
    sthi_mutex_init(&b->lock);
    sthi_cond_init(&b->changed);
    *out = b;
    return STH_OK;
}

void sthi_blocks_set_pinned_limit(sthi_blocks *b, uint64_t bytes) {
    sthi_lock(&b->lock);
    b->pinned_limit = bytes;
    sthi_unlock(&b->lock);
}

static void drop(sthi_blocks *b) {
    if (atomic_fetch_sub_explicit(&b->refs, 1, memory_order_acq_rel) != 1) return;
    for (sth_block *block; (block = b->spare); sthi_free(block)) b->spare = block->next;
    sthi_cond_fini(&b->changed);
    sthi_mutex_fini(&b->lock);
    sthi_device_release(b->device);
    sthi_free(b);
}

void sthi_blocks_close(sthi_blocks *b) {
    if (!b || b->fork_depth != sthi_fork_depth()) return;
    sthi_lock(&b->lock);
    b->closed = true;
    sthi_cond_broadcast(&b->changed);
    bool join = b->joinable;
    b->joinable = false;
    sthi_unlock(&b->lock);
    if (join) sthi_thread_join(b->reserver);
    for (;;) {
        sthi_lock(&b->lock);
        region *r = take_empty(b);
        sthi_unlock(&b->lock);
        if (!r) break;
        region_end(b, r);
    }
    drop(b);
}

static sth_status check(const sthi_blocks *b) { /* locked, or before the lock for the fork alone */
    if (b->fork_depth != sthi_fork_depth()) return sthi_fail_in_child("download", "this host memory");
    if (b->closed) return sthi_fail(STH_SHUT_DOWN, NULL, 0, "download", "the download was shut down; make a new one");
    return STH_OK;
}

/* ---- reserving */

static void *reserve_main(void *arg) {
    sthi_blocks *b = arg;
    sthi_lock(&b->lock);
    while (!b->closed && b->target > b->capacity) {
        if (b->growing) sthi_cond_wait(&b->changed, &b->lock);
        else if (!grow(b, STHI_ALIGN)) break; /* whoever needs the memory will be told */
    }
    b->reserving = false;
    sthi_unlock(&b->lock);
    return NULL;
}

sth_status sthi_blocks_reserve(sthi_blocks *b, uint64_t bytes) {
    if (b->fork_depth != sthi_fork_depth()) return check(b);
    sthi_lock(&b->lock);
    sth_status rc = check(b);
    b->target = sthi_max_u64(b->target, bytes);
    if (rc == STH_OK && b->target > b->capacity && !b->reserving) {
        if (b->joinable) sthi_thread_join(b->reserver); /* it has left its loop and needs no lock any more */
        b->joinable = false;
        rc = sthi_thread_start(&b->reserver, "sth-reserve", reserve_main, b);
        b->reserving = b->joinable = rc == STH_OK;
    }
    sthi_unlock(&b->lock);
    return rc;
}

/* ---- taking and giving back */

static sth_status take_locked(sthi_blocks *b, uint64_t bytes, sth_block **out) {
    sth_block *block;
    bool waited = false;
    for (;;) {
        STHI_TRY(check(b));
        if ((block = best_fit(b, bytes))) break;
        if (!waited) b->waits++;
        waited = true;
        if (b->growing) sthi_cond_wait(&b->changed, &b->lock);
        else if (!grow(b, bytes))
            return sthi_no_memory("download", "a block of %llu bytes", (unsigned long long)bytes);
    }
    bin_remove(b, block);
    cut(b, block, bytes);
    b->in_use += block->bytes;
    b->in_use_count++;
    atomic_store_explicit(&block->refs, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    *out = block;
    return STH_OK;
}

sth_status sthi_blocks_take(sthi_blocks *b, uint64_t bytes, sth_block **out) {
    uint64_t need = 0;
    if (!bytes || bytes > INT64_MAX || !sthi_round_up(bytes, STHI_ALIGN, &need))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "download", "a block of %llu bytes",
                         (unsigned long long)bytes);
    if (b->fork_depth != sthi_fork_depth()) return check(b);
    sthi_lock(&b->lock);
    sth_status rc = take_locked(b, need, out);
    sthi_unlock(&b->lock);
    return rc;
}

void *sthi_block_address(const sth_block *block) { return block->address; }
uint64_t sthi_block_bytes(const sth_block *block) { return block->bytes; }
bool sthi_block_is_pinned(const sth_block *block) { return block->region->pinned; }

void sthi_block_retain(sth_block *block) { atomic_fetch_add_explicit(&block->refs, 1, memory_order_relaxed); }

void sthi_block_release(sth_block *block) {
    if (!block || atomic_fetch_sub_explicit(&block->refs, 1, memory_order_acq_rel) != 1) return;
    sthi_blocks *b = block->owner;
    if (b->fork_depth != sthi_fork_depth()) return;
    sthi_lock(&b->lock);
    put_back(b, block);
    region *gone = b->closed ? take_empty(b) : NULL;
    if (b->growing) sthi_cond_broadcast(&b->changed); /* it may fit who waits for the region */
    sthi_unlock(&b->lock);
    if (gone) region_end(b, gone);
    drop(b);
}

void sthi_blocks_stats(sthi_blocks *b, sth_download_stats *out) {
    sthi_lock(&b->lock);
    out->blocks_in_use = b->in_use_count;
    out->bytes_in_use = b->in_use;
    out->pinned_bytes = b->pinned;
    out->pageable_bytes = b->capacity - b->pinned;
    out->regions = b->regions_taken;
    out->waits = b->waits;
    sthi_unlock(&b->lock);
}
