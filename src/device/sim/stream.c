/* Streams of the simulated device, and submission to them.
 *
 * Invariant: sequence numbers grow in the order of submission, so all of a stream's queue is younger than its head.
 * Lock: the device's, held throughout except where a real-time wait lets it go.
 * Stream 0 is the calling thread: its operations are carried out before the call returns. */
#include <inttypes.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/sim/sim.h"

/* ---- submission */

static int64_t now_locked(const sim_device *d) { return d->options.virtual_time ? d->now_ns : sthi_now_ns(); }

static void append(sim_stream *s, sim_op *op) {
    if (s->tail) s->tail->next = op;
    else s->head = op;
    s->tail = op;
}

sth_status sthi_sim_submit(sim_device *d, sim_stream *s, sim_op op) {
    bool caller = s == &d->caller;
    op.seq = ++d->next_seq;
    op.ready_ns = now_locked(d);
    if (caller && !d->options.virtual_time) {
        sthi_sim_real_inline(d, &op);
        sthi_sim_fence_drop(d, op.fence);
        return STH_OK;
    }
    sim_op *kept = sthi_sim_op_take(d);
    if (!kept) {
        sthi_sim_fence_drop(d, op.fence);
        return sthi_no_memory_in("sim", "operation", "one more operation");
    }
    *kept = op;
    append(s, kept);
    if (caller) return sthi_sim_drain(d, s);
    if (!d->options.virtual_time) sthi_cond_signal(&s->work);
    return STH_OK;
}

static sim_stream *find(sim_device *d, sth_stream id) {
    for (sim_stream *s = d->streams; s; s = s->next)
        if (s->id == id) return s;
    return NULL;
}

sth_status sthi_sim_stream_find(sim_device *d, sth_stream id, sim_stream **out) {
    *out = find(d, id);
    if (*out) return STH_OK;
    char object[40];
    snprintf(object, sizeof object, "stream %" PRIu64, id);
    return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, object, "%s is not a live stream of this device",
                     object);
}

sth_status sthi_sim_submit_to(sim_device *d, sth_stream id, sim_op op) {
    sim_stream *s;
    sth_status status = sthi_sim_stream_find(d, id, &s);
    if (status == STH_OK) return sthi_sim_submit(d, s, op);
    sthi_sim_fence_drop(d, op.fence);
    return status;
}

/* ---- streams */

static void unlink_stream(sim_device *d, const sim_stream *gone) {
    sim_stream **link = &d->streams;
    while (*link != gone) link = &(*link)->next;
    *link = gone->next;
}

sth_status sthi_sim_stream_create(sth_backend_device *device, int priority, sth_stream *out) {
    (void)priority; /* the simulated link serves in the order in which copies become ready */
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sim_stream *s = sthi_zalloc(1, sizeof *s);
    if (!s) return sthi_no_memory_in("sim", "stream", "one more stream");
    s->device = d;
    sthi_cond_init(&s->work);
    sthi_lock(&d->lock);
    sth_status status = STH_OK;
    if (!d->options.virtual_time)
        status = sthi_thread_start(&s->worker, "sth-sim-stream", sthi_sim_worker, s);
    if (status == STH_OK) {
        *out = s->id = ++d->next_id;
        s->next = d->streams;
        d->streams = s;
    }
    sthi_unlock(&d->lock);
    if (status == STH_OK) return STH_OK;
    sthi_cond_fini(&s->work);
    sthi_free(s);
    return status;
}

/* Locked, and again on return. */
static void end_stream(sim_device *d, sim_stream *s) {
    (void)sthi_sim_drain(d, s);
    unlink_stream(d, s);
    if (!d->options.virtual_time) {
        s->closing = true;
        sthi_cond_signal(&s->work);
        sthi_unlock(&d->lock);
        sthi_thread_join(s->worker);
        sthi_lock(&d->lock);
    }
    while (s->head) sthi_sim_retire(d, s);
    sthi_cond_fini(&s->work);
    sthi_free(s);
}

void sthi_sim_stream_destroy(sth_backend_device *device, sth_stream id) {
    sim_device *d = sthi_sim_of(device);
    if (id == 0 || sthi_sim_check_fork(d)) return;
    sim_stream *s;
    sthi_lock(&d->lock);
    if (sthi_sim_stream_find(d, id, &s) == STH_OK) end_stream(d, s);
    sthi_unlock(&d->lock);
}

sth_status sthi_sim_stream_synchronize(sth_backend_device *device, sth_stream id) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter_wait(d));
    sim_stream *s;
    sthi_lock(&d->lock);
    sth_status status = sthi_sim_stream_find(d, id, &s);
    if (status == STH_OK) status = sthi_sim_drain(d, s);
    sthi_unlock(&d->lock);
    return status;
}

void sthi_sim_streams_fini(sim_device *d) {
    sthi_lock(&d->lock);
    (void)sthi_sim_drain(d, NULL);
    while (d->streams != &d->caller) end_stream(d, d->streams);
    while (d->caller.head) sthi_sim_retire(d, &d->caller);
    sthi_unlock(&d->lock);
    for (sim_op *op; (op = d->op_pool); sthi_free(op)) d->op_pool = op->next;
    for (sim_fence *f; (f = d->fence_pool); sthi_free(f)) d->fence_pool = f->next;
}
