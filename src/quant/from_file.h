/* Layers of slabs that a device expands. See stagehand/quant.h. */
#ifndef STHI_QUANT_FROM_FILE_H
#define STHI_QUANT_FROM_FILE_H
#include "stagehand/quant.h"

const char *sthi_quant_unfit(const sth_quant_layer *layer);
sth_status sthi_quant_segment(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, sth_segment *out_segment);
sth_status sthi_quant_segments(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, uint64_t place_offset,
                               uint64_t packed_offset, uint64_t piece_bytes, sth_segment *segments,
                               uint32_t *inout_segments, sth_file_range *ranges, uint32_t *inout_ranges,
                               uint64_t *out_packed_end);
#endif
