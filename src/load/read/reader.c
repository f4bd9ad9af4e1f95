/* Readers: bytes that cannot be copied from where they are (files, pageable memory) are read into pinned
 * slabs ahead of issue, in the order of issue, by worker threads or by the caller where there are none.
 *
 *   request queue --(next chunk)--> job: slab READING -> READY --issue--> flight: slab until its event
 *
 * Lock: rt->lock guards jobs and flights; it is dropped while reading and while waiting for a slab's
 * copy. Each slab is in exactly one of: the pool's free list, a job, a flight, the hands of a demand load or
 * of whoever waits for its flight.
 *
 * Readers sleep on rt->readers.work. What lets them go on: a request was queued, rewound or came to the queue's head
 * unread (its unit had been on the device), a job left, a slab flew (it can be waited for). A shared pool's
 * slabs also come back from other runtimes, which do not know us: there a reader looks again from time to
 * time, and gives a slab back that is only filled ahead of need when somebody cannot go on without one. */
#include "load/read/reader.h"

#include "base/memory.h"
#include "load/expand.h"
#include "load/issue.h"
#include "load/read/from_store.h"
#include "load/read/keep.h"
#include "load/read/source.h"
#include "load/slots.h"
#include "state/state.h"
#include "store/store.h"

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
    if (rt->reads.under_way) rt->reads.ns += now - rt->reads.since;
    rt->reads.since = now;
    rt->reads.under_way = (uint32_t)((int)rt->reads.under_way + change);
}

sth_status sthi_read_slab(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, sth_slab slab,
                          uint32_t *out_shift) {
    sthi_unit *u = &rt->units[unit];
    uint32_t master = u->flags & STH_UNIT_WRITABLE ? 1 : 0;
    bool whole = !u->in_ram && (!u->segments || rt->expand.on); /* as it is at its source */
    bool from_file = u->checkpoint && whole, from_store = u->store && whole;
    sth_store *store = NULL; /* which is told what will be read after this */
    uint32_t next = 0;
    if (u->master) STHI_TRY(sthi_repack(rt, unit));
    sthi_fetcher *fetcher = from_file ? sthi_fetcher_take(rt) : NULL;
    if (from_file && !fetcher)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, u->name, "no memory to read unit '%s'", u->name);
    rt->reads.masters += master;
    rt->reads.images++;
    count_reads(rt, 1);
    if (from_store) (void)sthi_store_next(rt, unit, &store, &next);
    sthi_unlock(&rt->lock);
    uint8_t *to = sthi_pool_slab_address(rt->slabs.pool, slab);
    if (store) sthi_store_expect(store, next);
    *out_shift = 0;
    sth_status rc = from_store ? sthi_store_chunk(u, begin, bytes, to)
                               : sthi_read_source(rt, unit, fetcher, begin, bytes, to, out_shift);
    sthi_lock(&rt->lock);
    count_reads(rt, -1);
    if (rc == STH_OK && (from_file || from_store)) sthi_keep_chunk(rt, u, begin, bytes, to + *out_shift);
    if (fetcher) sthi_fetcher_give(rt, fetcher);
    rt->reads.bytes += rc == STH_OK ? bytes : 0;
    rt->reads.masters -= master;
    rt->reads.images--;
    if (!rt->reads.images || (master && !rt->reads.masters)) sthi_cond_broadcast(&rt->changed);
    return rc;
}

void sthi_read_rate_settle(sth_runtime *rt) {
    count_reads(rt, 0);
    if (rt->reads.ns > 0 && rt->reads.bytes >= RATE_CHUNKS * rt->copies.chunk) {
        double seen = (double)rt->reads.bytes / ((double)rt->reads.ns / 1e9);
        /* Where nobody waited, reading was not what set the pace. */
        if (seen > rt->reads.rate) rt->reads.rate = seen;
        else if (rt->current.host_waits > 0) rt->reads.rate = (rt->reads.rate + seen) / 2;
    }
    rt->reads.bytes = 0;
    rt->reads.ns = 0;
}

void sthi_readers_wake(sth_runtime *rt) {
    if (rt->readers.idle) sthi_cond_broadcast(&rt->readers.work);
}

