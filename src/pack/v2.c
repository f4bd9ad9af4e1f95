/* v2: one safetensors file and its manifest. Layers are made row by row in chunks; tensors whose size would put those
 * behind them at odd addresses come last, the rest in natural order, layers among what is stored as it is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/sha256.h"
#include "pack/formats.h"
#include "pack/rows.h"
#include "quant/int8.h"
#include "store/path.h"

#define PAD 64u
#define MANIFEST ".manifest.json"

/* ---- making a layer ---- */

typedef struct chunk {
    sthi_job job;
    const sthi_pack_job *pack;
    const sth_tensor_info *source;
    uint64_t first, rows, in, padded, row_bytes;
    char *raw;
    signed char *codes;
    float *scales;
} chunk;

static sth_status encode_row(sthi_job *job, uint64_t row, void *scratch) {
    const chunk *c = (const chunk *)job;
    float *w = scratch;
    sthi_rows_widen(c->source->dtype, c->raw + row * c->row_bytes, c->in, w);
    STHI_TRY(sthi_rows_check(c->pack, c->source, (c->first + row) * c->in, w, c->in));
    sthi_int8_encode_row(w, c->in, c->padded, c->codes + row * c->padded, &c->scales[row]);
    return STH_OK;
}

static sth_status make_chunk(sthi_pack_job *job, chunk *c) {
    const sth_tensor_info *t = c->source;
    uint64_t bytes = c->rows * c->row_bytes;
    c->job = (sthi_job){.run = encode_row, .pieces = c->rows};
    STHI_TRY(sthi_checkpoint_read(job->checkpoint, t->file, t->offset + c->first * c->row_bytes, bytes, c->raw));
    STHI_TRY(sthi_workers_run(job->workers, &c->job));
    STHI_TRY(sthi_job_put(job, 0, c->codes, c->rows * c->padded));
    STHI_TRY(sthi_job_put(job, 1, c->scales, c->rows * 4));
    memset(c->scales, 0, (size_t)c->rows * 4);
    STHI_TRY(sthi_job_put(job, 2, c->scales, c->rows * 4)); /* the zero points */
    return sthi_job_progress(job, t->name, bytes);
}

static sth_status put_bias(sthi_pack_job *job, const sth_tensor_info *bias) {
    float *wide = NULL;
    STHI_TRY(sthi_rows_read_vector(job, bias, &wide));
    sth_status status = sthi_job_put(job, 3, wide, bias->shape[0] * 4);
    sthi_free(wide);
    return status;
}

static sth_status make_layer(sthi_pack_job *job, const sthi_job_item *item) {
    const sth_tensor_info *t = item->source;
    chunk c = {.pack = job, .source = t, .in = t->shape[1], .padded = job->tensors[item->first].shape[1],
               .row_bytes = t->bytes / t->shape[0]};
    uint64_t rows = sthi_min_u64(sthi_rows_of_chunk(c.in, c.row_bytes), t->shape[0]);
    c.raw = sthi_zalloc((size_t)rows, (size_t)c.row_bytes);
    c.codes = sthi_zalloc((size_t)rows, (size_t)c.padded);
    c.scales = sthi_zalloc((size_t)rows, sizeof *c.scales);
    sth_status status = c.raw && c.codes && c.scales ? STH_OK : sthi_job_out_of_memory(job);
    for (; status == STH_OK && c.first < t->shape[0]; c.first += c.rows) {
        c.rows = sthi_min_u64(rows, t->shape[0] - c.first);
        status = make_chunk(job, &c);
    }
    sthi_free(c.raw);
    sthi_free(c.codes);
    sthi_free(c.scales);
    if (status == STH_OK && item->bias) status = put_bias(job, item->bias);
    return status;
}

/* ---- the list ---- */

/* The bias that belongs to a layer, if float32 can hold it; else NULL. */
static sth_status bias_of(const sthi_pack_job *job, const sthi_choice *choice, const sth_tensor_info **out) {
    size_t size = strlen(choice->base) + sizeof ".bias";
    char *name = sthi_alloc(size);
    if (!name) return sthi_job_out_of_memory(job);
    snprintf(name, size, "%s.bias", choice->base);
    const sth_tensor_info *t = sthi_checkpoint_find(job->checkpoint, name);
    sthi_free(name);
    bool fits = t && t->rank == 1 && t->shape[0] == choice->tensor->shape[0] && sthi_rows_is_float(t->dtype) &&
                t->dtype != STH_DTYPE_F64;
    *out = fits ? t : NULL;
    return STH_OK;
}

