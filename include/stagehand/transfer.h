/* stagehand/transfer.h - fewer bits over the link: how a unit's bytes are encoded in a packed image, and the encoding
 * and decoding of it by the CPU, which every device kernel is compared with.
 *
 * Life: sth_transfer_layout() (once to count, once to fill) -> sth_transfer_encode() -> sth_unit_desc.segments.
 * LOSSLESS has sizes that depend on the values: sth_transfer_fit() instead of sth_transfer_layout().
 *
 *   packed image:  | codes | scales (| zero points) |pad to 512| codes | scales | ... | bytes as they are | ...
 *                   `---------- segment 0 ---------'            `- segment 1 --'
 *   4 bits:        | codes | scales | up | down | smooth |
 *   LOSSLESS:      | codes |, which hold all: see lossless.h
 *
 * A segment is some whole rows of one tensor. Segments are in the order of the place, and in the same order in the
 * packed image, and overlap in neither. The value of an element is computed in float32, each operation rounded once,
 * and then rounded to the segment's dtype:
 *   INT8  (q - zero point) * scale     FP8  value of the e4m3fn code * scale     INT4  q * scale of its 64 inputs
 *   FILE_INT4, FILE_NVFP4  ((q * scale) H + up down^T) / smooth, NVFP4 with (q * scale) * factor: see quant.h, which
 *   lays them out; they are decoded here and never encoded. Every NaN becomes the one with bits 0x7fc00000.
 *   LOSSLESS  the bits that were encoded, whatever they are.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_TRANSFER_H
#define STAGEHAND_TRANSFER_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, text) */
#define STH_TRANSFER_LIST(X)                                                                      \
    X(VERBATIM, "verbatim") /* bytes as they are */                                              \
    X(INT8, "int8")         /* I8 [rows, stride], F32 [rows] scales, F32 [rows] zero points */    \
    X(FP8, "fp8")           /* E4M3 [rows, stride], F32 [rows] scales */                          \
    X(INT4, "int4")         /* two codes to a byte, the low one first: [rows, stride]; BF16 scales   \
                               [rows, groups of 64] */                                           \
    X(FILE_INT4, "file-int4")   /* the same codes; BF16 [groups, pitch] scales; factors */        \
    X(FILE_NVFP4, "file-nvfp4") /* e2m1 codes; e4m3 scales in tiles of 128 rows by 64 inputs; factors */ \
    X(LOSSLESS, "lossless")     /* sign, mantissa and codes of exponents; [stride] bytes: lossless.h */

typedef enum sth_transfer {
#define STH_TRANSFER_ENUM(name, text) STH_TRANSFER_##name,
    STH_TRANSFER_LIST(STH_TRANSFER_ENUM)
#undef STH_TRANSFER_ENUM
        STH_TRANSFER_COUNT
} sth_transfer;
STH_API const char *sth_transfer_name(sth_transfer encoding); /* "int8"; "?" out of range */

#define STH_TRANSFER_NONE UINT64_MAX

typedef struct sth_segment {
    sth_transfer encoding;
    /* of the values in the place: F32, BF16 or F16. VERBATIM: of no meaning */
    sth_dtype dtype;
    uint64_t place_offset; /* bytes from the start of the place; multiple of 16, VERBATIM: any */
    uint64_t rows, cols;   /* elements; VERBATIM: 1 row of `cols` bytes; LOSSLESS: 1 row */
    uint64_t stride;       /* bytes from a row of codes to the next; multiple of 16; FILE_..: of 8; INT8: any;
                              VERBATIM: 0; LOSSLESS: all bytes of the codes */
    /* bytes from the start of the packed image; multiple of 16, as the other parts */
    uint64_t codes;
    uint64_t scales;       /* STH_TRANSFER_NONE for VERBATIM and LOSSLESS */
    uint64_t zeros;        /* STH_TRANSFER_NONE: all are 0. INT8 only */
    /* FILE_INT4 and FILE_NVFP4 alone: */
    uint64_t up, down;  /* BF16 [rows, rank] and [cols, rank]; of no meaning where rank is 0 */
    uint64_t smooth;    /* BF16 [cols]; STH_TRANSFER_NONE: all are 1 */
    uint64_t pitch;     /* bytes from the scales of a group to those of the next. FILE_NVFP4: 0 */
    uint32_t rank;      /* 0: no low-rank part */
    uint32_t group;     /* inputs that share a scale; multiple of 16. FILE_NVFP4: 16 */
    uint32_t hadamard;  /* inputs of a block of H, a power of two from 16 to 8192; 0: no H */
    float factor;       /* of FILE_NVFP4, for the whole tensor. FILE_INT4: 1 */
} sth_segment;

