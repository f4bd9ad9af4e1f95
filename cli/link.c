/* Devices by default, and measured links. */
#include "link.h"

#include <string.h>

#define REPEATS 5

const char *link_default_device(void) {
    if (sth_device_count("cuda") > 0) return "cuda";
    return sth_device_count("hip") > 0 ? "hip" : "sim";
}

bool link_is_simulated(const char *device) {
    const char *decorators = strrchr(device, '+');
    if (decorators) device = decorators + 1;
    size_t length = strcspn(device, ":");
    return length == 3 && (!strncmp(device, "sim", 3) || !strncmp(device, "cpu", 3));
}

sth_status link_measure(sth_device *device, uint64_t bytes, double *out_bytes_per_s, bool *out_pinned) {
    *out_pinned = true;
    if (sth_device_measure_h2d(device, bytes, REPEATS, true, out_bytes_per_s) == STH_OK) return STH_OK;
    *out_pinned = false;
    return sth_device_measure_h2d(device, bytes, REPEATS, false, out_bytes_per_s);
}
