/* Slabs and readers of a runtime that has staged sources: how many, opened at seal, closed at the
 * end. */
#include "load/staging.h"

#include "base/memory.h"
#include "load/read/keep.h"
#include "load/read/slabs.h"
#include "load/read/source.h"
#include "load/reader.h"
#include "state/state.h"

enum { DEFAULT_SLABS = 8, PLAIN_READERS = 2, RING_READERS = 3, MANY_READERS = 8, CACHE_READERS = 16 };
enum { CACHE_CHUNK = 2 << 20, IN_FLIGHT = 24 << 20 };

static bool needs_staging(const sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (!rt->units[i].direct) return true;
    return false;
}

/* What direct reads need in a slab beside the chunk: a block at both ends, and one more where slabs do not begin at
 * a multiple of theirs. */
static uint64_t slack(const sth_runtime *rt) { return (rt->options.pool ? 3 : 2) * (uint64_t)sthi_sources_align(rt); }

static sth_status use_pool(sth_runtime *rt, sth_pool *pool) {
    uint64_t slab = sthi_pool_slab_bytes(pool), room = slack(rt);
    if (2 * room > slab) room = 0; /* such small slabs are filled by way of the side buffers */
    rt->slabs.pool = pool;
    if (rt->copies.chunk > slab - room) rt->copies.chunk = (slab - room) / STHI_ALIGN * STHI_ALIGN;
    return STH_OK;
}

static sth_status open_pool(sth_runtime *rt, uint32_t readers) {
    if (rt->options.pool) return use_pool(rt, rt->options.pool);
    uint64_t align = sthi_max_u64(sthi_sources_align(rt), STHI_ALIGN), slab;
    /* Slabs that the processors' caches hold: bytes are copied into them only to be copied out again. */
    if (!rt->options.chunk_bytes && sthi_sources_use(rt, STH_READ_CACHED))
        rt->copies.chunk = sthi_min_u64(rt->copies.chunk, CACHE_CHUNK);
    sthi_round_up(sthi_max_u64(rt->copies.chunk, rt->expand.stage_bytes) + slack(rt), align, &slab);
    uint64_t slabs = rt->options.staging_bytes / slab;
    if (!rt->options.staging_bytes) slabs = sthi_max_u64(DEFAULT_SLABS, 2 * (uint64_t)readers + 2);
    slabs = sthi_max_u64(slabs, 2);
    STHI_TRY(sthi_pool_create(rt->device, slabs * slab, slab, align, &rt->slabs.own_pool));
    rt->slabs.pool = rt->slabs.own_pool;
    return STH_OK;
}

/* A thread keeps several requests under way in a ring, and one without; from the page cache it copies. */
static uint32_t choose_readers(const sth_runtime *rt) {
    uint32_t threads = rt->options.reader_threads;
    if (threads == STH_READERS_AUTO) {
        uint64_t cores = (uint64_t)sthi_cpu_count(), wanted = PLAIN_READERS;
        if (sthi_sources_use(rt, STH_READ_URING)) wanted = sthi_max_u64(RING_READERS, IN_FLIGHT / rt->copies.chunk);
        if (sthi_sources_use(rt, STH_READ_DIRECT) || sthi_sources_use(rt, STH_READ_BUFFERED)) wanted = MANY_READERS;
        wanted = sthi_min_u64(wanted, MANY_READERS);
        if (sthi_sources_use(rt, STH_READ_CACHED)) wanted = sthi_max_u64(wanted, sthi_min_u64(cores, CACHE_READERS));
        threads = (uint32_t)wanted;
    }
    return rt->options.pool && !threads ? 1 : threads; /* a shared pool needs somebody who gives slabs back */
}

sth_status sthi_staging_open(sth_runtime *rt) {
    if (!needs_staging(rt)) return STH_OK;
    STHI_TRY(sthi_sources_open(rt));
    uint32_t readers = choose_readers(rt);
    STHI_TRY(open_pool(rt, readers));
    sth_pool_stats stats;
    sthi_pool_stats_get(rt->slabs.pool, &stats);
    rt->slabs.count = stats.total;
    rt->slabs.jobs = sthi_zalloc(rt->slabs.count, sizeof *rt->slabs.jobs);
    rt->slabs.flights = sthi_zalloc(rt->slabs.count, sizeof *rt->slabs.flights);
    rt->readers.threads = sthi_zalloc(readers, sizeof *rt->readers.threads);
    if (!rt->slabs.jobs || !rt->slabs.flights || !rt->readers.threads)
        return sthi_no_memory(NULL, "the staging records");
    sth_status rc = STH_OK;
    while (rt->readers.count < readers && rc == STH_OK) {
        rc = sthi_thread_start(&rt->readers.threads[rt->readers.count], "sth-read", sthi_reader_main, rt);
        if (rc == STH_OK) rt->readers.count++;
    }
    /* Without readers the caller's thread reads. */
    return rt->options.pool && !rt->readers.count ? rc : STH_OK;
}

void sthi_staging_stop(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    rt->readers.stop = true;
    sthi_cond_broadcast(&rt->readers.work);
    sthi_unlock(&rt->lock);
    for (uint32_t i = 0; i < rt->readers.count; i++) sthi_thread_join(rt->readers.threads[i]);
}

void sthi_staging_close(sth_runtime *rt) {
    for (; rt->slabs.flight_head < rt->slabs.flight_tail; rt->slabs.flight_head++)
        sthi_flight_land(rt, &rt->slabs.flights[rt->slabs.flight_head % rt->slabs.count]);
    sthi_sources_close(rt);
    sthi_keep_close(rt);
    sthi_pool_destroy(rt->slabs.own_pool);
    sthi_free(rt->slabs.jobs);
    sthi_free(rt->slabs.flights);
    sthi_free(rt->readers.threads);
    rt->slabs.own_pool = rt->slabs.pool = NULL;
    rt->slabs.jobs = NULL;
    rt->slabs.flights = NULL;
    rt->readers.threads = NULL;
    rt->readers.count = 0;
}
