/* v3 int4: a folder of shards. A layer is read as a whole, its low-rank part taken out, and the rest rotated, rounded
 * and written row by row. Blocks (names up to their first number) are in natural order, four to a shard; what is stored
 * as it is comes last, in a shard of its own.
 *
 * The factors are rounded to bfloat16 first, and what is quantised is the difference from their product as the decoder
 * will compute it, so that their rounding is made good; the errors in the plan are those of the decoded weight. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/sha256.h"
#include "pack/formats.h"
#include "pack/rows.h"
#include "pack/v3_plan.h"
#include "quant/hadamard.h"
#include "quant/int4.h"
#include "quant/lowrank.h"
#include "quant/rank_row.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define LEAST 1024u
#define BLOCKS_PER_SHARD 4u

/* ---- making a layer ---- */

typedef struct layer_work {
    sthi_job job;
    sthi_pack_job *pack;
    const sth_tensor_info *source;
    uint64_t rows, in, groups;
    float *w;               /* [rows, in] */
    uint16_t *up, *down;    /* [rows, rank], [in, rank] */
    float *wide_down;       /* [rank, in] */
    unsigned char *codes;   /* [rows, in / 2] */
    uint16_t *scales;       /* [in / group, rows] */
    sthi_v3_error *errors;  /* for each row */
    char *raw;              /* one chunk of the source */
    uint64_t raw_first;
    uint64_t passed;
} layer_work;

static sth_status widen_row(sthi_job *job, uint64_t row, void *scratch) {
    const layer_work *l = (const layer_work *)job;
    uint64_t row_bytes = l->source->bytes / l->rows, at = l->raw_first + row;
    (void)scratch;
    sthi_rows_widen(l->source->dtype, l->raw + row * row_bytes, l->in, l->w + at * l->in);
    return sthi_rows_check(l->pack, l->source, at * l->in, l->w + at * l->in, l->in);
}

static sth_status read_weight(layer_work *l) {
    const sth_tensor_info *t = l->source;
    uint64_t row_bytes = t->bytes / l->rows, rows = sthi_min_u64(sthi_rows_of_chunk(l->in, row_bytes), l->rows);
    l->raw = sthi_zalloc((size_t)rows, (size_t)row_bytes);
    if (!l->raw) return sthi_job_out_of_memory(l->pack);
    for (l->raw_first = 0; l->raw_first < l->rows; l->raw_first += rows) {
        uint64_t count = sthi_min_u64(rows, l->rows - l->raw_first);
        STHI_TRY(sthi_checkpoint_read(l->pack->checkpoint, t->file, t->offset + l->raw_first * row_bytes,
                                      count * row_bytes, l->raw));
        l->job = (sthi_job){.run = widen_row, .pieces = count};
        STHI_TRY(sthi_workers_run(l->pack->workers, &l->job));
    }
    return STH_OK;
}

static sth_status passed(void *context) {
    layer_work *l = context;
    return sthi_job_progress(l->pack, l->source->name, l->source->bytes / (STHI_LOWRANK_PRODUCTS + 2));
}

static sth_status fail_range(const layer_work *l, uint64_t row) {
    const char *path = l->pack->checkpoint->files[l->source->file].path;
    return sthi_fail(
        STH_UNSUPPORTED, NULL, 0, path,
        "%.300s: tensor '%.160s': the values of row %llu are too large to be rotated; leave the tensor out "
        "with skip",
        path, l->source->name, (unsigned long long)row);
}

static void decode_row(const layer_work *l, uint64_t row, double *wide) {
    const unsigned char *codes = l->codes + row * (l->in / 2);
    for (uint64_t g = 0; g < l->groups; g++) {
        float s = sthi_from_bf16(l->scales[g * l->rows + row]);
        for (uint64_t k = g * STHI_V3_GROUP; k < (g + 1) * STHI_V3_GROUP; k += 2) {
            int byte = codes[k / 2];
            wide[k] = (float)(((byte & 15) ^ 8) - 8) * s;
            wide[k + 1] = (float)(((byte >> 4) ^ 8) - 8) * s;
        }
    }
    sthi_hadamard(wide, l->in, STHI_V3_HADAMARD);
}

/* Decodes the row that was just encoded, and compares. */
static void measure(layer_work *l, uint64_t row, const float *low, double *wide) {
    const float *w = l->w + row * l->in;
    sthi_v3_error e = {0};
    decode_row(l, row, wide);
    for (uint64_t k = 0; k < l->in; k++) {
        double got = (float)wide[k] + low[k], wanted = w[k];
        e.squares += (got - wanted) * (got - wanted);
        e.original += wanted * wanted;
        e.decoded += got * got;
        e.product += got * wanted;
    }
    l->errors[row] = e;
}

