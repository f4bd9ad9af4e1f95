/* Losslessly packed tensors of a file, piece by piece. */
#ifndef STHI_QUANT_LOSSLESS_FILE_H
#define STHI_QUANT_LOSSLESS_FILE_H
#include "stagehand/quant.h"

/* Elements of a piece, and the bytes of their values. */
uint64_t sthi_lossless_piece_elements(const sth_quant_layer *layer, uint32_t piece);
uint64_t sthi_lossless_piece_bytes(const sth_quant_layer *layer, uint32_t piece);
/* First byte of a piece in the layer's codes. O(piece). */
uint64_t sthi_lossless_piece_offset(const sth_quant_layer *layer, uint32_t piece);
/* The most bytes that a piece of the layer has packed. */
uint64_t sthi_lossless_piece_most(const sth_quant_layer *layer);

/* The values of a piece, whose packed bytes are read to `packed` (room for the most of them) and checked.
 * offset: sthi_lossless_piece_offset(). CORRUPT_DATA by file, tensor and byte. */
sth_status sthi_lossless_piece_read(const sth_quant *slab, const sth_quant_layer *layer, uint32_t piece,
                                    uint64_t offset, uint8_t *packed, void *out_values);
/* A whole tensor, by threads. packed: its codes in memory; NULL: they are read. */
sth_status sthi_lossless_decode(const sth_quant *slab, const sth_quant_layer *layer, const uint8_t *packed,
                                sth_dtype dtype, void *out, uint32_t threads);

/* As sth_quant_segment() and sth_quant_segments(). */
sth_status sthi_lossless_segment(const sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype,
                                 sth_segment *out);
sth_status sthi_lossless_segments(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, uint64_t place_offset,
                                  uint64_t packed_offset, sth_segment *segments, uint32_t *inout_segments,
                                  sth_file_range *ranges, uint32_t *inout_ranges, uint64_t *out_packed_end);
#endif
