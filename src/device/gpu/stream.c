/* Streams, copies and events of a GPU: one driver call each, after the device is made current.
 *
 * An event remembers whether it was ever recorded, because the driver treats a wait on one that was not as
 * nothing at all. Our streams do not synchronise with the default stream, which is PyTorch's.
 * Locks: none; recording and waiting on one event from two threads is for the caller to order. */
#include "base/error.h"
#include "base/memory.h"
#include "device/gpu/gpu.h"

static const char *advice(gpu_result r) {
    return r < GPU_ERROR_CAPTURE_FIRST || r > GPU_ERROR_CAPTURE_LAST
               ? NULL
               : "work is being captured into a graph here, and streamed weights do not go into one by themselves: "
                 "stagehand.capture(), or stagehand/graph.h in C";
}

static sth_status checked(const gpu_device *d, gpu_result r, const char *what) {
    return r == GPU_OK ? STH_OK : sthi_gpu_fail(d->vendor, r, d->name, what, advice(r));
}

sth_status sthi_gpu_stream_create(sth_backend_device *device, int priority, sth_stream *out) {
    STHI_GPU_CALL(d, device);
    gpu_stream s = NULL;
    STHI_TRY(sthi_gpu_enter(d));
    STHI_TRY(
        checked(d, d->driver->stream_create(&s, GPU_STREAM_FLAG_NON_BLOCKING, priority), "creating a stream"));
    *out = (uintptr_t)s;
    return STH_OK;
}

void sthi_gpu_stream_destroy(sth_backend_device *device, sth_stream stream) {
    STHI_GPU_CALL(d, device);
    if (stream == 0 || !sthi_gpu_attach_to_end(d)) return;
    gpu_stream s = sthi_gpu_stream(stream);
    gpu_result r = d->driver->stream_synchronize(s);
    sthi_gpu_ended(d->vendor, r, d->name, "work of a stream that ends");
    if (r != GPU_OK) (void)sthi_gpu_idle(d); /* the memory that its work uses goes next */
    sthi_gpu_ended(d->vendor, d->driver->stream_destroy(s), d->name, "destroying a stream");
}

sth_status sthi_gpu_stream_synchronize(sth_backend_device *device, sth_stream stream) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    return checked(d, d->driver->stream_synchronize(sthi_gpu_stream(stream)), "waiting for a stream");
}

sth_status sthi_gpu_copy_h2d(sth_backend_device *device, sth_devptr dst, const void *src, uint64_t bytes,
                              sth_stream stream) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    if (bytes == 0) return STH_OK;
    return checked(d, d->driver->copy_h2d(dst, src, bytes, sthi_gpu_stream(stream)),
                   "copying to the device");
}

sth_status sthi_gpu_copy_d2h(sth_backend_device *device, void *dst, sth_devptr src, uint64_t bytes,
                              sth_stream stream) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    if (bytes == 0) return STH_OK;
    return checked(d, d->driver->copy_d2h(dst, src, bytes, sthi_gpu_stream(stream)),
                   "copying from the device");
}

sth_status sthi_gpu_event_create(sth_backend_device *device, bool timing, sth_event **out) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    sth_event *e = sthi_zalloc(1, sizeof *e);
    if (!e) return sthi_no_memory_in(d->vendor->name, "event", "one more event");
    gpu_result r = d->driver->event_create(&e->handle, timing ? 0u : GPU_EVENT_FLAG_DISABLE_TIMING);
    if (r != GPU_OK) {
        sthi_free(e);
        return checked(d, r, "creating an event");
    }
    e->timing = timing;
    *out = e;
    return STH_OK;
}

void sthi_gpu_event_destroy(sth_backend_device *device, sth_event *e) {
    STHI_GPU_CALL(d, device);
    if (!e) return;
    if (sthi_gpu_attach_to_end(d))
        sthi_gpu_ended(d->vendor, d->driver->event_destroy(e->handle), d->name, "destroying an event");
    sthi_free(e);
}

sth_status sthi_gpu_event_record(sth_backend_device *device, sth_event *e, sth_stream stream) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    STHI_TRY(checked(d, d->driver->event_record(e->handle, sthi_gpu_stream(stream)), "recording an event"));
    atomic_store_explicit(&e->recorded, true, memory_order_relaxed);
    return STH_OK;
}

static sth_status recorded_or_fail(const gpu_device *d, sth_event *e) {
    if (atomic_load_explicit(&e->recorded, memory_order_relaxed)) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, d->vendor->name, 0, "event",
                     "the event has never been recorded: record it before this");
}

sth_status sthi_gpu_stream_wait(sth_backend_device *device, sth_stream stream, sth_event *e) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    STHI_TRY(recorded_or_fail(d, e));
    return checked(d, d->driver->stream_wait(sthi_gpu_stream(stream), e->handle, 0), "making a stream wait");
}

sth_status sthi_gpu_event_query(sth_backend_device *device, sth_event *e, bool *out_done) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    STHI_TRY(recorded_or_fail(d, e));
    gpu_result r = d->driver->event_query(e->handle);
    if (r != GPU_OK && r != GPU_ERROR_NOT_READY) return checked(d, r, "asking for an event");
    *out_done = r == GPU_OK;
    return STH_OK;
}

sth_status sthi_gpu_event_synchronize(sth_backend_device *device, sth_event *e) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    STHI_TRY(recorded_or_fail(d, e));
    return checked(d, d->driver->event_synchronize(e->handle), "waiting for an event");
}

static sth_status not_timed(const gpu_device *d) {
    return sthi_fail(STH_INVALID_STATE, d->vendor->name, 0, "event",
                     "elapsed time needs two events created with timing, recorded and done");
}

sth_status sthi_gpu_event_elapsed_ns(sth_backend_device *device, sth_event *a, sth_event *b, int64_t *out) {
    STHI_GPU_CALL(d, device);
    float ms = 0;
    STHI_TRY(sthi_gpu_enter(d));
    if (!a->timing || !b->timing) return not_timed(d);
    STHI_TRY(recorded_or_fail(d, a));
    STHI_TRY(recorded_or_fail(d, b));
    gpu_result r = d->driver->event_elapsed(&ms, a->handle, b->handle);
    if (r == GPU_ERROR_NOT_READY) return not_timed(d);
    STHI_TRY(checked(d, r, "timing two events"));
    *out = (int64_t)((double)ms * 1e6);
    return STH_OK;
}
