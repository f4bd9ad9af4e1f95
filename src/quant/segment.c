/* Packed images: layout, checks, and the reference decoder. What it computes, in this order, is the definition of each
 * encoding:
 *
 *   INT8   ((float)q - zero point) * scale
 *   FP8    value(code) * scale
 *   INT4   (float)q * (float)scale
 *
 * each operation rounded to float32 (no product and difference become one: -std=c17 switches that off for GCC, the
 * pragma for clang), the result rounded to the dtype, to nearest, ties to even. Pure; no locks. */
#include "quant/segment.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "quant/fp8.h"
#include "store/dtype.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

typedef unsigned long long ull;

enum { ALIGN = 512, VECTOR = 16 };

static uint64_t round_to(uint64_t n, uint64_t grain) { return (n + grain - 1) / grain * grain; }

static uint64_t groups_of(const sth_segment *s) { return (s->cols + STHI_INT4_GROUP - 1) / STHI_INT4_GROUP; }

static uint64_t element_bytes(const sth_segment *s) {
    return s->encoding == STH_TRANSFER_VERBATIM ? 1 : sthi_dtype_bits(s->dtype) / 8;
}

static uint64_t stride_of(const sth_segment *s) {
    switch (s->encoding) {
    case STH_TRANSFER_VERBATIM: return 0;
    case STH_TRANSFER_INT4: return groups_of(s) * (STHI_INT4_GROUP / 2);
    default: return round_to(s->cols, VECTOR);
    }
}

static uint64_t codes_bytes(const sth_segment *s) {
    return s->encoding == STH_TRANSFER_VERBATIM ? s->cols : s->rows * s->stride;
}

static uint64_t scales_bytes(const sth_segment *s) {
    if (s->encoding == STH_TRANSFER_VERBATIM) return 0;
    return s->encoding == STH_TRANSFER_INT4 ? 2 * s->rows * groups_of(s) : 4 * s->rows;
}

uint64_t sthi_segment_place_bytes(const sth_segment *s) { return s->rows * s->cols * element_bytes(s); }

void sthi_segment_span(const sth_segment *s, uint64_t *out_begin, uint64_t *out_end) {
    *out_begin = s->codes;
    *out_end = s->codes + codes_bytes(s);
    if (s->scales != STH_TRANSFER_NONE) {
        *out_begin = sthi_min_u64(*out_begin, s->scales);
        *out_end = sthi_max_u64(*out_end, s->scales + scales_bytes(s));
    }
    if (s->zeros != STH_TRANSFER_NONE) {
        *out_begin = sthi_min_u64(*out_begin, s->zeros);
        *out_end = sthi_max_u64(*out_end, s->zeros + 4 * s->rows);
    }
}

/* ---- checks ---- */

static const char *wrong_shape(const sth_segment *s) {
    uint64_t bytes;
    if ((unsigned)s->encoding >= STH_TRANSFER_COUNT) return "has an encoding that there is none of";
    if (!s->rows || !s->cols) return "is empty";
    if (s->encoding == STH_TRANSFER_VERBATIM) return s->rows == 1 ? NULL : "is verbatim and has more than one row";
    if (s->dtype != STH_DTYPE_F32 && s->dtype != STH_DTYPE_BF16 && s->dtype != STH_DTYPE_F16)
        return "has a dtype that is not F32, BF16 or F16";
    if (!sthi_mul_u64(s->rows, round_to(s->cols, 64), &bytes) || s->cols > UINT32_MAX || bytes > UINT64_MAX / 16)
        return "is too large";
    return s->place_offset % VECTOR ? "does not begin at a multiple of 16 bytes of the place" : NULL;
}

static bool part_ok(uint64_t offset, uint64_t bytes, uint64_t packed_bytes) {
    return offset % VECTOR == 0 && sthi_range_inside(offset, bytes, packed_bytes);
}

