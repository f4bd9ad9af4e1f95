/* Fuzz target for what describes the layers of a slab. Input: a byte that says what the rest is, then that:
 *   0 the pickle of a v1 file, whose zip and members are made here
 *   1 the manifest beside a fixed model that suits v2 and SVDQuant
 *   2 the plan, 3 the index, 4 the only shard of a v3 folder
 *   5 a losslessly packed file
 *
 * Property: it opens or fails with a message; whatever opens decodes (or refuses a value) without a byte read or
 * written outside, and its segments expand to the same values; every part lies in its file; nothing is left allocated
 * or open. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "base/memory.h"
#include "fuzz/files.h"
#include "stagehand/quant.h"

#define MOST ((uint64_t)1 << 20) /* elements that are decoded */
#define T(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static const char model_header[] =
    "{" T("a.qweight", "I8", "[2,64]", 0, 128) "," T("a.scale", "F32", "[2]", 128, 136) ","
    T("a.zero_point", "F32", "[2]", 136, 144) "," T("a.bias", "F32", "[2]", 144, 152) ","
    T("b.qweight", "I8", "[2,32]", 152, 216) "," T("b.wscales", "BF16", "[1,2]", 216, 220) ","
    T("b.lora_down", "BF16", "[64,2]", 220, 476) "," T("b.lora_up", "BF16", "[2,2]", 476, 484) ","
    T("b.smooth", "BF16", "[64]", 484, 612) "," T("b.wscale", "BF16", "[2]", 612, 616) "}";

static const char shard_header[] =
    "{" T("a.qweight", "U8", "[2,128]", 0, 256) "," T("a.wscales", "BF16", "[4,2]", 256, 272) ","
    T("a.lora_down", "BF16", "[256,1]", 272, 784) "," T("a.lora_up", "BF16", "[2,1]", 784, 788) ","
    T("b.nvq", "U8", "[2,128]", 788, 1044) "," T("b.nvs", "U8", "[2048]", 1044, 3092) ","
    T("b.nvg", "F32", "[1]", 3092, 3096) "," T("b.lora_down", "BF16", "[256,1]", 3096, 3608) ","
    T("b.lora_up", "BF16", "[2,1]", 3608, 3612) "}";

static const char index_text[] =
    "{\"weight_map\":{\"a.qweight\":\"s.safetensors\",\"a.wscales\":\"s.safetensors\",\"a.lora_down\":"
    "\"s.safetensors\",\"a.lora_up\":\"s.safetensors\",\"b.nvq\":\"s.safetensors\",\"b.nvs\":\"s.safetensors\","
    "\"b.nvg\":\"s.safetensors\",\"b.lora_down\":\"s.safetensors\",\"b.lora_up\":\"s.safetensors\"}}";

/* ---- a zip round a pickle ---- */

typedef struct buffer {
    unsigned char bytes[65536];
    size_t used;
} buffer;

static void little(buffer *b, uint64_t value, int count) {
    CHECK(b->used + (size_t)count <= sizeof b->bytes);
    for (int i = 0; i < count; i++) b->bytes[b->used++] = (unsigned char)(value >> 8 * i);
}
static void raw(buffer *b, const void *bytes, size_t count) {
    CHECK(b->used + count <= sizeof b->bytes);
    memcpy(b->bytes + b->used, bytes, count);
    b->used += count;
}

static void add_member(buffer *file, buffer *directory, const char *name, const void *bytes, size_t count) {
    uint32_t crc = (uint32_t)crc32(0, bytes, (uInt)count);
    size_t start = file->used, n = strlen(name);
    little(file, 0x04034b50, 4), little(file, 0, 2), little(file, 0x0800, 2), little(file, 0, 2), little(file, 0, 4);
    little(file, crc, 4), little(file, count, 4), little(file, count, 4), little(file, n, 2), little(file, 0, 2);
    raw(file, name, n), raw(file, bytes, count);
    little(directory, 0x02014b50, 4), little(directory, 0, 4), little(directory, 0x0800, 2), little(directory, 0, 2);
    little(directory, 0, 4), little(directory, crc, 4), little(directory, count, 4), little(directory, count, 4);
    little(directory, n, 2), little(directory, 0, 2), little(directory, 0, 2), little(directory, 0, 2);
    little(directory, 0, 2), little(directory, 0, 4), little(directory, start, 4), raw(directory, name, n);
}

static void write_v1(const char *path, const uint8_t *pickle, size_t size) {
    static buffer file, directory;
    static const unsigned char zeros[256];
    file.used = directory.used = 0;
    if (size > 32768) return;
    add_member(&file, &directory, "r/data.pkl", pickle, size);
    add_member(&file, &directory, "r/data/0", zeros, 128); /* codes of [2, 64] */
    add_member(&file, &directory, "r/data/1", zeros, 8);
    add_member(&file, &directory, "r/data/2", zeros, 8);
    add_member(&file, &directory, "r/data/3", zeros, 8);
    size_t begin = file.used;
    raw(&file, directory.bytes, directory.used);
    little(&file, 0x06054b50, 4), little(&file, 0, 4), little(&file, 5, 2), little(&file, 5, 2);
    little(&file, directory.used, 4), little(&file, begin, 4), little(&file, 0, 2);
    fuzz_write(path, file.bytes, file.used);
}