static sth_status add_layer(sthi_pack_job *job, const sthi_choice *choice) {
    const sth_tensor_info *t = choice->tensor;
    uint64_t rows = t->shape[0], padded;
    if (!sthi_round_up(t->shape[1], PAD, &padded) || padded > SIZE_MAX / 4)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in,
                         "%.300s: tensor '%.160s' is too wide; leave it out with skip", job->in, t->name);
    sthi_job_item item = {.make = make_layer, .source = t, .work = t->bytes};
    STHI_TRY(bias_of(job, choice, &item.bias));
    job->scratch_bytes = (size_t)sthi_max_u64(job->scratch_bytes, t->shape[1] * 4);
    STHI_TRY(sthi_job_add_item(job, &item));
    STHI_TRY(sthi_job_add_tensor(job, choice->base, ".qweight", STH_DTYPE_I8, 2, (uint64_t[]){rows, padded}));
    STHI_TRY(sthi_job_add_tensor(job, choice->base, ".scale", STH_DTYPE_F32, 1, &rows));
    STHI_TRY(sthi_job_add_tensor(job, choice->base, ".zero_point", STH_DTYPE_F32, 1, &rows));
    return item.bias ? sthi_job_add_tensor(job, choice->base, ".bias", STH_DTYPE_F32, 1, &rows) : STH_OK;
}

/* In two rounds: tensors whose size is odd come in the second. taken[]: biases that are part of a layer. */
static sth_status add_items(sthi_pack_job *job, const sthi_choices *c, const unsigned char *taken) {
    const sth_tensor_info *all = job->checkpoint->tensors.items;
    for (int odd = 0; odd < 2; odd++)
        for (uint64_t i = 0; i < c->count; i++) {
            const sthi_choice *choice = &c->items[i];
            bool now = choice->quantise ? !odd : (choice->tensor->bytes % 8 != 0) == odd;
            if (!now || taken[choice->tensor - all]) continue;
            STHI_TRY(choice->quantise ? add_layer(job, choice) : sthi_job_add_copy(job, choice->tensor));
        }
    return STH_OK;
}

static sth_status add_all(sthi_pack_job *job, const sthi_choices *c) {
    unsigned char *taken = sthi_zalloc((size_t)c->count, 1);
    if (!taken) return sthi_job_out_of_memory(job);
    sth_status status = STH_OK;
    for (uint64_t i = 0; status == STH_OK && i < c->count; i++) {
        const sth_tensor_info *bias = NULL;
        if (c->items[i].quantise) status = bias_of(job, &c->items[i], &bias);
        if (bias) taken[bias - job->checkpoint->tensors.items] = 1;
    }
    if (status == STH_OK) status = add_items(job, c, taken);
    sthi_free(taken);
    return status;
}

/* ---- the manifest ---- */

