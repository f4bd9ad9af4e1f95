/* Rates of the link: copies between two events, on streams of their own. Knows no back end. No locks. */
#include "device/measure.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/device.h"
#include "device/pinning.h"

static sth_status enqueue(const sthi_trial_copies *c, sth_stream stream) {
    const sth_backend_ops *ops = c->device->ops;
    sth_status rc = STH_OK;
    for (uint64_t at = 0; rc == STH_OK && at < c->bytes; at += c->piece) {
        uint64_t bytes = sthi_min_u64(c->piece, c->bytes - at);
        rc = c->down ? ops->copy_d2h(c->device->self, c->host + at, c->place + at, bytes, stream)
                     : ops->copy_h2d(c->device->self, c->place + at, c->host + at, bytes, stream);
    }
    return rc;
}

sth_status sthi_time_copies(const sthi_trial_copies *c, sth_stream stream, sth_event *before, sth_event *after,
                            int64_t *out_ns) {
    const sth_backend_ops *ops = c->device->ops;
    STHI_TRY(ops->event_record(c->device->self, before, stream));
    STHI_TRY(enqueue(c, stream));
    STHI_TRY(ops->event_record(c->device->self, after, stream));
    STHI_TRY(ops->event_synchronize(c->device->self, after));
    return ops->event_elapsed_ns(c->device->self, before, after, out_ns);
}

/* ---- memory, streams and events of its own */

enum { UP, DOWN, DIRECTIONS };

typedef struct rig {
    sth_device *device;
    uint64_t bytes;
    uint8_t *host;
    bool pinned;
    int64_t pin_ns;
    sth_devptr memory;
    sth_stream stream[DIRECTIONS];
    sth_event *before, *after[DIRECTIONS];
} rig;

static void rig_fini(rig *r) {
    const sth_backend_ops *ops = r->device->ops;
    for (int i = 0; i < DIRECTIONS; i++) {
        if (r->stream[i]) ops->stream_destroy(r->device->self, r->stream[i]);
        if (r->after[i]) ops->event_destroy(r->device->self, r->after[i]);
    }
    if (r->before) ops->event_destroy(r->device->self, r->before);
    if (r->memory) ops->free(r->device->self, r->memory, r->bytes);
    if (r->pinned) sthi_unpin(r->device, r->host, r->bytes);
    sthi_pages_unmap(r->host, r->bytes);
}

static sth_status pin(rig *r) {
    const sth_backend_ops *ops = r->device->ops;
    sth_devptr alias;
    if (!(r->device->capabilities & STH_CAP_PINNED_HOST))
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, ops->backend,
                         "the device cannot pin host memory, which a measurement needs");
    int64_t begun = ops->now_ns(r->device->self);
    STHI_TRY(sthi_pin(r->device, r->host, r->bytes, &alias));
    r->pin_ns = ops->now_ns(r->device->self) - begun;
    r->pinned = true;
    return STH_OK;
}

static sth_status rig_init(rig *r, bool pinned, int directions) {
    const sth_backend_ops *ops = r->device->ops;
    r->host = sthi_pages_map(r->bytes, 1);
    if (!r->host)
        return sthi_no_memory("measurement", "%" PRIu64 " bytes to measure the link with", r->bytes);
    memset(r->host, 1, r->bytes); /* untouched pages would be read from the one zero page */
    if (pinned) STHI_TRY(pin(r));
    STHI_TRY(ops->alloc(r->device->self, r->bytes, &r->memory));
    for (int i = 0; i < directions; i++) {
        STHI_TRY(ops->stream_create(r->device->self, 0, &r->stream[i]));
        STHI_TRY(ops->event_create(r->device->self, true, &r->after[i]));
    }
    return ops->event_create(r->device->self, true, &r->before);
}

static sth_status end(rig *r, sth_status status) {
    sthi_error_copy first;
    sthi_error_save(&first);
    rig_fini(r);
    return status == STH_OK ? STH_OK : sthi_error_restore(&first);
}

/* ---- laps */

typedef sth_status lap(rig *r, int64_t *out_ns);

static sth_status one_way(rig *r, int way, int64_t *out_ns) {
    const sthi_trial_copies copies = {r->device, r->memory, r->host, r->bytes, r->bytes, way == DOWN};
    return sthi_time_copies(&copies, r->stream[way], r->before, r->after[way], out_ns);
}

static sth_status up(rig *r, int64_t *out_ns) { return one_way(r, UP, out_ns); }
static sth_status down(rig *r, int64_t *out_ns) { return one_way(r, DOWN, out_ns); }

/* Half of the memory each way, from one moment on, until both ways are through. */
static sth_status both(rig *r, int64_t *out_ns) {
    const sth_backend_ops *ops = r->device->ops;
    uint64_t half = r->bytes / 2;
    const sthi_trial_copies copies[DIRECTIONS] = {
        {r->device, r->memory, r->host, half, half, false},
        {r->device, r->memory + half, r->host + half, half, half, true},
    };
    STHI_TRY(ops->event_record(r->device->self, r->before, r->stream[UP]));
    STHI_TRY(ops->stream_wait(r->device->self, r->stream[DOWN], r->before));
    for (int i = 0; i < DIRECTIONS; i++) STHI_TRY(enqueue(&copies[i], r->stream[i]));
    for (int i = 0; i < DIRECTIONS; i++) STHI_TRY(ops->event_record(r->device->self, r->after[i], r->stream[i]));
    *out_ns = 0;
    for (int i = 0; i < DIRECTIONS; i++) {
        int64_t ns = 0;
        STHI_TRY(ops->event_synchronize(r->device->self, r->after[i]));
        STHI_TRY(ops->event_elapsed_ns(r->device->self, r->before, r->after[i], &ns));
        *out_ns = ns > *out_ns ? ns : *out_ns;
    }
    return STH_OK;
}

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static double rate_of(uint64_t bytes, int64_t ns) { return (double)bytes * 1e9 / (double)(ns > 0 ? ns : 1); }

/* Bytes per second of the median lap. */
static sth_status rate(rig *r, lap *one, int repeats, double *out) {
    int64_t *times = sthi_zalloc((size_t)repeats, sizeof *times);
    if (!times) return sthi_no_memory("measurement", "%d times", repeats);
    sth_status rc = one(r, &times[0]); /* warms up: the first copy also sets things up */
    for (int i = 0; rc == STH_OK && i < repeats; i++) rc = one(r, &times[i]);
    if (rc == STH_OK) {
        qsort(times, (size_t)repeats, sizeof *times, by_time);
        *out = rate_of(r->bytes, times[repeats / 2]);
    }
    sthi_free(times);
    return rc;
}

sth_status sthi_device_measure_h2d(sth_device *d, uint64_t bytes, int repeats, bool pinned, double *out) {
    rig r = {.device = d, .bytes = bytes};
    sth_status status = rig_init(&r, pinned, 1);
    if (status == STH_OK) status = rate(&r, up, repeats, out);
    return end(&r, status);
}

sth_status sthi_device_measure_link(sth_device *d, uint64_t bytes, int repeats, sth_link_rates *out) {
    rig r = {.device = d, .bytes = bytes};
    sth_link_rates found = {0};
    sth_status status = rig_init(&r, true, DIRECTIONS);
    if (status == STH_OK) status = rate(&r, up, repeats, &found.up);
    if (status == STH_OK) status = rate(&r, down, repeats, &found.down);
    if (status == STH_OK) status = rate(&r, both, repeats, &found.both);
    if (r.pin_ns > 0) found.pin = rate_of(bytes, r.pin_ns);
    if (status == STH_OK) *out = found;
    return end(&r, status);
}