static sth_status encode_row(sthi_job *job, uint64_t row, void *scratch) {
    layer_work *l = (layer_work *)job;
    double *wide = scratch;
    float *low = (float *)(wide + l->in), *x = low + l->in;
    const float *w = l->w + row * l->in;
    sthi_rank_row(l->up + row * STHI_V3_RANK, l->wide_down, STHI_V3_RANK, l->in, low); /* as the decoder sums it */
    for (uint64_t k = 0; k < l->in; k++) wide[k] = (double)w[k] - low[k];
    sthi_hadamard(wide, l->in, STHI_V3_HADAMARD);
    for (uint64_t k = 0; k < l->in; k++) x[k] = (float)wide[k];
    for (uint64_t k = 0; k < l->in; k++)
        if (!isfinite(x[k])) return fail_range(l, row);
    for (uint64_t g = 0; g < l->groups; g++)
        l->scales[g * l->rows + row] = sthi_int4_encode_group(x + g * STHI_V3_GROUP, STHI_V3_GROUP,
                                                              l->codes + (row * l->in + g * STHI_V3_GROUP) / 2);
    measure(l, row, low, wide);
    return STH_OK;
}

static sth_status widen_down(layer_work *l) {
    l->wide_down = sthi_zalloc((size_t)l->in, STHI_V3_RANK * sizeof *l->wide_down);
    if (!l->wide_down) return sthi_job_out_of_memory(l->pack);
    for (uint64_t k = 0; k < l->in; k++)
        for (uint32_t r = 0; r < STHI_V3_RANK; r++)
            l->wide_down[r * l->in + k] = sthi_from_bf16(l->down[k * STHI_V3_RANK + r]);
    return STH_OK;
}

static sth_status put_layer(layer_work *l) {
    STHI_TRY(sthi_job_put(l->pack, 0, l->codes, l->rows * (l->in / 2)));
    STHI_TRY(sthi_job_put(l->pack, 1, l->scales, l->groups * l->rows * 2));
    STHI_TRY(sthi_job_put(l->pack, 2, l->down, l->in * STHI_V3_RANK * 2));
    return sthi_job_put(l->pack, 3, l->up, l->rows * STHI_V3_RANK * 2);
}

/* As the format has it: the first four bytes of the name's SHA-256. */
static uint64_t seed_of(const char *name) {
    sthi_sha256 sha;
    unsigned char digest[32];
    sthi_sha256_init(&sha);
    sthi_sha256_add(&sha, name, strlen(name));
    sthi_sha256_end(&sha, digest);
    return digest[0] | (uint64_t)digest[1] << 8 | (uint64_t)digest[2] << 16 | (uint64_t)digest[3] << 24;
}

static sth_status make_parts(layer_work *l) {
    STHI_TRY(read_weight(l));
    STHI_TRY(sthi_lowrank(l->pack->workers, l->w, l->rows, l->in, STHI_V3_RANK, seed_of(l->source->name), passed, l,
                          l->up, l->down));
    STHI_TRY(widen_down(l));
    l->job = (sthi_job){.run = encode_row, .pieces = l->rows};
    STHI_TRY(sthi_workers_run(l->pack->workers, &l->job));
    STHI_TRY(put_layer(l));
    return sthi_v3_note_error(l->pack, l->source->name, l->errors, l->rows);
}

static sth_status make_layer(sthi_pack_job *job, const sthi_job_item *item) {
    const sth_tensor_info *t = item->source;
    layer_work l = {.pack = job, .source = t, .rows = t->shape[0], .in = t->shape[1],
                    .groups = t->shape[1] / STHI_V3_GROUP};
    l.w = sthi_zalloc((size_t)l.rows, (size_t)l.in * sizeof *l.w);
    l.codes = sthi_zalloc((size_t)l.rows, (size_t)l.in / 2);
    l.scales = sthi_zalloc((size_t)l.rows, (size_t)l.groups * sizeof *l.scales);
    l.up = sthi_zalloc((size_t)l.rows, STHI_V3_RANK * sizeof *l.up);
    l.down = sthi_zalloc((size_t)l.in, STHI_V3_RANK * sizeof *l.down);
    l.errors = sthi_zalloc((size_t)l.rows, sizeof *l.errors);
    bool room = l.w && l.codes && l.scales && l.up && l.down && l.errors;
    sth_status status = room ? make_parts(&l) : sthi_job_out_of_memory(job);
    void *const all[] = {l.w, l.codes, l.scales, l.up, l.down, l.errors, l.wide_down, l.raw};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) sthi_free(all[i]);
    return status;
}

/* ---- the list ---- */

