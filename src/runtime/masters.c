/* Copies that read images which the caller may write: waited for before the caller goes on. Lock
 * held; may be dropped. */
#include "runtime/masters.h"

#include "load/queue.h"
#include "state/state.h"

static sth_status wait_for_master(sth_runtime *rt, sthi_master_reads *m, sth_stream stream) {
    if (!m->pending) return STH_OK;
    if (!m->event || STHI_DEV(rt, event_synchronize, m->event) != STH_OK)
        STHI_TRY(STHI_DEV(rt, stream_synchronize, stream));
    m->pending = false;
    return STH_OK;
}

sth_status sthi_masters_wait(sth_runtime *rt) {
    if (rt->options.read_only) return STH_OK;
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) /* those not copied yet come too late now */
        if (rt->units[rt->queue.requests[n % STHI_REQUEST_CAP].unit].flags & STH_UNIT_WRITABLE) {
            sthi_cancel_queue(rt);
            break;
        }
    while (rt->reads.masters) sthi_cond_wait(&rt->changed, &rt->lock);
    sth_status rc = wait_for_master(rt, &rt->copies.masters[0], rt->copies.stream);
    sth_status rc2 = wait_for_master(rt, &rt->copies.masters[1], rt->copies.demand_stream);
    return rc != STH_OK ? rc : rc2;
}
