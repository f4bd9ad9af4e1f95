#include "stream/world.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "quant/segment.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"

world_spec world_default(uint32_t units, const uint64_t *bytes, uint64_t budget) {
    return (world_spec){.units = units, .bytes = bytes, .budget = budget, .virtual_time = true,
                        .link = UINT64_C(1000000000), .read_only = true, .chunk = 4096};
}

enum { COLS = 40 }; /* of a packed unit's rows: no multiple of a vector */

/* Bytes that depend on unit, position and version, so that any mix-up shows; the bytes with the exponents of bfloat16
 * take 8 values, so that they pack, but for WORLD_WILD. Rows of them are made once: most of a
 * test's time goes into looking at them, under the thread sanitizer above all. */
enum { ROW = 512 };
static uint8_t row[256][ROW], wild_row[256][ROW];
static pthread_once_t rows_once = PTHREAD_ONCE_INIT;

static void make_rows(void) {
    for (unsigned first = 0; first < 256; first++)
        for (unsigned at = 0; at < ROW; at++) {
            uint8_t any = (uint8_t)(first + at * 7u);
            wild_row[first][at] = at % 2 ? any & 0xBF : any; /* finite as bfloat16 */
            row[first][at] = at % 2 ? (any & 0x83) | 0x3C : any;
        }
}

static const uint8_t *row_at(uint32_t unit, uint64_t at, uint8_t version) {
    const uint8_t(*rows)[ROW] = version == WORLD_WILD ? wild_row : row;
    return rows[(uint8_t)(unit * 31u + at / ROW * 3u + version * 101u + 1u)];
}

static void fill(uint32_t unit, uint8_t version, uint8_t *out, uint64_t bytes) {
    pthread_once(&rows_once, make_rows);
    for (uint64_t at = 0; at < bytes; at += ROW)
        memcpy(out + at, row_at(unit, at, version), sthi_min_u64(ROW, bytes - at));
}

/* What the place shows when it is expanded from a packed image of `image`. */
static void world_expect(const world *w, uint32_t unit, const uint8_t *image, uint8_t *out) {
    uint64_t packed_bytes = 0, begin, end;
    if (w->lossless) {
        memcpy(out, image, w->bytes[unit]);
        return;
    }
    for (uint32_t i = 0; i < w->segment_count[unit]; i++) {
        sthi_segment_span(&w->segments[unit][i], &begin, &end);
        packed_bytes = sthi_max_u64(packed_bytes, end);
    }
    uint8_t *packed = malloc(packed_bytes);
    float scratch[2 * COLS];
    sth_transfer_error error = {0};
    if (!packed) abort();
    for (uint32_t i = 0; i < w->segment_count[unit]; i++)
        if (sthi_segment_encode(&w->segments[unit][i], image, packed, scratch, &error) != STH_OK) abort();
    if (sth_transfer_decode(w->segments[unit], w->segment_count[unit], packed, out) != STH_OK) abort();
    free(packed);
}

void world_fill(world *w, uint32_t unit, uint8_t version) {
    fill(unit, version, w->image[unit], w->bytes[unit]);
    w->version[unit] = version;
    if (w->packed[unit]) world_expect(w, unit, w->image[unit], w->shown[unit]);
}

bool world_shows(const world *w, uint32_t unit, uint8_t version, const uint8_t *bytes) {
    if (w->packed[unit]) {
        if (version == w->version[unit]) return memcmp(bytes, w->shown[unit], w->bytes[unit]) == 0;
        uint8_t *image = malloc(w->bytes[unit]), *shown = malloc(w->bytes[unit]);
        if (!image || !shown) abort();
        fill(unit, version, image, w->bytes[unit]);
        world_expect(w, unit, image, shown);
        bool same = memcmp(bytes, shown, w->bytes[unit]) == 0;
        free(image);
        free(shown);
        return same;
    }
    for (uint64_t at = 0, all = w->bytes[unit]; at < all; at += ROW)
        if (memcmp(bytes + at, row_at(unit, at, version), sthi_min_u64(ROW, all - at))) return false;
    return true;
}

