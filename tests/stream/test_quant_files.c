/* Layers of a quantised file that stream as the file holds them: every use sees what the decoder makes of them, by
 * every way of reading, from RAM within a budget, after failures, and where the host expands. With int8 by row (v2),
 * and with 4 bits, factors and a Hadamard matrix (v3), whose scales lie in many places of the file. */
#include "support/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/random.h"
#include "quant/decoder.h"
#include "quant/from_file.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"
#include "runtime/verify.h"
#include "store/quant.h"
#include "store/tempfiles.h"
#include "state/state.h"

enum { LAYERS = 6, IN = 90, PADDED = 96, PIECE = 3000, CHUNK = 4096, FOUR_IN = 256, RANK = 8, GROUP = 32 };
static const uint64_t EIGHT_ROWS[LAYERS] = {40, 96, 33, 1, 128, 64}, FOUR_ROWS[LAYERS] = {300, 96, 65, 40, 600, 512};
/* What the test that runs has: of v2, or of v3. */
static bool four;
static const uint64_t *rows_of_layers(void) { return four ? FOUR_ROWS : EIGHT_ROWS; }
#define ROWS rows_of_layers()
static uint64_t columns(void) { return four ? FOUR_IN : IN; }
static uint64_t budget(void) { return four ? 700000 : 60000; }
static const char *source(const char *folder) { return temp_path(folder, four ? "v3" : "q.safetensors"); }
static const char *shard(const char *folder) {
    return temp_path(folder, four ? "v3/model-1.safetensors" : "q.safetensors");
}

static uint64_t place_bytes(uint32_t i) { return ROWS[i] * columns() * 2; }

/* ---- the file ---- */

typedef struct writer {
    char header[8192], manifest[4096];
    unsigned char data[LAYERS * 600 * (FOUR_IN / 2 + 2 * FOUR_IN / GROUP + 2 * RANK)];
    uint64_t bytes;
} writer;

static void add_tensor(writer *w, uint32_t layer, const char *key, const char *dtype, const char *shape,
                       uint64_t bytes) {
    size_t used = strlen(w->header);
    snprintf(w->header + used, sizeof w->header - used,
             "%s\"l%u.%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}", used > 1 ? "," : "", layer,
             key, dtype, shape, (unsigned long long)w->bytes, (unsigned long long)(w->bytes + bytes));
    w->bytes += bytes;
}

static void add_floats(writer *w, uint64_t key, uint64_t rows, double factor) {
    for (uint64_t i = 0; i < rows; i++) {
        float x = (float)(factor * (double)(sthi_random64(key, i) >> 40));
        memcpy(w->data + w->bytes + 4 * i, &x, sizeof x);
    }
}

/* Layers with odd numbers have zero points that are not 0. */
static void add_layer(writer *w, uint32_t i) {
    char shape[64];
    uint64_t rows = ROWS[i];
    snprintf(shape, sizeof shape, "[%llu,%d]", (unsigned long long)rows, PADDED);
    for (uint64_t k = 0; k < rows * PADDED; k++) w->data[w->bytes + k] = (unsigned char)sthi_random64(i, k);
    add_tensor(w, i, "qweight", "I8", shape, rows * PADDED);
    snprintf(shape, sizeof shape, "[%llu]", (unsigned long long)rows);
    add_floats(w, 100 + i, rows, 0x1p-28);
    add_tensor(w, i, "scale", "F32", shape, rows * 4);
    add_floats(w, 200 + i, rows, i % 2 ? 0x1p-22 : 0);
    add_tensor(w, i, "zero_point", "F32", shape, rows * 4);
    size_t used = strlen(w->manifest);
    snprintf(
        w->manifest + used, sizeof w->manifest - used,
        "%s{\"canonical_name\":\"l%u\",\"qweight_key\":\"l%u.qweight\",\"scale_key\":\"l%u.scale\","
        "\"zero_point_key\":\"l%u.zero_point\",\"bias_key\":null,\"orig_shape\":[%llu,%d],\"packed_shape\":[%llu,%d],"
        "\"pad_k\":16,\"quant_bits\":8,\"quant_scheme\":\"per_row_symmetric\",\"quant_axis\":0,"
        "\"dtype_qweight\":\"int8\",\"dtype_scale\":\"float32\",\"dtype_zero_point\":\"float32\",\"block_id\":null}",
        i ? "," : "", i, i, i, i, (unsigned long long)rows, IN, (unsigned long long)rows, PADDED);
}

