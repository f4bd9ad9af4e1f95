/* The queue of loads. Lock held. */
#ifndef STHI_LOAD_QUEUE_H
#define STHI_LOAD_QUEUE_H
#include "state/state.h"

sthi_request *sthi_queued(sth_runtime *rt, uint32_t unit); /* its request in the queue, or NULL */
void sthi_request_abandon(sth_runtime *rt, uint64_t number);
sthi_issue sthi_request_fail(sth_runtime *rt, sthi_request *r);
void sthi_request_loaded(sth_runtime *rt, const sthi_request *r);
void sthi_queue_leave(sth_runtime *rt);
void sthi_cancel_queue(sth_runtime *rt);           /* lock held */
static inline sthi_request *sthi_request_at(sth_runtime *rt, uint64_t number) {
    return &rt->queue.requests[number % STHI_REQUEST_CAP];
}
#endif
