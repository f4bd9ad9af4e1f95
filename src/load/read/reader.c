/* Readers: bytes that cannot be copied from where they are (files, pageable memory) are read into pinned
 * slabs ahead of issue, in the order of issue, by worker threads or by the caller where there are none.
 *
 *   request queue --(next chunk)--> job: slab READING -> READY --issue--> flight: slab until its event
 *
 * Lock: rt->lock guards jobs and flights; it is dropped while reading and while waiting for a slab's
 * copy. Each slab is in exactly one of: the pool's free list, a job, a flight, the hands of a demand load or
 * of whoever waits for its flight.
 *
 * Readers sleep on rt->work. What lets them go on: a request was queued, rewound or came to the queue's head
 * unread (its unit had been on the device), a job left, a slab flew (it can be waited for). A shared pool's
 * slabs also come back from other runtimes, which do not know us: there a reader looks again from time to
 * time, and gives a slab back that is only filled ahead of need when somebody cannot go on without one. */
#include <string.h>

#include "base/memory.h"
#include "store/store.h"
#include "state/state.h"

enum { DEFAULT_SLABS = 8, SLABS_FOR_DEMAND = 1, LOOK_AGAIN_NS = 5000000, SLAB_POLL_NS = 1000000 };
enum { PLAIN_READERS = 2, RING_READERS = 3, MANY_READERS = 8, CACHE_READERS = 16 };
enum { CACHE_CHUNK = 2 << 20, IN_FLIGHT = 24 << 20, RATE_CHUNKS = 4 /* fewer say little about a rate */ };

static bool needs_staging(const sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (!rt->units[i].direct) return true;
    return false;
}

/* Reads under way count as one: the rate is what they bring together. */
static void count_reads(sth_runtime *rt, int change) {
    int64_t now = rt->device->ops->now_ns(rt->device->self);
    if (rt->reads_under_way) rt->read_ns += now - rt->reads_since;
    rt->reads_since = now;
    rt->reads_under_way = (uint32_t)((int)rt->reads_under_way + change);
}

sth_status sthi_read_slab(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, sth_slab slab,
                          uint32_t *out_shift) {
    sthi_unit *u = &rt->units[unit];
    uint32_t master = u->flags & STH_UNIT_WRITABLE ? 1 : 0;
    bool whole = !u->in_ram && (!u->segments || rt->expands); /* as it is at its source */
    bool from_file = u->checkpoint && whole, from_store = u->store && whole;
    sth_store *store = NULL; /* which is told what will be read after this */
    uint32_t next = 0;
    if (u->master) STHI_TRY(sthi_repack(rt, unit));
    sthi_fetcher *fetcher = from_file ? sthi_fetcher_take(rt) : NULL;
    if (from_file && !fetcher)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, u->name, "no memory to read unit '%s'", u->name);
    rt->masters_in_read += master;
    rt->images_in_read++;
    count_reads(rt, 1);
    if (from_store) (void)sthi_store_next(rt, unit, &store, &next);
    sthi_unlock(&rt->lock);
    uint8_t *to = sthi_pool_slab_address(rt->pool, slab);
    if (store) sthi_store_expect(store, next);
    *out_shift = 0;
    sth_status rc = from_store ? sthi_store_chunk(u, begin, bytes, to)
                               : sthi_read_source(rt, unit, fetcher, begin, bytes, to, out_shift);
    sthi_lock(&rt->lock);
    count_reads(rt, -1);
    if (rc == STH_OK && (from_file || from_store)) sthi_keep_chunk(rt, u, begin, bytes, to + *out_shift);
    if (fetcher) sthi_fetcher_give(rt, fetcher);
    rt->read_bytes += rc == STH_OK ? bytes : 0;
    rt->masters_in_read -= master;
    rt->images_in_read--;
    if (!rt->images_in_read || (master && !rt->masters_in_read)) sthi_cond_broadcast(&rt->changed);
    return rc;
}