static const char *wrong_parts(const sth_segment *s, uint64_t packed_bytes) {
    bool verbatim = s->encoding == STH_TRANSFER_VERBATIM;
    if (s->stride % VECTOR || s->stride < stride_of(s) || (verbatim && s->stride)) return "has an impossible stride";
    uint64_t bytes;
    if (!verbatim && !sthi_mul_u64(s->rows, s->stride, &bytes)) return "is too large";
    if (!part_ok(s->codes, codes_bytes(s), packed_bytes)) return "has codes that do not lie in the packed image";
    if (verbatim != (s->scales == STH_TRANSFER_NONE)) return "has scales where there are none, or none where it needs them";
    if (!verbatim && !part_ok(s->scales, scales_bytes(s), packed_bytes))
        return "has scales that do not lie in the packed image";
    if (s->zeros == STH_TRANSFER_NONE) return NULL;
    if (s->encoding != STH_TRANSFER_INT8) return "has zero points, which only int8 has";
    return part_ok(s->zeros, 4 * s->rows, packed_bytes) ? NULL : "has zero points that do not lie in the packed image";
}

sth_status sthi_segments_check(const sth_segment *s, uint32_t count, uint64_t place_bytes, uint64_t packed_bytes,
                               const char *object) {
    uint64_t place = 0, packed = 0;
    for (uint32_t i = 0; i < count; i++) {
        const char *wrong = wrong_shape(&s[i]);
        if (!wrong) wrong = wrong_parts(&s[i], packed_bytes);
        uint64_t begin = 0, end = 0;
        if (!wrong) sthi_segment_span(&s[i], &begin, &end);
        if (!wrong && (s[i].place_offset < place || begin < packed)) wrong = "overlaps the one before it, or is not in order";
        if (!wrong && !sthi_range_inside(s[i].place_offset, sthi_segment_place_bytes(&s[i]), place_bytes))
            wrong = "does not fit the place";
        if (wrong) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, object, "'%.200s': segment %u %s", object, i, wrong);
        place = s[i].place_offset + sthi_segment_place_bytes(&s[i]);
        packed = end;
    }
    return STH_OK;
}

/* ---- layout ---- */

typedef struct layout {
    sth_segment *out;
    uint32_t capacity, count;
    uint64_t packed;
} layout;

static void put(layout *l, sth_segment s, bool zeros) {
    s.codes = l->packed;
    s.scales = s.zeros = STH_TRANSFER_NONE;
    l->packed = round_to(l->packed + codes_bytes(&s), ALIGN);
    if (s.encoding != STH_TRANSFER_VERBATIM) {
        s.scales = l->packed;
        l->packed = round_to(l->packed + scales_bytes(&s), ALIGN);
    }
    if (zeros) {
        s.zeros = l->packed;
        l->packed = round_to(l->packed + 4 * s.rows, ALIGN);
    }
    if (l->out && l->count < l->capacity) l->out[l->count] = s;
    l->count++;
}

static void split_bytes(layout *l, sth_segment whole, uint64_t piece) {
    for (uint64_t at = 0; at < whole.cols; at += piece) {
        sth_segment s = whole;
        s.place_offset += at;
        s.cols = sthi_min_u64(piece, whole.cols - at);
        put(l, s, false);
    }
}

/* Every part begins at a multiple of 16 bytes of the place: so many rows are not taken apart. */
static uint64_t rows_together(const sth_segment *s) {
    uint64_t rows = 1, row = s->cols * element_bytes(s);
    while (rows * row % VECTOR) rows *= 2;
    return rows;
}

static void split_rows(layout *l, sth_segment whole, bool zeros, uint64_t piece) {
    sth_segment one = whole;
    one.rows = 1;
    uint64_t row = one.stride + scales_bytes(&one) + (zeros ? 4 : 0), together = rows_together(&whole);
    uint64_t padding = (zeros ? 3 : 2) * ALIGN, room = piece > padding ? piece - padding : 0;
    uint64_t rows = sthi_max_u64(room / row / together, 1) * together;
    for (uint64_t at = 0; at < whole.rows; at += rows) {
        sth_segment s = whole;
        s.place_offset += at * whole.cols * element_bytes(&whole);
        s.rows = sthi_min_u64(rows, whole.rows - at);
        put(l, s, zeros);
    }
}

static sth_status end_layout(const layout *l, uint32_t *out_count, uint64_t *out_packed_end) {
    if (l->out && l->count > l->capacity)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "a layout of %u segments does not fit %u", l->count,
                         l->capacity);
    *out_count = l->count;
    *out_packed_end = l->packed;
    return STH_OK;
}

