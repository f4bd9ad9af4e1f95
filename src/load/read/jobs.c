/* Jobs: slabs that are being filled, or are full, for the queue's requests, in the order of issue.
 * A job leaves when its bytes are issued, or when it is cancelled and nobody reads into it any
 * more. Lock held. */
#include "load/read/jobs.h"

#include "base/invariant.h"
#include "state/state.h"

void sthi_readers_wake(sth_runtime *rt) {
    if (rt->readers.idle) sthi_cond_broadcast(&rt->readers.work);
}

bool sthi_jobs_give_newest(sth_runtime *rt) {
    if (rt->slabs.job_head == rt->slabs.job_tail) return false;
    sthi_job *j = &rt->slabs.jobs[(rt->slabs.job_tail - 1) % rt->slabs.count];
    if (j->state == STHI_JOB_READING) return false;
    sthi_request *r = j->ticket >= rt->queue.head && j->ticket < rt->queue.tail && !j->cancelled
                          ? &rt->queue.requests[j->ticket % STHI_REQUEST_CAP] : NULL;
    STHI_INVARIANT(!r || r->read == j->begin + j->bytes); /* nothing behind it is read yet */
    if (r) r->read = j->begin;
    (void)sthi_pool_release(rt->slabs.pool, &j->slab, 1);
    rt->slabs.job_tail--;
    return true;
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
