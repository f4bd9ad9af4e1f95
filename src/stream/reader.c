/* Readers: bytes that cannot be copied from where they are (files, pageable memory) are read into pinned
 * slabs ahead of issue, in the order of issue, by worker threads or by the caller where there are none.
 *
 *   request queue --(next chunk)--> job: slab READING -> READY --issue--> flight: slab until its event
 *
 * Lock: rt->lock guards jobs and flights; it is dropped while reading and while waiting for a slab's
 * copy. Each slab is in exactly one of: the pool's free list, a job, a flight, a demand load's hands. */
#include <string.h>

#include "base/memory.h"
#include "stream/engine.h"

enum { DEFAULT_SLABS = 8, SLABS_FOR_DEMAND = 1 };

static bool needs_staging(const sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (!rt->units[i].direct) return true;
    return false;
}

static sth_status read_file(sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *to) {
    memset(to, 0, bytes); /* the gaps between tensors */
    for (uint32_t i = 0; i < u->range_count; i++) {
        const sth_file_range *r = &u->ranges[i];
        uint64_t from = sthi_max_u64(r->place_offset, begin);
        uint64_t end = sthi_min_u64(r->place_offset + r->bytes, begin + bytes);
        if (from >= end) continue;
        STHI_TRY(sthi_checkpoint_read(u->checkpoint, r->file, r->file_offset + (from - r->place_offset),
                                      end - from, to + (from - begin)));
    }
    return STH_OK;
}

sth_status sthi_read_range(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, uint8_t *to) {
    sthi_unit *u = &rt->units[unit];
    if (u->checkpoint) return read_file(u, begin, bytes, to);
    memcpy(to, u->host + begin, bytes);
    return STH_OK;
}

/* Lock held. Frees slabs whose copies are done, oldest first, without waiting. */
static void reap_flights(sth_runtime *rt) {
    while (rt->flight_head < rt->flight_tail) {
        sthi_flight *f = &rt->flights[rt->flight_head % rt->slab_count];
        bool done = false;
        if (STHI_DEV(rt, event_query, f->emptied, &done) != STH_OK || !done) return;
        sthi_event_give(rt, f->emptied);
        (void)sthi_pool_release(rt->pool, &f->slab, 1);
        rt->flight_head++;
    }
}

static bool try_slab(sth_runtime *rt, sth_slab *out) {
    uint32_t count = 0;
    reap_flights(rt);
    return sthi_pool_try_acquire(rt->pool, rt->chunk, out, 1, &count) == STH_OK && count == 1;
}

void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream) {
    sthi_event *event = NULL;
    if (sthi_event_take(rt, &event) == STH_OK && STHI_DEV(rt, event_record, event, stream) == STH_OK) {
        rt->flights[rt->flight_tail++ % rt->slab_count] = (sthi_flight){slab, event};
        return;
    }
    /* No event to be had: wait here rather than hand out a slab that is still being read. */
    sthi_event_give(rt, event);
    (void)STHI_DEV(rt, stream_synchronize, stream);
    (void)sthi_pool_release(rt->pool, &slab, 1);
}

/* Waits for the oldest flight with the lock dropped. False: there is none. */
static bool wait_oldest_flight(sth_runtime *rt) {
    if (rt->flight_head == rt->flight_tail) return false;
    sthi_flight f = rt->flights[rt->flight_head++ % rt->slab_count];
    sthi_unlock(&rt->lock);
    (void)STHI_DEV(rt, event_synchronize, f.emptied);
    sthi_lock(&rt->lock);
    sthi_event_give(rt, f.emptied);
    (void)sthi_pool_release(rt->pool, &f.slab, 1);
    sthi_cond_broadcast(&rt->changed);
    return true;
}

