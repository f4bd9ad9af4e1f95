/* The queue of loads: requests by history numbers, of which the first is being issued. A request
 * that failed stays at the head until its unit is asked for, which tries again, or the step ends.
 * Lock held. */
#include "load/queue.h"

#include "load/read/jobs.h"
#include "load/slots.h"
#include "state/state.h"

bool sthi_request_due(const sth_runtime *rt, const sthi_request *r) {
    const sth_plan *plan = rt->planned.plan;
    return r->lap == rt->program.lap && plan->loads[r->sequence % plan->load_count].first_use < rt->program.cursor;
}

sthi_request *sthi_queued(sth_runtime *rt, uint32_t unit) {
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
        if (r->unit == unit) return r;
    }
    return NULL;
}

void sthi_request_abandon(sth_runtime *rt, uint64_t number) {
    sthi_request *r = sthi_request_at(rt, number);
    if (r->slot != STHI_NO_SLOT) sthi_abandon_slot(rt, r->slot);
    r->slot = STHI_NO_SLOT;
}

sthi_issue sthi_request_fail(sth_runtime *rt, sthi_request *r) {
    STHI_INVARIANT(r == sthi_request_at(rt, rt->queue.head) && !r->failed);
    r->failed = true;
    if (r->slot != STHI_NO_SLOT) sthi_abandon_slot(rt, r->slot);
    r->slot = STHI_NO_SLOT;
    return STHI_ISSUE_FAILED;
}

void sthi_request_loaded(sth_runtime *rt, const sthi_request *r) {
    STHI_INVARIANT(r->slot == rt->units[r->unit].slot && rt->places.slots[r->slot].complete);
    rt->places.slots[r->slot].uses_left = r->uses;
    rt->places.slots[r->slot].resident = r->resident;
    rt->sync[r->slot].lap = r->lap;
}

void sthi_queue_leave(sth_runtime *rt) {
    STHI_INVARIANT(rt->units[sthi_request_at(rt, rt->queue.head)->unit].state == STH_UNIT_STATE_GPU_READY);
    rt->queue.head++;
    sthi_jobs_cancel(rt, rt->queue.head);
    sthi_cond_broadcast(&rt->changed);
}

void sthi_cancel_queue(sth_runtime *rt) {
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
        if (r->resident) rt->program.resident_next = 0;
        else if (r->kept) rt->program.kept_next = 0;
        else if (r->planned && r->sequence < rt->program.next_load) rt->program.next_load = r->sequence;
        sthi_request_abandon(rt, n);
    }
    rt->queue.head = rt->queue.tail;
    sthi_jobs_cancel(rt, rt->queue.head);
    sthi_cond_broadcast(&rt->changed);
}
