/* Opens every device of every back end and measures its link: at most a few tens of copies each. The
 * simulated device's copies are plain memory copies, so its rate is that of one thread's memcpy. */
#include <stdio.h>
#include <string.h>

#include "doctor.h"
#include "link.h"
#include "stagehand/backend.h"

const uint64_t doctor_rate_bytes[RATE_SIZES] = {(uint64_t)1 << 20, (uint64_t)16 << 20, (uint64_t)64 << 20};

static void keep_error(finding *f) { snprintf(f->error, sizeof f->error, "%s", sth_last_error()->message); }

static bool measure_all(sth_device *device, bool pinned, double rates[RATE_SIZES]) {
    static const int repeats[RATE_SIZES] = {9, 5, 3};
    for (int i = 0; i < RATE_SIZES; i++)
        if (sth_device_measure_h2d(device, doctor_rate_bytes[i], repeats[i], pinned, &rates[i]) != STH_OK)
            return false;
    return true;
}

static void examine(sth_device *device, finding *f) {
    if (sth_device_info_get(device, &f->info) != STH_OK) {
        keep_error(f);
        return;
    }
    f->pinned = measure_all(device, true, f->pinned_rate);
    if (!f->pinned) keep_error(f);
    f->ok = measure_all(device, false, f->pageable_rate);
    if (!f->ok) keep_error(f);
}

static void look_at_device(finding *f) {
    char name[64];
    sth_device *device = NULL;
    snprintf(name, sizeof name, "%s:%d", f->backend, f->index);
    if (sth_device_open(name, NULL, &device) != STH_OK) {
        keep_error(f);
        return;
    }
    examine(device, f);
    sth_device_close(device);
}

static finding *add_finding(diagnosis *d, const char *backend, int index) {
    if (d->finding_count == MAX_FINDINGS) return NULL;
    finding *f = &d->findings[d->finding_count++];
    *f = (finding){.backend = backend, .index = index};
    return f;
}

static void look_at_backend(diagnosis *d, const char *backend) {
    int count = sth_device_count(backend);
    if (count <= 0) {
        finding *f = add_finding(d, backend, -1);
        if (f) keep_error(f);
    }
    for (int i = 0; i < count; i++) {
        finding *f = add_finding(d, backend, i);
        if (f) look_at_device(f);
    }
}

void doctor_look_at_devices(diagnosis *d) {
    const char *backend;
    bool listed = sth_backend_load(NULL, NULL) == STH_OK;
    finding *f = listed ? NULL : add_finding(d, "STAGEHAND_BACKENDS", -1);
    if (f) keep_error(f);
    for (int i = 0; (backend = sth_backend_name(i)); i++) look_at_backend(d, backend);
}
