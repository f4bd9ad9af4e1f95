/* A C17 user of the installed library: streams eight units through a device with room for three, and finds each unit's
 * bytes there. Prints the version of the library; ends with 0. */
#include <stdio.h>
#include <string.h>

#include <stagehand/stagehand.h>

enum { UNITS = 8, UNIT_BYTES = 65536 };

static unsigned char weights[UNITS][UNIT_BYTES];

static sth_status add_units(sth_runtime *runtime) {
    for (int i = 0; i < UNITS; i++) {
        memset(weights[i], i + 1, UNIT_BYTES);
        char name[16];
        snprintf(name, sizeof name, "unit %d", i);
        sth_unit_desc desc = {.name = name, .bytes = UNIT_BYTES, .host = weights[i]};
        uint32_t unit;
        sth_status status = sth_runtime_add_unit(runtime, &desc, &unit);
        if (status != STH_OK) return status;
    }
    return sth_runtime_seal(runtime);
}

/* On the simulated device an address is one of the host. */
static sth_status one_step(sth_runtime *runtime, int *wrong) {
    sth_status status = sth_step_begin(runtime);
    for (uint32_t unit = 0; status == STH_OK && unit < UNITS; unit++) {
        sth_lease lease;
        if ((status = sth_unit_acquire(runtime, unit, 0, &lease)) != STH_OK) break;
        *wrong += memcmp((const void *)(uintptr_t)lease.address, weights[unit], UNIT_BYTES) != 0;
        sth_lease_release(runtime, &lease);
    }
    return status == STH_OK ? sth_step_end(runtime) : status;
}

int main(void) {
    sth_device *device = NULL;
    sth_runtime *runtime = NULL;
    sth_runtime_options options;
    sth_runtime_options_init(&options);
    options.budget = 3 * UNIT_BYTES;
    int wrong = 0;
    sth_status status = sth_device_open("sim", NULL, &device);
    if (status == STH_OK) status = sth_runtime_create(device, &options, &runtime);
    if (status == STH_OK) status = add_units(runtime);
    for (int step = 0; step < 3 && status == STH_OK; step++) status = one_step(runtime, &wrong);
    if (status != STH_OK) fprintf(stderr, "%s: %s\n", sth_status_name(status), sth_last_error()->message);
    sth_runtime_destroy(runtime);
    sth_device_close(device);
    if (status != STH_OK || wrong) return 1;
    return puts(sth_version()) < 0;
}
