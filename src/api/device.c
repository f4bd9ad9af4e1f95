/* The public functions of stagehand/device.h and backend.h: they check arguments and hand on. */
#include "stagehand/device.h"

#include <inttypes.h>

#include "base/error.h"
#include "device/device.h"
#include "device/measure.h"

static sth_status missing(const char *what) {
    return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, what, "%s is NULL", what);
}

void sth_sim_options_init(sth_sim_options *options) {
    if (options) sthi_sim_options_init(options);
}

sth_status sth_device_open(const char *name, const sth_sim_options *sim, sth_device **out_device) {
    if (!name) return missing("name");
    if (!out_device) return missing("out_device");
    return sthi_device_open(name, sim, out_device);
}

void sth_device_close(sth_device *device) { sthi_device_release(device); }

void sth_device_retain(sth_device *device) { sthi_device_retain(device); }

sth_status sth_device_alloc(sth_device *device, uint64_t bytes, sth_devptr *out_address) {
    if (!device) return missing("device");
    if (!out_address) return missing("out_address");
    return device->ops->alloc(device->self, bytes, out_address);
}

void sth_device_free(sth_device *device, sth_devptr address, uint64_t bytes) {
    if (device) device->ops->free(device->self, address, bytes);
}

sth_status sth_device_info_get(sth_device *device, sth_device_info *out_info) {
    if (!device) return missing("device");
    if (!out_info) return missing("out_info");
    return device->ops->info(device->self, out_info);
}

int sth_device_count(const char *backend) {
    const sth_backend_ops *ops;
    int index;
    if (!backend) return (void)missing("backend"), 0;
    return sthi_backend_find(backend, &ops, &index) == STH_OK ? ops->count() : 0;
}

const char *sth_backend_name(int i) {
    const sth_backend_ops *ops = sthi_backend_at(i);
    return ops ? ops->backend : NULL;
}

sth_status sth_backend_register(const sth_backend_ops *table) { return sthi_backend_register(table); }

sth_status sth_backend_load(const char *path, const char **out_name) { return sthi_backend_load(path, out_name); }

sth_status sth_trace_replay(const char *path, sth_device *device, sth_replay_report *out_report) {
    if (!path) return missing("path");
    if (!device) return missing("device");
    if (!out_report) return missing("out_report");
    if (out_report->size != sizeof *out_report)
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "sth_replay_report",
                         "the report says that it is %zu bytes and this library knows %zu; set size first",
                         out_report->size, sizeof *out_report);
    return sthi_trace_replay(path, device, out_report);
}

static sth_status check_trial(uint64_t bytes, uint64_t least, int repeats) {
    if (bytes >= least && repeats >= 1 && repeats <= 10000) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "measurement",
                     "%" PRIu64 " bytes and %d repeats: give at least %" PRIu64 " bytes and 1 to 10000 repeats", bytes,
                     repeats, least);
}

sth_status sth_device_measure_h2d(sth_device *device, uint64_t bytes, int repeats, bool pinned,
                                  double *out_bytes_per_s) {
    if (!device) return missing("device");
    if (!out_bytes_per_s) return missing("out_bytes_per_s");
    STHI_TRY(check_trial(bytes, 1, repeats));
    return sthi_device_measure_h2d(device, bytes, repeats, pinned, out_bytes_per_s);
}

sth_status sth_device_measure_link(sth_device *device, uint64_t bytes, int repeats,
                                   sth_link_rates *out_rates) {
    if (!device) return missing("device");
    if (!out_rates) return missing("out_rates");
    STHI_TRY(check_trial(bytes, 2, repeats));
    return sthi_device_measure_link(device, bytes, repeats, out_rates);
}

sth_status sth_sim_compute(sth_device *device, sth_stream stream, int64_t ns) {
    if (!device) return missing("device");
    if (!device->ops->sim_compute)
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, device->ops->backend,
                         "\"%s\" is a real device: only the simulated one can be told to compute",
                         device->ops->backend);
    return device->ops->sim_compute(device->self, stream, ns);
}

int64_t sth_device_now_ns(sth_device *device) { return device ? device->ops->now_ns(device->self) : 0; }
