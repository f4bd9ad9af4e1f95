/* One layer of a slab, ready to be decoded row by row. */
#ifndef STHI_QUANT_DECODER_H
#define STHI_QUANT_DECODER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/quant.h"

typedef struct sthi_decoder {
    const sth_quant_layer *layer;
    const void *parts[STH_QUANT_PART_COUNT];
    float *down; /* [rank, in]: lora_down turned round, so that a row's sum runs along it */
    float *smooth; /* [in]; NULL where it is 1 everywhere */
    float global_scale;
} sthi_decoder;

/* Checks every scale, so that decoding cannot fail: finite, and a value of its format. `path` and the names of the
 * tensors are for errors. `parts` must outlive the decoder. Allocates in proportion to rank x in. */
sth_status sthi_decoder_init(sthi_decoder *decoder, const sth_checkpoint *checkpoint, const sth_quant_layer *layer,
                             const void *const parts[STH_QUANT_PART_COUNT]);
void sthi_decoder_fini(sthi_decoder *decoder);

/* Bytes of scratch that a thread needs. False where they overflow. */
bool sthi_decoder_scratch(const sth_quant_layer *layer, size_t *out);
/* Row `row` of the weight into out[0..in). Threads: any, each its own scratch. */
void sthi_decoder_row(const sthi_decoder *decoder, uint64_t row, float *out, void *scratch);

/* Rows [first, first + count) into `out` as F32, BF16 or F16, by `threads` threads (0: one for each core). */
sth_status sthi_decoder_rows(const sthi_decoder *decoder, uint64_t first, uint64_t count, sth_dtype dtype, void *out,
                             uint32_t threads);

/* CORRUPT_DATA by file, tensor and byte where a value of a layer's part that holds numbers is not finite, a factor of
 * `smooth` 0, or a scale of NVFP4 none of its format. No part: OK. */
sth_status sthi_quant_check_part(const sth_checkpoint *checkpoint, const sth_quant_layer *layer, sth_quant_part part,
                                 const void *bytes);

/* A whole layer from a slab's files. */
sth_status sthi_quant_decode(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, void *out,
                            uint32_t threads);
sth_status sthi_quant_decode_parts(const sth_quant *slab, const sth_quant_layer *layer,
                                  const void *const parts[STH_QUANT_PART_COUNT], sth_dtype dtype, void *out,
                                  uint32_t threads);
/* Reads the parts of a layer but for its bias; *out_block is freed with sthi_free. */
sth_status sthi_quant_read_parts(const sth_quant *slab, const sth_quant_layer *layer,
                                const void *out_parts[STH_QUANT_PART_COUNT], void **out_block);
#endif