static void write_tensors(const writer *w, const char *path) {
    static unsigned char file[8 + sizeof w->header + sizeof w->data];
    uint64_t length = strlen(w->header);
    memcpy(file, &length, sizeof length);
    memcpy(file + 8, w->header, length);
    memcpy(file + 8 + length, w->data, w->bytes);
    write_bytes(path, file, 8 + length + w->bytes);
}

/* BF16 numbers of +-(1/16 to 16). */
static void add_numbers(writer *w, uint32_t layer, const char *key, uint64_t rows, uint64_t columns_of) {
    char shape[64];
    for (uint64_t i = 0; i < rows * columns_of; i++) {
        uint64_t r = sthi_random64(1000 * layer + (uint64_t)(unsigned char)key[6], i);
        uint16_t h = (uint16_t)((r & 0x807f) | ((123 + (r >> 20) % 8) << 7));
        memcpy(w->data + w->bytes + 2 * i, &h, sizeof h);
    }
    snprintf(shape, sizeof shape, "[%llu,%llu]", (unsigned long long)rows, (unsigned long long)columns_of);
    add_tensor(w, layer, key, "BF16", shape, 2 * rows * columns_of);
}

static void write_v3(const char *folder) {
    static writer w;
    static char index[8192];
    w = (writer){.header = "{"};
    strcpy(index, "{\"metadata\":{\"format\":\"squareq_w4_v1\"},\"weight_map\":{");
    for (uint32_t i = 0; i < LAYERS; i++) {
        static const char *const keys[] = {"qweight", "wscales", "lora_down", "lora_up"};
        char shape[64];
        for (uint64_t k = 0; k < ROWS[i] * FOUR_IN / 2; k++) w.data[w.bytes + k] = (unsigned char)sthi_random64(i, k);
        snprintf(shape, sizeof shape, "[%llu,%d]", (unsigned long long)ROWS[i], FOUR_IN / 2);
        add_tensor(&w, i, keys[0], "U8", shape, ROWS[i] * FOUR_IN / 2);
        add_numbers(&w, i, keys[1], FOUR_IN / GROUP, ROWS[i]);
        add_numbers(&w, i, keys[2], FOUR_IN, RANK);
        add_numbers(&w, i, keys[3], ROWS[i], RANK);
        for (int k = 0; k < 4; k++)
            snprintf(index + strlen(index), sizeof index - strlen(index), "%s\"l%u.%s\":\"model-1.safetensors\"",
                     i + (uint32_t)k ? "," : "", i, keys[k]);
    }
    strcat(w.header, "}");
    strcat(index, "}}");
    (void)mkdir(temp_path(folder, "v3"), 0700);
    write_tensors(&w, temp_path(folder, "v3/model-1.safetensors"));
    write_text(temp_path(folder, "v3/model.safetensors.index.json"), index);
}

static void write_v2(const char *folder) {
    static writer w;
    static char manifest[sizeof w.manifest + 512];
    uint64_t codes = 0;
    w = (writer){.header = "{"};
    for (uint32_t i = 0; i < LAYERS; i++) {
        add_layer(&w, i);
        codes += ROWS[i] * PADDED;
    }
    strcat(w.header, "}");
    write_tensors(&w, temp_path(folder, "q.safetensors"));
    snprintf(
        manifest, sizeof manifest,
        "{\"model_signature\":\"0123456789abcdef\",\"architecture_id\":\"unknown\","
        "\"quant_version\":\"squareq_bp8_v2\","
        "\"kernel_abi_version\":1,\"min_runtime_version\":\"0.1.0\",\"layer_count\":%d,\"total_qweight_bytes\":%llu,"
        "\"layers\":[%s]}",
        LAYERS, (unsigned long long)codes, w.manifest);
    write_text(temp_path(folder, "q.manifest.json"), manifest);
}

