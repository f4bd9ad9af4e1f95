/* The queue of loads. Lock held. */
#ifndef STHI_LOAD_QUEUE_H
#define STHI_LOAD_QUEUE_H
#include "base/invariant.h"
#include "state/state.h"

sthi_request *sthi_queued(sth_runtime *rt, uint32_t unit); /* its request in the queue, or NULL */
/* Whether the use that this planned request is for has begun. */
bool sthi_request_due(const sth_runtime *rt, const sthi_request *r);
/* Its slot, if it has one, goes with what was copied into it. */
void sthi_request_abandon(sth_runtime *rt, uint64_t number);
/* Stays at the queue's head until its unit is asked for, which tries again, or the step ends. */
sthi_issue sthi_request_fail(sth_runtime *rt, sthi_request *r);
/* What becomes of a request whose unit is on the device now. */
void sthi_request_loaded(sth_runtime *rt, const sthi_request *r);
void sthi_queue_leave(sth_runtime *rt);            /* the request at the head */
void sthi_cancel_queue(sth_runtime *rt);           /* all requests; they are fed again */
static inline sthi_request *sthi_request_at(sth_runtime *rt, uint64_t number) {
    STHI_INVARIANT(rt->queue.head <= number && number < rt->queue.tail);
    return &rt->queue.requests[number % STHI_REQUEST_CAP];
}
#endif
