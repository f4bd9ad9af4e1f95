/* Segments of packed images, from the inside. */
#ifndef STHI_QUANT_SEGMENT_H
#define STHI_QUANT_SEGMENT_H
#include <stdbool.h>

#include "stagehand/transfer.h"

enum { STHI_INT4_GROUP = 64 };

/* First byte of a segment in the packed image and the one behind its last. */
void sthi_segment_span(const sth_segment *s, uint64_t *out_begin, uint64_t *out_end);
uint64_t sthi_segment_place_bytes(const sth_segment *s);

/* Segments that a place of `place_bytes` and a packed image of `packed_bytes` can have. INVALID_ARGUMENT names the
 * object and the segment. */
sth_status sthi_segments_check(const sth_segment *s, uint32_t count, uint64_t place_bytes, uint64_t packed_bytes,
                               const char *object);
sth_status sthi_segments_layout(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, sth_segment *out,
                                uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_bytes);
/* As sth_transfer_fit(). */
sth_status sthi_segments_fit(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, const void *place,
                             uint32_t threads, sth_segment *out, uint32_t capacity, uint32_t *out_count,
                             uint64_t *out_packed_bytes);
/* One tensor whose codes have a stride of their own (whole->stride), from `packed_offset` (multiple of 512) on, with
 * the zero points, smooth and factors that it has: STH_TRANSFER_NONE or rank 0 where not. VERBATIM and LOSSLESS are
 * none. */
sth_status sthi_segments_of_rows(const sth_segment *whole, uint64_t piece_bytes, uint64_t packed_offset,
                                 sth_segment *out, uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_end);
/* Bytes of the largest segment of either layout; where whole->stride is 0 it is that of the first, of LOSSLESS values
 * the most that it can be. 0: there is no such tensor. */
uint64_t sthi_segment_piece(const sth_segment *whole, uint64_t piece_bytes);
/* One of them. scratch: twice as many floats as it has columns. error: added to. */
sth_status sthi_segment_encode(const sth_segment *s, const uint8_t *place, uint8_t *packed, float *scratch,
                               sth_transfer_error *error);
/* out_failed (may be NULL): on failure, the segment that could not be encoded. */
sth_status sthi_segments_encode(const sth_segment *s, uint32_t count, const void *place, void *packed, uint32_t threads,
                                sth_transfer_error *error, uint32_t *out_failed);

/* Where the parts of a segment are; NULL for those that it has not. */
typedef struct sthi_segment_parts {
    const uint8_t *codes, *scales, *zeros, *up, *down, *smooth;
} sthi_segment_parts;
/* In a packed image of which the first byte here is `packed_begin`. */
sthi_segment_parts sthi_segment_find(const sth_segment *s, const uint8_t *packed, uint64_t packed_begin);

/* The part of a segment's values that lies in [begin, end) of its own bytes of the place, written to `out`. Both ends
 * are multiples of an element's size. */
void sthi_segment_decode_part(const sth_segment *s, const sthi_segment_parts *parts, uint64_t begin, uint64_t end,
                              void *out);
/* The same from a packed image of which the first byte here is `packed_begin`. */
void sthi_segment_decode(const sth_segment *s, const uint8_t *packed, uint64_t packed_begin, uint64_t begin,
                         uint64_t end, void *out);

/* All of them into a place, by threads that end with the call (0: one for each core). */
void sthi_segments_decode(const sth_segment *s, uint32_t count, const void *packed, void *place,
                          uint32_t threads);
/* Whether the place has what the packed image says, bit for bit, where segments are. As above. */
sth_status sthi_segments_same(const sth_segment *s, uint32_t count, const void *packed, const void *place,
                              uint32_t threads, bool *out_same);
#endif