static void write_slab(const char *folder) {
    if (four) write_v3(folder);
    else write_v2(folder);
}

/* ---- a runtime over it ---- */

typedef struct quant_world {
    sth_quant *quant;
    sth_device *device;
    sth_runtime *runtime;
    uint16_t *values[LAYERS];
} quant_world;

typedef struct setting {
    uint32_t readers;
    uint64_t budget, ram;
    bool no_expand;
} setting;

static sth_status add_unit(quant_world *w, uint32_t i) {
    char name[16];
    sth_segment segments[64];
    sth_file_range ranges[256];
    uint32_t count = 0, range_count = 0, id;
    uint64_t end;
    snprintf(name, sizeof name, "l%u", i);
    const sth_quant_layer *l = sthi_quant_find(w->quant, name);
    assert_null(sthi_quant_unfit(l));
    STHI_TRY(sthi_quant_segments(w->quant, l, STH_DTYPE_BF16, 512, 0, PIECE, NULL, &count, NULL, &range_count, &end));
    assert_in_range(count, 1, 64);
    if (!four) assert_int_equal(range_count, count * (i % 2 ? 3 : 2));
    else if (count > 1) assert_int_equal(range_count, count * (3 + FOUR_IN / GROUP));
    else assert_int_equal(range_count, 4);
    assert_in_range(range_count, 1, 256);
    STHI_TRY(
        sthi_quant_segments(w->quant, l, STH_DTYPE_BF16, 512, 0, PIECE, segments, &count, ranges, &range_count, &end));
    w->values[i] = sthi_zalloc(ROWS[i] * columns(), 2);
    STHI_TRY(sthi_quant_decode(w->quant, l, STH_DTYPE_BF16, w->values[i], 1));
    sth_unit_desc d = {.name = name, .bytes = 512 + place_bytes(i), .checkpoint = w->quant->checkpoint,
                       .ranges = ranges, .range_count = range_count, .segments = segments, .segment_count = count,
                       .packed_bytes = end};
    char weight[24];
    snprintf(weight, sizeof weight, "%s.weight", name);
    d.tensors = &(sth_unit_tensor){.name = weight, .place_offset = 512};
    d.tensor_count = 1;
    return sthi_runtime_add_unit(w->runtime, &d, &id);
}

static void close_world(quant_world *w) {
    sthi_runtime_destroy(w->runtime);
    sthi_device_release(w->device);
    sthi_quant_close(w->quant);
    for (int i = 0; i < LAYERS; i++) sthi_free(w->values[i]);
}

static sth_status open_world(quant_world *w, const char *folder, const setting *s) {
    *w = (quant_world){0};
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = s->budget;
    sim.link_bytes_per_s = UINT64_C(2000000000);
    sim.no_expand = s->no_expand;
    sth_runtime_options o;
    sthi_runtime_options_init(&o);
    o.budget = s->budget;
    o.reader_threads = s->readers;
    o.chunk_bytes = CHUNK;
    o.ram_budget = s->ram;
    o.link_bytes_per_s = 2e9;
    STHI_TRY(sthi_quant_open(source(folder), &w->quant));
    STHI_TRY(sthi_device_open("sim", &sim, &w->device));
    STHI_TRY(sthi_runtime_create(w->device, &o, &w->runtime));
    for (uint32_t i = 0; i < LAYERS; i++) STHI_TRY(add_unit(w, i));
    return sthi_runtime_seal(w->runtime);
}

static sth_status use(quant_world *w, uint32_t unit) {
    sth_lease lease;
    STHI_TRY(sthi_unit_acquire(w->runtime, unit, 0, &lease));
    bool right = memcmp((const char *)(uintptr_t)lease.address + 512, w->values[unit], place_bytes(unit)) == 0;
    sthi_lease_release(w->runtime, &lease);
    STHI_TRY(sthi_runtime_poll(w->runtime));
    return right ? STH_OK : sthi_fail(STH_INTERNAL, "test", 0, NULL, "unit %u: wrong values", unit);
}