void sthi_read_rate_settle(sth_runtime *rt) {
    count_reads(rt, 0);
    if (rt->read_ns > 0 && rt->read_bytes >= RATE_CHUNKS * rt->chunk) {
        double seen = (double)rt->read_bytes / ((double)rt->read_ns / 1e9);
        /* Where nobody waited, reading was not what set the pace. */
        if (seen > rt->read_rate) rt->read_rate = seen;
        else if (rt->current.host_waits > 0) rt->read_rate = (rt->read_rate + seen) / 2;
    }
    rt->read_bytes = 0;
    rt->read_ns = 0;
}

void sthi_readers_wake(sth_runtime *rt) {
    if (rt->idle_readers) sthi_cond_broadcast(&rt->work);
}

/* The pool counts slabs that are lost, so that whoever waits for one hears of it. */
static void set_lost(sth_runtime *rt, sthi_flight *f, bool lost) {
    if (f->lost != lost) sthi_pool_lose(rt->pool, lost ? 1 : -1);
    f->lost = lost;
}

/* The device is done with the slab. */
static void land(sth_runtime *rt, sthi_flight *f) {
    set_lost(rt, f, false);
    sthi_event_give(rt, f->emptied);
    (void)sthi_pool_release(rt->pool, &f->slab, 1);
}

/* The oldest flight becomes the newest: others may be over. */
static void stay_in_the_air(sth_runtime *rt, sthi_flight f) {
    set_lost(rt, &f, true);
    rt->flights[rt->flight_tail++ % rt->slab_count] = f;
}

/* Frees slabs whose copies are done, oldest first, without waiting. */
static void reap_flights(sth_runtime *rt) {
    for (uint64_t looks = rt->flight_tail - rt->flight_head; looks > 0; looks--) {
        sthi_flight *f = &rt->flights[rt->flight_head % rt->slab_count];
        bool done = false;
        bool told = f->emptied && STHI_DEV(rt, event_query, f->emptied, &done) == STH_OK;
        if (told) set_lost(rt, f, false);
        if (told && !done) return;
        rt->flight_head++;
        if (told) land(rt, f);
        else stay_in_the_air(rt, *f);
    }
}

/* *out_got: there is one. Fails where none can come any more, as long as the device fails or for good. */
static sth_status try_slab(sth_runtime *rt, sth_slab *out, bool *out_got) {
    uint32_t count = 0;
    reap_flights(rt);
    sth_status rc = sthi_pool_try_acquire(rt->pool, rt->chunk, out, 1, &count);
    if (rc == STH_SHUT_DOWN) {
        rt->pool_shut = true;
        sthi_cond_broadcast(&rt->changed);
    }
    *out_got = count == 1;
    return rc;
}

void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream) {
    sthi_flight f = {.slab = slab, .stream = stream};
    if (sthi_event_take(rt, &f.emptied) == STH_OK &&
        STHI_DEV(rt, event_record, f.emptied, stream) != STH_OK) {
        sthi_event_give(rt, f.emptied);
        f.emptied = NULL;
    }
    rt->flights[rt->flight_tail++ % rt->slab_count] = f;
    sthi_readers_wake(rt);
}

/* Waits for the oldest flight, with the lock dropped. When the device does not say that the copy is done
 * the slab stays in the air: it must not be filled again. */
static sth_status wait_oldest_flight(sth_runtime *rt, bool *out_any) {
    *out_any = rt->flight_head < rt->flight_tail;
    if (!*out_any) return STH_OK;
    sthi_flight f = rt->flights[rt->flight_head++ % rt->slab_count];
    sthi_unlock(&rt->lock);
    sth_status rc = f.emptied ? STHI_DEV(rt, event_synchronize, f.emptied)
                              : STHI_DEV(rt, stream_synchronize, f.stream);
    sthi_lock(&rt->lock);
    if (rc != STH_OK) {
        stay_in_the_air(rt, f);
        return rc;
    }
    land(rt, &f);
    sthi_readers_wake(rt);
    sthi_cond_broadcast(&rt->changed);
    return STH_OK;
}