sth_status sthi_segments_layout(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, sth_segment *out,
                                uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_bytes) {
    layout l = {.out = out, .capacity = capacity};
    uint64_t piece = sthi_max_u64(piece_bytes / ALIGN * ALIGN, ALIGN), place = 0;
    for (uint32_t i = 0; i < count; i++) {
        sth_segment s = tensors[i];
        const char *wrong = wrong_shape(&s);
        if (!wrong && s.place_offset < place) wrong = "overlaps the one before it, or is not in order";
        if (wrong) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "tensor %u of a layout %s", i, wrong);
        place = s.place_offset + sthi_segment_place_bytes(&s);
        s.stride = stride_of(&s);
        if (s.encoding == STH_TRANSFER_VERBATIM) split_bytes(&l, s, piece);
        else split_rows(&l, s, false, piece);
    }
    return end_layout(&l, out_count, out_packed_bytes);
}

sth_status sthi_segments_of_rows(const sth_segment *whole, bool zeros, uint64_t piece_bytes, uint64_t packed_offset,
                                 sth_segment *out, uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_end) {
    layout l = {.out = out, .capacity = capacity, .packed = packed_offset};
    const char *wrong = wrong_shape(whole);
    if (!wrong && (whole->stride % VECTOR || whole->stride < stride_of(whole))) wrong = "has an impossible stride";
    if (!wrong && whole->stride > UINT64_MAX / 16 / whole->rows) wrong = "is too large";
    if (wrong) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "a tensor to be laid out %s", wrong);
    split_rows(&l, *whole, zeros, sthi_max_u64(piece_bytes / ALIGN * ALIGN, ALIGN));
    return end_layout(&l, out_count, out_packed_end);
}

/* ---- decoding ---- */

static float f32_at(const uint8_t *p, uint64_t i) {
    float x;
    memcpy(&x, p + 4 * i, sizeof x);
    return x;
}

static float bf16_at(const uint8_t *p, uint64_t i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, sizeof h);
    return sthi_from_bf16(h);
}

typedef struct row_of {
    const uint8_t *codes, *group_scales;
    float scale, zero;
} row_of;

static float value(const sth_segment *s, const row_of *r, uint64_t k) {
    switch (s->encoding) {
    case STH_TRANSFER_INT8: return ((float)(int8_t)r->codes[k] - r->zero) * r->scale;
    case STH_TRANSFER_FP8: return sthi_e4m3_value(r->codes[k]) * r->scale;
    default: {
        unsigned byte = r->codes[k / 2], code = k % 2 ? byte >> 4 : byte & 15;
        return (float)((int)(code ^ 8u) - 8) * bf16_at(r->group_scales, k / STHI_INT4_GROUP);
    }
    }
}

static void store(sth_dtype dtype, float x, uint8_t *out) {
    uint16_t h = dtype == STH_DTYPE_BF16 ? sthi_to_bf16(x) : sthi_to_f16(x);
    if (dtype == STH_DTYPE_F32) memcpy(out, &x, sizeof x);
    else memcpy(out, &h, sizeof h);
}

void sthi_segment_decode_part(const sth_segment *s, const void *codes, const void *scales, const void *zeros,
                              uint64_t begin, uint64_t end, void *out) {
    uint8_t *to = out;
    if (s->encoding == STH_TRANSFER_VERBATIM) {
        memcpy(to, (const uint8_t *)codes + begin, end - begin);
        return;
    }
    uint64_t each = element_bytes(s), at = begin / each, last = end / each;
    while (at < last) {
        uint64_t row = at / s->cols, k = at % s->cols, stop = sthi_min_u64(s->cols, k + (last - at));
        row_of r = {.codes = (const uint8_t *)codes + row * s->stride};
        if (s->encoding == STH_TRANSFER_INT4) r.group_scales = (const uint8_t *)scales + 2 * row * groups_of(s);
        else r.scale = f32_at(scales, row);
        if (zeros) r.zero = f32_at(zeros, row);
        at += stop - k;
        for (; k < stop; k++, to += each) store(s->dtype, value(s, &r, k), to);
    }
}

void sthi_segment_decode(const sth_segment *s, const uint8_t *packed, uint64_t packed_begin, uint64_t begin, uint64_t end,
                         void *out) {
    const uint8_t *scales = s->scales == STH_TRANSFER_NONE ? NULL : packed + (s->scales - packed_begin);
    const uint8_t *zeros = s->zeros == STH_TRANSFER_NONE ? NULL : packed + (s->zeros - packed_begin);
    sthi_segment_decode_part(s, packed + (s->codes - packed_begin), scales, zeros, begin, end, out);
}
