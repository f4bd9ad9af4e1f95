/* Streams, copies and events of a CUDA device: one driver call each, after the context is set.
 *
 * An event remembers whether it was ever recorded, because the driver treats a wait on one that was not as
 * nothing at all. Our streams do not synchronise with the default stream, which is PyTorch's.
 * Locks: none; recording and waiting on one event from two threads is for the caller to order. */
#include "base/error.h"
#include "base/memory.h"
#include "device/cuda/cuda.h"

static sth_status checked(const cuda_device *d, cu_result r, const char *what) {
    return r == CU_OK ? STH_OK : sthi_cuda_fail(d->driver, r, d->name, what, NULL);
}

sth_status sthi_cuda_stream_create(sth_backend_device *device, int priority, sth_stream *out) {
    cuda_device *d = sthi_cuda_of(device);
    cu_stream s = NULL;
    STHI_TRY(sthi_cuda_enter(d));
    STHI_TRY(
        checked(d, d->driver->stream_create(&s, CU_STREAM_FLAG_NON_BLOCKING, priority), "creating a stream"));
    *out = (uintptr_t)s;
    return STH_OK;
}

void sthi_cuda_stream_destroy(sth_backend_device *device, sth_stream stream) {
    cuda_device *d = sthi_cuda_of(device);
    if (stream == 0 || !sthi_cuda_attach_to_end(d)) return;
    cu_stream s = sthi_cuda_stream(stream);
    cu_result r = d->driver->stream_synchronize(s);
    sthi_cuda_ended(d->driver, r, d->name, "work of a stream that ends");
    if (r != CU_OK) (void)sthi_cuda_idle(d); /* the memory that its work uses goes next */
    sthi_cuda_ended(d->driver, d->driver->stream_destroy(s), d->name, "destroying a stream");
}

sth_status sthi_cuda_stream_synchronize(sth_backend_device *device, sth_stream stream) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    return checked(d, d->driver->stream_synchronize(sthi_cuda_stream(stream)), "waiting for a stream");
}

sth_status sthi_cuda_copy_h2d(sth_backend_device *device, sth_devptr dst, const void *src, uint64_t bytes,
                              sth_stream stream) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    if (bytes == 0) return STH_OK;
    return checked(d, d->driver->copy_h2d(dst, src, bytes, sthi_cuda_stream(stream)),
                   "copying to the device");
}

sth_status sthi_cuda_copy_d2h(sth_backend_device *device, void *dst, sth_devptr src, uint64_t bytes,
                              sth_stream stream) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    if (bytes == 0) return STH_OK;
    return checked(d, d->driver->copy_d2h(dst, src, bytes, sthi_cuda_stream(stream)),
                   "copying from the device");
}

sth_status sthi_cuda_event_create(sth_backend_device *device, bool timing, sth_event **out) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    sth_event *e = sthi_zalloc(1, sizeof *e);
    if (!e) return sthi_fail(STH_OUT_OF_HOST_MEMORY, "cuda", 0, "event", "no host memory for one more event");
    cu_result r = d->driver->event_create(&e->handle, timing ? 0u : CU_EVENT_FLAG_DISABLE_TIMING);
    if (r != CU_OK) {
        sthi_free(e);
        return checked(d, r, "creating an event");
    }
    e->timing = timing;
    *out = e;
    return STH_OK;
}

void sthi_cuda_event_destroy(sth_backend_device *device, sth_event *e) {
    cuda_device *d = sthi_cuda_of(device);
    if (!e) return;
    if (sthi_cuda_attach_to_end(d))
        sthi_cuda_ended(d->driver, d->driver->event_destroy(e->handle), d->name, "destroying an event");
    sthi_free(e);
}

sth_status sthi_cuda_event_record(sth_backend_device *device, sth_event *e, sth_stream stream) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    STHI_TRY(checked(d, d->driver->event_record(e->handle, sthi_cuda_stream(stream)), "recording an event"));
    atomic_store_explicit(&e->recorded, true, memory_order_relaxed);
    return STH_OK;
}

static sth_status recorded_or_fail(sth_event *e) {
    if (atomic_load_explicit(&e->recorded, memory_order_relaxed)) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, "cuda", 0, "event",
                     "the event has never been recorded: record it before this");
}

sth_status sthi_cuda_stream_wait(sth_backend_device *device, sth_stream stream, sth_event *e) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    STHI_TRY(recorded_or_fail(e));
    return checked(d, d->driver->stream_wait(sthi_cuda_stream(stream), e->handle, 0), "making a stream wait");
}

sth_status sthi_cuda_event_query(sth_backend_device *device, sth_event *e, bool *out_done) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    STHI_TRY(recorded_or_fail(e));
    cu_result r = d->driver->event_query(e->handle);
    if (r != CU_OK && r != CU_ERROR_NOT_READY) return checked(d, r, "asking for an event");
    *out_done = r == CU_OK;
    return STH_OK;
}

sth_status sthi_cuda_event_synchronize(sth_backend_device *device, sth_event *e) {
    cuda_device *d = sthi_cuda_of(device);
    STHI_TRY(sthi_cuda_enter(d));
    STHI_TRY(recorded_or_fail(e));
    return checked(d, d->driver->event_synchronize(e->handle), "waiting for an event");
}

static sth_status not_timed(void) {
    return sthi_fail(STH_INVALID_STATE, "cuda", 0, "event",
                     "elapsed time needs two events created with timing, recorded and done");
}

sth_status sthi_cuda_event_elapsed_ns(sth_backend_device *device, sth_event *a, sth_event *b, int64_t *out) {
    cuda_device *d = sthi_cuda_of(device);
    float ms = 0;
    STHI_TRY(sthi_cuda_enter(d));
    if (!a->timing || !b->timing) return not_timed();
    STHI_TRY(recorded_or_fail(a));
    STHI_TRY(recorded_or_fail(b));
    cu_result r = d->driver->event_elapsed(&ms, a->handle, b->handle);
    if (r == CU_ERROR_NOT_READY) return not_timed();
    STHI_TRY(checked(d, r, "timing two events"));
    *out = (int64_t)((double)ms * 1e6);
    return STH_OK;
}
