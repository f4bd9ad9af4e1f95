/* stagehand/lossless.h - floating-point values packed without loss into a format that expands in a
 * fixed time a value: 8 to 24 bits of sign and mantissa as they are, 3 bits for the exponent, and
 * the exponents that those do not name behind all.
 *
 * Life: sth_lossless_bytes() -> sth_lossless_pack() -> sth_lossless_unpack().
 *
 *   | records, one for 1024 values | table, 16 bytes | starts, 4 bytes each | exponents |
 *
 * docs/lossless.md has the layout, which is version 1. The same values have the same bytes on
 * every processor. Dtypes: BF16, F16, F32. NaN with any bits, infinities, subnormals and zeros of
 * both signs come back as they were. Segments that cross a link so are STH_TRANSFER_LOSSLESS in
 * transfer.h.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: computes. Allocates: no.
 * `values` may lie at any address; at most 2^32 - 1 of them. */
#ifndef STAGEHAND_LOSSLESS_H
#define STAGEHAND_LOSSLESS_H
#include <stdint.h>

#include "stagehand/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that the values take when they are packed, a multiple of 16. Reads all of them. Returns
 * UNSUPPORTED for another dtype, INVALID_ARGUMENT for too many values. */
STH_API sth_status sth_lossless_bytes(sth_dtype dtype, const void *values, uint64_t count,
                                      uint64_t *out_bytes);
/* The same from 64 samples of 1024 values, with the room that sth_transfer_fit() adds; the bytes
 * of the values themselves where packing does not make them smaller by a tenth, and for dtypes
 * that are not packed. values: NULL: as weights usually are. */
STH_API uint64_t sth_lossless_estimate(sth_dtype dtype, const void *values, uint64_t count);

/* Packs into exactly `bytes` bytes, a multiple of 16: sth_lossless_bytes(), or more, of which the
 * rest is zeros and room for other values. Returns INVALID_ARGUMENT for a size that is none, and
 * UNSUPPORTED for another dtype, or where the values need more; then `packed` is of no use. */
STH_API sth_status sth_lossless_pack(sth_dtype dtype, const void *values, uint64_t count,
                                     void *packed, uint64_t bytes);

/* Writes `count` values. Reads the `bytes` bytes and no others whatever they are: of bytes that
 * were not packed so, the values are of no meaning. Returns what sth_lossless_pack() returns for
 * arguments. */
STH_API sth_status sth_lossless_unpack(sth_dtype dtype, const void *packed, uint64_t bytes,
                                       uint64_t count, void *out_values);

/* CORRUPT_DATA with the byte where these are not the packed bytes of `count` values. */
STH_API sth_status sth_lossless_check(sth_dtype dtype, const void *packed, uint64_t bytes,
                                      uint64_t count);

#ifdef __cplusplus
}
#endif
#endif
