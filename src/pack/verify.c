/* Checks a slab or a checkpoint: checksums over the bytes of every tensor (v1: of every member), and the difference
 * from an original, accumulated in float64 in the order of the elements. One pass over each file; layers are decoded in
 * chunks of rows by threads, compared by one. No locks. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/lossless.h"
#include "pack/formats.h"
#include "pack/lossless.h"
#include "pack/rows.h"
#include "quant/decoder.h"
#include "quant/lossless_file.h"
#include "store/dtype.h"
#include "store/json.h"
#include "store/path.h"

typedef struct verifier {
    sthi_pack_job job; /* for its source, its progress and its options; nothing is made */
    sth_checkpoint *original;
    const json_t *checksums; /* {tensor: text}; NULL: none */
    json_t *index;           /* owns them, for a layer index */
    sth_verified_function each;
    sth_verify_result result;
    char *buffer, *other; /* of STHI_JOB_CHUNK */
} verifier;

/* ---- checksums ---- */

static sth_status hash_tensor(verifier *v, const sth_tensor_info *t, char out[33]) {
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    for (uint64_t at = 0; at < t->bytes;) {
        uint64_t part = sthi_min_u64(STHI_JOB_CHUNK, t->bytes - at);
        STHI_TRY(sthi_checkpoint_read(v->job.checkpoint, t->file, t->offset + at, part, v->buffer));
        XXH3_128bits_update(&hash, v->buffer, (size_t)part);
        STHI_TRY(sthi_job_progress(&v->job, t->name, part));
        at += part;
    }
    XXH128_hash_t h = XXH3_128bits_digest(&hash);
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
    return STH_OK;
}

static const sthi_zip_member *member_at(const verifier *v, const sth_tensor_info *t) {
    const sthi_zip *zip = &v->job.quant->zip;
    for (uint64_t i = 0; i < zip->count; i++)
        if (zip->members[i].offset <= t->offset && t->offset - zip->members[i].offset < zip->members[i].bytes)
            return &zip->members[i];
    return NULL;
}

static sth_status check_member(verifier *v, const sth_tensor_info *t, int *out) {
    const sthi_zip_member *m = member_at(v, t);
    uLong crc = crc32(0, NULL, 0);
    for (uint64_t at = 0; m && at < m->bytes;) {
        uint64_t part = sthi_min_u64(STHI_JOB_CHUNK, m->bytes - at);
        STHI_TRY(sthi_checkpoint_read(v->job.checkpoint, t->file, m->offset + at, part, v->buffer));
        crc = crc32(crc, (const Bytef *)v->buffer, (uInt)part);
        at += part;
    }
    *out = m ? crc == m->crc : -1;
    return sthi_job_progress(&v->job, t->name, t->bytes);
}

/* *out: 1 right, 0 wrong, -1 there is none. */
static sth_status check_tensor(verifier *v, const sth_tensor_info *t, int *out) {
    char got[33];
    if (v->job.quant && v->job.quant->zip.count) return check_member(v, t, out);
    const char *wanted = json_string_value(json_object_get(v->checksums, t->name));
    *out = -1;
    if (!wanted) return sthi_job_progress(&v->job, t->name, t->bytes);
    STHI_TRY(hash_tensor(v, t, got));
    *out = strcmp(got, wanted) == 0;
    return STH_OK;
}

static int worse(int a, int b) {
    if (a == 0 || b == 0) return 0;
    return a < b ? a : b;
}

/* ---- differences ---- */

typedef struct difference {
    double max_abs, squares, original_squares, decoded_squares, product;
    bool equal;
} difference;

static void compare(difference *d, const float *got, const float *wanted, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        double a = got[i], b = wanted[i], error = a - b;
        if (!(a == b || (isnan(a) && isnan(b)))) d->equal = false;
        if (!(fabs(error) <= d->max_abs)) d->max_abs = fabs(error); /* a NaN shows */
        d->squares += error * error;
        d->original_squares += b * b;
        d->decoded_squares += a * a;
        d->product += a * b;
    }
}

static void conclude(const difference *d, sth_verified *out) {
    double norm = sqrt(d->original_squares), norms = norm * sqrt(d->decoded_squares);
    out->compared = true;
    out->equal = d->equal;
    out->max_abs = d->max_abs;
    out->rel_l2 = sqrt(d->squares) > 0 ? INFINITY : 0;
    if (norm > 0) out->rel_l2 = sqrt(d->squares) / norm;
    out->cosine = norms > 0 ? d->product / norms : d->equal;
}

