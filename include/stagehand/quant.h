/* stagehand/quant.h - quantised model files: which layers they hold, how those are encoded and where their bytes
 * lie; and the decoding of a layer by the CPU, which every device kernel is compared with.
 *
 * Life: sth_quant_open() -> look at layers, decode them or read their parts -> sth_quant_close().
 * PATH may be
 *  - a v1 file (.fpk, .slab): a zip that torch.save wrote. Its pickle is read as data: nothing in it is executed;
 *  - a v2 or SVDQuant file: x.safetensors with x.manifest.json beside it, by either name; SVDQuant's manifest may also
 *    be in the header alone;
 *  - a v3 folder (int4 or NVFP4): shards, an index, squareq-plan.json;
 *  - a losslessly packed file, of which docs/lossless.md has the layout.
 * All of it is treated as hostile: what does not add up is CORRUPT_DATA with the file, the tensor and the byte.
 * A slab is a checkpoint with layers on top: sth_quant_checkpoint() gives its tensors and reads them.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_QUANT_H
#define STAGEHAND_QUANT_H
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, as the files call it) */
#define STH_QUANT_FORMAT_LIST(X)                \
    X(V1, "squareq_bp8_v1")                    \
    X(V2, "squareq_bp8_v2")                    \
    X(SVDQUANT, "svdquant_int4")               \
    X(SVDQUANT_HYBRID, "svdquant_w4a4_hybrid") \
    X(V3_INT4, "squareq_w4_v1")                \
    X(V3_NVFP4, "squareq_nvfp4_v1")            \
    X(LOSSLESS, "stagehand_lossless_v1")

typedef enum sth_quant_format {
#define STH_QUANT_FORMAT_ENUM(name, text) STH_QUANT_##name,
    STH_QUANT_FORMAT_LIST(STH_QUANT_FORMAT_ENUM)
#undef STH_QUANT_FORMAT_ENUM
        STH_QUANT_FORMAT_COUNT
} sth_quant_format;

/* How a weight W [out, in] is encoded. q: codes, s: scales, L: lora_up x lora_down^T (float32,
 * summed over the rank in ascending order), H: the normalized Sylvester Hadamard matrix, in
 * blocks of `hadamard` inputs. X(name, text) */
#define STH_ENCODING_LIST(X)                       \
    X(INT8_ROW, "int8-row")                        /* (q - zero point) s, one s for each row */            \
    X(INT4_GROUP, "int4-group")                    /* (q s + L) / smooth, one s for each group of inputs */ \
    X(INT4_ROW_HADAMARD, "int4-row-hadamard")      /* (q s) H + L, one s for each row */                   \
    X(INT4_GROUP_HADAMARD, "int4-group-hadamard")  /* (q s) H + L, one s for each group of inputs */       \
    X(NVFP4_HADAMARD, "nvfp4-hadamard")            /* (q s g) H + L: e2m1 codes, an e4m3 s for 16 inputs */ \
    X(LOSSLESS, "lossless")                        /* every bit of `tensor`, of any shape (lossless.h) */

typedef enum sth_encoding {
#define STH_ENCODING_ENUM(name, text) STH_ENCODING_##name,
    STH_ENCODING_LIST(STH_ENCODING_ENUM)
#undef STH_ENCODING_ENUM
        STH_ENCODING_COUNT
} sth_encoding;

/* The tensors that a layer is made of. X(name, text) */
#define STH_QUANT_PART_LIST(X)                                                                              \
    X(CODES, "codes")               /* I8 [out, padded_in], or two codes to a byte: [out, in / 2]; */      \
                                    /* LOSSLESS: U8 [n], the pieces one behind the other */                \
    X(SCALES, "scales")             /* F32 or BF16 [out], BF16 [in / group, out], or U8 tiles (NVFP4) */   \
    X(ZERO_POINTS, "zero_points")   /* F32 [out] */                                                        \
    X(GLOBAL_SCALE, "global_scale") /* F32 [1] */                                                          \
    X(LORA_DOWN, "lora_down")       /* BF16 [in, rank] */                                                  \
    X(LORA_UP, "lora_up")           /* BF16 [out, rank] */                                                 \
    X(SMOOTH, "smooth")             /* BF16 [in] */                                                        \
    X(BIAS, "bias")                 /* F32 or BF16 [out]; not part of the weight */