static sth_status step(quant_world *w) {
    const char *why;
    sth_status first = STH_OK;
    STHI_TRY(sthi_step_begin(w->runtime));
    for (uint32_t u = 0; u < LAYERS; u++) {
        sth_status rc = use(w, u);
        if (first == STH_OK) first = rc;
        if (rc == STH_INTERNAL) fail_msg("%s", sthi_error_last()->message);
    }
    STHI_TRY(sthi_step_end(w->runtime));
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
    return first;
}

static void good(quant_world *w, int n) {
    for (int i = 0; i < n; i++) assert_ok(step(w));
}

static sth_runtime_stats stats_of(quant_world *w) {
    sth_runtime_stats stats;
    sthi_runtime_stats(w->runtime, &stats);
    return stats;
}

static void want(const char *folder, int way) {
    if (way == STH_READ_CACHED) warm_cache(shard(folder));
    else drop_cache(shard(folder));
    if (way == STH_READ_DIRECT) sthi_fault_arm(STHI_FAULT_URING, 1, true);
    if (way == STH_READ_BUFFERED) sthi_fault_arm(STHI_FAULT_DIRECT, 1, true);
}

/* ---- tests ---- */

static void every_use_sees_what_the_decoder_makes(void **state) {
    write_slab(*state);
    for (int way = 0; way < STH_READ_WAY_COUNT; way++)
        for (uint32_t readers = few_under_tsan(2, 0); readers < 3; readers++)
            for (int no_expand = 0; no_expand < 2; no_expand++) {
                quant_world w;
                setting s = {readers, budget(), 0, no_expand};
                want(*state, way);
                assert_ok(open_world(&w, *state, &s));
                good(&w, 4);
                sthi_fault_disarm_all();
                sth_runtime_stats stats = stats_of(&w);
                assert_int_equal(*stats.expand_error != 0, no_expand);
                assert_true((no_expand || stats.file_bytes > 0) && stats.device_peak <= s.budget);
                for (uint32_t u = 0; u < LAYERS; u++) {
                    bool equal = false;
                    assert_ok(sthi_unit_verify(w.runtime, u, &equal, NULL));
                    assert_true(equal);
                }
                close_world(&w);
            }
}

static void what_fits_the_ram_budget_is_read_once(void **state) {
    write_slab(*state);
    for (uint32_t readers = 0; readers < 3; readers++)
        for (int pinned = 0; pinned < 2; pinned++) {
            quant_world w;
            setting s = {readers, budget(), 1 << 20, false};
            if (!pinned) sthi_fault_arm(STHI_FAULT_PIN, 1, true);
            assert_ok(open_world(&w, *state, &s));
            good(&w, 4);
            sthi_fault_disarm_all();
            uint64_t before = stats_of(&w).file_bytes;
            good(&w, 4);
            assert_int_equal(stats_of(&w).file_bytes, before);
            uint64_t packed = 0;
            for (uint32_t u = 0; u < LAYERS; u++) packed += w.runtime->units[u].packed_bytes;
            assert_int_equal(stats_of(&w).ram_bytes, packed);
            close_world(&w);
        }
}

static void half_of_it_in_ram(void **state) {
    write_slab(*state);
    quant_world w;
    setting s = {2, budget(), four ? 200000 : 20000, false};
    assert_ok(open_world(&w, *state, &s));
    good(&w, 4);
    uint64_t before = stats_of(&w).file_bytes, kept = stats_of(&w).ram_bytes;
    good(&w, 4);
    assert_in_range(kept, s.ram / 4, s.ram);
    assert_true(stats_of(&w).file_bytes > before);
    close_world(&w);
}