/* A slab that was read for a prefetch not yet begun serves a demand now: the newest job goes back. */
static bool steal_newest_job(sth_runtime *rt) {
    if (rt->job_head == rt->job_tail) return false;
    sthi_job *j = &rt->jobs[(rt->job_tail - 1) % rt->slab_count];
    if (j->state == STHI_JOB_READING) return false;
    sthi_request *r = j->ticket >= rt->queue_head && j->ticket < rt->queue_tail && !j->cancelled
                          ? &rt->queue[j->ticket % STHI_REQUEST_CAP] : NULL;
    if (r) r->read = j->begin;
    (void)sthi_pool_release(rt->pool, &j->slab, 1);
    rt->job_tail--;
    return true;
}

sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out) {
    for (;;) {
        if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
        if (try_slab(rt, out) || (steal_newest_job(rt) && try_slab(rt, out))) return STH_OK;
        if (wait_oldest_flight(rt)) continue;
        if (rt->job_head < rt->job_tail) {
            sthi_cond_wait_for(&rt->changed, &rt->lock, 1000000); /* a reader is at work */
        } else {
            /* Every slab is out of this runtime's hands: a shared pool. Wait for the others. */
            sth_slab slab;
            uint32_t count = 0;
            sthi_unlock(&rt->lock);
            sth_status rc = sthi_pool_acquire(rt->pool, rt->chunk, &slab, 1, &count);
            sthi_lock(&rt->lock);
            if (rc == STH_OK) *out = slab;
            return rc;
        }
    }
}

/* The next chunk to read, in the order of issue; NULL when all queued requests are read. */
static sthi_request *next_to_read(sth_runtime *rt, uint64_t *out_ticket) {
    for (uint64_t n = rt->queue_head; n < rt->queue_tail; n++) {
        sthi_request *r = &rt->queue[n % STHI_REQUEST_CAP];
        if (!r->staged || r->failed || r->read >= rt->units[r->unit].bytes) continue;
        if (r->slot == STHI_NO_SLOT && rt->units[r->unit].slot != STHI_NO_SLOT) continue; /* there already */
        *out_ticket = n;
        return r;
    }
    return NULL;
}

static bool slabs_to_spare(sth_runtime *rt) {
    sth_pool_stats stats;
    reap_flights(rt);
    sthi_pool_stats_get(rt->pool, &stats);
    /* The last slab is for demand loads, or a prefetch that cannot be placed yet would starve them. */
    return stats.free > SLABS_FOR_DEMAND || (rt->job_head == rt->job_tail && stats.free > 0);
}

void sthi_jobs_trim(sth_runtime *rt) {
    while (rt->job_head < rt->job_tail) {
        sthi_job *j = &rt->jobs[rt->job_head % rt->slab_count];
        if (!j->cancelled || j->state == STHI_JOB_READING) return;
        (void)sthi_pool_release(rt->pool, &j->slab, 1);
        rt->job_head++;
    }
}

void sthi_jobs_cancel(sth_runtime *rt, uint64_t before_ticket) {
    for (uint64_t n = rt->job_head; n < rt->job_tail; n++) {
        sthi_job *j = &rt->jobs[n % rt->slab_count];
        if (j->ticket < before_ticket) j->cancelled = true;
    }
    sthi_jobs_trim(rt);
}

void sthi_reads_rewind(sth_runtime *rt) {
    sthi_jobs_cancel(rt, UINT64_MAX);
    for (uint64_t n = rt->queue_head; n < rt->queue_tail; n++) {
        sthi_request *r = &rt->queue[n % STHI_REQUEST_CAP];
        r->read = r->slot == STHI_NO_SLOT ? 0 : rt->places.slots[r->slot].claimed;
    }
    sthi_cond_broadcast(&rt->changed);
}

