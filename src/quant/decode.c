/* Whole layers: reads the parts, and decodes rows by threads of its own. Threads get their rows in pieces; each
 * piece writes its own part of the output. No locks of its own. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/thread.h"
#include "base/workers.h"
#include "quant/decoder.h"
#include "quant/lossless_file.h"
#include "store/dtype.h"
#include "store/quant.h"

#define MAX_THREADS 256u
#define PIECE_BYTES ((uint64_t)1 << 16) /* of float32 rows */

/* ---- rows ---- */

typedef struct rows_job {
    sthi_job job;
    const sthi_decoder *decoder;
    uint64_t first, count, each; /* each: rows of a piece */
    sth_dtype dtype;
    char *out;
} rows_job;

static void narrow(const float *row, uint64_t count, sth_dtype dtype, char *out) {
    for (uint64_t k = 0; k < count; k++) {
        uint16_t h = dtype == STH_DTYPE_BF16 ? sthi_to_bf16(row[k]) : sthi_to_f16(row[k]);
        memcpy(out + 2 * k, &h, sizeof h);
    }
}

static sth_status run_piece(sthi_job *job, uint64_t piece, void *scratch) {
    const rows_job *j = (const rows_job *)job;
    uint64_t in = j->decoder->layer->in, begin = piece * j->each, end = sthi_min_u64(begin + j->each, j->count);
    float *row = (float *)((double *)scratch + in);
    for (uint64_t i = begin; i < end; i++) {
        sthi_decoder_row(j->decoder, j->first + i, row, scratch);
        if (j->dtype == STH_DTYPE_F32) memcpy(j->out + i * in * 4, row, (size_t)in * 4);
        else narrow(row, in, j->dtype, j->out + i * in * 2);
    }
    return STH_OK;
}

sth_status sthi_decoder_rows(const sthi_decoder *decoder, uint64_t first, uint64_t count, sth_dtype dtype, void *out,
                             uint32_t threads) {
    size_t scratch;
    if (dtype != STH_DTYPE_F32 && dtype != STH_DTYPE_BF16 && dtype != STH_DTYPE_F16)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, decoder->layer->name,
                         "layer '%.160s' decodes to F32, BF16 or F16, not to %s", decoder->layer->name,
                         sthi_dtype_name(dtype));
    if (threads > MAX_THREADS)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "threads", "at most %u threads (asked for: %u)", MAX_THREADS,
                         threads);
    if (!sthi_decoder_scratch(decoder->layer, &scratch))
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, decoder->layer->name, "layer '%.160s': its rows are too long",
                         decoder->layer->name);
    rows_job j = {.job = {.run = run_piece}, .decoder = decoder, .first = first, .count = count, .dtype = dtype,
                  .out = out};
    j.each = sthi_max_u64(1, PIECE_BYTES / 4 / decoder->layer->in);
    j.job.pieces = count / j.each + (count % j.each != 0);
    return sthi_workers_once("decoder", "sth-decode", threads, scratch, &j.job);
}

/* ---- parts ---- */

static sth_status lay_out(const sth_quant_layer *layer, uint64_t offsets[STH_QUANT_PART_COUNT], uint64_t *out_bytes) {
    uint64_t bytes = 0;
    for (int p = 0; p < STH_QUANT_PART_COUNT; p++) {
        offsets[p] = bytes;
        if (!layer->parts[p] || p == STH_QUANT_PART_BIAS) continue;
        if (!sthi_add_u64(bytes, layer->parts[p]->bytes, &bytes) || !sthi_round_up(bytes, 64, &bytes) ||
            bytes > SIZE_MAX / 2)
            return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, layer->name, "layer '%.160s': too large", layer->name);
    }
    *out_bytes = bytes;
    return STH_OK;
}

sth_status sthi_quant_read_parts(const sth_quant *slab, const sth_quant_layer *layer,
                                const void *out_parts[STH_QUANT_PART_COUNT], void **out_block) {
    uint64_t offsets[STH_QUANT_PART_COUNT], bytes = 0;
    STHI_TRY(lay_out(layer, offsets, &bytes));
    char *block = sthi_alloc((size_t)bytes);
    if (!block)
        return sthi_no_memory(layer->name,
                              "the %llu encoded bytes of layer '%.160s'", (unsigned long long)bytes, layer->name);
    sth_status status = STH_OK;
    for (int p = 0; status == STH_OK && p < STH_QUANT_PART_COUNT; p++) {
        const sth_tensor_info *t = layer->parts[p];
        out_parts[p] = t && p != STH_QUANT_PART_BIAS ? block + offsets[p] : NULL;
        if (out_parts[p])
            status = sthi_checkpoint_read(slab->checkpoint, t->file, t->offset, t->bytes, block + offsets[p]);
    }
    if (status == STH_OK) *out_block = block;
    else sthi_free(block);
    return status;
}

sth_status sthi_quant_decode_parts(const sth_quant *slab, const sth_quant_layer *layer,
                                  const void *const parts[STH_QUANT_PART_COUNT], sth_dtype dtype, void *out,
                                  uint32_t threads) {
    sthi_decoder decoder;
    if (layer->encoding == STH_ENCODING_LOSSLESS)
        return sthi_lossless_decode(slab, layer, parts[STH_QUANT_PART_CODES], dtype, out, threads);
    STHI_TRY(sthi_decoder_init(&decoder, slab->checkpoint, layer, parts));
    sth_status status = sthi_decoder_rows(&decoder, 0, layer->out, dtype, out, threads);
    sthi_decoder_fini(&decoder);
    return status;
}

sth_status sthi_quant_decode(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, void *out,
                            uint32_t threads) {
    const void *parts[STH_QUANT_PART_COUNT];
    void *block = NULL;
    if (layer->encoding == STH_ENCODING_LOSSLESS) return sthi_lossless_decode(slab, layer, NULL, dtype, out, threads);
    STHI_TRY(sthi_quant_read_parts(slab, layer, parts, &block));
    sth_status status = sthi_quant_decode_parts(slab, layer, parts, dtype, out, threads);
    sthi_free(block);
    return status;
}
