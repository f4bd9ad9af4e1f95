/* Opening and closing devices, and what needs nothing but their table. Knows no back end. No locks. */
#include "device/device.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/decorate/layer.h"
#include "device/pinning.h"

void sthi_sim_options_init(sth_sim_options *options) {
    *options = (sth_sim_options){
        .size = sizeof *options,
        .memory_bytes = (uint64_t)8 << 30,
        .copy_latency_ns = 2000,
        .poison = true,
    };
}

/* A caller built against an older header hands in a shorter struct: the rest keeps its defaults. */
static sth_status complete_options(const sth_sim_options *given, sth_sim_options *out) {
    sthi_sim_options_init(out);
    if (!given) return STH_OK;
    if (given->size < sizeof given->size || given->size > sizeof *given)
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "sth_sim_options",
                         "the options say they are %zu bytes and this library knows %zu; fill them with "
                         "sth_sim_options_init first",
                         given->size, sizeof *given);
    memcpy(out, given, given->size);
    out->size = sizeof *out;
    return STH_OK;
}

/* Asks the new device what it is, and fills in all that the library keeps beside it. */
static sth_status take_up(sth_device *d) {
    sth_device_info info;
    d->capabilities = d->ops->capabilities(d->self);
    STHI_TRY(sthi_backend_check_capabilities(d->ops, d->capabilities));
    d->default_cap = UINT64_MAX;
    if (d->capabilities & STH_CAP_HOST_IS_DEVICE) { /* nobody else allocates there */
        STHI_TRY(d->ops->info(d->self, &info));
        d->default_cap = info.memory_total;
    }
    d->account = (sthi_account){.cap = d->default_cap};
    return STH_OK;
}

static sth_status open_on(const sth_backend_ops *ops, int index, const char *name, const sth_sim_options *options,
                          sth_device **out) {
    sth_device *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_no_memory(ops->backend, "a device");
    d->ops = ops;
    sth_status rc = ops->open(index, options, &d->self);
    if (rc != STH_OK) {
        sthi_free(d);
        return rc;
    }
    rc = sthi_decorate(name, &d->ops, &d->self);
    if (rc == STH_OK) rc = take_up(d);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        d->ops->close(d->self);
        sthi_error_restore(&why);
    }
    if (rc != STH_OK) {
        sthi_free(d);
        return rc;
    }
    atomic_init(&d->refs, 1);
    sthi_mutex_init(&d->account_lock);
    sthi_cond_init(&d->account_changed);
    *out = d;
    return STH_OK;
}

sth_status sthi_device_open(const char *name, const sth_sim_options *sim, sth_device **out) {
    const sth_backend_ops *ops;
    int index;
    sth_sim_options options;
    STHI_TRY(sthi_backend_find(name, &ops, &index));
    STHI_TRY(complete_options(sim, &options));
    return open_on(ops, index, name, &options, out);
}

void sthi_device_retain(sth_device *d) {
    if (d) atomic_fetch_add_explicit(&d->refs, 1, memory_order_relaxed);
}

void sthi_device_drop_phases(sth_device *d) {
    d->ran = NULL;
    while (d->phases) {
        sthi_phase *p = d->phases;
        d->phases = p->next;
        sthi_free(p);
    }
}

void sthi_device_release(sth_device *d) {
    if (!d || atomic_fetch_sub_explicit(&d->refs, 1, memory_order_acq_rel) != 1) return;
    sthi_cond_fini(&d->account_changed);
    sthi_device_drop_phases(d);
    sthi_mutex_fini(&d->account_lock);
    d->ops->close(d->self);
    sthi_free(d);
}

/* ---- measuring the link */

typedef struct rig {
    sth_device *device;
    uint64_t bytes;
    void *host;
    bool pinned;
    sth_devptr memory;
    sth_stream stream;
    sth_event *before, *after;
} rig;

static void rig_fini(rig *r) {
    const sth_backend_ops *ops = r->device->ops;
    if (r->stream) ops->stream_destroy(r->device->self, r->stream);
    if (r->before) ops->event_destroy(r->device->self, r->before);
    if (r->after) ops->event_destroy(r->device->self, r->after);
    if (r->memory) ops->free(r->device->self, r->memory, r->bytes);
    if (r->pinned) sthi_unpin(r->device, r->host, r->bytes);
    sthi_pages_unmap(r->host, r->bytes);
}

static sth_status rig_init(rig *r, bool pinned) {
    const sth_backend_ops *ops = r->device->ops;
    r->host = sthi_pages_map(r->bytes, 1);
    if (!r->host)
        return sthi_no_memory("measurement", "%" PRIu64 " bytes to measure the link with", r->bytes);
    memset(r->host, 1, r->bytes); /* untouched pages would be read from the one zero page */
    if (pinned) {
        if (!(r->device->capabilities & STH_CAP_PINNED_HOST))
            return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, ops->backend, "the device cannot pin host memory");
        sth_devptr alias;
        STHI_TRY(sthi_pin(r->device, r->host, r->bytes, &alias));
        r->pinned = true;
    }
    STHI_TRY(ops->alloc(r->device->self, r->bytes, &r->memory));
    STHI_TRY(ops->stream_create(r->device->self, 0, &r->stream));
    STHI_TRY(ops->event_create(r->device->self, true, &r->before));
    return ops->event_create(r->device->self, true, &r->after);
}

static sth_status time_one(rig *r, int64_t *out_ns) {
    const sth_backend_ops *ops = r->device->ops;
    STHI_TRY(ops->event_record(r->device->self, r->before, r->stream));
    STHI_TRY(ops->copy_h2d(r->device->self, r->memory, r->host, r->bytes, r->stream));
    STHI_TRY(ops->event_record(r->device->self, r->after, r->stream));
    STHI_TRY(ops->event_synchronize(r->device->self, r->after));
    return ops->event_elapsed_ns(r->device->self, r->before, r->after, out_ns);
}

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static sth_status time_all(rig *r, int64_t *times, int repeats) {
    STHI_TRY(time_one(r, &times[0])); /* warms up: the first copy also sets things up */
    for (int i = 0; i < repeats; i++) STHI_TRY(time_one(r, &times[i]));
    return STH_OK;
}

sth_status sthi_device_measure_h2d(sth_device *d, uint64_t bytes, int repeats, bool pinned, double *out) {
    int64_t *times = sthi_zalloc((size_t)repeats, sizeof *times);
    if (!times) return sthi_no_memory("measurement", "%d times", repeats);
    rig r = {.device = d, .bytes = bytes};
    sth_status status = rig_init(&r, pinned);
    if (status == STH_OK) status = time_all(&r, times, repeats);
    if (status == STH_OK) {
        qsort(times, (size_t)repeats, sizeof *times, by_time);
        int64_t median = times[repeats / 2];
        *out = (double)bytes * 1e9 / (double)(median > 0 ? median : 1);
    }
    sthi_error_copy first;
    sthi_error_save(&first);
    rig_fini(&r);
    sthi_free(times);
    return status == STH_OK ? STH_OK : sthi_error_restore(&first);
}
