/* Failures here end the program: no input is to blame for them. */
#define _GNU_SOURCE
#include "fuzz/files.h"

#include <fcntl.h>
#include <malloc.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#define NAMES 16

size_t fuzz_json_bytes, fuzz_json_peak;
static char folder[] = "/dev/shm/stagehand-fuzz-XXXXXX";
static char paths[NAMES][sizeof folder + 64];
static int made, path_count;

static void *counted_alloc(size_t bytes) {
    size_t *block = malloc(sizeof(max_align_t) + bytes);
    if (!block) return NULL;
    *block = bytes;
    fuzz_json_bytes += bytes;
    if (fuzz_json_bytes > fuzz_json_peak) fuzz_json_peak = fuzz_json_bytes;
    return (char *)block + sizeof(max_align_t);
}

static void counted_free(void *p) {
    if (!p) return;
    size_t *block = (size_t *)(void *)((char *)p - sizeof(max_align_t));
    fuzz_json_bytes -= *block;
    free(block);
}

void fuzz_reset_peak(void) { fuzz_json_peak = fuzz_json_bytes; }

size_t fuzz_heap_bytes(void) { return mallinfo2().uordblks; }

static void remove_folder(void) {
    for (int i = 0; i < path_count; i++) unlink(paths[i]);
    rmdir(folder);
}

const char *fuzz_folder(void) {
    if (made) return folder;
    made = 1;
    json_set_alloc_funcs(counted_alloc, counted_free);
    CHECK(mkdtemp(folder));
    atexit(remove_folder);
    return folder;
}

const char *fuzz_path(const char *name) {
    char path[sizeof *paths];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    for (int i = 0; i < path_count; i++)
        if (strcmp(paths[i], path) == 0) return paths[i];
    CHECK(path_count < NAMES);
    strcpy(paths[path_count], path);
    return paths[path_count++];
}

void fuzz_write(const char *path, const void *bytes, size_t count) {
    const struct timespec old[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    int fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK(write(fd, bytes, count) == (ssize_t)count);
    CHECK(futimens(fd, old) == 0);
    CHECK(close(fd) == 0);
}

void fuzz_write_safetensors(const char *path, const char *header, size_t data_bytes, int fill) {
    size_t n = strlen(header);
    unsigned char *file = calloc(1, 8 + n + data_bytes);
    CHECK(file);
    for (unsigned i = 0; i < 8; i++) file[i] = (unsigned char)(n >> 8 * i);
    memcpy(file + 8, header, n);
    memset(file + 8 + n, fill, data_bytes);
    fuzz_write(path, file, 8 + n + data_bytes);
    free(file);
}