static void reads_that_fail_name_the_tensor_and_leave_nothing_half(void **state) {
    write_slab(*state);
    for (uint32_t readers = few_under_tsan(2, 0); readers < 3; readers++)
        for (uint64_t n = 1; n < 60; n += 1 + n / 2) {
            quant_world w;
            setting s = {readers, budget(), n % 2 ? budget() / 2 : 0, false};
            assert_ok(open_world(&w, *state, &s));
            sthi_fault_arm(STHI_FAULT_READ, n, true);
            sth_status rc = STH_OK;
            for (int i = 0; i < 2 && rc == STH_OK; i++) rc = step(&w);
            sthi_fault_disarm_all();
            if (rc != STH_OK) {
                assert_int_equal(rc, STH_IO);
                assert_non_null(strstr(sthi_error_last()->message, "unit 'l"));
                assert_non_null(strstr(sthi_error_last()->message, "tensor 'l"));
                assert_non_null(strstr(sthi_error_last()->message, four ? "model-1.safetensors" : "q.safetensors"));
            }
            good(&w, 3);
            close_world(&w);
        }
}

/* In an order that no plan knows, so that loads are made on demand: what fails there comes to the caller. */
static void kernels_that_fail_name_the_tensor(void **state) {
    write_slab(*state);
    int named = 0;
    /* Few of these calls are kernels, and which they are changes. */
    for (uint64_t n = 1; n < 80 && named < (int)few_under_tsan(four ? 1 : 4, 1000); n++) {
        quant_world w;
        setting s = {0, budget(), 0, false};
        assert_ok(open_world(&w, *state, &s));
        good(&w, 1);
        assert_ok(sthi_step_begin(w.runtime));
        sthi_fault_arm(STHI_FAULT_DEVICE_CALL, n, false);
        for (uint32_t u = LAYERS; u-- > 0;)
            if (use(&w, u) != STH_OK && strstr(sthi_error_last()->message, "expanding bytes [")) {
                assert_non_null(strstr(sthi_error_last()->message, "unit 'l"));
                assert_non_null(strstr(sthi_error_last()->message, ".weight'"));
                named++;
            }
        sthi_fault_disarm_all();
        assert_ok(sthi_step_end(w.runtime));
        good(&w, 1);
        close_world(&w);
    }
    assert_true(named > 0);
}

static void counts_that_are_too_small_are_refused(void **state) {
    write_slab(*state);
    sth_quant *quant = NULL;
    assert_ok(sthi_quant_open(source(*state), &quant));
    const sth_quant_layer *l = sthi_quant_find(quant, "l4");
    sth_segment segments[64];
    sth_file_range ranges[192];
    uint32_t count = 0, range_count = 0;
    uint64_t end;
    assert_ok(sthi_quant_segments(quant, l, STH_DTYPE_F32, 0, 0, PIECE, NULL, &count, NULL, &range_count, &end));
    for (int which = 0; which < 2; which++) {
        uint32_t a = count - !which, b = range_count - which;
        assert_status(sthi_quant_segments(quant, l, STH_DTYPE_F32, 0, 0, PIECE, segments, &a, ranges, &b, &end),
                      STH_INVALID_ARGUMENT);
    }
    sth_quant_layer odd = *l; /* a layer that no kernel has */
    odd.encoding = STH_ENCODING_INT4_GROUP;
    odd.group = 8;
    assert_non_null(sthi_quant_unfit(&odd));
    assert_status(sthi_quant_segments(quant, &odd, STH_DTYPE_F32, 0, 0, PIECE, NULL, &count, NULL, &range_count, &end),
                  STH_UNSUPPORTED);
    sthi_quant_close(quant);
}

static int of_v2(void **state) {
    four = false;
    return temp_setup(state);
}

static int of_v3(void **state) {
    four = true;
    return temp_setup(state);
}

#define OF_BOTH(test)                                                  \
    cmocka_unit_test_setup_teardown(test, of_v2, temp_teardown),       \
        {#test "_4_bits", test, of_v3, temp_teardown, NULL}

int main(void) {
    const struct CMUnitTest tests[] = {
        OF_BOTH(every_use_sees_what_the_decoder_makes),
        OF_BOTH(what_fits_the_ram_budget_is_read_once),
        OF_BOTH(half_of_it_in_ram),
        OF_BOTH(reads_that_fail_name_the_tensor_and_leave_nothing_half),
        OF_BOTH(kernels_that_fail_name_the_tensor),
        OF_BOTH(counts_that_are_too_small_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
