/* Slabs of every format, written byte by byte. Their parts stay in memory, for tests that know
 * what they decode to. */
#ifndef TESTS_STORE_SLABS_H
#define TESTS_STORE_SLABS_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/quant.h"

enum { SLAB_PARTS = 12, SLAB_DATA = 1 << 15, SLAB_TEXT = 4096 };

typedef struct slab_part {
    char name[40];
    const char *dtype;
    int rank;
    uint64_t shape[2];
    uint64_t at, bytes; /* in `data` */
} slab_part;

/* A text that tests edit before it is written; v1: the pickle, which is not text. */
typedef struct slab_text {
    char bytes[SLAB_TEXT];
    size_t count;
} slab_text;

typedef struct slab_files {
    sth_quant_format format;
    slab_part parts[SLAB_PARTS];
    size_t count;
    unsigned char data[SLAB_DATA];
    uint64_t data_bytes;
    slab_text header; /* of the safetensors file; v1: the pickle */
    slab_text beside; /* the manifest, or v3's plan; empty: none is written */
} slab_files;

/* v1 and v2: layers "a" [3, 10], padded to 64, with a bias, and "b" [2, 64]. SVDQuant: "a" [24,
 * 32] with a bias; the hybrid: "b" [2, 16] besides. v3: "a" [3, 256], or [24, 256] in NVFP4. All
 * but v1: a plain tensor "norm". */
void slab_make(slab_files *f, sth_quant_format format);
/* Puts `to` in the place of the first `from` in the header or else in the text beside it; one of
 * them must have it. */
void slab_edit(slab_files *f, const char *from, const char *to);
/* Writes it all; the path to open, which lives until the 8th next call of temp_path(). */
const char *slab_write(const slab_files *f, const char *folder);
const slab_part *slab_find(const slab_files *f, const char *name); /* ends the test where there is none */
unsigned char *slab_bytes(slab_files *f, const char *name);
float slab_f32(slab_files *f, const char *name, uint64_t i);
float slab_bf16(slab_files *f, const char *name, uint64_t i);

/* What a hostile file gets: each edit alone makes opening fail so, and leaves nothing allocated
 * or open. */
typedef struct slab_edit_case {
    const char *from, *to;
    sth_status status;
    const char *says;
} slab_edit_case;
void slab_check_edits(const char *folder, sth_quant_format format, const slab_edit_case *cases, size_t count);
/* Opens while the n-th allocation, then the n-th read fails, for n = 1, 2, ..., until it comes
 * through. The JSON parser's own allocations do not fail: Jansson asserts that its buffers grow. */
void slab_check_faults(const char *path);

/* A zip file of stored members. */
typedef struct zip_file_member {
    const char *name;
    const void *bytes;
    uint32_t count;
} zip_file_member;
size_t zip_make(const zip_file_member *members, size_t count, unsigned char *out, size_t room);
#endif