/* The pool counts slabs that are lost, so that whoever waits for one hears of it. */
static void set_lost(sth_runtime *rt, sthi_flight *f, bool lost) {
    if (f->lost != lost) sthi_pool_lose(rt->slabs.pool, lost ? 1 : -1);
    f->lost = lost;
}

/* The device is done with the slab. */
static void land(sth_runtime *rt, sthi_flight *f) {
    set_lost(rt, f, false);
    sthi_event_give(rt, f->emptied);
    (void)sthi_pool_release(rt->slabs.pool, &f->slab, 1);
}

/* The oldest flight becomes the newest: others may be over. */
static void stay_in_the_air(sth_runtime *rt, sthi_flight f) {
    set_lost(rt, &f, true);
    rt->slabs.flights[rt->slabs.flight_tail++ % rt->slabs.count] = f;
}

/* Frees slabs whose copies are done, oldest first, without waiting. */
static void reap_flights(sth_runtime *rt) {
    for (uint64_t looks = rt->slabs.flight_tail - rt->slabs.flight_head; looks > 0; looks--) {
        sthi_flight *f = &rt->slabs.flights[rt->slabs.flight_head % rt->slabs.count];
        bool done = false;
        bool told = f->emptied && STHI_DEV(rt, event_query, f->emptied, &done) == STH_OK;
        if (told) set_lost(rt, f, false);
        if (told && !done) return;
        rt->slabs.flight_head++;
        if (told) land(rt, f);
        else stay_in_the_air(rt, *f);
    }
}

/* *out_got: there is one. Fails where none can come any more, as long as the device fails or for good. */
static sth_status try_slab(sth_runtime *rt, sth_slab *out, bool *out_got) {
    uint32_t count = 0;
    reap_flights(rt);
    sth_status rc = sthi_pool_try_acquire(rt->slabs.pool, rt->copies.chunk, out, 1, &count);
    if (rc == STH_SHUT_DOWN) {
        rt->slabs.pool_shut = true;
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
    rt->slabs.flights[rt->slabs.flight_tail++ % rt->slabs.count] = f;
    sthi_readers_wake(rt);
}

/* Waits for the oldest flight, with the lock dropped. When the device does not say that the copy is done
 * the slab stays in the air: it must not be filled again. */
static sth_status wait_oldest_flight(sth_runtime *rt, bool *out_any) {
    *out_any = rt->slabs.flight_head < rt->slabs.flight_tail;
    if (!*out_any) return STH_OK;
    sthi_flight f = rt->slabs.flights[rt->slabs.flight_head++ % rt->slabs.count];
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
    if (rt->slabs.job_head == rt->slabs.job_tail) return false;
    sthi_job *j = &rt->slabs.jobs[(rt->slabs.job_tail - 1) % rt->slabs.count];
    if (j->state == STHI_JOB_READING) return false;
    sthi_request *r = j->ticket >= rt->queue.head && j->ticket < rt->queue.tail && !j->cancelled
                          ? &rt->queue.requests[j->ticket % STHI_REQUEST_CAP] : NULL;
    if (r) r->read = j->begin;
    (void)sthi_pool_release(rt->slabs.pool, &j->slab, 1);
    rt->slabs.job_tail--;
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
    rt->slabs.needy = (uint32_t)((int)rt->slabs.needy + change);
    sthi_pool_hungry(rt->slabs.pool, change);
}

/* Another runtime cannot go on without a slab, and no caller of ours waits for one. */
static bool others_come_first(const sth_runtime *rt) { return !rt->slabs.needy && sthi_pool_is_hungry(rt->slabs.pool); }

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
    const sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
    if (r->slot != STHI_NO_SLOT || rt->units[r->unit].slot == STHI_NO_SLOT) return false;
    const sthi_slot *s = &rt->places.slots[rt->units[r->unit].slot];
    for (uint64_t m = rt->queue.head; m < n; m++) {
        const sthi_request *q = &rt->queue.requests[m % STHI_REQUEST_CAP];
        if (q->extent == s->extent && q->unit != r->unit &&
            sthi_ranges_touch(&rt->places.extents[s->extent], q->offset, rt->units[q->unit].bytes, s->offset, s->bytes))
            return false;
    }
    return true;
}

