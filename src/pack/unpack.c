/* Back to a plain checkpoint: layers are decoded in chunks of rows, biases converted, the rest copied. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "pack/formats.h"
#include "pack/rows.h"
#include "quant/decoder.h"
#include "store/dtype.h"

static uint64_t out_bytes(const sthi_pack_job *job, uint64_t n) {
    return n * (sthi_dtype_bits(job->options.dtype) / 8);
}

static sth_status put_rows(sthi_pack_job *job, const sthi_job_item *item, const sthi_decoder *decoder) {
    const sth_quant_layer *l = item->layer;
    uint64_t rows = sthi_min_u64(sthi_rows_of_chunk(l->in, l->in * 4), l->out), worked = 0;
    char *buffer = sthi_zalloc((size_t)rows, (size_t)out_bytes(job, l->in));
    sth_status status = buffer ? STH_OK : sthi_job_out_of_memory(job);
    for (uint64_t first = 0; status == STH_OK && first < l->out; first += rows) {
        uint64_t count = sthi_min_u64(rows, l->out - first);
        status = sthi_decoder_rows(decoder, first, count, job->options.dtype, buffer, job->options.threads);
        if (status == STH_OK) status = sthi_job_put(job, 0, buffer, out_bytes(job, count * l->in));
        uint64_t work = (first + count) * (item->work / l->out) - worked;
        if (status == STH_OK) status = sthi_job_progress(job, l->name, work);
        worked += work;
    }
    sthi_free(buffer);
    return status;
}

static sth_status put_bias(sthi_pack_job *job, const sth_tensor_info *bias) {
    uint64_t n = bias->shape[0];
    float *wide = NULL;
    STHI_TRY(sthi_rows_read_vector(job, bias, &wide));
    uint16_t *half = (uint16_t *)(void *)wide; /* narrowed in place: element i lies at or before where it was read */
    for (uint64_t i = 0; job->options.dtype != STH_DTYPE_F32 && i < n; i++) {
        float x = wide[i];
        uint16_t h = job->options.dtype == STH_DTYPE_BF16 ? sthi_to_bf16(x) : sthi_to_f16(x);
        memcpy(&half[i], &h, sizeof h);
    }
    sth_status status = sthi_job_put(job, 1, wide, out_bytes(job, n));
    sthi_free(wide);
    return status;
}

static sth_status make_weight(sthi_pack_job *job, const sthi_job_item *item) {
    const void *parts[STH_QUANT_PART_COUNT];
    void *block = NULL;
    sthi_decoder decoder;
    STHI_TRY(sthi_quant_read_parts(job->quant, item->layer, parts, &block));
    sth_status status = sthi_decoder_init(&decoder, job->checkpoint, item->layer, parts);
    if (status == STH_OK) {
        status = put_rows(job, item, &decoder);
        sthi_decoder_fini(&decoder);
    }
    sthi_free(block);
    if (status == STH_OK && item->bias) status = put_bias(job, item->bias);
    return status;
}

static sth_status add_layer(sthi_pack_job *job, const sth_quant_layer *l) {
    const sth_tensor_info *bias = l->parts[STH_QUANT_PART_BIAS];
    sthi_job_item item = {.make = make_weight, .layer = l, .bias = bias, .work = l->parts[STH_QUANT_PART_CODES]->bytes};
    STHI_TRY(sthi_job_add_item(job, &item));
    STHI_TRY(sthi_job_add_tensor(job, l->name, ".weight", job->options.dtype, 2, (uint64_t[]){l->out, l->in}));
    return bias ? sthi_job_add_tensor(job, l->name, ".bias", job->options.dtype, 1, &l->out) : STH_OK;
}

sth_status sthi_pack_plain(sthi_pack_job *job, const char *out) {
    char *unused = NULL;
    STHI_TRY(sthi_pack_name(out, ".safetensors", "", &unused));
    sthi_free(unused);
    STHI_TRY(sthi_job_add_file(job, sthi_pack_leaf(out), out));
    if (!job->quant) {
        const sthi_tensors *all = &job->checkpoint->tensors;
        for (uint64_t i = 0; i < all->count; i++) STHI_TRY(sthi_job_add_copy(job, &all->items[i]));
        return STH_OK;
    }
    for (uint64_t i = 0; i < job->quant->count; i++) STHI_TRY(add_layer(job, &job->quant->layers[i]));
    for (uint64_t i = 0; i < job->quant->plain_count; i++) STHI_TRY(sthi_job_add_copy(job, job->quant->plain[i]));
    return STH_OK;
}
