/* Opening and closing devices. Knows no back end. No locks. */
#include "device/device.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/decorate/layer.h"

void sthi_sim_options_init(sth_sim_options *options) {
    *options = (sth_sim_options){
        .size = sizeof *options,
        .memory_bytes = (uint64_t)8 << 30,
        .copy_latency_ns = 2000,
        .poison = true,
        .expand_bytes_per_s = UINT64_C(1024) * 1000 * 1000 * 1000,
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