bool sthi_read_one(sth_runtime *rt) {
    uint64_t ticket;
    sthi_request *r = rt->pool ? next_to_read(rt, &ticket) : NULL;
    sth_slab slab;
    if (!r || rt->job_tail - rt->job_head >= rt->slab_count || !slabs_to_spare(rt) || !try_slab(rt, &slab))
        return false;
    uint64_t begin = r->read, bytes = sthi_min_u64(rt->chunk, rt->units[r->unit].bytes - begin);
    uint64_t number = rt->job_tail++;
    sthi_job *j = &rt->jobs[number % rt->slab_count];
    *j = (sthi_job){.ticket = ticket, .unit = r->unit, .slab = slab, .begin = begin, .bytes = bytes};
    r->read = begin + bytes;
    uint32_t unit = r->unit;
    sthi_unlock(&rt->lock);
    sth_status rc = sthi_read_range(rt, unit, begin, bytes, sthi_pool_slab_address(rt->pool, slab));
    sthi_lock(&rt->lock);
    /* The record has not moved: jobs leave from the head only when they are not READING. */
    if (rc != STH_OK) sthi_error_save(&j->error);
    j->state = rc == STH_OK ? STHI_JOB_READY : STHI_JOB_FAILED;
    sthi_jobs_trim(rt);
    sthi_pump(rt);
    sthi_cond_broadcast(&rt->changed);
    return true;
}

static void *reader_main(void *arg) {
    sth_runtime *rt = arg;
    sthi_lock(&rt->lock);
    while (!rt->stop_readers) {
        if (sthi_read_one(rt)) continue;
        uint64_t ticket;
        if (next_to_read(rt, &ticket) && wait_oldest_flight(rt)) continue;
        sthi_cond_wait(&rt->changed, &rt->lock);
    }
    sthi_unlock(&rt->lock);
    return NULL;
}

static sth_status open_pool(sth_runtime *rt) {
    if (rt->options.pool) {
        rt->pool = rt->options.pool;
        uint64_t slab = sthi_pool_slab_bytes(rt->pool);
        if (rt->chunk > slab) rt->chunk = slab / STHI_ALIGN * STHI_ALIGN;
        return STH_OK;
    }
    uint64_t bytes = rt->options.staging_bytes ? rt->options.staging_bytes : DEFAULT_SLABS * rt->chunk;
    uint64_t slabs = sthi_max_u64(bytes / rt->chunk, 2);
    STHI_TRY(sthi_pool_create(rt->device, slabs * rt->chunk, rt->chunk, STHI_ALIGN, &rt->own_pool));
    rt->pool = rt->own_pool;
    return STH_OK;
}

sth_status sthi_staging_open(sth_runtime *rt) {
    if (!needs_staging(rt)) return STH_OK;
    STHI_TRY(open_pool(rt));
    sth_pool_stats stats;
    sthi_pool_stats_get(rt->pool, &stats);
    rt->slab_count = stats.total;
    rt->jobs = sthi_zalloc(rt->slab_count, sizeof *rt->jobs);
    rt->flights = sthi_zalloc(rt->slab_count, sizeof *rt->flights);
    rt->readers = sthi_zalloc(rt->options.reader_threads, sizeof *rt->readers);
    if (!rt->jobs || !rt->flights || !rt->readers)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for the staging records");
    while (rt->reader_count < rt->options.reader_threads &&
           sthi_thread_start(&rt->readers[rt->reader_count], "sth-read", reader_main, rt) == STH_OK)
        rt->reader_count++;
    return STH_OK; /* without readers the caller's thread reads */
}

void sthi_staging_close(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    rt->stop_readers = true;
    sthi_cond_broadcast(&rt->changed);
    sthi_unlock(&rt->lock);
    for (uint32_t i = 0; i < rt->reader_count; i++) sthi_thread_join(rt->readers[i]);
    rt->reader_count = 0;
    sthi_lock(&rt->lock);
    sthi_cancel_queue(rt);
    while (wait_oldest_flight(rt)) {
    }
    sthi_unlock(&rt->lock);
    sthi_pool_destroy(rt->own_pool);
    sthi_free(rt->jobs);
    sthi_free(rt->flights);
    sthi_free(rt->readers);
    rt->own_pool = rt->pool = NULL;
    rt->jobs = NULL;
    rt->flights = NULL;
    rt->readers = NULL;
}
