/* Issue: turns the queue's requests into places, copies and events, as far as it goes now. Only
 * enqueues. Lock held. */
#include "load/issue.h"

#include "base/invariant.h"
#include "load/astray.h"
#include "load/distance.h"
#include "load/feed.h"
#include "load/fill.h"
#include "load/pieces.h"
#include "load/queue.h"
#include "load/read/jobs.h"
#include "load/read/slabs.h"
#include "load/run.h"
#include "load/slots.h"
#include "state/state.h"

/* The read job for the next chunk of the request at the queue's head; NULL if it is not begun. */
static sthi_job *job_for(sth_runtime *rt, uint64_t begin) {
    if (rt->slabs.job_head == rt->slabs.job_tail) return NULL;
    sthi_job *j = &rt->slabs.jobs[rt->slabs.job_head % rt->slabs.count];
    STHI_INVARIANT(j->cancelled || (rt->queue.head <= j->ticket && j->ticket < rt->queue.tail));
    if (!j->cancelled && j->ticket == rt->queue.head && j->begin == begin) return j;
    /* Later requests were read first (this unit was on the device then, and has left since). */
    if (!j->cancelled) sthi_reads_rewind(rt);
    return NULL;
}

/* Static policy: cost of taking a slot. Far and large goes first. */
static double static_cost(void *context, const sthi_slot *s) {
    sth_runtime *rt = context;
    uint32_t far = sthi_distance(rt, s->unit);
    /* What the lookahead itself wants must stay, or prefetches would evict each other. */
    if (s->leases || !s->complete || far <= rt->options.prefetch_window) return -1;
    return 1.0 / ((double)far * (double)s->bytes);
}

static sthi_issue start_request(sth_runtime *rt, sthi_request *r) {
    sthi_place home = {r->extent, r->offset};
    if (r->extent == STH_NONE &&
        !sthi_places_choose(&rt->places, rt->units[r->unit].bytes, static_cost, rt, &home))
        return STHI_ISSUE_NO_PLACE;
    bool packed = sthi_packed_on_link(rt, &rt->units[r->unit]);
    sth_stream writer = packed ? rt->expand.stream : rt->copies.stream;
    if (sthi_open_slot(rt, r->unit, home.extent, home.offset, writer, &r->slot) != STH_OK)
        return sthi_request_fail(rt, r);
    return STHI_ISSUE_DONE;
}

/* The unit is on the device already. DONE: that copy serves. NO_PLACE: its use before this one has to end first. */
static sthi_issue serve_as_it_lies(sth_runtime *rt, const sthi_request *r, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    if (r->planned && !sthi_request_due(rt, r) && sthi_in_the_way(rt, s, r)) {
        if (sthi_slot_busy(s) || s->uses_left) return STHI_ISSUE_NO_PLACE;
        return sthi_evict(rt, slot, rt->copies.stream) == STH_OK ? STHI_ISSUE_DONE : STHI_ISSUE_FAILED;
    }
    s->uses_left += r->uses;
    rt->sync[slot].lap = r->lap;
    return STHI_ISSUE_DONE;
}

/* Carries the request at the queue's head as far as it goes now. */
static sthi_issue issue_head(sth_runtime *rt, sthi_request *r) {
    sthi_unit *u = &rt->units[r->unit];
    if (r->slot == STHI_NO_SLOT) {
        if (u->slot != STHI_NO_SLOT) {
            sthi_issue as_it_lies = serve_as_it_lies(rt, r, u->slot);
            if (as_it_lies == STHI_ISSUE_FAILED) return sthi_request_fail(rt, r);
            if (as_it_lies != STHI_ISSUE_DONE || u->slot != STHI_NO_SLOT) return as_it_lies;
        }
        sthi_issue started = start_request(rt, r);
        if (started != STHI_ISSUE_DONE) return started;
    }
    sthi_slot *s = &rt->places.slots[r->slot];
    STHI_INVARIANT(u->slot == r->slot && !s->leases && !s->complete);
    while (s->claimed < u->bytes) {
        sthi_piece_of p = sthi_next_piece(rt, u, s->claimed);
        if (!sthi_range_takeable(rt, r->slot, p.begin, p.bytes)) return STHI_ISSUE_NO_PLACE;
        sthi_job *job = r->staged ? job_for(rt, p.begin) : NULL;
        if (r->staged && (!job || job->state == STHI_JOB_READING)) return STHI_ISSUE_NOT_READ;
        STHI_INVARIANT(!job || (job->unit == r->unit && job->bytes == p.bytes));
        if (job && job->state == STHI_JOB_FAILED) return sthi_request_fail(rt, r);
        sth_status claimed = job ? sthi_claim_range(rt, r->slot, p.begin, p.bytes) : sthi_run_claim(rt, r->slot, &p);
        if (claimed != STH_OK) return sthi_request_fail(rt, r);
        const uint8_t *from = job ? sthi_slab_bytes(rt, job->slab, job->shift) : u->host + p.from;
        if (sthi_piece_copy(rt, r->slot, &p, from) != STH_OK) return sthi_request_fail(rt, r);
        if (job) {
            sthi_slab_fly(rt, job->slab, rt->copies.stream);
            rt->slabs.job_head++;
            sthi_readers_wake(rt);
        }
    }
    if (sthi_slot_complete(rt, r->slot) != STH_OK) return sthi_request_fail(rt, r);
    sthi_request_loaded(rt, r);
    return STHI_ISSUE_DONE;
}

void sthi_pump_for(sth_runtime *rt, uint32_t wanted) {
    for (;;) {
        sthi_feed(rt);
        if (rt->queue.head == rt->queue.tail) return;
        sthi_request *r = sthi_request_at(rt, rt->queue.head);
        if (r->failed) return;
        bool alone = !r->resident && !rt->planned.bundles;
        if (alone || !sthi_issue_with_others(rt, r, wanted, &rt->queue.head_state))
            rt->queue.head_state = issue_head(rt, r);
        /* Readers may have passed it over: its unit was on the device then. */
        if (rt->queue.head_state == STHI_ISSUE_NOT_READ) sthi_readers_wake(rt);
        if (rt->queue.head_state != STHI_ISSUE_DONE) return;
        sthi_queue_leave(rt);
    }
}
