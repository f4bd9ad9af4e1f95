/* Fuzz target for the checkpoint reader. Input: one byte that says as what the rest is opened (the lowest
 * bit set: an index beside two files; else a safetensors file), then the file.
 *
 * Property: it opens or fails with a status and a message; whatever opens has tensors inside their files,
 * of which no two share a byte, in order, found by name and readable; nothing is left allocated or open;
 * memory stays within a fixed multiple of the input. */
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#include "base/memory.h"
#include "fuzz/files.h"
#include "stagehand/checkpoint.h"

static const char *model_path, *index_path;

static void prepare(void) {
    if (model_path) return;
    model_path = fuzz_path("m.safetensors");
    index_path = fuzz_path("x.json");
    fuzz_write_safetensors(fuzz_path("a.safetensors"),
                           "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
                           "\"y\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[8,16]}}",
                           16, 0);
    fuzz_write_safetensors(fuzz_path("b.safetensors"),
                           "{\"y\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}", 8, 0);
}

static void check_tensor(sth_checkpoint *c, uint64_t i) {
    const sth_tensor_info *t = sth_checkpoint_tensor(c, i),
                          *before = i ? sth_checkpoint_tensor(c, i - 1) : NULL;
    struct stat st;
    CHECK(sth_checkpoint_find(c, t->name) == t);
    CHECK(t->file < sth_checkpoint_file_count(c));
    CHECK(stat(sth_checkpoint_file_path(c, t->file), &st) == 0);
    CHECK(t->offset <= (uint64_t)st.st_size && t->bytes <= (uint64_t)st.st_size - t->offset);
    CHECK(t->rank >= 0 && t->rank <= STH_MAX_RANK && t->dtype <= STH_DTYPE_OTHER && t->spelling);
    uint64_t bytes = sth_dtype_bits(t->dtype) / 8;
    for (int d = 0; d < t->rank; d++) bytes *= t->shape[d];
    CHECK(bytes == t->bytes || t->dtype == STH_DTYPE_OTHER);
    CHECK(!before || before->file <= t->file);
    if (before && before->file == t->file) CHECK(before->offset <= t->offset);
    char first;
    if (t->bytes) CHECK(sth_checkpoint_read(c, t->file, t->offset + t->bytes - 1, 1, &first) == STH_OK);
}

/* Tensors are in the order on disk, so the last non-empty one is the one to compare with. */
static void check_apart(const sth_checkpoint *c) {
    uint64_t end = 0;
    uint32_t file = 0;
    for (uint64_t i = 0; i < sth_checkpoint_tensor_count(c); i++) {
        const sth_tensor_info *t = sth_checkpoint_tensor(c, i);
        if (t->file != file) file = t->file, end = 0;
        if (!t->bytes) continue;
        CHECK(t->offset >= end);
        end = t->offset + t->bytes;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    prepare();
    const char *path = data[0] & 1 ? index_path : model_path;
    fuzz_write(path, data + 1, size - 1);
    long live = sthi_alloc_live();
    fuzz_reset_peak();
    sth_checkpoint *c = NULL;
    sth_status status = sth_checkpoint_open(path, &c);
    if (status == STH_OK) {
        for (uint64_t i = 0; i < sth_checkpoint_tensor_count(c); i++) check_tensor(c, i);
        check_apart(c);
        sth_checkpoint_close(c);
    } else {
        CHECK(c == NULL);
        CHECK(sth_last_error()->status == status && *sth_last_error()->message);
        CHECK(strstr(sth_last_error()->message, fuzz_folder()));
    }
    CHECK(sthi_alloc_live() == live);
    CHECK(fuzz_json_bytes == 0);
    CHECK(fuzz_json_peak <= 65536 + 128 * size);
    return 0;
}
