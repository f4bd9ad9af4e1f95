/* Parsing JSON from files that are not trusted, and the fields that describe a tensor. */
#ifndef STHI_STORE_JSON_H
#define STHI_STORE_JSON_H
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "store/file.h"

/* Larger JSON texts are refused; the safetensors format sets the same limit for its header. */
#define STHI_JSON_MAX_BYTES 100000000u

/* Parses [offset, offset + bytes) of the file. Refused: duplicate keys, text behind the value, nesting
 * beyond jansson's limit, integers beyond 63 bits. */
sth_status sthi_json_read(const sthi_file *file, uint64_t offset, uint64_t bytes, json_t **out);

/* Its first half: the text alone, for sthi_free. */
sth_status sthi_json_read_text(const sthi_file *file, uint64_t offset, uint64_t bytes, char **out);

/* The same for text that is in memory; `offset` is where it begins in the file, for errors. */
sth_status sthi_json_parse(const sthi_file *file, uint64_t offset, const char *text, size_t bytes, json_t **out);

/* Frees what json_dumps returned. Not free(): the host program may have given jansson an allocator of its own. */
void sthi_json_free_text(char *text);

/* True for an exact integer >= 0; false for anything else, 24.0 included. */
bool sthi_json_u64(const json_t *value, uint64_t *out);

/* Whether a tensor's bytes are those of its dtype and shape; true for a dtype that nobody knows. */
bool sthi_json_size_fits(const sth_tensor_info *tensor);

/* Reads a tensor's dtype (may be NULL: U8; STH_DTYPE_OTHER where it is none of the list) and shape (may be NULL: one
 * dimension over all bytes), and checks them against tensor->bytes. Uses and fills *tensor; `path` is named in
 * errors. */
sth_status sthi_json_type_and_shape(const char *path, const json_t *dtype, const json_t *shape,
                                    sth_tensor_info *tensor);
#endif
