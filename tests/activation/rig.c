#include "activation/rig.h"

#include <string.h>

#include "base/error.h"
#include "base/memory.h"

/* What a thing holds, by eights of bytes: byte by byte the tests would spend most of their time on it. */
static uint64_t word(uint64_t at, unsigned seed) {
    return (at + 8) * UINT64_C(0x9E3779B97F4A7C15) + seed * UINT64_C(0xD1B54A32D192ED03);
}

static void fill(uint8_t *p, uint64_t bytes, unsigned seed) {
    for (uint64_t at = 0; at < bytes; at += 8) {
        uint64_t is = word(at, seed);
        if (bytes - at >= 8) memcpy(p + at, &is, 8);
        else memcpy(p + at, &is, bytes - at);
    }
}

static bool filled(const uint8_t *p, uint64_t bytes, unsigned seed, uint64_t *out_at) {
    for (uint64_t at = *out_at = 0; at < bytes; *out_at = at += 8) {
        uint64_t wanted = word(at, seed), is = wanted;
        if (bytes - at >= 8) memcpy(&is, p + at, 8);
        else memcpy(&is, p + at, bytes - at);
        if (is != wanted) return false;
    }
    return true;
}

sth_status rig_start(rig *g, sth_device *device, const sth_activation_options *options, bool stream_zero) {
    memset(g, 0, sizeof *g);
    sth_device_retain(g->device = device);
    g->garbage = sthi_alloc(LARGEST);
    g->found = sthi_alloc(LARGEST);
    memset(g->garbage, 0xEE, LARGEST);
    if (!stream_zero) STHI_TRY(device->ops->stream_create(device->self, 0, &g->stream));
    return sth_activation_create(device, options, &g->store);
}

void rig_init(rig *g, bool virtual_time, uint64_t link, const sth_activation_options *options, bool stream_zero) {
    sth_sim_options o;
    sth_device *device;
    sth_sim_options_init(&o);
    o.virtual_time = virtual_time;
    o.link_bytes_per_s = link;
    o.memory_bytes = (uint64_t)1 << 30;
    assert_ok(sth_device_open("sim", &o, &device));
    assert_ok(rig_start(g, device, options, stream_zero));
    sth_device_close(device);
}

static bool held(const rig *g, sth_devptr at) {
    for (int i = 0; i < THINGS; i++)
        if (g->things[i].record && (g->things[i].memory == at || g->things[i].copy == at)) return true;
    return false;
}

void rig_rest(rig *g) {
    int kept = 0;
    (void)g->device->ops->stream_synchronize(g->device->self, g->stream);
    for (int i = 0; i < g->memory_count; i++)
        if (held(g, g->memories[i].at)) g->memories[kept++] = g->memories[i];
        else g->device->ops->free(g->device->self, g->memories[i].at, g->memories[i].bytes);
    g->memory_count = kept;
}

void rig_fini(rig *g) {
    sth_activation_destroy(g->store);
    memset(g->things, 0, sizeof g->things);
    rig_rest(g);
    g->device->ops->stream_destroy(g->device->self, g->stream);
    sthi_free(g->garbage);
    sthi_free(g->found);
    sth_device_close(g->device);
}

static sth_status take(rig *g, uint64_t bytes, sth_devptr *out) {
    assert_true(g->memory_count < MEMORIES);
    sth_status rc = g->device->ops->alloc(g->device->self, bytes, out);
    if (rc != STH_OK) return rc;
    g->memories[g->memory_count].at = *out;
    g->memories[g->memory_count++].bytes = bytes;
    return STH_OK;
}

/* Whatever uses the memory next. */
static sth_status scribble(rig *g, sth_devptr at, uint64_t bytes) {
    if (g->quiet) return STH_OK;
    return g->device->ops->copy_h2d(g->device->self, at, g->garbage, bytes, g->stream);
}

static sth_status let_go(rig *g, sth_devptr *which, uint64_t bytes) {
    assert_int_not_equal(*which, 0);
    sth_status rc = scribble(g, *which, bytes);
    *which = 0;
    return rc;
}

sth_status rig_save(rig *g, int i, uint64_t bytes, unsigned seed, bool passing) {
    thing *t = &g->things[i], fresh = {.bytes = bytes, .seed = seed, .held = g->held};
    assert_int_equal(t->record, 0);
    sth_status rc = take(g, bytes, &fresh.memory);
    if (rc != STH_OK) return rc;
    fill((uint8_t *)(uintptr_t)fresh.memory, bytes, seed);
    rc = sth_activation_save(g->store, bytes, passing, &fresh.record);
    if (rc != STH_OK) return rc;
    *t = fresh;
    if (g->recomputable) {
        rc = sth_activation_recomputable(g->store, t->record);
        if (rc != STH_OK) return rc;
    }
    return rig_room(g, 0);
}