/* Length of a name up to its first part that is a number, that included; the whole name where there is none. */
static size_t block_length(const char *name) {
    for (const char *part = name; part; part = strchr(part, '.') ? strchr(part, '.') + 1 : NULL) {
        size_t n = strspn(part, "0123456789");
        if (n && (part[n] == '.' || !part[n])) return (size_t)(part - name) + n;
    }
    return strlen(name);
}

static bool same_block(const char *a, const char *b) {
    size_t n = block_length(a);
    return n == block_length(b) && memcmp(a, b, n) == 0;
}

/* Shards that hold layers; `shard_of` (may be NULL) gets each choice's, from 0. */
static uint32_t count_shards(const sthi_choices *c, uint32_t *shard_of) {
    uint32_t blocks = 0;
    const char *last = NULL;
    for (uint64_t i = 0; i < c->count; i++) {
        const char *name = c->items[i].tensor->name;
        if (!c->items[i].quantise) continue;
        if (!last || !same_block(last, name)) blocks++;
        last = name;
        if (shard_of) shard_of[i] = (blocks - 1) / BLOCKS_PER_SHARD;
    }
    return (blocks + BLOCKS_PER_SHARD - 1) / BLOCKS_PER_SHARD;
}

static sth_status add_shard(sthi_pack_job *job, uint32_t number, uint32_t count) {
    char name[64];
    snprintf(name, sizeof name, "model-%05u-of-%05u.safetensors", number + 1, count);
    return sthi_job_add_file(job, name, NULL);
}

static sth_status add_layer(sthi_pack_job *job, const sthi_choice *choice) {
    const sth_tensor_info *t = choice->tensor;
    uint64_t out = t->shape[0], in = t->shape[1];
    if (in > SIZE_MAX / 64)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in, "tensor '%.160s' is too wide; leave it out with skip",
                         t->name);
    job->scratch_bytes = (size_t)sthi_max_u64(job->scratch_bytes, in * (sizeof(double) + 2 * sizeof(float)));
    STHI_TRY(sthi_job_add_item(job, &(sthi_job_item){.make = make_layer, .source = t, .work = t->bytes}));
    STHI_TRY(sthi_job_add_tensor(job, choice->base, ".qweight", STH_DTYPE_U8, 2, (uint64_t[]){out, in / 2}));
    STHI_TRY(sthi_job_add_tensor(job, choice->base, ".wscales", STH_DTYPE_BF16, 2,
                                 (uint64_t[]){in / STHI_V3_GROUP, out}));
    STHI_TRY(sthi_job_add_tensor(job, choice->base, ".lora_down", STH_DTYPE_BF16, 2, (uint64_t[]){in, STHI_V3_RANK}));
    return sthi_job_add_tensor(job, choice->base, ".lora_up", STH_DTYPE_BF16, 2, (uint64_t[]){out, STHI_V3_RANK});
}

static sth_status add_all(sthi_pack_job *job, const sthi_choices *c, const uint32_t *shard_of, uint32_t shards,
                          bool plain) {
    for (uint64_t i = 0; i < c->count; i++) {
        if (!c->items[i].quantise) continue;
        if (shard_of[i] == job->file_count) STHI_TRY(add_shard(job, shard_of[i], shards + plain));
        STHI_TRY(add_layer(job, &c->items[i]));
    }
    if (plain) STHI_TRY(add_shard(job, shards, shards + 1));
    for (uint64_t i = 0; i < c->count; i++)
        if (!c->items[i].quantise) STHI_TRY(sthi_job_add_copy(job, c->items[i].tensor));
    return STH_OK;
}

static sth_status plan_items(sthi_pack_job *job, const sthi_choices *c) {
    uint64_t quantised = 0;
    for (uint64_t i = 0; i < c->count; i++) quantised += c->items[i].quantise;
    if (!quantised)
        return sthi_fail(
            STH_UNSUPPORTED, NULL, 0, job->in,
            "%.300s: nothing to quantise: no two-dimensional weight has 1024 rows, 1024 columns and columns "
            "in multiples of 256; choose another format",
            job->in);
    uint32_t *shard_of = sthi_zalloc((size_t)c->count, sizeof *shard_of);
    if (!shard_of) return sthi_job_out_of_memory(job);
    uint32_t shards = count_shards(c, shard_of);
    sth_status status = add_all(job, c, shard_of, shards, quantised < c->count);
    sthi_free(shard_of);
    return status;
}

sth_status sthi_pack_v3(sthi_pack_job *job, const char *out) {
    sthi_choices choices = {0};
    (void)out; /* the folder takes any name */
    job->whole_folder = true;
    STHI_TRY(sthi_v3_prepare(job));
    STHI_TRY(sthi_choose(job, LEAST, STHI_V3_HADAMARD, &choices));
    sth_status status = plan_items(job, &choices);
    sthi_choices_fini(&choices);
    return status;
}
