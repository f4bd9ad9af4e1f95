/* See files_world.h. */
#include "support/check.h"

#include "stream/files_world.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"
#include "store/tempfiles.h"

/* Two tensors a unit; neither starts at a multiple of 512 in the file. */
static const uint64_t FIRST[UNITS] = {13000, 100, 40000, 7, 9000, 30011, 512, 20000};
static const uint64_t SECOND[UNITS] = {1000, 8000, 3, 5000, 9000, 1, 4096, 600};

static uint64_t up(uint64_t n) { return (n + 511) / 512 * 512; }

uint64_t file_unit_bytes(uint32_t unit) { return up(up(FIRST[unit]) + SECOND[unit]); }

void write_model(const char *folder, int half, char *path, size_t path_bytes) {
    char header[2048] = "{", name[32];
    uint64_t at = 0;
    for (uint32_t u = (uint32_t)half; u < UNITS; u += 2)
        for (int k = 0; k < 2; k++) {
            uint64_t bytes = k ? SECOND[u] : FIRST[u];
            snprintf(header + strlen(header), sizeof header - strlen(header),
                     "%s\"u%u.%c\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                     at ? "," : "", u, k ? 'b' : 'a', (unsigned long long)bytes, (unsigned long long)at,
                     (unsigned long long)(at + bytes));
            at += bytes;
        }
    strcat(header, "}");
    snprintf(name, sizeof name, "m%d.safetensors", half);
    snprintf(path, path_bytes, "%s", temp_path(folder, name));
    write_safetensors(path, header, at);
}

static sth_status add_units(file_world *w) {
    for (uint32_t u = 0; u < UNITS; u++) {
        char name[16], tensor[16];
        sth_checkpoint *c = w->files[u % 2];
        sth_file_range ranges[2];
        for (int k = 0; k < 2; k++) {
            snprintf(tensor, sizeof tensor, "u%u.%c", u, k ? 'b' : 'a');
            const sth_tensor_info *t = sthi_checkpoint_find(c, tensor);
            ranges[k] = (sth_file_range){t->file, t->offset, t->bytes, k ? up(FIRST[u]) : 0};
        }
        snprintf(name, sizeof name, "unit.%u", u);
        sth_unit_desc d = {.name = name, .bytes = up(FIRST[u]) + SECOND[u], .checkpoint = c, .ranges = ranges,
                           .range_count = 2};
        uint32_t id;
        STHI_TRY(sthi_runtime_add_unit(w->runtime, &d, &id));
    }
    return STH_OK;
}

void file_world_close(file_world *w) {
    sthi_runtime_destroy(w->runtime);
    sthi_device_release(w->device);
    for (int i = 0; i < 2; i++) sthi_checkpoint_close(w->files[i]);
    *w = (file_world){0};
}

static sth_status start(file_world *w, const setting *s) {
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = s->budget;
    sim.link_bytes_per_s = UINT64_C(2000000000);
    sim.virtual_time = s->virtual_time;
    sim.copy_latency_ns = 500;
    sth_runtime_options o;
    sthi_runtime_options_init(&o);
    o.budget = s->budget;
    o.reader_threads = s->readers;
    o.chunk_bytes = CHUNK;
    o.staging_bytes = (uint64_t)s->slabs * CHUNK;
    o.pool = s->pool;
    o.ram_budget = s->ram;
    o.link_bytes_per_s = 2e9;
    STHI_TRY(sthi_device_open("sim", &sim, &w->device));
    STHI_TRY(sthi_runtime_create(w->device, &o, &w->runtime));
    STHI_TRY(add_units(w));
    return sthi_runtime_seal(w->runtime);
}

void want_way(const char *folder, sth_read_way way) {
    for (int i = 0; i < 2; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s", temp_path(folder, i ? "m1.safetensors" : "m0.safetensors"));
        if (access(path, R_OK)) write_model(folder, i, path, sizeof path);
        if (way == STH_READ_CACHED) warm_cache(path);
        else drop_cache(path);
    }
    if (way == STH_READ_DIRECT) sthi_fault_arm(STHI_FAULT_URING, 1, true);
    if (way == STH_READ_BUFFERED) sthi_fault_arm(STHI_FAULT_DIRECT, 1, true);
}

sth_status file_world_open(file_world *w, const char *folder, const setting *s) {
    *w = (file_world){.folder = folder};
    char path[2][512];
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s", temp_path(folder, i ? "m1.safetensors" : "m0.safetensors"));
        if (access(path[i], R_OK)) write_model(folder, i, path[i], sizeof path[i]);
    }
    sth_status rc = sthi_checkpoint_open(path[0], &w->files[0]);
    if (rc == STH_OK) rc = sthi_checkpoint_open(path[1], &w->files[1]);
    if (rc == STH_OK) rc = start(w, s);
    if (rc == STH_OK) return STH_OK;
    sthi_error_copy why;
    sthi_error_save(&why);
    file_world_close(w);
    return sthi_error_restore(&why);
}

/* Where the unit's first tensor begins in its file's data. */
static uint64_t data_at(uint32_t unit) {
    uint64_t at = 0;
    for (uint32_t u = unit % 2; u < unit; u += 2) at += FIRST[u] + SECOND[u];
    return at;
}

static bool right(const sth_lease *l) {
    const uint8_t *p = (const uint8_t *)(uintptr_t)l->address;
    uint64_t at = data_at(l->unit);
    return is_pattern(p, at, FIRST[l->unit]) &&
           is_pattern(p + up(FIRST[l->unit]), at + FIRST[l->unit], SECOND[l->unit]);
}

static void assert_sound(file_world *w) {
    const char *why;
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
}

static sth_status use(file_world *w, uint32_t unit) {
    sth_lease lease;
    STHI_TRY(sthi_unit_acquire(w->runtime, unit, 0, &lease));
    bool was_right = right(&lease);
    sth_status rc = w->device->ops->sim_compute(w->device->self, 0, 20000);
    was_right = was_right && right(&lease);
    sthi_lease_release(w->runtime, &lease);
    STHI_TRY(sthi_runtime_poll(w->runtime));
    return was_right ? rc : sthi_fail(STH_INTERNAL, "test", 0, NULL, "unit %u: wrong bytes", unit);
}

sth_status file_step(file_world *w, uint32_t *bad) {
    *bad = 0;
    sthi_error_copy why = {.status = STH_OK};
    STHI_TRY(sthi_step_begin(w->runtime));
    for (uint32_t u = 0; u < UNITS; u++) {
        if (use(w, u) == STH_OK) continue;
        if (!*bad) sthi_error_save(&why);
        *bad |= 1u << u;
        assert_sound(w);
        sth_unit_stats stats;
        sthi_unit_stats(w->runtime, u, &stats);
        if (!w->runtime->options.reader_threads) assert_int_equal(stats.state, STH_UNIT_STATE_UNLOADED);
        else assert_in_range(stats.state, STH_UNIT_STATE_UNLOADED, STH_UNIT_STATE_GPU_READY); /* read again by now */
    }
    STHI_TRY(sthi_step_end(w->runtime));
    assert_sound(w);
    return *bad ? sthi_error_restore(&why) : STH_OK;
}

void good_steps(file_world *w, int n) {
    uint32_t bad;
    for (int i = 0; i < n; i++) assert_ok(file_step(w, &bad));
}