/* ---- what opened ---- */

static void check_part(sth_quant *q, const sth_tensor_info *t) {
    struct stat st;
    const char *path = sth_checkpoint_file_path(sth_quant_checkpoint(q), t->file);
    CHECK(stat(path, &st) == 0 && t->offset <= (uint64_t)st.st_size && t->bytes <= (uint64_t)st.st_size - t->offset);
}

static sth_dtype dtype_of(const sth_quant_layer *l) { return l->tensor ? l->tensor->dtype : STH_DTYPE_F32; }

/* What a device would make of the file's bytes is what the decoder made of them. */
static void check_segments(sth_quant *q, const sth_quant_layer *l, const void *weight) {
    uint32_t count = 0, range_count = 0;
    uint64_t end = 0;
    if (sth_quant_unfit(l)) return;
    sth_dtype dtype = dtype_of(l);
    size_t bytes = (size_t)(l->out * l->in) * sth_dtype_bits(dtype) / 8;
    CHECK(sth_quant_segments(q, l, dtype, 0, 0, 256, NULL, &count, NULL, &range_count, &end) == STH_OK);
    sth_segment *segments = malloc(count * sizeof *segments);
    sth_file_range *ranges = malloc(range_count * sizeof *ranges);
    char *packed = calloc(1, (size_t)end);
    char *place = malloc(bytes);
    CHECK(segments && ranges && packed && place);
    CHECK(sth_quant_segments(q, l, dtype, 0, 0, 256, segments, &count, ranges, &range_count, &end) == STH_OK);
    for (uint32_t i = 0; i < range_count; i++) {
        const sth_file_range *r = &ranges[i];
        CHECK(r->place_offset <= end && r->bytes <= end - r->place_offset);
        CHECK(sth_checkpoint_read(sth_quant_checkpoint(q), r->file, r->file_offset, r->bytes,
                                  packed + r->place_offset) == STH_OK);
    }
    CHECK(sth_transfer_decode(segments, count, packed, place) == STH_OK);
    CHECK(memcmp(place, weight, bytes) == 0);
    free(segments);
    free(ranges);
    free(packed);
    free(place);
}

static void check_layer(sth_quant *q, const sth_quant_layer *l) {
    CHECK(sth_quant_find(q, l->name) == l && l->out > 0 && l->in > 0 && l->padded_in >= l->in);
    CHECK(l->parts[STH_QUANT_PART_CODES] && (l->parts[STH_QUANT_PART_SCALES] || l->tensor));
    for (int p = 0; p < STH_QUANT_PART_COUNT; p++)
        if (l->parts[p]) check_part(q, l->parts[p]);
    if (l->in > MOST || l->out > MOST / l->in) return;
    void *weight = malloc((size_t)(l->out * l->in) * sth_dtype_bits(dtype_of(l)) / 8); /* exactly: writing past it is
                                                                                           seen */
    CHECK(weight);
    sth_status status = sth_quant_decode(q, l, dtype_of(l), weight, 1);
    CHECK(status == STH_OK || status == STH_CORRUPT_DATA);
    if (status == STH_OK) check_segments(q, l, weight);
    free(weight);
}

static void open_and_check(const char *path) {
    sth_quant *q = NULL;
    sth_status status = sth_quant_open(path, &q);
    if (status == STH_OK) {
        for (uint64_t i = 0; i < sth_quant_layer_count(q); i++) check_layer(q, sth_quant_get_layer(q, i));
        for (uint64_t i = 0; i < sth_quant_plain_count(q); i++) check_part(q, sth_quant_plain(q, i));
        sth_quant_close(q);
    } else {
        CHECK(!q && sth_last_error()->status == status && strstr(sth_last_error()->message, fuzz_folder()));
    }
}

/* The v3 files, of which one is the input. */
static const char *write_v3(int which, const uint8_t *data, size_t size) {
    const char *index = fuzz_path("model.safetensors.index.json"), *plan = fuzz_path("squareq-plan.json"),
               *shard = fuzz_path("s.safetensors");
    unlink(plan);
    fuzz_write(index, index_text, strlen(index_text));
    fuzz_write_safetensors(shard, shard_header, 3612, 0x38);
    fuzz_write(which == 2 ? plan : which == 3 ? index : shard, data, size);
    return fuzz_folder();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    const uint8_t *rest = data + 1;
    const char *path = fuzz_folder();
    size_t left = size - 1;
    long live = sthi_alloc_live();
    fuzz_reset_peak();
    switch (data[0] % 6) {
    case 0:
        path = fuzz_path("x.fpk");
        write_v1(path, rest, left);
        if (left > 32768) return 0;
        break;
    case 1:
        path = fuzz_path("m.manifest.json");
        fuzz_write_safetensors(fuzz_path("m.safetensors"), model_header, 616, 0x3f);
        fuzz_write(path, rest, left);
        break;
    case 5:
        path = fuzz_path("l.safetensors");
        fuzz_write(path, rest, left);
        break;
    default:
        path = write_v3(data[0] % 6, rest, left);
    }
    open_and_check(path);
    CHECK(sthi_alloc_live() == live);
    CHECK(fuzz_json_bytes == 0);
    CHECK(fuzz_json_peak <= 1 << 16 || fuzz_json_peak <= (1 << 16) + 128 * size);
    return 0;
}