/* Elements [first, first + n) of a tensor as float32. */
static sth_status read_floats(const sth_checkpoint *c, const sth_tensor_info *t, uint64_t first, uint64_t n, char *raw,
                              float *out) {
    uint64_t each = sthi_dtype_bits(t->dtype) / 8;
    STHI_TRY(sthi_checkpoint_read(c, t->file, t->offset + first * each, n * each, raw));
    sthi_rows_widen(t->dtype, raw, n, out);
    return STH_OK;
}

static sth_status compare_rows(verifier *v, const sth_quant_layer *l, const sthi_decoder *decoder,
                               const sth_tensor_info *t, difference *d) {
    uint64_t rows = sthi_min_u64(sthi_rows_of_chunk(l->in, l->in * 8), l->out);
    float *got = sthi_zalloc((size_t)rows, (size_t)l->in * sizeof *got),
          *wanted = sthi_zalloc((size_t)rows, (size_t)l->in * sizeof *wanted);
    char *raw = sthi_zalloc((size_t)rows, (size_t)l->in * 8);
    sth_status status = got && wanted && raw ? STH_OK : sthi_job_out_of_memory(&v->job);
    for (uint64_t first = 0; status == STH_OK && first < l->out; first += rows) {
        uint64_t count = sthi_min_u64(rows, l->out - first);
        status = sthi_decoder_rows(decoder, first, count, STH_DTYPE_F32, got, v->job.options.threads);
        if (status == STH_OK) status = read_floats(v->original, t, first * l->in, count * l->in, raw, wanted);
        if (status == STH_OK) compare(d, got, wanted, count * l->in);
        if (status == STH_OK) status = sthi_job_progress(&v->job, l->name, 0);
    }
    sthi_free(got);
    sthi_free(wanted);
    sthi_free(raw);
    return status;
}

/* Bytes, where the dtype is none of ours. */
static uint64_t elements(const sth_tensor_info *t) {
    return t->dtype == STH_DTYPE_OTHER ? t->bytes : t->bytes / (sthi_dtype_bits(t->dtype) / 8);
}

/* Decodes once even without an original: that checks the scales. */
static sth_status compare_layer(verifier *v, const sth_quant_layer *l, const sth_tensor_info *t, sth_verified *out) {
    const void *parts[STH_QUANT_PART_COUNT];
    void *block = NULL;
    sthi_decoder decoder;
    difference d = {.equal = true};
    STHI_TRY(sthi_quant_read_parts(v->job.quant, l, parts, &block));
    sth_status status = sthi_decoder_init(&decoder, v->job.checkpoint, l, parts);
    if (status == STH_OK) {
        if (t) status = compare_rows(v, l, &decoder, t, &d);
        sthi_decoder_fini(&decoder);
    }
    sthi_free(block);
    if (status == STH_OK && t) conclude(&d, out);
    return status;
}

static sth_status compare_floats(verifier *v, const sth_tensor_info *a, const sth_tensor_info *b, difference *d) {
    uint64_t part = STHI_JOB_CHUNK / 16;
    float *got = (float *)(void *)(v->buffer + STHI_JOB_CHUNK / 2),
          *wanted = (float *)(void *)(v->other + STHI_JOB_CHUNK / 2);
    for (uint64_t at = 0; at < elements(a); at += part) {
        uint64_t n = sthi_min_u64(part, elements(a) - at);
        STHI_TRY(read_floats(v->job.checkpoint, a, at, n, v->buffer, got));
        STHI_TRY(read_floats(v->original, b, at, n, v->other, wanted));
        compare(d, got, wanted, n);
    }
    return STH_OK;
}

static sth_status compare_bytes(verifier *v, const sth_tensor_info *a, const sth_tensor_info *b, difference *d) {
    for (uint64_t at = 0; d->equal && at < a->bytes;) {
        uint64_t part = sthi_min_u64(STHI_JOB_CHUNK, a->bytes - at);
        STHI_TRY(sthi_checkpoint_read(v->job.checkpoint, a->file, a->offset + at, part, v->buffer));
        STHI_TRY(sthi_checkpoint_read(v->original, b->file, b->offset + at, part, v->other));
        if (memcmp(v->buffer, v->other, (size_t)part) != 0) d->equal = false;
        at += part;
    }
    return STH_OK;
}

