/* The list of what is to be made. Nothing is written here; run.c does that. No locks: one thread. */
#include "pack/job.h"

#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"

sth_status sthi_job_open(const char *in, const sth_pack_options *options, bool quant, sthi_pack_job *out) {
    sthi_pack_job job = {.in = in, .options = *options, .folder = {.fd = -1}, .alignment = 1};
    if (quant) STHI_TRY(sthi_quant_open_if_slab(in, &job.quant));
    if (job.quant) job.checkpoint = job.quant->checkpoint;
    else STHI_TRY(sthi_checkpoint_open(in, &job.checkpoint));
    job.notes = json_object();
    if (!job.notes) {
        sth_status status = sthi_job_out_of_memory(&job);
        sthi_job_close(&job);
        return status;
    }
    *out = job;
    return STH_OK;
}

void sthi_job_close(sthi_pack_job *job) {
    for (uint64_t i = 0; i < job->tensor_count; i++) sthi_free(job->tensors[i].name);
    for (uint64_t i = 0; i < job->item_count; i++) sthi_free(job->items[i].note);
    for (uint32_t i = 0; i < job->file_count; i++) {
        sthi_free(job->files[i].name);
        sthi_free(job->files[i].publish);
        sthi_free(job->files[i].header);
    }
    for (uint32_t i = 0; i < job->side_count; i++) {
        sthi_free(job->sides[i]);
        sthi_free(job->side_paths[i]);
    }
    sthi_free(job->tensors);
    sthi_free(job->items);
    sthi_free(job->files);
    json_decref(job->notes);
    if (job->quant) sthi_quant_close(job->quant);
    else sthi_checkpoint_close(job->checkpoint);
    *job = (sthi_pack_job){.folder = {.fd = -1}};
}

sth_status sthi_job_add_file(sthi_pack_job *job, const char *name, const char *publish) {
    if (job->file_count == job->file_capacity) {
        uint32_t capacity = job->file_capacity ? job->file_capacity * 2 : 4;
        sthi_job_file *files = sthi_realloc(job->files, capacity, sizeof *files);
        if (!files) return sthi_job_out_of_memory(job);
        job->files = files;
        job->file_capacity = capacity;
    }
    sthi_job_file *f = &job->files[job->file_count++];
    *f = (sthi_job_file){.fd = -1, .name = sthi_strdup(name), .publish = publish ? sthi_strdup(publish) : NULL};
    return f->name && (f->publish || !publish) ? STH_OK : sthi_job_out_of_memory(job);
}

sth_status sthi_job_add_side(sthi_pack_job *job, const char *name, const char *publish) {
    char **side = &job->sides[job->side_count], **path = &job->side_paths[job->side_count++];
    *side = sthi_strdup(name);
    *path = publish ? sthi_strdup(publish) : NULL;
    return *side && (*path || !publish) ? STH_OK : sthi_job_out_of_memory(job);
}

sth_status sthi_job_add_item(sthi_pack_job *job, const sthi_job_item *item) {
    if (job->item_count == job->item_capacity) {
        uint64_t capacity = job->item_capacity ? job->item_capacity * 2 : 64;
        sthi_job_item *items = sthi_realloc(job->items, (size_t)capacity, sizeof *items);
        if (!items) return sthi_job_out_of_memory(job);
        job->items = items;
        job->item_capacity = capacity;
    }
    job->items[job->item_count] = *item;
    job->items[job->item_count].first = job->tensor_count;
    job->items[job->item_count++].count = 0;
    job->all_work += item->work;
    return STH_OK;
}

static sth_status grow_tensors(sthi_pack_job *job) {
    uint64_t capacity = job->tensor_capacity ? job->tensor_capacity * 2 : 64;
    sthi_job_tensor *tensors = sthi_realloc(job->tensors, (size_t)capacity, sizeof *tensors);
    if (!tensors) return sthi_job_out_of_memory(job);
    job->tensors = tensors;
    job->tensor_capacity = capacity;
    return STH_OK;
}

sth_status sthi_job_add_tensor(sthi_pack_job *job, const char *base, const char *suffix, sth_dtype dtype, int rank,
                               const uint64_t *shape) {
    sthi_job_tensor t = {.dtype = dtype, .spelling = sthi_dtype_name(dtype), .rank = rank,
                         .bytes = sthi_dtype_bits(dtype) / 8, .file = job->file_count - 1};
    for (int i = 0; i < rank; i++) {
        t.shape[i] = shape[i];
        if (!sthi_mul_u64(t.bytes, shape[i], &t.bytes))
            return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in,
                             "%.300s: tensor '%.160s' would be too large; leave it out with skip",
                             job->in, base);
    }
    if (job->tensor_count == job->tensor_capacity) STHI_TRY(grow_tensors(job));
    size_t size = strlen(base) + strlen(suffix) + 1;
    t.name = sthi_alloc(size);
    if (!t.name) return sthi_job_out_of_memory(job);
    snprintf(t.name, size, "%s%s", base, suffix);
    job->tensors[job->tensor_count++] = t;
    job->items[job->item_count - 1].count++;
    return STH_OK;
}

static sth_status copy_tensor(sthi_pack_job *job, const sthi_job_item *item) {
    const sth_tensor_info *t = item->source;
    char *buffer = sthi_alloc((size_t)sthi_min_u64(STHI_JOB_CHUNK, t->bytes));
    sth_status status = buffer ? STH_OK : sthi_job_out_of_memory(job);
    for (uint64_t at = 0; status == STH_OK && at < t->bytes;) {
        uint64_t part = sthi_min_u64(STHI_JOB_CHUNK, t->bytes - at);
        status = sthi_checkpoint_read(job->checkpoint, t->file, t->offset + at, part, buffer);
        if (status == STH_OK) status = sthi_job_put(job, 0, buffer, part);
        if (status == STH_OK) status = sthi_job_progress(job, t->name, part);
        at += part;
    }
    sthi_free(buffer);
    return status;
}

sth_status sthi_job_add_copy(sthi_pack_job *job, const sth_tensor_info *source) {
    STHI_TRY(sthi_job_add_item(job, &(sthi_job_item){.make = copy_tensor, .source = source, .work = source->bytes}));
    STHI_TRY(sthi_job_add_tensor(job, source->name, "", source->dtype, source->rank, source->shape));
    sthi_job_tensor *t = &job->tensors[job->tensor_count - 1];
    t->spelling = source->spelling;
    t->bytes = source->bytes;
    return STH_OK;
}
