/* Encoding of packed images: rows to codes and scales. Rows depend on nothing but their own values, so that any number
 * of threads gives the same bytes; errors are summed by segment, in order. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/four_bits.h"
#include "quant/fp8.h"
#include "quant/int8.h"
#include "quant/lossless.h"
#include "quant/segment.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

STHI_KNOWS_ENCODINGS(7);

enum { MOST_THREADS = 16 };

static void widen(const sth_segment *s, const uint8_t *row, float *out) {
    for (uint64_t k = 0; k < s->cols; k++) {
        uint16_t h;
        if (s->dtype == STH_DTYPE_F32) {
            memcpy(&out[k], row + 4 * k, sizeof *out);
            continue;
        }
        memcpy(&h, row + 2 * k, sizeof h);
        out[k] = s->dtype == STH_DTYPE_BF16 ? sthi_from_bf16(h) : sthi_from_f16(h);
    }
}

static float largest(const float *w, uint64_t n) {
    float most = 0;
    for (uint64_t k = 0; k < n; k++) most = fmaxf(most, fabsf(w[k]));
    return most;
}

static void fp8_row(const sth_segment *s, const float *w, uint8_t *codes, float *out_scale) {
    float scale = fmaxf(largest(w, s->cols) / 448, 0x1p-100f);
    for (uint64_t k = 0; k < s->cols; k++) codes[k] = sthi_e4m3_code(w[k] / scale);
    memset(codes + s->cols, 0, (size_t)(s->stride - s->cols));
    *out_scale = scale;
}

/* The scale is rounded before the codes are chosen, so that they are those of the scale that is stored. */
static void int4_group(const float *w, uint64_t n, uint8_t *codes, uint16_t *out_scale) {
    *out_scale = sthi_to_bf16(fmaxf(largest(w, n) / 7, 0x1p-100f));
    float scale = sthi_from_bf16(*out_scale);
    memset(codes, 0, STHI_INT4_GROUP / 2);
    for (uint64_t k = 0; k < n; k++) {
        int q = (int)fminf(fmaxf(rintf(w[k] / scale), -8), 7);
        codes[k / 2] |= (uint8_t)((q & 15) << (k % 2 ? 4 : 0));
    }
}

static void int4_row(const sth_segment *s, const float *w, uint8_t *codes, uint8_t *scales) {
    for (uint64_t begin = 0, g = 0; begin < s->cols; begin += STHI_INT4_GROUP, g++) {
        uint16_t scale;
        int4_group(w + begin, sthi_min_u64(STHI_INT4_GROUP, s->cols - begin), codes + begin / 2, &scale);
        memcpy(scales + 2 * g, &scale, sizeof scale);
    }
}

/* One row, from the floats in scratch[0..cols) to the packed image, and its error. */
static void encode_row(const sth_segment *s, uint64_t row, float *w, uint8_t *packed, sth_transfer_error *error) {
    uint8_t *codes = packed + s->codes + row * s->stride, *scales = packed + s->scales;
    uint64_t groups = (s->cols + STHI_INT4_GROUP - 1) / STHI_INT4_GROUP;
    float scale, *decoded = w + s->cols;
    if (s->encoding == STH_TRANSFER_INT4) {
        scales += 2 * groups * row;
        int4_row(s, w, codes, scales);
    } else {
        scales += 4 * row;
        if (s->encoding == STH_TRANSFER_FP8) fp8_row(s, w, codes, &scale);
        else sthi_int8_encode_row(w, s->cols, s->stride, (signed char *)codes, &scale);
        memcpy(scales, &scale, sizeof scale);
    }
    sth_segment one = *s;
    one.rows = 1;
    one.dtype = STH_DTYPE_F32;
    sthi_segment_decode_part(&one, &(sthi_segment_parts){.codes = codes, .scales = scales}, 0, 4 * s->cols, decoded);
    for (uint64_t k = 0; k < s->cols; k++) {
        double d = (double)decoded[k] - (double)w[k];
        error->error += d * d;
        error->reference += (double)w[k] * (double)w[k];
    }
}