/* Gives up the newest slab that was filled for a load not yet issued; it will be read again. */
static bool give_newest_job(sth_runtime *rt) {
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

/* One look for a slab: free, ours filled ahead of need, or on its way back. *out_got says whether. */
static sth_status look_for_slab(sth_runtime *rt, sth_slab *out, bool *out_got) {
    *out_got = false;
    for (;;) {
        bool flying = false;
        if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
        sth_status rc = try_slab(rt, out, out_got);
        if (rc == STH_OK && !*out_got && give_newest_job(rt)) rc = try_slab(rt, out, out_got);
        if (rc == STH_SHUT_DOWN || *out_got) return rc;
        STHI_TRY(wait_oldest_flight(rt, &flying)); /* it says better than the pool why there is none */
        if (!flying) STHI_TRY(rc);
        if (!flying) return STH_OK;
    }
}

void sthi_need_slabs(sth_runtime *rt, int change) {
    rt->needy = (uint32_t)((int)rt->needy + change);
    sthi_pool_hungry(rt->pool, change);
}

/* Another runtime cannot go on without a slab, and no caller of ours waits for one. */
static bool others_come_first(const sth_runtime *rt) { return !rt->needy && sthi_pool_is_hungry(rt->pool); }

sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out) {
    bool got = false;
    sth_status rc = look_for_slab(rt, out, &got);
    if (rc != STH_OK || got) return rc;
    /* A reader fills the one that there is, another load holds it, or another runtime. */
    sthi_need_slabs(rt, 1);
    while (rc == STH_OK && !got) {
        sthi_cond_wait_for(&rt->changed, &rt->lock, SLAB_POLL_NS);
        rc = look_for_slab(rt, out, &got);
    }
    sthi_need_slabs(rt, -1);
    return rc;
}

/* The unit is on the device, and no load that is issued before the n-th takes its place: nothing to read. What a plan
 * lets go of first is read in time, or all that was read ahead of it would have to be given up. */
static bool stays_until(const sth_runtime *rt, uint64_t n) {
    const sthi_request *r = &rt->queue[n % STHI_REQUEST_CAP];
    if (r->slot != STHI_NO_SLOT || rt->units[r->unit].slot == STHI_NO_SLOT) return false;
    const sthi_slot *s = &rt->places.slots[rt->units[r->unit].slot];
    for (uint64_t m = rt->queue_head; m < n; m++) {
        const sthi_request *q = &rt->queue[m % STHI_REQUEST_CAP];
        if (q->extent == s->extent && q->unit != r->unit &&
            sthi_ranges_touch(&rt->places.extents[s->extent], q->offset, rt->units[q->unit].bytes, s->offset, s->bytes))
            return false;
    }
    return true;
}

/* The next chunk to read, in the order of issue; NULL when all queued requests are read. */
static sthi_request *next_to_read(sth_runtime *rt, uint64_t *out_ticket) {
    for (uint64_t n = rt->queue_head; n < rt->queue_tail; n++) {
        sthi_request *r = &rt->queue[n % STHI_REQUEST_CAP];
        if (!r->staged || r->failed || r->read >= rt->units[r->unit].bytes) continue;
        if (stays_until(rt, n)) continue;
        *out_ticket = n;
        return r;
    }
    return NULL;
}

static bool slabs_to_spare(sth_runtime *rt) {
    sth_pool_stats stats;
    reap_flights(rt);
    sthi_pool_stats_get(rt->pool, &stats);
    bool none_filled = rt->job_head == rt->job_tail;
    /* The last slab is for demand loads, or a prefetch that cannot be placed yet would starve them. */
    if (others_come_first(rt)) return false;
    return stats.free > SLABS_FOR_DEMAND || (none_filled && stats.free > 0);
}