/* Floats by value (a bias may be stored wider than it was), all else by its bytes. */
static sth_status compare_stored(verifier *v, const sth_tensor_info *a, const sth_tensor_info *b, sth_verified *out) {
    difference d = {.equal = true};
    bool floats = sthi_rows_is_float(a->dtype) && sthi_rows_is_float(b->dtype);
    if (elements(a) != elements(b) || (!floats && strcmp(a->spelling, b->spelling) != 0)) {
        out->missing = true;
        return STH_OK;
    }
    STHI_TRY(floats && a->dtype != b->dtype ? compare_floats(v, a, b, &d) : compare_bytes(v, a, b, &d));
    if (!d.equal && floats && a->dtype == b->dtype) STHI_TRY(compare_floats(v, a, b, &d));
    conclude(&d, out);
    if (d.equal) out->cosine = 1;
    return STH_OK;
}

/* ---- one tensor, one layer ---- */

static void report(verifier *v, const sth_verified *one, bool layer) {
    v->result.tensors++;
    v->result.checksums_wrong += one->checksum == 0;
    v->result.checksums_missing += one->checksum < 0;
    v->result.missing += one->missing;
    if (one->compared && layer) v->result.worst_rel_l2 = fmax(v->result.worst_rel_l2, one->rel_l2);
    if (one->compared && !layer) v->result.stored_differ += !one->equal;
    if (v->each) v->each(v->job.options.context, one);
}

static sth_status verify_stored(verifier *v, const sth_tensor_info *t) {
    sth_verified one = {.name = t->name, .encoding = "stored", .checksum = -1};
    const sth_tensor_info *original = v->original ? sthi_checkpoint_find(v->original, t->name) : NULL;
    STHI_TRY(check_tensor(v, t, &one.checksum));
    if (original) STHI_TRY(compare_stored(v, t, original, &one));
    else one.missing = v->original != NULL;
    report(v, &one, false);
    return STH_OK;
}

static sth_status original_weight(const verifier *v, const sth_quant_layer *l, const sth_tensor_info **out) {
    size_t size = strlen(l->name) + sizeof ".weight";
    *out = NULL;
    if (!v->original) return STH_OK;
    char *name = sthi_alloc(size);
    if (!name) return sthi_job_out_of_memory(&v->job);
    snprintf(name, size, "%s.weight", l->name);
    const sth_tensor_info *t = sthi_checkpoint_find(v->original, name);
    sthi_free(name);
    *out = t;
    return STH_OK;
}

static bool comparable(const sth_tensor_info *t, const sth_quant_layer *l) {
    return t && sthi_rows_is_float(t->dtype) && elements(t) == l->out * l->in;
}

static sth_status verify_layer(verifier *v, const sth_quant_layer *l) {
    sth_verified one = {.name = l->name, .encoding = sthi_encoding_name(l->encoding), .checksum = 1};
    for (int p = 0; p < STH_QUANT_PART_COUNT; p++) {
        int checksum = -1;
        if (!l->parts[p] || p == STH_QUANT_PART_BIAS) continue;
        STHI_TRY(check_tensor(v, l->parts[p], &checksum));
        one.checksum = worse(one.checksum, checksum);
    }
    const sth_tensor_info *original = NULL;
    STHI_TRY(original_weight(v, l, &original));
    if (!comparable(original, l)) original = NULL;
    one.missing = v->original && !original;
    STHI_TRY(compare_layer(v, l, original, &one));
    report(v, &one, true);
    return l->parts[STH_QUANT_PART_BIAS] ? verify_stored(v, l->parts[STH_QUANT_PART_BIAS]) : STH_OK;
}

/* ---- losslessly packed files ---- */

/* One tensor that comes back, or a header, or the index, and what is found about it. */
typedef struct lossless {
    verifier *v;
    const uint8_t *sums;
} lossless;

/* Called with the bytes of a tensor as they were, part by part. */
typedef struct plain_parts {
    XXH3_state_t hash;
    difference difference;
    const sth_tensor_info *tensor, *original;
    uint64_t at;
} plain_parts;

