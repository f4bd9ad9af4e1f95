/* What the fuzz targets share: a folder in memory, files in it, and the parser's memory counted. */
#ifndef TESTS_FUZZ_FILES_H
#define TESTS_FUZZ_FILES_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "broken: %s (%s:%d)\n", #condition, __FILE__, __LINE__); \
            abort();                                                                 \
        }                                                                            \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The folder's path; made at the first call, removed with its files at the end. Counts jansson's memory from then
 * on. */
const char *fuzz_folder(void);
/* "folder/name"; lives until the end. Names are few and fixed. */
const char *fuzz_path(const char *name);
/* Writes a file with an old time: the reader waits a moment for one that was written just now. */
void fuzz_write(const char *path, const void *bytes, size_t count);
/* A safetensors file of this header and `data_bytes` bytes of `fill`. */
void fuzz_write_safetensors(const char *path, const char *header, size_t data_bytes, int fill);

/* jansson's memory: now, and at most since fuzz_reset_peak. */
extern size_t fuzz_json_bytes, fuzz_json_peak;
void fuzz_reset_peak(void);
/* Bytes taken from the allocator as a whole; 0 where it does not tell (under a sanitizer). */
size_t fuzz_heap_bytes(void);
#endif