void sthi_jobs_trim(sth_runtime *rt) {
    while (rt->job_head < rt->job_tail) {
        sthi_job *j = &rt->jobs[rt->job_head % rt->slab_count];
        if (!j->cancelled || j->state == STHI_JOB_READING) return;
        (void)sthi_pool_release(rt->pool, &j->slab, 1);
        rt->job_head++;
        sthi_readers_wake(rt);
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
    sthi_readers_wake(rt);
}

bool sthi_read_one(sth_runtime *rt) {
    uint64_t ticket;
    sthi_request *r = rt->pool ? next_to_read(rt, &ticket) : NULL;
    sth_slab slab;
    bool got = false;
    if (!r || rt->job_tail - rt->job_head >= rt->slab_count || !slabs_to_spare(rt)) return false;
    if (try_slab(rt, &slab, &got) != STH_OK || !got) return false;
    sthi_piece_of p = sthi_next_piece(rt, &rt->units[r->unit], r->read);
    uint64_t number = rt->job_tail++;
    sthi_job *j = &rt->jobs[number % rt->slab_count];
    *j = (sthi_job){.ticket = ticket, .unit = r->unit, .slab = slab, .begin = p.begin, .bytes = p.bytes};
    r->read = p.begin + p.bytes;
    uint32_t shift = 0;
    sth_status rc = sthi_read_slab(rt, r->unit, p.from, p.from_bytes, slab, &shift);
    /* The record has not moved: jobs leave only when they are not READING. */
    j->shift = shift;
    j->state = rc == STH_OK ? STHI_JOB_READY : STHI_JOB_FAILED;
    sthi_jobs_trim(rt);
    sthi_pump(rt);
    sthi_cond_broadcast(&rt->changed);
    return true;
}

void sthi_read_ahead(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    rt->callers++;
    while (!rt->shut && rt->sealed && !rt->reader_count && sthi_read_one(rt)) continue;
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
}

/* Sleeps until there may be something to do. */
static void reader_sleep(sth_runtime *rt, bool look_again) {
    bool shared = rt->options.pool != NULL;
    rt->idle_readers++;
    if (shared || look_again) sthi_cond_wait_for(&rt->work, &rt->lock, LOOK_AGAIN_NS);
    else sthi_cond_wait(&rt->work, &rt->lock);
    rt->idle_readers--;
    if (shared) reap_flights(rt); /* nobody else would, where this runtime is not called */
    if (shared && others_come_first(rt)) (void)give_newest_job(rt);
}

/* Nothing will be read now: whoever waits for it tries on its own, and gets the device's error. */
static void tell_callers(sth_runtime *rt) {
    rt->slab_failures++;
    sthi_cond_broadcast(&rt->changed);
}

static void *reader_main(void *arg) {
    sth_runtime *rt = arg;
    sthi_lock(&rt->lock);
    while (!rt->stop_readers) {
        if (sthi_read_one(rt)) continue;
        uint64_t ticket;
        bool wants = next_to_read(rt, &ticket) != NULL, flying = false;
        /* In virtual time a copy ends when somebody waits for it; whoever needs the slab has no event to wait for. */
        bool lends = rt->options.pool && others_come_first(rt);
        sth_status rc = wants || lends ? wait_oldest_flight(rt, &flying) : STH_OK;
        if (wants && rc == STH_OK && !flying) rc = sthi_pool_reachable(rt->pool); /* others may hold all slabs */
        if ((rc == STH_OK && flying) || rt->stop_readers) continue;
        if (rc != STH_OK) tell_callers(rt);
        reader_sleep(rt, rc != STH_OK);
    }
    sthi_unlock(&rt->lock);
    return NULL;
}

/* What direct reads need in a slab beside the chunk: a block at both ends, and one more where slabs do not begin at
 * a multiple of theirs. */
static uint64_t slack(const sth_runtime *rt) { return (rt->options.pool ? 3 : 2) * (uint64_t)sthi_sources_align(rt); }

static sth_status use_pool(sth_runtime *rt, sth_pool *pool) {
    uint64_t slab = sthi_pool_slab_bytes(pool), room = slack(rt);
    if (2 * room > slab) room = 0; /* such small slabs are filled by way of the side buffers */
    rt->pool = pool;
    if (rt->chunk > slab - room) rt->chunk = (slab - room) / STHI_ALIGN * STHI_ALIGN;
    return STH_OK;
}

static sth_status open_pool(sth_runtime *rt, uint32_t readers) {
    if (rt->options.pool) return use_pool(rt, rt->options.pool);
    uint64_t align = sthi_max_u64(sthi_sources_align(rt), STHI_ALIGN), slab;
    /* Slabs that the processors' caches hold: bytes are copied into them only to be copied out again. */
    if (!rt->options.chunk_bytes && sthi_sources_use(rt, STH_READ_CACHED))
        rt->chunk = sthi_min_u64(rt->chunk, CACHE_CHUNK);
    sthi_round_up(sthi_max_u64(rt->chunk, rt->stage_bytes) + slack(rt), align, &slab);
    uint64_t slabs = rt->options.staging_bytes / slab;
    if (!rt->options.staging_bytes) slabs = sthi_max_u64(DEFAULT_SLABS, 2 * (uint64_t)readers + 2);
    slabs = sthi_max_u64(slabs, 2);
    STHI_TRY(sthi_pool_create(rt->device, slabs * slab, slab, align, &rt->own_pool));
    rt->pool = rt->own_pool;
    return STH_OK;
}

/* A thread keeps several requests under way in a ring, and one without; from the page cache it copies. */
static uint32_t choose_readers(const sth_runtime *rt) {
    uint32_t threads = rt->options.reader_threads;
    if (threads == STH_READERS_AUTO) {
        uint64_t cores = (uint64_t)sthi_cpu_count(), wanted = PLAIN_READERS;
        if (sthi_sources_use(rt, STH_READ_URING)) wanted = sthi_max_u64(RING_READERS, IN_FLIGHT / rt->chunk);
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
    sthi_pool_stats_get(rt->pool, &stats);
    rt->slab_count = stats.total;
    rt->jobs = sthi_zalloc(rt->slab_count, sizeof *rt->jobs);
    rt->flights = sthi_zalloc(rt->slab_count, sizeof *rt->flights);
    rt->readers = sthi_zalloc(readers, sizeof *rt->readers);
    if (!rt->jobs || !rt->flights || !rt->readers)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for the staging records");
    sth_status rc = STH_OK;
    while (rt->reader_count < readers && rc == STH_OK) {
        rc = sthi_thread_start(&rt->readers[rt->reader_count], "sth-read", reader_main, rt);
        if (rc == STH_OK) rt->reader_count++;
    }
    /* Without readers the caller's thread reads. */
    return rt->options.pool && !rt->reader_count ? rc : STH_OK;
}

void sthi_staging_stop(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    rt->stop_readers = true;
    sthi_cond_broadcast(&rt->work);
    sthi_unlock(&rt->lock);
    for (uint32_t i = 0; i < rt->reader_count; i++) sthi_thread_join(rt->readers[i]);
}

void sthi_staging_close(sth_runtime *rt) {
    for (; rt->flight_head < rt->flight_tail; rt->flight_head++)
        land(rt, &rt->flights[rt->flight_head % rt->slab_count]);
    sthi_sources_close(rt);
    sthi_keep_close(rt);
    sthi_pool_destroy(rt->own_pool);
    sthi_free(rt->jobs);
    sthi_free(rt->flights);
    sthi_free(rt->readers);
    rt->own_pool = rt->pool = NULL;
    rt->jobs = NULL;
    rt->flights = NULL;
    rt->readers = NULL;
    rt->reader_count = 0;
}
