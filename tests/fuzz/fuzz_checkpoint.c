/* Fuzz target for the checkpoint reader. Input: one byte that says as what the rest is opened (the lowest
 * bit set: an index beside two files; else a safetensors file), then the file.
 *
 * Property: it opens or fails with a status and a message; whatever opens has tensors inside their files,
 * of which no two share a byte, in order, found by name and readable; nothing is left allocated or open;
 * memory stays within a fixed multiple of the input. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "base/memory.h"
#include "stagehand/checkpoint.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "broken: %s (%s:%d)\n", #condition, __FILE__, __LINE__); \
            abort();                                                                 \
        }                                                                            \
    } while (0)

/* The parser's memory, counted: a header must not make it grow out of proportion. */
static size_t parser_bytes, parser_peak;

static void *counted_alloc(size_t bytes) {
    size_t *block = malloc(sizeof(max_align_t) + bytes);
    if (!block) return NULL;
    *block = bytes;
    parser_bytes += bytes;
    if (parser_bytes > parser_peak) parser_peak = parser_bytes;
    return (char *)block + sizeof(max_align_t);
}

static void counted_free(void *p) {
    if (!p) return;
    size_t *block = (size_t *)(void *)((char *)p - sizeof(max_align_t));
    parser_bytes -= *block;
    free(block);
}

static char folder[] = "/dev/shm/stagehand-fuzz-XXXXXX";
static char model_path[sizeof folder + 32], index_path[sizeof folder + 32];

/* An old time: the reader waits a moment for a file that was written just now. */
static void write_file(const char *path, const void *bytes, size_t count) {
    int fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK(write(fd, bytes, count) == (ssize_t)count);
    const struct timespec old[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    CHECK(futimens(fd, old) == 0);
    CHECK(close(fd) == 0);
}

static void write_fixed(const char *name, const char *header, size_t data_bytes) {
    char path[sizeof folder + 32];
    unsigned char file[512] = {0};
    size_t n = strlen(header);
    file[0] = (unsigned char)n;
    memcpy(file + 8, header, n);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    write_file(path, file, 8 + n + data_bytes);
}

static void remove_folder(void) {
    static const char *const names[] = {"m.safetensors", "x.json", "a.safetensors", "b.safetensors"};
    char path[sizeof folder + 32];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

static void prepare(void) {
    if (model_path[0]) return;
    json_set_alloc_funcs(counted_alloc, counted_free);
    CHECK(mkdtemp(folder));
    atexit(remove_folder);
    snprintf(model_path, sizeof model_path, "%s/m.safetensors", folder);
    snprintf(index_path, sizeof index_path, "%s/x.json", folder);
    write_fixed("a.safetensors",
                "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
                "\"y\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[8,16]}}",
                16);
    write_fixed("b.safetensors", "{\"y\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}", 8);
}

static void check_tensor(sth_checkpoint *c, uint64_t i) {
    const sth_tensor_info *t = sth_checkpoint_tensor(c, i),
                          *before = i ? sth_checkpoint_tensor(c, i - 1) : NULL;
    struct stat st;
    CHECK(sth_checkpoint_find(c, t->name) == t);
    CHECK(t->file < sth_checkpoint_file_count(c));
    CHECK(stat(sth_checkpoint_file_path(c, t->file), &st) == 0);
    CHECK(t->offset <= (uint64_t)st.st_size && t->bytes <= (uint64_t)st.st_size - t->offset);
    CHECK(t->rank >= 0 && t->rank <= STH_MAX_RANK && t->dtype < STH_DTYPE_COUNT);
    uint64_t bytes = sth_dtype_bits(t->dtype) / 8;
    for (int d = 0; d < t->rank; d++) bytes *= t->shape[d];
    CHECK(bytes == t->bytes);
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
    write_file(path, data + 1, size - 1);
    long live = sthi_alloc_live();
    parser_peak = 0;
    sth_checkpoint *c = NULL;
    sth_status status = sth_checkpoint_open(path, &c);
    if (status == STH_OK) {
        for (uint64_t i = 0; i < sth_checkpoint_tensor_count(c); i++) check_tensor(c, i);
        check_apart(c);
        sth_checkpoint_close(c);
    } else {
        CHECK(c == NULL);
        CHECK(sth_last_error()->status == status && *sth_last_error()->message);
        CHECK(strstr(sth_last_error()->message, folder));
    }
    CHECK(sthi_alloc_live() == live);
    CHECK(parser_bytes == 0);
    CHECK(parser_peak <= 65536 + 128 * size);
    return 0;
}