/* Both in v->other: half for bytes of each. Where bits differ the difference is told in values. */
static sth_status compare_part(verifier *v, plain_parts *p, const uint8_t *bytes, uint64_t count) {
    uint64_t each = sthi_dtype_bits(p->tensor->dtype) / 8, part = STHI_JOB_CHUNK / 16;
    float *got = (float *)(void *)(v->other + STHI_JOB_CHUNK / 4),
          *wanted = (float *)(void *)(v->other + STHI_JOB_CHUNK / 2);
    bool floats = sthi_rows_is_float(p->tensor->dtype);
    for (uint64_t at = 0, some; at < count; at += some) {
        some = sthi_min_u64(part, count - at);
        STHI_TRY(sthi_checkpoint_read(v->original, p->original->file, p->original->offset + p->at + at, some,
                                      v->other));
        bool same = memcmp(v->other, bytes + at, (size_t)some) == 0;
        if (floats) {
            sthi_rows_widen(p->tensor->dtype, bytes + at, some / each, got);
            sthi_rows_widen(p->tensor->dtype, v->other, some / each, wanted);
            compare(&p->difference, got, wanted, some / each);
        }
        if (!same) p->difference.equal = false;
    }
    return STH_OK;
}

static sth_status take_part(verifier *v, plain_parts *p, const uint8_t *bytes, uint64_t count) {
    XXH3_128bits_update(&p->hash, bytes, (size_t)count);
    if (p->original) STHI_TRY(compare_part(v, p, bytes, count));
    p->at += count;
    return STH_OK;
}

static sth_status parts_of_layer(verifier *v, const sth_quant_layer *l, plain_parts *p) {
    /* Of the buffer's four pieces: a packed one is at most 1.2 x its values. */
    uint8_t *values = (uint8_t *)v->buffer, *packed = values + STHI_LOSSLESS_PIECE;
    uint64_t offset = 0;
    for (uint32_t i = 0; i < l->pieces; offset += l->lengths[i++]) {
        STHI_TRY(sthi_lossless_piece_read(v->job.quant, l, i, offset, packed, values));
        STHI_TRY(take_part(v, p, values, sthi_lossless_piece_bytes(l, i)));
        STHI_TRY(sthi_job_progress(&v->job, l->name, l->lengths[i]));
    }
    return STH_OK;
}

static sth_status parts_of_stored(verifier *v, const sth_tensor_info *t, plain_parts *p) {
    for (uint64_t at = 0; at < t->bytes;) {
        uint64_t part = sthi_min_u64(STHI_JOB_CHUNK, t->bytes - at);
        STHI_TRY(sthi_checkpoint_read(v->job.checkpoint, t->file, t->offset + at, part, v->buffer));
        STHI_TRY(take_part(v, p, (const uint8_t *)v->buffer, part));
        STHI_TRY(sthi_job_progress(&v->job, t->name, part));
        at += part;
    }
    return STH_OK;
}

static bool same_kind(const sth_tensor_info *a, const sth_tensor_info *b) {
    return a->bytes == b->bytes && strcmp(a->spelling, b->spelling) == 0;
}

static sth_status verify_row(void *context, uint64_t row, const sthi_sum_row *what) {
    const lossless *of = context;
    verifier *v = of->v;
    const sthi_originals *o = &v->job.quant->originals;
    const sth_tensor_info *t = what->tensor, *stored = t ? sthi_checkpoint_find(v->job.checkpoint, t->name) : NULL;
    const sth_quant_layer *l = t ? sthi_quant_find(v->job.quant, t->name) : NULL;
    char text[33];
    uint8_t sum[STHI_SUM_BYTES];
    if (!t) stored = what->file < o->count ? o->items[what->file].header : o->index;
    sth_verified one = {.name = stored->name, .encoding = l ? sthi_encoding_name(l->encoding) : "stored"};
    plain_parts p = {.difference = {.equal = true}, .tensor = t};
    XXH3_128bits_reset(&p.hash);
    if (t && v->original) {
        p.original = sthi_checkpoint_find(v->original, t->name);
        if (p.original && !same_kind(t, p.original)) p.original = NULL;
        one.missing = !p.original;
    }
    STHI_TRY(l ? parts_of_layer(v, l, &p) : parts_of_stored(v, stored, &p));
    XXH128_hash_t h = XXH3_128bits_digest(&p.hash);
    sthi_sum_digits(h.high64, h.low64, text);
    one.checksum = sthi_sum_of_text(text, sum) && memcmp(sum, of->sums + row * STHI_SUM_BYTES, sizeof sum) == 0;
    if (p.original) {
        conclude(&p.difference, &one);
        if (one.equal) one.cosine = 1;
    }
    report(v, &one, false);
    return STH_OK;
}