typedef enum sth_quant_part {
#define STH_QUANT_PART_ENUM(name, text) STH_QUANT_PART_##name,
    STH_QUANT_PART_LIST(STH_QUANT_PART_ENUM)
#undef STH_QUANT_PART_ENUM
        STH_QUANT_PART_COUNT
} sth_quant_part;

/* Names for people; "?" out of range. */
STH_API const char *sth_quant_format_name(sth_quant_format format);
STH_API const char *sth_encoding_name(sth_encoding encoding);
STH_API const char *sth_quant_part_name(sth_quant_part part);

typedef struct sth_quant sth_quant;

/* One layer. Pointers live as long as the slab. */
typedef struct sth_quant_layer {
    const char *name; /* of the module: the weight is `name`.weight */
    sth_encoding encoding;
    uint64_t out, in;   /* the weight is [out, in]; a convolution's is flattened to that */
    uint64_t padded_in; /* columns of the codes: more than `in` only for INT8_ROW */
    uint64_t group;     /* inputs that share a scale; `padded_in` where a row does */
    uint64_t rank;      /* columns of the low-rank factors, 0 for none */
    uint64_t hadamard;  /* inputs in a block of H, 0 for none */
    const sth_tensor_info *parts[STH_QUANT_PART_COUNT]; /* NULL where the layer has no such part */
    /* LOSSLESS alone, NULL and 0 for the others: the tensor that was packed, with its own dtype and
     * shape (BF16, F16 or F32; file, offset and bytes as in the original), and the packed bytes of
     * each piece, 2 MiB of its values, the last one of the rest. `name` is then the tensor's own
     * name, `out` is 1 and `in` is the number of its elements. */
    const sth_tensor_info *tensor;
    const uint32_t *lengths;
    uint32_t pieces;
} sth_quant_layer;

/* Opens and checks; reads headers and manifests only. The files stay open (read only) until close.
 * Returns NOT_FOUND, IO, CORRUPT_DATA, UNSUPPORTED (not a slab, or of a version that is not known),
 * OUT_OF_HOST_MEMORY.
 * Threads: any. Blocks: for reading headers. Allocates: in proportion to the headers. */
STH_API sth_status sth_quant_open(const char *path, sth_quant **out_slab);
/* The same for a path that may as well be a plain checkpoint, or nothing: then OK with *out_slab
 * NULL. */
STH_API sth_status sth_quant_open_if_slab(const char *path, sth_quant **out_slab);
/* NULL is fine. Threads: one, the last user. */
STH_API void sth_quant_close(sth_quant *slab);

STH_API sth_quant_format sth_quant_get_format(const sth_quant *slab);
STH_API uint64_t sth_quant_layer_count(const sth_quant *slab);
/* Layers are in the order of their codes on disk. NULL past the end. */
STH_API const sth_quant_layer *sth_quant_get_layer(const sth_quant *slab, uint64_t i);
STH_API const sth_quant_layer *sth_quant_find(const sth_quant *slab, const char *name);
/* Tensors that are part of no layer, stored as they are; in the order on disk. NULL past the
 * end. */
STH_API uint64_t sth_quant_plain_count(const sth_quant *slab);
STH_API const sth_tensor_info *sth_quant_plain(const sth_quant *slab, uint64_t i);
/* All tensors of all files, for sth_checkpoint_read() and the rest. The slab's: do not close it.
 * v1 tensors are named as in v2: `layer`.qweight, .scale, .zero_point, .bias. */
