/* Calls of checkpoint.h, store.h, quant.h and pack.h. Model files are made once; results of packing are removed. */
#define _GNU_SOURCE
#include "fuzz/calls.h"

#include <stdio.h>
#include <unistd.h>

enum { ROOM = 1 << 16 };

#define T(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

void calls_make_files(void) {
    static bool made;
    if (made) return;
    made = true;
    const char *model = fuzz_path("model.safetensors"), *slab = fuzz_path("slab.safetensors");
    fuzz_write_safetensors(model,
                           "{" T("layer.0.weight", "F32", "[16,16]", 0, 1024) ","
                               T("layer.0.bias", "F32", "[16]", 1024, 1088) ","
                               T("layer.1.weight", "F32", "[16,16]", 1088, 2112) ","
                               T("layer.2.weight", "F32", "[16,16]", 2112, 3136) "}",
                           3136, 0);
    fuzz_path("slab.manifest.json"); /* so that it is removed at the end */
    fuzz_path("telemetry");
    fuzz_write(fuzz_path("index.json"), "[]", 2);
    sth_pack_options o;
    sth_pack_options_init(&o);
    o.threads = 1;
    CHECK(sth_pack(model, slab, &o) == STH_OK);
}

/* ---- checkpoints */

static void open_checkpoint(calls *c) {
    sth_checkpoint *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_checkpoint_open(calls_or_null(c, (void *)(uintptr_t)calls_file(c)), &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->checkpoint = made;
}

static void on_checkpoint(calls *c) {
    sth_checkpoint *on = calls_or_null(c, c->checkpoint);
    sth_file_way way;
    uint32_t file = calls_number(c, 2);
    uint64_t bytes = calls_bytes(c, ROOM);
    CALLS_TRY(sth_checkpoint_read(on, file, calls_byte(c) % 4 ? 8 * calls_byte(c) : calls_extreme(c), bytes,
                                  calls_or_null(c, calls_memory)));
    CALLS_TRY(sth_checkpoint_file_way(on, file, calls_or_null(c, &way)));
    (void)sth_checkpoint_tensor(on, calls_extreme(c));
    (void)sth_checkpoint_tensor_count(on);
    (void)sth_checkpoint_find(on, calls_or_null(c, (void *)(uintptr_t)calls_text(c)));
    (void)sth_checkpoint_file_count(on);
    (void)sth_checkpoint_file_path(on, file);
    (void)sth_checkpoint_file_descriptor(on, file);
    (void)sth_checkpoint_hole_bytes(on, file);
}

/* ---- stores */

static uint32_t two_layers(void *self) { return (void)self, 2; }
static sth_status any_layer(void *self, uint32_t layer, sth_store_layer *out) {
    static const sth_store_tensor weight = {"weight", STH_DTYPE_F32, 2, {16, 16}, 0, 1024, 1};
    *out = (sth_store_layer){layer ? "b" : "a", 1024, &weight, 1};
    return *(uint8_t *)self > 250 ? sth_error_set(STH_IO, "fuzz", 0, "store", "the layer cannot be read") : STH_OK;
}
static sth_status request(void *self, uint32_t layer) {
    (void)layer;
    return *(uint8_t *)self == 250 ? sth_error_set(STH_IO, "fuzz", 0, "store", "the layer cannot be read") : STH_OK;
}
static sth_status wait_for(void *self, uint32_t layer) { return (void)self, (void)layer, STH_OK; }
static const void *get(void *self, uint32_t layer) {
    return (void)self, (void)layer, calls_images;
}
static void release(void *self, uint32_t layer) { (void)self, (void)layer; }

static void make_own_store(calls *c) {
    static uint8_t moods[3] = {0, 250, 251};
    sth_store_ops ops = {sizeof ops, STH_STORE_VERSION, "fuzz", two_layers, any_layer, request, wait_for, get,
                         release, NULL, NULL};
    switch (calls_byte(c) % 16) {
    case 0: ops.struct_size = (size_t)calls_extreme(c); break;
    case 1: ops.version = (uint32_t)calls_extreme(c); break;
    case 2: ops.kind = NULL; break;
    case 3: ops.layer = NULL; break;
    case 4: ops.get = NULL; break;
    case 5: ops.layer_count = NULL; break;
    default: break;
    }
    sth_store *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_store_create(calls_or_null(c, &ops), &moods[calls_byte(c) % 3], &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->store = made;
}

static void make_memory_store(calls *c) {
    sth_store_tensor tensors[3] = {{"weight", STH_DTYPE_F32, 2, {16, 16}, 0, 1024, 1},
                                   {"up.bias", STH_DTYPE_F32, 1, {16}, 1024, 64, 0},
                                   {"weight", STH_DTYPE_F32, 2, {16, 16}, 0, 1024, 1}};
    sth_store_layer layers[2] = {{"layer.0", 1088, tensors, 2}, {"layer.1", 1024, tensors + 2, 1}};
    const void *data[2] = {calls_images, calls_or_null_const(c, calls_images + 4096)};
    sth_store_tensor *odd = &tensors[calls_byte(c) % 3];
    switch (calls_byte(c) % 24) {
    case 0: odd->name = calls_or_null(c, (void *)(uintptr_t)calls_text(c)); break;
    case 1: odd->dtype = (sth_dtype)calls_choice(c, STH_DTYPE_COUNT); break;
    case 2: odd->rank = (int)calls_extreme(c); break;
    case 3: odd->shape[0] = calls_extreme(c); break;
    case 4: odd->offset = calls_extreme(c); break;
    case 5: odd->bytes = calls_extreme(c); break;
    case 6: odd->scale = calls_real(c); break;
    case 7: layers[1].name = calls_or_null(c, (void *)(uintptr_t)calls_text(c)); break;
    case 8: layers[1].bytes = calls_byte(c) & 1 ? 0 : UINT64_MAX; break;
    case 9: layers[1].tensors = NULL; break;
    case 10: layers[1].tensor_count = 0; break;
    default: break;
    }
    sth_store *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_store_memory_create(calls_or_null_const(c, layers), data, calls_byte(c) % 3u, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->store = made;
}

static void open_store(calls *c) {
    const char *names[2] = {"layer.0", calls_or_null(c, (void *)(uintptr_t)calls_text(c))};
    sth_store *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_store_files_open(calls_or_null(c, (void *)(uintptr_t)calls_file(c)),
                                                   calls_byte(c) & 1 ? names : NULL, calls_byte(c) % 3u, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->store = made;
}

static void on_store(calls *c) {
    sth_store *on = calls_or_null(c, c->store);
    uint32_t layer = calls_number(c, 3);
    CALLS_TRY(sth_store_read(on, layer, calls_byte(c) % 4 ? calls_byte(c) : calls_extreme(c), calls_bytes(c, 1 << 11),
                             calls_or_null(c, calls_memory + ROOM)));
    const sth_store_layer *at = sth_store_layer_at(on, layer);
    CHECK(!at || (at->name && at->tensor_count));
    CHECK(sth_store_kind(on));
    (void)sth_store_layer_count(on);
}

/* ---- slabs */

static void open_quant(calls *c) {
    sth_quant *made = (void *)c;
    const char *path = calls_or_null(c, (void *)(uintptr_t)calls_file(c));
    sth_status rc = calls_byte(c) & 1 ? CALLS_TRY(sth_quant_open(path, &made))
                                      : CALLS_TRY(sth_quant_open_if_slab(path, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->quant = made;
}

static void segments(calls *c, const sth_quant_layer *layer) {
    sth_segment parts[32];
    sth_file_range ranges[64];
    uint32_t part_count = 0, range_count = 0;
    uint64_t end, place = calls_byte(c) % 4 ? 0 : calls_extreme(c), packed = calls_byte(c) % 4 ? 0 : calls_extreme(c);
    uint64_t piece = calls_byte(c) % 4 ? 1 << 10 : calls_extreme(c);
    sth_dtype dtype = calls_byte(c) % 4 ? STH_DTYPE_F32 : (sth_dtype)calls_choice(c, STH_DTYPE_COUNT);
    if (CALLS_TRY(sth_quant_segments(c->quant, layer, dtype, place, packed, piece, NULL, &part_count, NULL,
                                     &range_count, calls_or_null(c, &end))) != STH_OK ||
        part_count > 32 || range_count > 64)
        return;
    CALLS_TRY(sth_quant_segments(c->quant, layer, dtype, place, packed, piece, parts, &part_count, ranges,
                                 &range_count, &end));
}

static void on_quant(calls *c) {
    sth_quant *on = calls_or_null(c, c->quant);
    const sth_quant_layer *layer = sth_quant_get_layer(on, calls_number(c, 3));
    (void)sth_quant_find(on, calls_or_null(c, (void *)(uintptr_t)calls_text(c)));
    (void)sth_quant_get_format(on);
    (void)sth_quant_layer_count(on);
    (void)sth_quant_plain_count(on);
    (void)sth_quant_plain(on, calls_extreme(c));
    (void)sth_quant_checkpoint(on);
    (void)sth_quant_unfit(layer);
    sth_quant_layer strange = {0};
    const void *parts[STH_QUANT_PART_COUNT] = {0};
    CHECK(CALLS_TRY(sth_quant_decode(c->quant, &strange, STH_DTYPE_F32, calls_memory, 1)) != STH_OK);
    CALLS_TRY(sth_quant_decode_parts(c->quant, layer, parts, STH_DTYPE_F32, calls_memory, 1));
    CALLS_TRY(sth_quant_decode(on, layer, (sth_dtype)calls_choice(c, STH_DTYPE_COUNT), calls_or_null(c, calls_memory),
                               calls_byte(c) % 3u));
    if (c->quant && layer) segments(c, layer);
}

static bool goes_on(void *context, const char *tensor, uint64_t done, uint64_t total) {
    CHECK(tensor && done <= total);
    return *(int *)context > 0 && --*(int *)context;
}

static void seen(void *context, const sth_verified *tensor) { CHECK(context && tensor->name && tensor->encoding); }

static void remove_results(void) {
    static const char *const names[] = {"out.safetensors", "out.manifest.json", "out.json", "out.bin"};
    char path[4096];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", fuzz_folder(), names[i]);
        unlink(path);
    }
    static const char *const folders[] = {"out.partial", "out.safetensors.partial", "out.json.partial"};
    static const char *const inside[] = {"state.json", "p.safetensors", "p.manifest.json", "p.bin", "p.json"};
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 5; k++) {
            snprintf(path, sizeof path, "%s/%s/%s", fuzz_folder(), folders[i], inside[k]);
            unlink(path);
        }
        snprintf(path, sizeof path, "%s/%s", fuzz_folder(), folders[i]);
        rmdir(path);
    }
}

static void pack(calls *c) {
    static const char *const outs[] = {"out.safetensors", "out.json", "out.safetensors", "nothing/out.safetensors",
                                       "out"};
    char out[4096];
    int steps = calls_byte(c) % 8;
    sth_pack_options o;
    sth_pack_options_init(&o);
    sth_pack_options_init(NULL);
    snprintf(out, sizeof out, "%s/%s", fuzz_folder(), outs[calls_byte(c) % 5]);
    o.format = (sth_pack_format)calls_choice(c, STH_PACK_FORMAT_COUNT);
    o.threads = 1 + calls_byte(c) % 2u;
    if (calls_byte(c) % 4 == 0) o.skip = calls_byte(c) & 1 ? "[" : calls_text(c);
    if (calls_byte(c) % 4 == 0) o.dtype = (sth_dtype)calls_choice(c, STH_DTYPE_COUNT);
    if (calls_byte(c) % 2) o.progress = goes_on, o.context = &steps;
    if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
    const char *in = calls_or_null(c, (void *)(uintptr_t)calls_file(c));
    sth_verify_result result;
    switch (calls_byte(c) % 3) {
    case 0: CALLS_TRY(sth_pack(in, calls_or_null(c, out), calls_or_null(c, &o))); break;
    case 1: CALLS_TRY(sth_unpack(in, calls_or_null(c, out), calls_or_null(c, &o))); break;
    default:
        o.context = &steps;
        CALLS_TRY(sth_verify(in, calls_byte(c) & 1 ? calls_file(c) : NULL, &o, calls_byte(c) & 1 ? seen : NULL,
                             calls_or_null(c, &result)));
    }
    remove_results();
}

void calls_on_files(calls *c) {
    switch (calls_byte(c) % 8) {
    case 0:
    case 1:
        if (c->checkpoint) on_checkpoint(c);
        else open_checkpoint(c);
        break;
    case 2:
    case 3:
    case 4:
        if (c->store) on_store(c);
        else if (calls_byte(c) % 3 == 0) open_store(c);
        else if (calls_byte(c) & 1) make_own_store(c);
        else make_memory_store(c);
        break;
    case 5:
        if (calls_once_in(c, 4)) pack(c);
        break;
    default:
        if (c->quant) on_quant(c);
        else open_quant(c);
    }
}

void calls_end_files(calls *c) {
    sth_store_close(c->store);
    sth_quant_close(c->quant);
    sth_checkpoint_close(c->checkpoint);
}