static int by_name_text(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

/* "name:in:out:bias" of every two-dimensional weight, which is as near to "every linear layer of the model" as a file
 * can tell. */
static char *signature_line(const sthi_pack_job *job, const sth_tensor_info *t) {
    size_t base = strlen(t->name) - strlen(".weight"), size = base + 64;
    char *line = sthi_alloc(size);
    if (!line) return NULL;
    snprintf(line, size, "%.*s.bias", (int)base, t->name);
    bool bias = sthi_checkpoint_find(job->checkpoint, line) != NULL;
    snprintf(line, size, "%.*s:%llu:%llu:%s", (int)base, t->name, (unsigned long long)t->shape[1],
             (unsigned long long)t->shape[0], bias ? "True" : "False");
    return line;
}

static sth_status sign(const sthi_pack_job *job, char out[17]) {
    const sthi_tensors *all = &job->checkpoint->tensors;
    char **lines = sthi_zalloc((size_t)all->count, sizeof *lines);
    uint64_t n = 0;
    bool room = lines != NULL;
    for (uint64_t i = 0; room && i < all->count; i++) {
        const sth_tensor_info *t = &all->items[i];
        if (t->rank != 2 || !sthi_path_ends_with(t->name, ".weight")) continue;
        lines[n] = signature_line(job, t);
        room = lines[n++] != NULL;
    }
    sthi_sha256 sha;
    unsigned char digest[32];
    sthi_sha256_init(&sha);
    if (room && n) qsort(lines, (size_t)n, sizeof *lines, by_name_text);
    for (uint64_t i = 0; room && i < n; i++) {
        if (i) sthi_sha256_add(&sha, "|", 1);
        sthi_sha256_add(&sha, lines[i], strlen(lines[i]));
    }
    sthi_sha256_end(&sha, digest);
    for (int i = 0; i < 8; i++) snprintf(out + 2 * i, 3, "%02x", digest[i]);
    for (uint64_t i = 0; lines && i < n; i++) sthi_free(lines[i]);
    sthi_free(lines);
    return room ? STH_OK : sthi_job_out_of_memory(job);
}

static json_t *describe_layer(const sthi_pack_job *job, const sthi_job_item *item) {
    const sthi_job_tensor *t = &job->tensors[item->first];
    json_int_t rows = (json_int_t)t->shape[0];
    json_t *bias = item->count > 3 ? json_string(t[3].name) : json_null();
    char name[4096];
    snprintf(name, sizeof name, "%.*s", (int)(strlen(t->name) - strlen(".qweight")), t->name);
    return json_pack("{s:s, s:s, s:s, s:s, s:o, s:[I,I], s:[I,I], s:i, s:i, s:s, s:i, s:s, s:s, s:s, s:n}",
                     "canonical_name", name, "qweight_key", t[0].name, "scale_key", t[1].name, "zero_point_key",
                     t[2].name, "bias_key", bias, "orig_shape", rows, (json_int_t)item->source->shape[1],
                     "packed_shape", rows, (json_int_t)t->shape[1], "pad_k", (int)PAD, "quant_bits", 8, "quant_scheme",
                     "per_row_symmetric", "quant_axis", 0, "dtype_qweight", "int8", "dtype_scale", "float32",
                     "dtype_zero_point", "float32", "block_id");
}

static int by_layer_name(const void *left, const void *right) {
    const json_t *a = *(const json_t *const *)left, *b = *(const json_t *const *)right;
    return strcmp(json_string_value(json_object_get(a, "canonical_name")),
                  json_string_value(json_object_get(b, "canonical_name")));
}

/* The layers' objects, sorted by name; NULL when memory is out. */
static json_t *describe_layers(const sthi_pack_job *job, uint64_t *out_bytes) {
    json_t **layers = sthi_zalloc((size_t)job->item_count, sizeof *layers), *list = json_array();
    uint64_t n = 0;
    bool room = layers && list;
    for (uint64_t i = 0; room && i < job->item_count; i++) {
        if (job->items[i].make != make_layer) continue;
        *out_bytes += job->tensors[job->items[i].first].bytes;
        layers[n] = describe_layer(job, &job->items[i]);
        room = layers[n++] != NULL;
    }
    if (room && n) qsort(layers, (size_t)n, sizeof *layers, by_layer_name);
    for (uint64_t i = 0; room && i < n; i++) room = json_array_append(list, layers[i]) == 0;
    for (uint64_t i = 0; layers && i < n; i++) json_decref(layers[i]);
    sthi_free(layers);
    if (!room) json_decref(list);
    return room ? list : NULL;
}

static sth_status finish(sthi_pack_job *job) {
    char signature[17];
    uint64_t bytes = 0;
    STHI_TRY(sign(job, signature));
    json_t *layers = describe_layers(job, &bytes), *checksums = sthi_job_checksums(job);
    if (!layers || !checksums) {
        json_decref(layers);
        json_decref(checksums);
        return sthi_job_out_of_memory(job);
    }
    json_t *manifest = json_pack("{s:s, s:s, s:s, s:i, s:s, s:I, s:I, s:o, s:o}", "model_signature", signature,
                                 "architecture_id", "unknown", "quant_version", "squareq_bp8_v2", "kernel_abi_version",
                                 1, "min_runtime_version", "0.1.0", "layer_count", (json_int_t)json_array_size(layers),
                                 "total_qweight_bytes", (json_int_t)bytes, "layers", layers, "xxh3_128", checksums);
    return sthi_job_side(job, job->sides[0], manifest, JSON_INDENT(1));
}

sth_status sthi_pack_v2(sthi_pack_job *job, const char *out) {
    char *manifest = NULL;
    sthi_choices choices = {0};
    STHI_TRY(sthi_pack_name(out, ".safetensors", MANIFEST, &manifest));
    sth_status status = sthi_job_add_side(job, sthi_pack_leaf(manifest), manifest);
    sthi_free(manifest);
    STHI_TRY(status);
    STHI_TRY(sthi_job_add_file(job, sthi_pack_leaf(out), out));
    job->finish = finish;
    STHI_TRY(sthi_choose(job, 1, 1, &choices));
    status = add_all(job, &choices);
    sthi_choices_fini(&choices);
    return status;
}