STH_API sth_checkpoint *sth_quant_checkpoint(sth_quant *slab);

/* Decodes a layer's weight into out[out * in], row by row, as F32, BF16 or F16 (rounded to
 * nearest even from float32). `threads`: 0 for one on each core. The bytes are the same for
 * every number of threads. A LOSSLESS layer decodes to its own dtype alone. Returns
 * INVALID_ARGUMENT for another dtype or a layer of another slab, IO, CHANGED_DATA, CORRUPT_DATA
 * for a scale that is not finite or not a value of its format and for packed bytes that are none,
 * OUT_OF_HOST_MEMORY. Threads: any, at once, each its own `out`. Blocks: for the disk
 * and the work. Allocates: the layer's encoded bytes, the factors as float32 and a row for each
 * thread, until it returns. */
STH_API sth_status sth_quant_decode(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype,
                                    void *out, uint32_t threads);
/* The same from bytes that are in memory: parts[i] holds what layer->parts[i] says, and may be
 * NULL for BIAS and where the layer has none. Names in errors are those of the slab. Does no
 * I/O. Threads: any, at once. Blocks: for the work. Allocates: as above without the encoded
 * bytes. */
STH_API sth_status sth_quant_decode_parts(const sth_quant *slab, const sth_quant_layer *layer,
                                          const void *const parts[STH_QUANT_PART_COUNT],
                                          sth_dtype dtype, void *out, uint32_t threads);

/* Why a layer's bytes cannot be expanded on a device as they lie in the file, for people; NULL:
 * they can. */
STH_API const char *sth_quant_unfit(const sth_quant_layer *layer);

/* The description that streams a layer as its file holds it: segments (transfer.h) of whole rows,
 * of at most `piece_bytes` packed bytes (or as few rows as can be: one; in 4 bits 128 or 256, and
 * so many that factors which each segment carries are a quarter of it), and the ranges of
 * sth_quant_checkpoint() that their packed image is made of. The expanded values are those of
 * sth_quant_decode(), bit by bit. dtype: of the values in the place. place_offset: of the weight,
 * multiple of 16. packed_offset: of its first byte in the packed image, multiple of 512, so that
 * several tensors can share an image. segments and ranges: NULL to count; else room for as many
 * as that said. *out_packed_end: behind the layer's last byte, a multiple of 512. LOSSLESS: a
 * segment is a piece of the file, whatever piece_bytes says, and dtype is the tensor's own;
 * counting checks the table of each piece and its starts. Returns INVALID_ARGUMENT, UNSUPPORTED
 * saying sth_quant_unfit(), IO, CHANGED_DATA, CORRUPT_DATA for a scale, zero point or factor that
 * is not finite (all are read, when segments are counted), OUT_OF_HOST_MEMORY. Threads: any, at
 * once. Blocks: for the disk. Allocates: one of these at a time, and segments, until it returns.
 * */
STH_API sth_status sth_quant_segments(sth_quant *slab, const sth_quant_layer *layer,
                                      sth_dtype dtype, uint64_t place_offset,
                                      uint64_t packed_offset, uint64_t piece_bytes,
                                      sth_segment *segments, uint32_t *inout_segments,
                                      sth_file_range *ranges, uint32_t *inout_ranges,
                                      uint64_t *out_packed_end);

/* The layer as one segment, for sth_budget_weight.packed: its codes, scales and factors lie
 * nowhere yet. LOSSLESS: the largest piece. Returns INVALID_ARGUMENT, UNSUPPORTED, IO,
 * CHANGED_DATA, OUT_OF_HOST_MEMORY. Threads: any, at once. Blocks: for the disk, for zero points
 * and smooth factors alone. Allocates: one of these at a time, until it returns. */
STH_API sth_status sth_quant_segment(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype,
                                     sth_segment *out_segment);

#ifdef __cplusplus
}
#endif
#endif
