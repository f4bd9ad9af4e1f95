/* Epochs: the times when the caller's code may have written images. One begins with a step, and
 * where the caller says that its code has run in between. */
#include "runtime/epoch.h"

#include "load/fingerprint.h"
#include "load/read/jobs.h"
#include "state/state.h"

void sthi_epoch_begin(sth_runtime *rt) {
    rt->step.epoch++;
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        const sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
        if (!r->staged || !sthi_watched(&rt->units[r->unit])) continue;
        sthi_reads_rewind(rt); /* slabs read ahead hold the image of before */
        return;
    }
}

sth_status sthi_runtime_fence(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    if (rt->sealed && !rt->shut) sthi_epoch_begin(rt);
    sthi_unlock(&rt->lock);
    return STH_OK;
}
