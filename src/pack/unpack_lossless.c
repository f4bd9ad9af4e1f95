/* A losslessly packed file back to the file, or the shards, that it was made from: headers as they were, tensors in the
 * order of the originals, the checksum of each compared. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/lossless.h"
#include "pack/formats.h"
#include "pack/lossless.h"
#include "quant/lossless_file.h"

#define PER_THREAD 2u /* pieces that are in memory at once, for each thread */

/* ---- packed tensors */

typedef struct unpacking {
    sthi_job job;
    const sth_quant *slab;
    const sth_quant_layer *layer;
    uint32_t first;
    uint64_t offset; /* of the first piece */
    uint8_t *values;
} unpacking;

static sth_status unpack_piece(sthi_job *job, uint64_t i, void *scratch) {
    const unpacking *u = (const unpacking *)job;
    uint64_t offset = u->offset;
    for (uint64_t k = 0; k < i; k++) offset += u->layer->lengths[u->first + k];
    return sthi_lossless_piece_read(u->slab, u->layer, u->first + (uint32_t)i, offset, scratch,
                                    u->values + i * STHI_LOSSLESS_PIECE);
}

static sth_status unpack_some(sthi_pack_job *job, unpacking *u, uint32_t count) {
    const sth_quant_layer *l = u->layer;
    uint64_t bytes = 0;
    u->job = (sthi_job){.run = unpack_piece, .pieces = count};
    STHI_TRY(sthi_workers_run(job->workers, &u->job));
    for (uint32_t i = 0; i < count; i++) {
        STHI_TRY(sthi_job_put(job, 0, u->values + (uint64_t)i * STHI_LOSSLESS_PIECE,
                              sthi_lossless_piece_bytes(l, u->first + i)));
        bytes += l->lengths[u->first + i];
    }
    u->first += count;
    u->offset += bytes;
    return sthi_job_progress(job, l->name, bytes);
}

static sth_status make_tensor(sthi_pack_job *job, const sthi_job_item *item) {
    const sth_quant_layer *l = item->layer;
    uint32_t together = (uint32_t)sthi_min_u64(PER_THREAD * sthi_workers_count(job->workers), l->pieces);
    unpacking u = {.slab = job->quant, .layer = l, .values = sthi_zalloc(together, STHI_LOSSLESS_PIECE)};
    sth_status status = u.values ? STH_OK : sthi_job_out_of_memory(job);
    while (status == STH_OK && u.first < l->pieces)
        status = unpack_some(job, &u, (uint32_t)sthi_min_u64(together, l->pieces - u.first));
    sthi_free(u.values);
    return status;
}

static sth_status add_packed(sthi_pack_job *job, const sth_quant_layer *l) {
    const sth_tensor_info *t = l->tensor;
    job->scratch_bytes = (size_t)sthi_max_u64(job->scratch_bytes, sthi_lossless_piece_most(l));
    STHI_TRY(sthi_job_add_item(job, &(sthi_job_item){.make = make_tensor, .layer = l,
                                                     .work = l->parts[STH_QUANT_PART_CODES]->bytes}));
    return sthi_job_add_tensor(job, t->name, "", t->dtype, t->rank, t->shape);
}

/* ---- files */

static sth_status read_all(const sthi_pack_job *job, const sth_tensor_info *t, char **out) {
    char *text = sthi_alloc((size_t)t->bytes);
    if (!text) return sthi_job_out_of_memory(job);
    sth_status status = sthi_checkpoint_read(job->checkpoint, t->file, t->offset, t->bytes, text);
    if (status == STH_OK) *out = text;
    else sthi_free(text);
    return status;
}

static sth_status add_file(sthi_pack_job *job, const sthi_original *o, const char *out) {
    STHI_TRY(sthi_job_add_file(job, o->name ? o->name : sthi_pack_leaf(out), o->name ? NULL : out));
    sthi_job_file *f = &job->files[job->file_count - 1];
    STHI_TRY(read_all(job, o->header, &f->header));
    f->header_bytes = o->header->bytes;
    for (uint64_t i = 0; i < o->tensors.count; i++) {
        const sth_tensor_info *t = &o->tensors.items[i];
        const sth_quant_layer *l = sthi_quant_find(job->quant, t->name);
        STHI_TRY(l ? add_packed(job, l) : sthi_job_add_copy(job, sthi_checkpoint_find(job->checkpoint, t->name)));
    }
    return STH_OK;
}

/* ---- the end: checksums, and the index */

typedef struct judging {
    sthi_pack_job *job;
    const uint8_t *sums;
    uint64_t tensor;
} judging;

/* The text of a header or the index. */
static sth_status sum_of_text(const sthi_pack_job *job, const sth_tensor_info *t, char out[33]) {
    char *text = NULL;
    STHI_TRY(read_all(job, t, &text));
    sthi_sum_text(text, t->bytes, out);
    sthi_free(text);
    return STH_OK;
}

static sth_status judge(void *context, uint64_t row, const sthi_sum_row *what) {
    judging *j = context;
    const sthi_pack_job *job = j->job;
    const sthi_originals *o = &job->quant->originals;
    const sth_tensor_info *t = what->tensor;
    char got[33];
    uint8_t sum[STHI_SUM_BYTES];
    if (t) {
        memcpy(got, job->tensors[j->tensor++].checksum, sizeof got);
    } else {
        t = what->file < o->count ? o->items[what->file].header : o->index;
        STHI_TRY(sum_of_text(job, t, got));
    }
    if (sthi_sum_of_text(got, sum) && memcmp(sum, j->sums + row * STHI_SUM_BYTES, sizeof sum) == 0) return STH_OK;
    return sthi_fail(STH_CORRUPT_DATA, "lossless", 0, job->quant->path,
                     "%.300s: tensor '%.160s' does not have the checksum that it was packed with; the file is damaged",
                     job->quant->path, t->name);
}

static sth_status finish(sthi_pack_job *job) {
    const sthi_originals *o = &job->quant->originals;
    uint8_t *sums = NULL;
    char *index = NULL;
    STHI_TRY(sthi_sums_read(job->quant, &sums));
    judging j = {.job = job, .sums = sums};
    sth_status status = sthi_sums_each(job->quant, judge, &j);
    sthi_free(sums);
    if (status != STH_OK || !o->index) return status;
    STHI_TRY(read_all(job, o->index, &index));
    status = sthi_folder_put(&job->folder, o->index_name, index, o->index->bytes);
    sthi_free(index);
    return status;
}

sth_status sthi_unpack_lossless(sthi_pack_job *job, const char *out) {
    const sthi_originals *o = &job->quant->originals;
    char *unused = NULL;
    job->finish = finish;
    job->whole_folder = o->index != NULL;
    if (o->index) STHI_TRY(sthi_job_add_side(job, o->index_name, NULL));
    else STHI_TRY(sthi_pack_name(out, ".safetensors", "", &unused));
    sthi_free(unused);
    for (uint32_t i = 0; i < o->count; i++) STHI_TRY(add_file(job, &o->items[i], out));
    return STH_OK;
}