/* The next chunk to read, in the order of issue; NULL when all queued requests are read. */
static sthi_request *next_to_read(sth_runtime *rt, uint64_t *out_ticket) {
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
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
    sthi_pool_stats_get(rt->slabs.pool, &stats);
    bool none_filled = rt->slabs.job_head == rt->slabs.job_tail;
    /* The last slab is for demand loads, or a prefetch that cannot be placed yet would starve them. */
    if (others_come_first(rt)) return false;
    return stats.free > SLABS_FOR_DEMAND || (none_filled && stats.free > 0);
}

void sthi_jobs_trim(sth_runtime *rt) {
    while (rt->slabs.job_head < rt->slabs.job_tail) {
        sthi_job *j = &rt->slabs.jobs[rt->slabs.job_head % rt->slabs.count];
        if (!j->cancelled || j->state == STHI_JOB_READING) return;
        (void)sthi_pool_release(rt->slabs.pool, &j->slab, 1);
        rt->slabs.job_head++;
        sthi_readers_wake(rt);
    }
}

void sthi_jobs_cancel(sth_runtime *rt, uint64_t before_ticket) {
    for (uint64_t n = rt->slabs.job_head; n < rt->slabs.job_tail; n++) {
        sthi_job *j = &rt->slabs.jobs[n % rt->slabs.count];
        if (j->ticket < before_ticket) j->cancelled = true;
    }
    sthi_jobs_trim(rt);
}

void sthi_reads_rewind(sth_runtime *rt) {
    sthi_jobs_cancel(rt, UINT64_MAX);
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
        r->read = r->slot == STHI_NO_SLOT ? 0 : rt->places.slots[r->slot].claimed;
    }
    sthi_readers_wake(rt);
}

bool sthi_read_one(sth_runtime *rt) {
    uint64_t ticket;
    sthi_request *r = rt->slabs.pool ? next_to_read(rt, &ticket) : NULL;
    sth_slab slab;
    bool got = false;
    if (!r || rt->slabs.job_tail - rt->slabs.job_head >= rt->slabs.count || !slabs_to_spare(rt)) return false;
    if (try_slab(rt, &slab, &got) != STH_OK || !got) return false;
    sthi_piece_of p = sthi_next_piece(rt, &rt->units[r->unit], r->read);
    uint64_t number = rt->slabs.job_tail++;
    sthi_job *j = &rt->slabs.jobs[number % rt->slabs.count];
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
    while (!rt->shut && rt->sealed && !rt->readers.count && sthi_read_one(rt)) continue;
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
}

/* Sleeps until there may be something to do. */
static void reader_sleep(sth_runtime *rt, bool look_again) {
    bool shared = rt->options.pool != NULL;
    rt->readers.idle++;
    if (shared || look_again) sthi_cond_wait_for(&rt->readers.work, &rt->lock, LOOK_AGAIN_NS);
    else sthi_cond_wait(&rt->readers.work, &rt->lock);
    rt->readers.idle--;
    if (shared) reap_flights(rt); /* nobody else would, where this runtime is not called */
    if (shared && others_come_first(rt)) (void)give_newest_job(rt);
}

/* Nothing will be read now: whoever waits for it tries on its own, and gets the device's error. */
static void tell_callers(sth_runtime *rt) {
    rt->slabs.failures++;
    sthi_cond_broadcast(&rt->changed);
}

static void *reader_main(void *arg) {
    sth_runtime *rt = arg;
    sthi_lock(&rt->lock);
    while (!rt->readers.stop) {
        if (sthi_read_one(rt)) continue;
        uint64_t ticket;
        bool wants = next_to_read(rt, &ticket) != NULL, flying = false;
        /* In virtual time a copy ends when somebody waits for it; whoever needs the slab has no event to wait for. */
        bool lends = rt->options.pool && others_come_first(rt);
        sth_status rc = wants || lends ? wait_oldest_flight(rt, &flying) : STH_OK;
        if (wants && rc == STH_OK && !flying) rc = sthi_pool_reachable(rt->slabs.pool); /* others may hold all slabs */
        if ((rc == STH_OK && flying) || rt->readers.stop) continue;
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
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for the staging records");
    sth_status rc = STH_OK;
    while (rt->readers.count < readers && rc == STH_OK) {
        rc = sthi_thread_start(&rt->readers.threads[rt->readers.count], "sth-read", reader_main, rt);
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
        land(rt, &rt->slabs.flights[rt->slabs.flight_head % rt->slabs.count]);
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