sth_status sthi_segment_encode(const sth_segment *s, const uint8_t *place, uint8_t *packed, float *scratch,
                               sth_transfer_error *error) {
    uint64_t row_bytes = sthi_segment_place_bytes(s) / s->rows;
    if (s->encoding == STH_TRANSFER_LOSSLESS) {
        if (sthi_lossless_pack(s->dtype, place + s->place_offset, s->cols, packed + s->codes, s->stride)) return STH_OK;
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, NULL,
                         "the values at byte %llu of the place have more unlike exponents than their segment of %llu "
                         "bytes has room for; lay the unit out again with sth_transfer_fit()",
                         (unsigned long long)s->place_offset, (unsigned long long)s->stride);
    }
    if (s->zeros != STH_TRANSFER_NONE) memset(packed + s->zeros, 0, 4 * s->rows);
    for (uint64_t row = 0; row < s->rows; row++) {
        const uint8_t *from = place + s->place_offset + row * row_bytes;
        if (s->encoding == STH_TRANSFER_VERBATIM) {
            memcpy(packed + s->codes, from, row_bytes);
            continue;
        }
        widen(s, from, scratch);
        for (uint64_t k = 0; k < s->cols; k++)
            if (!isfinite(scratch[k]))
                return sthi_fail(STH_CORRUPT_DATA, NULL, 0, NULL,
                                 "element [%llu, %llu] of the rows at byte %llu of the place is not finite",
                                 (unsigned long long)row, (unsigned long long)k, (unsigned long long)s->place_offset);
        encode_row(s, row, scratch, packed, error);
    }
    return STH_OK;
}

typedef struct encoding {
    const sth_segment *segments;
    uint32_t count;
    const uint8_t *place;
    uint8_t *packed;
    uint64_t most_cols;
    atomic_uint next;
    sth_transfer_error *errors; /* [count] */
} encoding;

typedef struct encoder {
    encoding *job;
    sthi_thread thread;
    sthi_error_copy failure; /* status OK: none */
    uint32_t failed;         /* the segment */
} encoder;

static sth_status encode_some(encoding *e, uint32_t *out_failed) {
    float *scratch = sthi_alloc(2 * e->most_cols * sizeof *scratch);
    if (!scratch) return sthi_no_memory(NULL, "rows to encode");
    sth_status status = STH_OK;
    for (uint32_t i; status == STH_OK && (i = atomic_fetch_add(&e->next, 1)) < e->count; *out_failed = i)
        status = sthi_segment_encode(&e->segments[i], e->place, e->packed, scratch, &e->errors[i]);
    sthi_free(scratch);
    if (status != STH_OK) atomic_store(&e->next, e->count); /* the others may stop */
    return status;
}

static void *encoder_main(void *arg) {
    encoder *me = arg;
    if (encode_some(me->job, &me->failed) != STH_OK) sthi_error_save(&me->failure);
    return NULL;
}

static sth_status run(encoding *e, uint32_t threads, uint32_t *out_failed) {
    encoder others[MOST_THREADS - 1];
    uint32_t started = 0;
    for (; started + 1 < threads; started++) {
        others[started] = (encoder){.job = e, .failure = {.status = STH_OK}};
        if (sthi_thread_start(&others[started].thread, "sth-encode", encoder_main, &others[started]) != STH_OK) break;
    }
    uint32_t failed = 0;
    sth_status status = encode_some(e, &failed);
    sthi_error_copy why = {.status = STH_OK};
    if (status != STH_OK) sthi_error_save(&why);
    for (uint32_t i = 0; i < started; i++) {
        sthi_thread_join(others[i].thread);
        if (why.status != STH_OK) continue;
        why = others[i].failure;
        failed = others[i].failed;
    }
    if (out_failed) *out_failed = failed;
    return why.status == STH_OK ? STH_OK : sthi_error_restore(&why);
}

sth_status sthi_segments_encode(const sth_segment *s, uint32_t count, const void *place, void *packed, uint32_t threads,
                                sth_transfer_error *error, uint32_t *out_failed) {
    encoding e = {.segments = s, .count = count, .place = place, .packed = packed, .most_cols = 1};
    for (uint32_t i = 0; i < count; i++) {
        if (sthi_is_four_bits((int)s[i].encoding))
            return sthi_fail(STH_UNSUPPORTED, NULL, 0, NULL, "segment %u is of a file's 4 bits, which are not encoded",
                             i);
        if (s[i].encoding != STH_TRANSFER_VERBATIM && s[i].encoding != STH_TRANSFER_LOSSLESS)
            e.most_cols = sthi_max_u64(e.most_cols, s[i].cols);
    }
    if (!threads) threads = (uint32_t)sthi_cpu_count();
    threads = (uint32_t)sthi_min_u64(sthi_min_u64(threads, MOST_THREADS), count);
    e.errors = sthi_zalloc(count ? count : 1, sizeof *e.errors);
    if (!e.errors) return sthi_no_memory(NULL, "%u segments to encode", count);
    atomic_init(&e.next, 0);
    sth_status status = run(&e, threads, out_failed);
    for (uint32_t i = 0; error && i < count; i++) {
        error->error += e.errors[i].error;
        error->reference += e.errors[i].reference;
    }
    sthi_free(e.errors);
    return status;
}
