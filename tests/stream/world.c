#include "stream/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

world_spec world_default(uint32_t units, const uint64_t *bytes, uint64_t budget) {
    return (world_spec){.units = units, .bytes = bytes, .budget = budget, .virtual_time = true,
                        .link = UINT64_C(1000000000), .read_only = true, .chunk = 4096};
}

/* A byte that depends on unit, position and version, so that any mix-up shows. */
static uint8_t pattern(uint32_t unit, uint64_t at, uint8_t version) {
    return (uint8_t)(unit * 31u + at * 7u + (at >> 9) * 3u + version * 101u + 1u);
}

void world_fill(world *w, uint32_t unit, uint8_t version) {
    for (uint64_t i = 0; i < w->bytes[unit]; i++) w->image[unit][i] = pattern(unit, i, version);
    w->version[unit] = version;
}

bool world_shows(const world *w, uint32_t unit, uint8_t version, const uint8_t *bytes) {
    for (uint64_t i = 0; i < w->bytes[unit]; i++)
        if (bytes[i] != pattern(unit, i, version)) return false;
    return true;
}

bool world_right(const world *w, const sth_lease *lease) {
    return world_shows(w, lease->unit, w->version[lease->unit], (const uint8_t *)(uintptr_t)lease->address);
}

static sth_status make_units(world *w, const world_spec *spec) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < spec->units; i++) total += (spec->bytes[i] + 511) / 512 * 512;
    STHI_TRY(sthi_arena_create(w->device, total, &w->arena));
    for (uint32_t i = 0; i < spec->units; i++) {
        void *p;
        STHI_TRY(sthi_arena_reserve(w->arena, spec->bytes[i], &p));
        w->image[i] = p;
        w->bytes[i] = spec->bytes[i];
        world_fill(w, i, 0);
    }
    STHI_TRY(sthi_arena_finish(w->arena));
    for (uint32_t i = 0; i < spec->units; i++) {
        char name[32];
        uint32_t id;
        snprintf(name, sizeof name, "unit.%u", i);
        sth_unit_desc d = {.name = name, .bytes = spec->bytes[i], .host = w->image[i], .arena = w->arena,
                           .flags = spec->flags | (spec->writable ? STH_UNIT_WRITABLE : 0)};
        STHI_TRY(sthi_runtime_add_unit(w->runtime, &d, &id));
    }
    return STH_OK;
}

sth_status world_open(world *w, const world_spec *spec) {
    *w = (world){.units = spec->units};
    w->image = sthi_zalloc(spec->units, sizeof *w->image);
    w->bytes = sthi_zalloc(spec->units, sizeof *w->bytes);
    w->version = sthi_zalloc(spec->units, 1);
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = spec->capacity ? spec->capacity : spec->budget;
    sim.link_bytes_per_s = spec->link;
    sim.virtual_time = spec->virtual_time;
    sim.pin_limit_bytes = spec->pin_limit;
    sim.copy_latency_ns = 500;
    sth_runtime_options o;
    sthi_runtime_options_init(&o);
    o.budget = spec->budget;
    o.reader_threads = spec->readers;
    o.policy = spec->policy;
    o.read_only = spec->read_only;
    o.chunk_bytes = spec->chunk;
    o.name = spec->name;
    o.reserved = spec->reserved;
    sth_status rc = w->image && w->bytes && w->version
                        ? STH_OK
                        : sthi_fail(STH_OUT_OF_HOST_MEMORY, "test", 0, NULL, "no memory for a world");
    if (rc == STH_OK && spec->device) sthi_device_retain(w->device = spec->device);
    else if (rc == STH_OK) rc = sthi_device_open("sim", &sim, &w->device);
    if (rc == STH_OK) rc = sthi_runtime_create(w->device, &o, &w->runtime);
    if (rc == STH_OK) rc = make_units(w, spec);
    if (rc == STH_OK) rc = sthi_runtime_seal(w->runtime);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        world_close(w);
        return sthi_error_restore(&why);
    }
    return STH_OK;
}

void world_close(world *w) {
    sthi_runtime_destroy(w->runtime);
    sthi_arena_release(w->arena);
    sthi_device_release(w->device);
    sthi_free(w->image);
    sthi_free(w->bytes);
    sthi_free(w->version);
    *w = (world){0};
}

sth_status world_use(world *w, uint32_t unit, int64_t compute_ns) {
    sth_lease lease;
    STHI_TRY(sthi_unit_acquire(w->runtime, unit, 0, &lease));
    bool right = world_right(w, &lease);
    sth_status rc = w->device->ops->sim_compute(w->device, 0, compute_ns);
    right = right && world_right(w, &lease); /* and nobody wrote there meanwhile */
    sthi_lease_release(w->runtime, &lease);
    if (rc == STH_OK) rc = sthi_runtime_poll(w->runtime);
    if (!right) return sthi_fail(STH_INTERNAL, "test", 0, NULL, "unit %u: wrong bytes on the device", unit);
    return rc;
}

sth_status world_step(world *w, const uint32_t *order, uint32_t count, int64_t compute_ns) {
    STHI_TRY(sthi_step_begin(w->runtime));
    for (uint32_t t = 0; t < count; t++) STHI_TRY(world_use(w, order[t], compute_ns));
    return sthi_step_end(w->runtime);
}
