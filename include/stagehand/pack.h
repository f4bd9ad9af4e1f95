/* stagehand/pack.h - makes quantised and losslessly packed model files and layer indexes from
 * checkpoints, turns them back, and checks them.
 *
 * sth_pack() writes one, sth_unpack() writes a checkpoint of what a slab decodes to,
 * sth_verify() compares. Files are written in a folder OUT.partial and renamed when all is there
 * and synced; nothing that exists is overwritten. A call that ended early (a signal, an error
 * while reading, a progress function that said so) leaves OUT.partial behind, and the same call
 * goes on from there; after a failed write nothing is left. Memory: some MiB for each thread;
 * for STH_PACK_V3_INT4 one and a half times the largest weight as float32.
 *
 * Unless a function says otherwise: Threads: any, at once, each on its own OUT. Blocks: for disk
 * and work. Allocates: as above, until it returns. */
#ifndef STAGEHAND_PACK_H
#define STAGEHAND_PACK_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, as the tool calls it) */
#define STH_PACK_FORMAT_LIST(X) \
    X(V2, "v2")             /* OUT.safetensors and OUT.manifest.json; int8 by row, rows padded to 64 */ \
    X(V3_INT4, "v3-int4")   /* a folder; int4 in groups of 64, rotated, with rank 32 */ \
    X(LAYER_INDEX, "layer-index") /* OUT.json and OUT.bin: the tensors as they are, each on its own pages */ \
    X(LOSSLESS, "lossless") /* OUT.safetensors; every bit kept, the file comes back as it was */

typedef enum sth_pack_format {
#define STH_PACK_FORMAT_ENUM(name, text) STH_PACK_##name,
    STH_PACK_FORMAT_LIST(STH_PACK_FORMAT_ENUM)
#undef STH_PACK_FORMAT_ENUM
        STH_PACK_FORMAT_COUNT
} sth_pack_format;
/* As the tool calls it; "?" out of range. Threads: any. Blocks: no. Allocates: no. */
STH_API const char *sth_pack_format_name(sth_pack_format format);

/* Called on the calling thread after each part of the work. `tensor` is the one at work, done
 * and total are bytes of the source. False stops the call with SHUT_DOWN. */
typedef bool (*sth_progress_function)(void *context, const char *tensor, uint64_t done, uint64_t total);

typedef struct sth_pack_options {
    size_t size;            /* sizeof(sth_pack_options), set by init */
    sth_pack_format format; /* V2 */
    /* POSIX extended regex, searched for in names of tensors: these stay as they are. NULL */
    const char *skip;
    sth_dtype dtype;        /* sth_unpack only: F32, BF16 (default) or F16 */
    uint32_t threads;       /* 0 (default): one for each core */
    sth_progress_function progress; /* NULL */
    void *context;
} sth_pack_options;
/* Sets the defaults. Threads: any. Blocks: no. Allocates: no. */
STH_API void sth_pack_options_init(sth_pack_options *options);

/* Writes the checkpoint `in` (anything sth_checkpoint_open takes) as `out`, whose name must end
 * as the format's does. Quantised are float tensors of two dimensions whose name ends in
 * ".weight" and neither contains "embed" nor matches `skip`, for V3_INT4 with at least 1024 rows
 * and columns and columns in multiples of 256. All others are stored as they are. LOSSLESS packs
 * tensors of BF16, F16 and F32 with any shape and 4,096 values or more that do not match `skip` and
 * become smaller by a tenth; `in` is a safetensors file or shards with their index (UNSUPPORTED: a
 * layer index, a file that is packed so already, shards with tensors that the index does not place
 * there). The source is read twice: `total` of the progress counts what is measured first, too. Returns
 * INVALID_ARGUMENT (names, options, `out` exists), UNSUPPORTED (values that are not finite,
 * dtypes without a place in the format), NOT_FOUND, IO, CORRUPT_DATA, CHANGED_DATA, SHUT_DOWN,
 * OUT_OF_HOST_MEMORY. */
STH_API sth_status sth_pack(const char *in, const char *out, const sth_pack_options *options);

/* Writes the slab or checkpoint `in` as one safetensors file `out`: weights and biases of layers
 * as `dtype`, all else as it is. Of a losslessly packed file `out` is the file that was packed, byte
 * by byte, whatever `dtype` says, or a folder with the shards and the index under their names;
 * CORRUPT_DATA where a checksum says otherwise. Returns as sth_pack. */
STH_API sth_status sth_unpack(const char *in, const char *out, const sth_pack_options *options);

/* The findings about one tensor, or about the weight of a layer. */
typedef struct sth_verified {
    const char *name;
    const char *encoding;   /* of sth_encoding_name, or "stored" */
    int checksum;           /* 1 right, 0 wrong, -1 there is none */
    bool compared;          /* with the original; the rest is 0 where not */
    bool missing;           /* one side has no such tensor, or with another number of elements */
    bool equal;             /* every element has the same value */
    /* of the difference in float64; rel_l2: by the original's norm */
    double max_abs, rel_l2, cosine;
} sth_verified;
typedef void (*sth_verified_function)(void *context, const sth_verified *tensor);

typedef struct sth_verify_result {
    uint64_t tensors, checksums_wrong, checksums_missing, missing;
    uint64_t stored_differ;  /* stored and losslessly packed tensors that do not equal the original */
    double worst_rel_l2;     /* over the layers */
} sth_verify_result;

/* Checks the slab or checkpoint `path`: every checksum that it has, every scale, every piece that
 * is losslessly packed, and with `original` (NULL: none) the error of every tensor. `each` (may
 * be NULL) is called on the calling thread for every tensor, in the order on disk. `options`:
 * threads, progress, context (for both functions); NULL for the defaults. Differences are
 * results, not failures. Returns as sth_quant_decode, and SHUT_DOWN. */
STH_API sth_status sth_verify(const char *path, const char *original,
                              const sth_pack_options *options, sth_verified_function each,
                              sth_verify_result *out_result);

#ifdef __cplusplus
}
#endif
#endif