sth_status rig_let_loose(rig *g, int i, unsigned seed) {
    thing *t = &g->things[i];
    assert_true(t->held && t->memory);
    t->held = false;
    t->seed = seed;
    fill((uint8_t *)(uintptr_t)t->memory, t->bytes, seed);
    return sth_activation_set_held(g->store, t->record, false);
}

static thing *thing_of(rig *g, sth_record record) {
    for (int i = 0; i < THINGS; i++)
        if (g->things[i].record == record) return &g->things[i];
    fail_msg("the store names a record that is not alive");
    return NULL;
}

sth_status rig_room(rig *g, uint64_t need) {
    for (int turn = 0;; turn++) {
        sth_record record;
        sth_relief relief;
        assert_true(turn < 10 * THINGS);
        sth_status rc = sth_activation_relieve(g->store, 0, need, g->stream, &record, &relief);
        if (rc != STH_OK || relief == STH_RELIEF_NONE) return rc;
        thing *t = thing_of(g, record);
        if (t->held && relief != STH_RELIEF_LET_GO) {
            rc = sth_activation_set_held(g->store, record, true);
        } else if (relief == STH_RELIEF_SPILL) {
            rc = sth_activation_spill(g->store, record, t->memory, g->stream);
        } else {
            if (relief == STH_RELIEF_DROP) rc = sth_activation_drop(g->store, record);
            if (rc != STH_OK) return rc;
            rc = let_go(g, t->copy ? &t->copy : &t->memory, t->bytes);
        }
        if (rc != STH_OK) return rc;
        unsigned spilling = 0;
        for (int i = 0; i < THINGS; i++)
            spilling += g->things[i].record && rig_state(g, i) == STH_ACTIVATION_SPILLING;
        if (spilling > g->most_spilling) g->most_spilling = spilling;
    }
}

static sth_status restore(rig *g, thing *t) {
    sth_devptr to;
    sth_status rc = take(g, t->bytes, &to);
    if (rc == STH_OK) rc = scribble(g, to, t->bytes); /* what the memory was used for before */
    if (rc == STH_OK) rc = sth_activation_restore(g->store, t->record, to, g->stream);
    if (rc == STH_OK) t->copy = to;
    return rc;
}

static sth_status recompute(rig *g, thing *t) {
    sth_devptr to;
    sth_status rc = take(g, t->bytes, &to);
    if (rc != STH_OK) return rc;
    fill((uint8_t *)(uintptr_t)to, t->bytes, t->seed);
    rc = sth_activation_recomputed(g->store, t->record);
    if (rc == STH_OK) t->copy = to;
    return rc;
}

static sth_status check_bytes(rig *g, const thing *t) {
    const sth_backend_ops *ops = g->device->ops;
    if (g->quiet) return STH_OK;
    sth_status rc = ops->copy_d2h(g->device->self, g->found, t->memory ? t->memory : t->copy, t->bytes, g->stream);
    if (rc == STH_OK) rc = ops->stream_synchronize(g->device->self, g->stream);
    if (rc != STH_OK) return rc;
    uint64_t at;
    if (!filled(g->found, t->bytes, t->seed, &at))
        fail_msg("byte %llu of %llu or one of the 7 behind it is wrong (seed %u)", (unsigned long long)at,
                 (unsigned long long)t->bytes, t->seed);
    return STH_OK;
}

sth_status rig_ask(rig *g, int i) {
    thing *t = &g->things[i];
    sth_activation_state state;
    sth_status rc = sth_activation_ask(g->store, t->record, &state);
    if (rc != STH_OK) return rc;
    if (state == STH_ACTIVATION_SPILLED || state == STH_ACTIVATION_DROPPED) {
        rc = rig_room(g, t->bytes);
        if (rc == STH_OK) rc = state == STH_ACTIVATION_SPILLED ? restore(g, t) : recompute(g, t);
    }
    if (rc == STH_OK && !t->memory) rc = sth_activation_arrive(g->store, t->record, g->stream);
    return rc == STH_OK ? check_bytes(g, t) : rc;
}

sth_status rig_ahead(rig *g) {
    for (;;) {
        sth_record record;
        sth_status rc = sth_activation_ahead(g->store, 0, &record);
        if (rc != STH_OK || !record) return rc;
        rc = restore(g, thing_of(g, record));
        if (rc != STH_OK) return rc;
    }
}

sth_status rig_release(rig *g, int i) {
    thing *t = &g->things[i];
    sth_status rc = sth_activation_release(g->store, t->record, g->stream);
    if (rc == STH_OK && t->memory) rc = scribble(g, t->memory, t->bytes);
    if (rc == STH_OK && t->copy) rc = scribble(g, t->copy, t->bytes);
    *t = (thing){0};
    return rc;
}

sth_activation_state rig_state(rig *g, int i) {
    sth_activation_state state;
    assert_ok(sth_activation_state_get(g->store, g->things[i].record, &state));
    return state;
}

sth_activation_stats rig_stats(rig *g) {
    sth_activation_stats stats;
    assert_ok(sth_activation_stats_get(g->store, &stats));
    return stats;
}