/* Lays tensors out. `tensors`: encoding, dtype, place_offset, rows and cols of whole tensors, in
 * the order of the place; the rest is not read. Each becomes segments of at most `piece_bytes`
 * packed bytes, or of one row where that is more. segments: NULL to count. Returns
 * INVALID_ARGUMENT for sizes that overflow, an order that is none, an encoding that only files
 * have, LOSSLESS, or a `capacity` that is too small. */
STH_API sth_status sth_transfer_layout(const sth_segment *tensors, uint32_t count,
                                       uint64_t piece_bytes, sth_segment *segments,
                                       uint32_t capacity, uint32_t *out_count,
                                       uint64_t *out_packed_bytes);

/* The same where tensors may be LOSSLESS: such a tensor becomes segments of at most `piece_bytes`
 * bytes of the place, each of the size that its values in `place`, the image of the place, need
 * and n / 256 escapes more for n elements, so that values that change a little fit later. A
 * segment that does not shrink by a tenth is VERBATIM. segments: NULL to count; then `place` is
 * not read and *out_packed_bytes is the most that there can be. Blocks: reads the values with
 * `threads` threads (0: one for each core), which end with the call. Allocates: scratch.
 * Returns what sth_transfer_layout() returns, and OUT_OF_HOST_MEMORY. */
STH_API sth_status sth_transfer_fit(const sth_segment *tensors, uint32_t count,
                                    uint64_t piece_bytes, const void *place, uint32_t threads,
                                    sth_segment *segments, uint32_t capacity, uint32_t *out_count,
                                    uint64_t *out_packed_bytes);

/* Bytes of the largest segment that either makes of the tensor, of any values; 0: there is no such
 * tensor. */
STH_API uint64_t sth_transfer_largest(const sth_segment *tensor, uint64_t piece_bytes);

/* Sums over what was encoded, for its error: sqrt(error / reference) is relative. Added to, not
 * set. */
typedef struct sth_transfer_error {
    double error;     /* of squares of (decoded - original), before rounding to the dtype */
    double reference; /* of squares of the original */
} sth_transfer_error;

/* Writes the packed image of `segments` from `place`, an image of the place as it is when
 * nothing is encoded. inout_error may be NULL. Returns CORRUPT_DATA naming the first element
 * that is inf or NaN (VERBATIM takes any bytes); the packed image is then of no use; and
 * UNSUPPORTED for FILE_INT4 and FILE_NVFP4, and for LOSSLESS values that have more escapes than
 * their segment has room for (LOSSLESS takes inf and NaN). Blocks: computes with `threads` threads (0: one for
 * each core), which end with the call. Allocates: scratch. */
STH_API sth_status sth_transfer_encode(const sth_segment *segments, uint32_t count,
                                       const void *place, void *packed, uint32_t threads,
                                       sth_transfer_error *inout_error);

/* Writes into `place` what the packed image says: the reference. Bytes between the segments
 * stay. Blocks: computes with a thread for each core, which end with the call, where there is
 * memory for that. */
STH_API sth_status sth_transfer_decode(const sth_segment *segments, uint32_t count,
                                       const void *packed, void *place);

#ifdef __cplusplus
}
#endif
#endif