static sth_status verify_lossless(verifier *v) {
    uint8_t *sums = NULL;
    STHI_TRY(sthi_sums_read(v->job.quant, &sums));
    sth_status status = sthi_sums_each(v->job.quant, verify_row, &(lossless){v, sums});
    sthi_free(sums);
    const sthi_originals *o = &v->job.quant->originals;
    return status == STH_OK ? sthi_job_progress(&v->job, o->sums->name, o->sums->bytes + o->sizes->bytes) : status;
}

/* ---- what only the original has ---- */

/* Marks in known[] the original's tensors that are the weight of a layer. */
static sth_status mark_weights(const verifier *v, unsigned char *known) {
    for (uint64_t i = 0; v->job.quant && i < v->job.quant->count; i++) {
        const sth_tensor_info *t = NULL;
        STHI_TRY(original_weight(v, &v->job.quant->layers[i], &t));
        if (t) known[t - v->original->tensors.items] = 1;
    }
    return STH_OK;
}

static sth_status report_lost(verifier *v) {
    if (!v->original) return STH_OK;
    const sthi_tensors *all = &v->original->tensors;
    unsigned char *known = sthi_zalloc((size_t)all->count, 1);
    if (!known) return sthi_job_out_of_memory(&v->job);
    sth_status status = mark_weights(v, known);
    for (uint64_t i = 0; status == STH_OK && i < all->count; i++) {
        const char *name = all->items[i].name;
        if (known[i] || sthi_checkpoint_find(v->job.checkpoint, name)) continue;
        report(v, &(sth_verified){.name = name, .encoding = "absent", .checksum = 1, .missing = true}, false);
    }
    sthi_free(known);
    return status;
}

/* ---- the whole ---- */

static sth_status verify_all(verifier *v) {
    const sth_quant *q = v->job.quant;
    const sthi_tensors *all = &v->job.checkpoint->tensors;
    if (q && q->format == STH_QUANT_LOSSLESS) {
        STHI_TRY(verify_lossless(v));
        return report_lost(v);
    }
    for (uint64_t i = 0; q && i < q->count; i++) STHI_TRY(verify_layer(v, &q->layers[i]));
    for (uint64_t i = 0; q && i < q->plain_count; i++) STHI_TRY(verify_stored(v, q->plain[i]));
    for (uint64_t i = 0; !q && i < all->count; i++) STHI_TRY(verify_stored(v, &all->items[i]));
    return report_lost(v);
}

/* A layer index has its checksums in its entries. */
static sth_status read_index(verifier *v, const char *path) {
    sthi_file file;
    json_t *root = NULL, *entry;
    size_t at;
    STHI_TRY(sthi_file_open(path, &file));
    sth_status status = sthi_json_read(&file, 0, file.size, &root);
    sthi_file_close(&file);
    STHI_TRY(status);
    v->index = json_object();
    json_array_foreach (json_object_get(root, "layers"), at, entry) {
        const char *name = json_string_value(json_object_get(entry, "name"));
        json_t *sum = json_object_get(entry, "xxh3_128");
        if (name && sum) json_object_set(v->index, name, sum);
    }
    json_decref(root);
    v->checksums = v->index;
    return STH_OK;
}

static sth_status prepare(verifier *v, const char *path, const char *original) {
    if (v->job.quant) v->checksums = json_object_get(v->job.quant->description, "xxh3_128");
    else if (sthi_path_ends_with(path, ".json")) STHI_TRY(read_index(v, path));
    if (original) STHI_TRY(sthi_checkpoint_open(original, &v->original));
    v->buffer = sthi_alloc(STHI_JOB_CHUNK);
    v->other = sthi_alloc(STHI_JOB_CHUNK);
    for (uint64_t i = 0; i < v->job.checkpoint->tensors.count; i++)
        v->job.all_work += v->job.checkpoint->tensors.items[i].bytes;
    return v->buffer && v->other ? STH_OK : sthi_job_out_of_memory(&v->job);
}

sth_status sthi_verify(const char *path, const char *original, const sth_pack_options *options,
                       sth_verified_function each, sth_verify_result *out_result) {
    verifier v = {.each = each};
    STHI_TRY(sthi_pack_check_options(options));
    STHI_TRY(sthi_job_open(path, options, true, &v.job));
    sth_status status = prepare(&v, path, original);
    if (status == STH_OK) status = verify_all(&v);
    if (status == STH_OK) *out_result = v.result;
    sthi_free(v.buffer);
    sthi_free(v.other);
    json_decref(v.index);
    sthi_checkpoint_close(v.original);
    sthi_job_close(&v.job);
    return status;
}
