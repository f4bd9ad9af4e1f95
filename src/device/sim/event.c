/* Events of the simulated device. An event is its latest recording; a wait holds that
 * recording's fence.
 * Invariant: a wait only ever refers to a recording that was submitted before it, hence no cycle
 * of waits exists.
 * Lock: the device's; a wait in real time lets it go meanwhile. */
#include "base/error.h"
#include "base/memory.h"
#include "device/sim/sim.h"

static sth_status recorded_or_fail(const sth_event *e) {
    if (e->last) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, "sim", 0, "event",
                     "the event has never been recorded: record it before this");
}

sth_status sthi_sim_event_create(sth_backend_device *device, bool timing, sth_event **out) {
    STHI_TRY(sthi_sim_enter(sthi_sim_of(device)));
    sth_event *e = sthi_zalloc(1, sizeof *e);
    if (!e) return sthi_no_memory_in("sim", "event", "one more event");
    e->timing = timing;
    *out = e;
    return STH_OK;
}

void sthi_sim_event_destroy(sth_backend_device *device, sth_event *e) {
    sim_device *d = sthi_sim_of(device);
    if (!e || sthi_sim_check_fork(d)) return;
    sthi_lock(&d->lock);
    sthi_sim_fence_drop(d, e->last);
    sthi_unlock(&d->lock);
    sthi_free(e);
}

static sth_status record_locked(sim_device *d, sth_event *e, sth_stream stream) {
    sim_stream *s;
    STHI_TRY(sthi_sim_stream_find(d, stream, &s));
    sim_fence *fresh = sthi_sim_fence_take(d);
    if (!fresh) return sthi_no_memory_in("sim", "fence", "one more fence");
    fresh->refs = 2; /* the operation's and the event's */
    sth_status status = sthi_sim_submit(d, s, (sim_op){.kind = SIM_OP_RECORD, .fence = fresh});
    if (status != STH_OK) {
        sthi_sim_fence_drop(d, fresh);
        return status;
    }
    sthi_sim_fence_drop(d, e->last);
    e->last = fresh;
    return STH_OK;
}

sth_status sthi_sim_event_record(sth_backend_device *device, sth_event *e, sth_stream stream) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    sth_status status = record_locked(d, e, stream);
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_stream_wait(sth_backend_device *device, sth_stream stream, sth_event *e) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    sth_status status = recorded_or_fail(e);
    if (status == STH_OK) {
        e->last->refs++;
        status = sthi_sim_submit_to(d, stream, (sim_op){.kind = SIM_OP_WAIT, .fence = e->last});
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_event_query(sth_backend_device *device, sth_event *e, bool *out_done) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter_wait(d));
    sthi_lock(&d->lock);
    sth_status status = recorded_or_fail(e);
    if (status == STH_OK) {
        if (d->options.virtual_time) sthi_sim_advance(d, d->now_ns);
        *out_done = e->last->done;
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_event_synchronize(sth_backend_device *device, sth_event *e) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter_wait(d));
    sthi_lock(&d->lock);
    sth_status status = recorded_or_fail(e);
    if (status == STH_OK) {
        sim_fence *f = e->last; /* another thread may record the event again meanwhile */
        f->refs++;
        if (d->options.virtual_time) status = sthi_sim_virtual_wait(d, f);
        else sthi_sim_real_wait(d, f);
        sthi_sim_fence_drop(d, f);
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_event_elapsed_ns(sth_backend_device *device, sth_event *a, sth_event *b, int64_t *out) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    if (d->options.virtual_time) sthi_sim_advance(d, d->now_ns);
    bool ready = a->timing && b->timing && a->last && b->last && a->last->done && b->last->done;
    int64_t ns = ready ? b->last->time_ns - a->last->time_ns : 0;
    sthi_unlock(&d->lock);
    if (!ready)
        return sthi_fail(STH_INVALID_STATE, "sim", 0, "event",
                         "elapsed time needs two events created with timing, recorded and done");
    *out = ns;
    return STH_OK;
}
