/* Readers: bytes that cannot be copied from where they are (files, pageable memory) are read into
 * pinned slabs ahead of issue, in the order of issue, by worker threads or by the caller where there
 * are none.
 *
 *   request queue --(next chunk)--> job: slab READING -> READY --issue--> flight: slab until its event
 *
 * Readers sleep on `readers.work`. What lets them go on: a request was queued, rewound or came to
 * the queue's head unread (its unit had been on the device), a job left, a slab flew (it can be
 * waited for). A shared pool's slabs also come back from other runtimes, which do not know us: there
 * a reader looks again from time to time, and gives a slab back that is only filled ahead of need
 * when somebody cannot go on without one.
 *
 * Lock: the runtime's; dropped while reading and while waiting for a slab's copy. */
#include "load/reader.h"

#include "load/issue.h"
#include "load/pieces.h"
#include "load/read/jobs.h"
#include "load/read/read.h"
#include "load/read/slabs.h"
#include "state/state.h"

enum { SLABS_FOR_DEMAND = 1, LOOK_AGAIN_NS = 5000000 };

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
    sthi_flights_reap(rt);
    sthi_pool_stats_get(rt->slabs.pool, &stats);
    bool none_filled = rt->slabs.job_head == rt->slabs.job_tail;
    /* The last slab is for demand loads, or a prefetch that cannot be placed yet would starve them. */
    if (sthi_others_come_first(rt)) return false;
    return stats.free > SLABS_FOR_DEMAND || (none_filled && stats.free > 0);
}

bool sthi_read_one(sth_runtime *rt) {
    uint64_t ticket;
    sthi_request *r = rt->slabs.pool ? next_to_read(rt, &ticket) : NULL;
    sth_slab slab;
    bool got = false;
    if (!r || rt->slabs.job_tail - rt->slabs.job_head >= rt->slabs.count || !slabs_to_spare(rt)) return false;
    if (sthi_slab_try(rt, &slab, &got) != STH_OK || !got) return false;
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
    if (shared) sthi_flights_reap(rt); /* nobody else would, where this runtime is not called */
    if (shared && sthi_others_come_first(rt)) (void)sthi_jobs_give_newest(rt);
}

/* Nothing will be read now: whoever waits for it tries on its own, and gets the device's error. */
static void tell_callers(sth_runtime *rt) {
    rt->slabs.failures++;
    sthi_cond_broadcast(&rt->changed);
}

void *sthi_reader_main(void *arg) {
    sth_runtime *rt = arg;
    sthi_lock(&rt->lock);
    while (!rt->readers.stop) {
        if (sthi_read_one(rt)) continue;
        uint64_t ticket;
        bool wants = next_to_read(rt, &ticket) != NULL, flying = false;
        /* In virtual time a copy ends when somebody waits for it; whoever needs the slab has no event to wait for. */
        bool lends = rt->options.pool && sthi_others_come_first(rt);
        sth_status rc = wants || lends ? sthi_flights_wait(rt, &flying) : STH_OK;
        if (wants && rc == STH_OK && !flying) rc = sthi_pool_reachable(rt->slabs.pool); /* others may hold all slabs */
        if ((rc == STH_OK && flying) || rt->readers.stop) continue;
        if (rc != STH_OK) tell_callers(rt);
        reader_sleep(rt, rc != STH_OK);
    }
    sthi_unlock(&rt->lock);
    return NULL;
}
