/* Index, plan and build state of a v3 folder, as its readers expect them. No I/O of its own. */
#include "pack/v3_plan.h"

#include <math.h>
#include <string.h>

#include "pack/formats.h"
#include "store/utf8.h"

#define FORMAT "squareq_w4_v1"
#define INDEX "model.safetensors.index.json"
#define PLAN "squareq-plan.json"
#define STATE "build-state.json"
#define ERRORS "errors" /* key of the job's notes */

sth_status sthi_v3_note_error(sthi_pack_job *job, const char *key, const sthi_v3_error *rows, uint64_t count) {
    sthi_v3_error all = {0, 0, 0, 0};
    for (uint64_t i = 0; i < count; i++) {
        all.squares += rows[i].squares;
        all.original += rows[i].original;
        all.decoded += rows[i].decoded;
        all.product += rows[i].product;
    }
    double norms = sqrt(all.original) * sqrt(all.decoded);
    double cosine = norms > 0 ? all.product / norms : 1,
           relative = all.original > 0 ? sqrt(all.squares / all.original) : 0;
    json_t *note = json_pack("{s:f, s:f}", "cos_w", cosine, "rel_l2", relative);
    if (!note || json_object_set_new(json_object_get(job->notes, ERRORS), key, note))
        return sthi_job_out_of_memory(job);
    return STH_OK;
}

/* Paths may be any bytes; JSON holds text. */
static const char *text_of_path(const char *path) { return sthi_utf8_is_text(path, strlen(path)) ? path : "?"; }

static json_t *describe_index(const sthi_pack_job *job) {
    json_t *map = json_object();
    for (uint64_t i = 0; i < job->tensor_count; i++)
        json_object_set_new(map, job->tensors[i].name, json_string(job->files[job->tensors[i].file].name));
    return json_pack("{s:{s:s}, s:o}", "metadata", "format", FORMAT, "weight_map", map);
}

typedef struct totals {
    json_int_t layers, plain, quantised, bf16;
    double least, sum;
} totals;

static bool is_layer(const sthi_job_item *item) { return item->count > 1; }

static json_t *describe_layer(const sthi_pack_job *job, const sthi_job_item *item, totals *t) {
    const sth_tensor_info *source = item->source;
    json_t *errors = json_object_get(json_object_get(job->notes, ERRORS), source->name);
    double cosine = json_number_value(json_object_get(errors, "cos_w"));
    json_int_t bytes = 0, wide = (json_int_t)(source->shape[0] * source->shape[1] * 2);
    for (uint32_t i = 0; i < item->count; i++) bytes += (json_int_t)job->tensors[item->first + i].bytes;
    t->least = t->layers ? fmin(t->least, cosine) : cosine;
    t->sum += cosine;
    t->layers++;
    t->quantised += bytes;
    t->bf16 += wide;
    return json_pack("{s:I, s:I, s:i, s:f, s:f, s:I, s:I, s:s}", "out", (json_int_t)source->shape[0], "in",
                     (json_int_t)source->shape[1], "rank", (int)STHI_V3_RANK, "cos_w", cosine, "rel_l2",
                     json_number_value(json_object_get(errors, "rel_l2")), "bytes_q", bytes, "bytes_bf16", wide,
                     "format", FORMAT);
}

static json_t *describe_totals(const totals *t) {
    return json_pack("{s:I, s:I, s:I, s:I, s:f, s:f, s:f}", "quantized_layers", t->layers, "passthrough_tensors",
                     t->plain, "bytes_quantized", t->quantised, "bytes_bf16_equiv", t->bf16, "compression",
                     (double)t->bf16 / (double)t->quantised, "cos_w_min", t->least, "cos_w_mean",
                     t->sum / (double)t->layers);
}

static json_t *describe_plan(const sthi_pack_job *job) {
    totals t = {0};
    json_t *layers = json_object(), *plain = json_array(), *sums = sthi_job_checksums(job);
    for (uint64_t i = 0; i < job->item_count; i++) {
        const sthi_job_item *item = &job->items[i];
        if (is_layer(item)) json_object_set_new(layers, item->source->name, describe_layer(job, item, &t));
        else json_array_append_new(plain, json_string(item->source->name));
    }
    t.plain = (json_int_t)json_array_size(plain);
    return json_pack("{s:i, s:s, s:s, s:s, s:i, s:i, s:i, s:o, s:o, s:o, s:o}", "plan_version", 1, "format", FORMAT,
                     "model", text_of_path(sthi_pack_leaf(job->in)), "source", text_of_path(job->in), "hblock",
                     (int)STHI_V3_HADAMARD, "group", (int)STHI_V3_GROUP, "rank_default", (int)STHI_V3_RANK, "layers",
                     layers, "passthrough", plain, "totals", describe_totals(&t), "xxh3_128", sums);
}

static json_t *describe_state(const sthi_pack_job *job) {
    json_int_t bytes = 0, latest = 0;
    json_t *shards = json_array();
    for (uint32_t i = 0; i < job->checkpoint->file_count; i++) {
        const sthi_file *f = &job->checkpoint->files[i];
        bytes += (json_int_t)f->size;
        if (f->mtime_s > latest) latest = f->mtime_s;
    }
    for (uint32_t i = 0; i < job->file_count; i++) json_array_append_new(shards, json_string(job->files[i].name));
    return json_pack("{s:i, s:s, s:I, s:I, s:o}", "state_version", 1, "source", text_of_path(job->in), "source_bytes",
                     bytes, "source_mtime", latest, "completed_shards", shards);
}

static sth_status finish(sthi_pack_job *job) {
    STHI_TRY(sthi_job_side(job, INDEX, describe_index(job), JSON_INDENT(1) | JSON_SORT_KEYS));
    STHI_TRY(sthi_job_side(job, PLAN, describe_plan(job), JSON_INDENT(1) | JSON_SORT_KEYS));
    return sthi_job_side(job, STATE, describe_state(job), JSON_INDENT(1) | JSON_SORT_KEYS);
}

sth_status sthi_v3_prepare(sthi_pack_job *job) {
    STHI_TRY(sthi_job_add_side(job, INDEX, NULL));
    STHI_TRY(sthi_job_add_side(job, PLAN, NULL));
    STHI_TRY(sthi_job_add_side(job, STATE, NULL));
    job->finish = finish;
    json_t *metadata = json_pack("{s:s, s:s, s:s}", "format", FORMAT, "rank", "32", "group", "64");
    if (!metadata || json_object_set_new(job->notes, "__metadata__", metadata) ||
        json_object_set_new(job->notes, ERRORS, json_object()))
        return sthi_job_out_of_memory(job);
    return STH_OK;
}