bool world_right(const world *w, const sth_lease *lease) {
    return world_shows(w, lease->unit, w->version[lease->unit], (const uint8_t *)(uintptr_t)lease->address);
}

static sth_status lay_out(const world *w, uint32_t unit, const sth_segment *tensors, uint32_t count, uint64_t piece,
                          sth_segment *out, uint32_t capacity, uint32_t *out_count, uint64_t *out_bytes) {
    if (!w->lossless) return sthi_segments_layout(tensors, count, piece, out, capacity, out_count, out_bytes);
    return sthi_segments_fit(tensors, count, piece, w->image[unit], 1, out, capacity, out_count, out_bytes);
}

/* Rows of bfloat16, then what is left as it is. Of LOSSLESS one row, with what the image holds. */
static sth_status pack_unit(world *w, const world_spec *spec, uint32_t i, uint64_t *out_packed_bytes) {
    uint64_t rows = spec->bytes[i] / 2 / COLS, rest = spec->bytes[i] - rows * COLS * 2;
    sth_segment tensors[2] = {{.encoding = spec->packed, .dtype = STH_DTYPE_BF16, .rows = w->lossless ? 1 : rows,
                               .cols = w->lossless ? rows * COLS : COLS},
                              {.encoding = STH_TRANSFER_VERBATIM, .place_offset = spec->bytes[i] - rest, .rows = 1,
                               .cols = rest}};
    uint32_t skip = rows ? 0 : 1, count = (rows ? 1u : 0u) + (rest ? 1u : 0u);
    uint64_t bytes = 0;
    uint32_t segments = 0;
    STHI_TRY(lay_out(w, i, tensors + skip, count, sthi_max_u64(spec->chunk, 2048), NULL, 0, &segments, &bytes));
    w->segments[i] = sthi_zalloc(segments, sizeof *w->segments[i]);
    w->shown[i] = sthi_zalloc(spec->bytes[i], 1);
    if (!w->segments[i] || !w->shown[i])
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, "test", 0, NULL, "no memory for a world");
    STHI_TRY(lay_out(w, i, tensors + skip, count, sthi_max_u64(spec->chunk, 2048), w->segments[i], segments, &segments,
                     &bytes));
    w->segment_count[i] = segments;
    void *p;
    STHI_TRY(sthi_arena_reserve(w->arena, bytes, &p));
    *out_packed_bytes = bytes;
    w->packed[i] = p;
    return STH_OK;
}

static bool is_packed(const world_spec *spec, uint32_t i) { return spec->packed && i % 2 == 0; }

static sth_status fill_arena(world *w, const world_spec *spec, uint64_t total, uint64_t *packed_bytes) {
    STHI_TRY(sthi_arena_create(w->device, total, &w->arena));
    for (uint32_t i = 0; i < spec->units; i++) {
        void *p;
        STHI_TRY(sthi_arena_reserve(w->arena, spec->bytes[i], &p));
        w->image[i] = p;
        w->bytes[i] = spec->bytes[i];
        fill(i, 0, w->image[i], w->bytes[i]);
        if (is_packed(spec, i)) STHI_TRY(pack_unit(w, spec, i, &packed_bytes[i]));
        world_fill(w, i, 0);
        if (w->packed[i])
            STHI_TRY(
                sthi_segments_encode(w->segments[i], w->segment_count[i], w->image[i], w->packed[i], 1, NULL, NULL));
    }
    return sthi_arena_finish(w->arena);
}

