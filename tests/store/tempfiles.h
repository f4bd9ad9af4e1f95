/* A folder of one test's own, and model files written into it byte by byte. */
#ifndef TESTS_STORE_TEMPFILES_H
#define TESTS_STORE_TEMPFILES_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* cmocka set-up and tear-down: *state is the folder's path; the folder is removed with all it holds. */
int temp_setup(void **state);
int temp_teardown(void **state);

/* "folder/name"; the text lives until the 8th next call. */
const char *temp_path(const char *folder, const char *name);

void write_bytes(const char *path, const void *bytes, size_t count);
void write_text(const char *path, const char *text);
/* Length, header, then data_bytes bytes of which byte i is pattern_byte(i). */
void write_safetensors(const char *path, const char *header, size_t data_bytes);
unsigned char pattern_byte(uint64_t i);
/* Whether byte k of them is pattern_byte(first + k), for all. */
bool is_pattern(const void *bytes, uint64_t first, uint64_t count);
uint64_t file_bytes(const char *path);
void cut_file(const char *path, uint64_t bytes);
/* Writes the file out and takes it out of the page cache, as far as the file system lets us. */
void drop_cache(const char *path);
/* Reads the file into the page cache. */
void warm_cache(const char *path);
/* Number of descriptors that this process has open. */
int open_descriptors(void);
#endif
