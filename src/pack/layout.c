/* Places of tensors in their files: back to back behind a safetensors header (a gap is no valid file), or aligned in a
 * raw one. The header is padded with spaces so that the data begins at a page. No I/O. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "pack/run.h"
#include "store/json.h"

#define PAGE 4096u
#define LENGTH_BYTES 8u

static sth_status too_large(const sthi_pack_job *job) {
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in, "%.300s: the result would be too large; pack its parts",
                     job->in);
}

/* Places relative to the data's begin; files[].bytes: of the data. */
static sth_status place(sthi_pack_job *job) {
    for (uint64_t i = 0; i < job->tensor_count; i++) {
        sthi_job_tensor *t = &job->tensors[i];
        sthi_job_file *f = &job->files[t->file];
        if (!sthi_round_up(f->bytes, job->alignment, &t->offset) || !sthi_add_u64(t->offset, t->bytes, &f->bytes) ||
            f->bytes > INT64_MAX / 2)
            return too_large(job);
    }
    return STH_OK;
}

static json_t *shape_of(const sthi_job_tensor *t) {
    json_t *shape = json_array();
    for (int i = 0; i < t->rank; i++) json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    return shape;
}

static json_t *describe(const sthi_pack_job *job, uint32_t file) {
    json_t *header = json_object();
    for (uint64_t i = 0; i < job->tensor_count; i++) {
        const sthi_job_tensor *t = &job->tensors[i];
        if (t->file != file) continue;
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", t->spelling, "shape", shape_of(t),
                                  "data_offsets", (json_int_t)t->offset, (json_int_t)(t->offset + t->bytes));
        if (!entry || json_object_set_new(header, t->name, entry)) {
            json_decref(header);
            return NULL;
        }
    }
    return header;
}

static json_t *add_metadata(json_t *header, json_t *metadata) {
    if (header && metadata && json_object_set(header, "__metadata__", metadata)) {
        json_decref(header);
        return NULL;
    }
    return header;
}

static sth_status make_header(sthi_pack_job *job, uint32_t file) {
    sthi_job_file *f = &job->files[file];
    json_t *header = add_metadata(describe(job, file), json_object_get(job->notes, "__metadata__"));
    char *text = header ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text) return sthi_job_out_of_memory(job);
    size_t length = strlen(text), padded = (length + LENGTH_BYTES + PAGE - 1) / PAGE * PAGE;
    f->header = length <= STHI_JSON_MAX_BYTES - PAGE ? sthi_alloc(padded) : NULL;
    if (f->header) {
        f->header_bytes = padded;
        memset(f->header, ' ', padded);
        for (unsigned i = 0; i < LENGTH_BYTES; i++) f->header[i] = (char)((padded - LENGTH_BYTES) >> (8 * i));
        memcpy(f->header + LENGTH_BYTES, text, length);
    }
    sthi_json_free_text(text);
    return f->header ? STH_OK : sthi_job_out_of_memory(job);
}

static int by_text(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

/* The source may hold a tensor of the name that a part of a layer would get. */
static sth_status check_names(const sthi_pack_job *job) {
    const char **names = sthi_zalloc((size_t)job->tensor_count, sizeof *names);
    if (!names) return sthi_job_out_of_memory(job);
    for (uint64_t i = 0; i < job->tensor_count; i++) names[i] = job->tensors[i].name;
    if (job->tensor_count) qsort(names, (size_t)job->tensor_count, sizeof *names, by_text);
    sth_status status = STH_OK;
    for (uint64_t i = 1; status == STH_OK && i < job->tensor_count; i++)
        if (strcmp(names[i], names[i - 1]) == 0)
            status = sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in,
                               "%.300s: two tensors of the result would be called '%.160s'; leave the layer out with "
                               "skip",
                               job->in, names[i]);
    sthi_free(names);
    return status;
}

/* Same sources, options and layout: the same bytes come out. */
static void identify(sthi_pack_job *job) {
    char line[256];
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    int n = snprintf(line, sizeof line, "1 %d %d %d\n", (int)job->options.format, (int)job->options.dtype,
                     job->quant != NULL);
    XXH3_128bits_update(&hash, line, (size_t)n);
    for (uint32_t i = 0; i < job->checkpoint->file_count; i++) {
        const sthi_file *f = &job->checkpoint->files[i];
        n = snprintf(line, sizeof line, "%llu %lld %lld %llu %llu\n", (unsigned long long)f->size,
                     (long long)f->mtime_s, (long long)f->mtime_ns, (unsigned long long)f->inode,
                     (unsigned long long)f->device);
        XXH3_128bits_update(&hash, line, (size_t)n);
    }
    for (uint64_t i = 0; i < job->tensor_count; i++) {
        const sthi_job_tensor *t = &job->tensors[i];
        n = snprintf(line, sizeof line, "%d %u %llu %llu\n", (int)t->dtype, t->file, (unsigned long long)t->offset,
                     (unsigned long long)t->bytes);
        XXH3_128bits_update(&hash, line, (size_t)n);
        XXH3_128bits_update(&hash, t->name, strlen(t->name) + 1);
        XXH3_128bits_update(&hash, t->spelling, strlen(t->spelling) + 1);
    }
    XXH128_hash_t h = XXH3_128bits_digest(&hash);
    snprintf(job->identity, sizeof job->identity, "%016llx%016llx", (unsigned long long)h.high64,
             (unsigned long long)h.low64);
}

sth_status sthi_job_lay_out(sthi_pack_job *job) {
    STHI_TRY(check_names(job));
    STHI_TRY(place(job));
    identify(job);
    if (job->alignment > 1) return STH_OK;
    for (uint32_t f = 0; f < job->file_count; f++)
        if (!job->files[f].header) STHI_TRY(make_header(job, f));
    for (uint32_t f = 0; f < job->file_count; f++) job->files[f].bytes += job->files[f].header_bytes;
    for (uint64_t i = 0; i < job->tensor_count; i++)
        job->tensors[i].offset += job->files[job->tensors[i].file].header_bytes;
    return STH_OK;
}