static sth_status add_units(world *w, const world_spec *spec, const uint64_t *packed_bytes) {
    for (uint32_t i = 0; i < spec->units; i++) {
        char name[32];
        uint32_t id;
        snprintf(name, sizeof name, "unit.%u", i);
        sth_unit_desc d = {.name = name, .bytes = spec->bytes[i], .host = w->image[i], .arena = w->arena,
                           .flags = spec->flags | (spec->writable ? STH_UNIT_WRITABLE : 0) |
                                    (spec->either && is_packed(spec, i) ? STH_UNIT_EITHER : 0)};
        if (w->packed[i]) {
            d.host = w->packed[i];
            d.master = w->image[i];
            d.segments = w->segments[i];
            d.segment_count = w->segment_count[i];
            d.packed_bytes = packed_bytes[i];
        }
        STHI_TRY(sthi_runtime_add_unit(w->runtime, &d, &id));
    }
    return STH_OK;
}

static sth_status make_units(world *w, const world_spec *spec) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < spec->units; i++)
        total += (spec->bytes[i] + 511) / 512 * 512 + (is_packed(spec, i) ? 4 * spec->bytes[i] + 16384 : 0);
    uint64_t *packed_bytes = sthi_zalloc(spec->units, sizeof *packed_bytes);
    if (!packed_bytes) return sthi_fail(STH_OUT_OF_HOST_MEMORY, "test", 0, NULL, "no memory for a world");
    sth_status rc = fill_arena(w, spec, total, packed_bytes);
    if (rc == STH_OK) rc = add_units(w, spec, packed_bytes);
    sthi_free(packed_bytes);
    return rc;
}

sth_status world_open(world *w, const world_spec *spec) {
    *w = (world){.units = spec->units, .lossless = spec->packed == STH_TRANSFER_LOSSLESS};
    w->image = sthi_zalloc(spec->units, sizeof *w->image);
    w->bytes = sthi_zalloc(spec->units, sizeof *w->bytes);
    w->version = sthi_zalloc(spec->units, 1);
    w->packed = sthi_zalloc(spec->units, sizeof *w->packed);
    w->shown = sthi_zalloc(spec->units, sizeof *w->shown);
    w->segments = sthi_zalloc(spec->units, sizeof *w->segments);
    w->segment_count = sthi_zalloc(spec->units, sizeof *w->segment_count);
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = spec->capacity ? spec->capacity : spec->budget;
    sim.link_bytes_per_s = spec->link;
    sim.virtual_time = spec->virtual_time;
    sim.pin_limit_bytes = spec->pin_limit;
    sim.copy_latency_ns = spec->latency_ns ? spec->latency_ns : 500;
    sim.no_expand = spec->no_expand;
    sth_runtime_options o;
    sthi_runtime_options_init(&o);
    o.budget = spec->budget;
    o.reader_threads = spec->readers;
    if (spec->stages) o.stages = spec->stages;
    o.policy = spec->policy;
    o.read_only = spec->read_only;
    o.chunk_bytes = spec->chunk;
    o.name = spec->name;
    o.pool = spec->pool;
    o.reserved = spec->reserved;
    o.high_watermark = spec->high_watermark;
    o.low_watermark = spec->low_watermark;
    o.least_room = spec->least_room;
    bool made = w->image && w->bytes && w->version && w->packed && w->shown && w->segments && w->segment_count;
    sth_status rc = made ? STH_OK
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
    for (uint32_t i = 0; i < w->units && w->shown && w->segments; i++) {
        sthi_free(w->shown[i]);
        sthi_free(w->segments[i]);
    }
    sthi_free(w->packed);
    sthi_free(w->shown);
    sthi_free(w->segments);
    sthi_free(w->segment_count);
    *w = (world){0};
}

sth_status world_use(world *w, uint32_t unit, int64_t compute_ns) {
    sth_lease lease;
    STHI_TRY(sthi_unit_acquire(w->runtime, unit, 0, &lease));
    bool right = world_right(w, &lease);
    sth_status rc = w->device->ops->sim_compute(w->device->self, 0, compute_ns);
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
