/* Packed images: layout, checks, and the reference decoder. What it computes, in this order, is the definition of each
 * encoding:
 *
 *   INT8   ((float)q - zero point) * scale
 *   FP8    value(code) * scale
 *   INT4   (float)q * (float)scale
 *
 * LOSSLESS, lossless.c: bits; and what files hold in 4 bits, four_bits.c: each operation rounded to
 * float32 (no product and difference become one: -std=c17 switches that off for GCC, the pragma for
 * clang), the result rounded to the dtype, to nearest, ties to even.
 * Pure; no locks. */
#include "quant/segment.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/workers.h"
#include "quant/four_bits.h"
#include "quant/fp8.h"
#include "quant/lossless.h"
#include "quant/store.h"
#include "store/dtype.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

typedef unsigned long long ull;

STHI_KNOWS_ENCODINGS(7);

enum { ALIGN = 512, VECTOR = 16, SEGMENTS_MOST = 1 << 24 };
#define BYTES_MOST (UINT64_MAX / 16) /* of a tensor and of a packed image */

static uint64_t round_to(uint64_t n, uint64_t grain) { return (n + grain - 1) / grain * grain; }

static uint64_t groups_of(const sth_segment *s) { return (s->cols + STHI_INT4_GROUP - 1) / STHI_INT4_GROUP; }

static uint64_t element_bytes(const sth_segment *s) {
    return s->encoding == STH_TRANSFER_VERBATIM ? 1 : sthi_dtype_bits(s->dtype) / 8;
}

static bool has_scales(const sth_segment *s) {
    return s->encoding != STH_TRANSFER_VERBATIM && s->encoding != STH_TRANSFER_LOSSLESS;
}

static uint64_t stride_of(const sth_segment *s) {
    switch (s->encoding) {
    case STH_TRANSFER_VERBATIM: return 0;
    case STH_TRANSFER_INT4: return groups_of(s) * (STHI_INT4_GROUP / 2);
    default: return round_to(s->cols, VECTOR);
    }
}

uint64_t sthi_segment_place_bytes(const sth_segment *s) { return s->rows * s->cols * element_bytes(s); }

/* ---- parts, in the order of the image */

enum { CODES, SCALES, ZEROS, UP, DOWN, SMOOTH, PARTS };

static uint64_t *offset_of(sth_segment *s, int part) {
    uint64_t *const all[PARTS] = {&s->codes, &s->scales, &s->zeros, &s->up, &s->down, &s->smooth};
    return all[part];
}

/* Bytes of each part, 0 for none; of sizes that were checked. */
static void part_bytes(const sth_segment *s, uint64_t out[PARTS]) {
    memset(out, 0, PARTS * sizeof *out);
    if (sthi_is_four_bits(s->encoding)) {
        sthi_four_bytes four;
        (void)sthi_four_wrong(s, &four);
        out[CODES] = four.codes, out[SCALES] = four.scales, out[UP] = four.up, out[DOWN] = four.down;
        out[SMOOTH] = four.smooth;
        return;
    }
    out[CODES] = s->encoding == STH_TRANSFER_VERBATIM ? s->cols : s->rows * s->stride;
    if (!has_scales(s)) return;
    out[SCALES] = s->encoding == STH_TRANSFER_INT4 ? 2 * s->rows * groups_of(s) : 4 * s->rows;
    out[ZEROS] = s->zeros != STH_TRANSFER_NONE ? 4 * s->rows : 0;
}

void sthi_segment_span(const sth_segment *s, uint64_t *out_begin, uint64_t *out_end) {
    uint64_t bytes[PARTS];
    sth_segment copy = *s;
    part_bytes(s, bytes);
    *out_begin = UINT64_MAX;
    *out_end = 0;
    for (int p = 0; p < PARTS; p++) {
        if (!bytes[p]) continue;
        *out_begin = sthi_min_u64(*out_begin, *offset_of(&copy, p));
        *out_end = sthi_max_u64(*out_end, *offset_of(&copy, p) + bytes[p]);
    }
}

sthi_segment_parts sthi_segment_find(const sth_segment *s, const uint8_t *packed, uint64_t packed_begin) {
    uint64_t bytes[PARTS];
    sth_segment copy = *s;
    const uint8_t *at[PARTS];
    part_bytes(s, bytes);
    for (int p = 0; p < PARTS; p++) at[p] = bytes[p] ? packed + (*offset_of(&copy, p) - packed_begin) : NULL;
    return (sthi_segment_parts){at[CODES], at[SCALES], at[ZEROS], at[UP], at[DOWN], at[SMOOTH]};
}

/* ---- checks ---- */

static const char *wrong_shape(const sth_segment *s) {
    uint64_t bytes;
    if ((unsigned)s->encoding >= STH_TRANSFER_COUNT) return "has an encoding that there is none of";
    if (!s->rows || !s->cols) return "is empty";
    if (s->place_offset > BYTES_MOST || s->cols > BYTES_MOST) return "is too large";
    if (s->encoding == STH_TRANSFER_VERBATIM) return s->rows == 1 ? NULL : "is verbatim and has more than one row";
    if (s->dtype != STH_DTYPE_F32 && s->dtype != STH_DTYPE_BF16 && s->dtype != STH_DTYPE_F16)
        return "has a dtype that is not F32, BF16 or F16";
    if (s->encoding == STH_TRANSFER_LOSSLESS && s->rows != 1) return "is lossless and has more than one row";
    if (s->cols > UINT32_MAX || !sthi_mul_u64(s->rows, round_to(s->cols, 64), &bytes) || bytes > BYTES_MOST)
        return "is too large";
    return s->place_offset % VECTOR ? "does not begin at a multiple of 16 bytes of the place" : NULL;
}

static const char *wrong_stride(const sth_segment *s) {
    sthi_four_bytes four;
    uint64_t bytes;
    if (sthi_is_four_bits(s->encoding)) return sthi_four_wrong(s, &four);
    if (s->encoding == STH_TRANSFER_VERBATIM) return s->stride ? "has an impossible stride" : NULL;
    if (s->encoding == STH_TRANSFER_LOSSLESS)
        return sthi_lossless_has_size(s->dtype, s->cols, s->stride) ? NULL : "has an impossible stride";
    bool int8 = s->encoding == STH_TRANSFER_INT8; /* rows of files have any length */
    if (s->stride < (int8 ? s->cols : stride_of(s)) || (!int8 && s->stride % VECTOR)) return "has an impossible stride";
    return sthi_mul_u64(s->rows, s->stride, &bytes) ? NULL : "is too large";
}

/* Of a segment whose shape and stride are right. */
static const char *wrong_parts(const sth_segment *s, uint64_t packed_bytes) {
    static const char *const outside[PARTS] = {"has codes that do not lie in the packed image",
                                               "has scales that do not lie in the packed image",
                                               "has zero points that do not lie in the packed image",
                                               "has an up factor that does not lie in the packed image",
                                               "has a down factor that does not lie in the packed image",
                                               "has a smooth that does not lie in the packed image"};
    uint64_t bytes[PARTS];
    sth_segment copy = *s;
    if (has_scales(s) == (s->scales == STH_TRANSFER_NONE))
        return "has scales where there are none, or none where it needs them";
    if (s->zeros != STH_TRANSFER_NONE && s->encoding != STH_TRANSFER_INT8)
        return "has zero points, which only int8 has";
    part_bytes(s, bytes);
    for (int p = 0; p < PARTS; p++) {
        uint64_t at = *offset_of(&copy, p);
        if (bytes[p] && (at % VECTOR || !sthi_range_inside(at, bytes[p], packed_bytes))) return outside[p];
    }
    return NULL;
}

sth_status sthi_segments_check(const sth_segment *s, uint32_t count, uint64_t place_bytes, uint64_t packed_bytes,
                               const char *object) {
    uint64_t place = 0, packed = 0;
    for (uint32_t i = 0; i < count; i++) {
        const char *wrong = wrong_shape(&s[i]);
        if (!wrong) wrong = wrong_stride(&s[i]);
        if (!wrong) wrong = wrong_parts(&s[i], packed_bytes);
        uint64_t begin = 0, end = 0;
        if (!wrong) sthi_segment_span(&s[i], &begin, &end);
        if (!wrong && (s[i].place_offset < place || begin < packed))
            wrong = "overlaps the one before it, or is not in order";
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
    bool too_large; /* it has more segments or bytes than a layout may have */
} layout;

/* s: with the parts that it has. */
static void put(layout *l, sth_segment s) {
    uint64_t bytes[PARTS];
    part_bytes(&s, bytes);
    for (int p = 0; p < PARTS; p++) {
        *offset_of(&s, p) = bytes[p] ? l->packed : STH_TRANSFER_NONE;
        if (bytes[p]) l->packed = round_to(l->packed + bytes[p], ALIGN);
    }
    if (l->out && l->count < l->capacity) l->out[l->count] = s;
    l->count++;
    if (l->packed > BYTES_MOST) l->too_large = true;
}

/* A tensor of `n` parts, so many of them in a segment. */
static bool has_room(layout *l, uint64_t n, uint64_t together) {
    if (n / together >= SEGMENTS_MOST - l->count) l->too_large = true;
    return !l->too_large;
}

/* LOSSLESS: bytes of so many values as they are, and the most that they take. */
static uint64_t plain_bytes(const sth_segment *s) { return round_to(s->cols * element_bytes(s), VECTOR); }

/* VERBATIM and LOSSLESS: one row of elements, so many of them in a segment. */
static void split_row(layout *l, sth_segment whole, uint64_t together) {
    if (!has_room(l, whole.cols, together)) return;
    for (uint64_t at = 0; at < whole.cols; at += together) {
        sth_segment s = whole;
        s.place_offset += at * element_bytes(&whole);
        s.cols = sthi_min_u64(together, whole.cols - at);
        if (s.encoding == STH_TRANSFER_LOSSLESS) s.stride = plain_bytes(&s);
        put(l, s);
    }
}

/* LOSSLESS: whole tiles, of which the plain bytes fit a piece. */
static uint64_t elements_of_piece(const sth_segment *s, uint64_t piece) {
    uint64_t tile = STHI_TILE_ELEMENTS * element_bytes(s);
    return sthi_max_u64(piece / tile, 1) * STHI_TILE_ELEMENTS;
}

/* Every part begins at a multiple of 16 bytes of the place: so many rows are not taken apart. */
static uint64_t rows_together(const sth_segment *s) {
    uint64_t rows = 1, row = s->cols * element_bytes(s);
    if (s->encoding == STH_TRANSFER_FILE_INT4) return ALIGN / 2; /* each group's scales are a range of a file */
    if (s->encoding == STH_TRANSFER_FILE_NVFP4) return STHI_TILE_ROWS;
    while (rows * row % VECTOR) rows *= 2;
    return rows;
}

/* Packed bytes of a row (of 256, and 256th of it), and of what all segments carry. */
static uint64_t row_bytes(const sth_segment *whole, uint64_t *out_shared, uint64_t *out_padding) {
    uint64_t bytes[PARTS], sum = 0, parts = 0, together = rows_together(whole);
    sth_segment some = *whole;
    some.rows = together;
    if (some.encoding == STH_TRANSFER_FILE_INT4) some.pitch = 2 * together;
    part_bytes(&some, bytes);
    for (int p = 0; p < PARTS; p++) parts += bytes[p] != 0;
    for (int p = 0; p < DOWN; p++) sum += bytes[p];
    *out_shared = bytes[DOWN] + bytes[SMOOTH];
    *out_padding = parts * ALIGN;
    return sum / together;
}

/* As many rows as fit a piece; where all segments carry something, as many as make it a quarter of them. */
static uint64_t rows_of_piece(const sth_segment *whole, uint64_t piece) {
    uint64_t shared, padding, row = row_bytes(whole, &shared, &padding), together = rows_together(whole);
    uint64_t room = piece > padding + shared ? piece - padding - shared : 0;
    uint64_t rows = sthi_max_u64(room / row / together, 1) * together;
    return sthi_max_u64(rows, round_to(3 * shared / row, together));
}

/* So many rows of the tensor, from row `at` on. */
static sth_segment rows_from(const sth_segment *whole, uint64_t at, uint64_t rows) {
    sth_segment s = *whole;
    s.place_offset += at * whole->cols * element_bytes(whole);
    s.rows = sthi_min_u64(rows, whole->rows - at);
    if (s.encoding == STH_TRANSFER_FILE_INT4)
        s.pitch = s.rows == whole->rows ? 2 * s.rows : round_to(2 * s.rows, ALIGN);
    return s;
}

static void split_rows(layout *l, sth_segment whole, uint64_t piece) {
    uint64_t rows = rows_of_piece(&whole, piece);
    if (!has_room(l, whole.rows, rows)) return;
    for (uint64_t at = 0; at < whole.rows; at += rows) put(l, rows_from(&whole, at, rows));
}

static uint64_t piece_of(uint64_t bytes) { return sthi_max_u64(bytes / ALIGN * ALIGN, ALIGN); }

static sth_status end_layout(const layout *l, uint32_t *out_count, uint64_t *out_packed_end) {
    if (l->too_large)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "a layout of more than %d segments, or of more bytes than any memory has; give larger pieces",
                         SEGMENTS_MOST);
    if (l->out && l->count > l->capacity)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "a layout of %u segments does not fit %u", l->count,
                         l->capacity);
    *out_count = l->count;
    *out_packed_end = l->packed;
    return STH_OK;
}

/* lossless: tensors may be so; their segments have the most bytes that they can have. */
static sth_status lay_out(layout *l, const sth_segment *tensors, uint32_t count, uint64_t piece, bool lossless) {
    uint64_t place = 0;
    for (uint32_t i = 0; i < count; i++) {
        sth_segment s = tensors[i];
        const char *wrong = wrong_shape(&s);
        if (!wrong && sthi_is_four_bits(s.encoding)) wrong = "has an encoding that only files have";
        if (!wrong && !lossless && s.encoding == STH_TRANSFER_LOSSLESS)
            wrong = "is lossless: its size is that of its values, see sth_transfer_fit()";
        if (!wrong && s.place_offset < place) wrong = "overlaps the one before it, or is not in order";
        if (wrong) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "tensor %u of a layout %s", i, wrong);
        place = s.place_offset + sthi_segment_place_bytes(&s);
        s.stride = stride_of(&s);
        s.zeros = STH_TRANSFER_NONE;
        if (s.encoding == STH_TRANSFER_VERBATIM) split_row(l, s, piece);
        else if (s.encoding == STH_TRANSFER_LOSSLESS) split_row(l, s, elements_of_piece(&s, piece));
        else split_rows(l, s, piece);
    }
    return STH_OK;
}

sth_status sthi_segments_layout(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, sth_segment *out,
                                uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_bytes) {
    layout l = {.out = out, .capacity = capacity};
    STHI_TRY(lay_out(&l, tensors, count, piece_of(piece_bytes), false));
    return end_layout(&l, out_count, out_packed_bytes);
}

/* ---- sizes of values */

typedef struct measuring {
    sthi_job job;
    sth_segment *segments;
    const uint8_t *place;
} measuring;

static sth_status measure(sthi_job *job, uint64_t piece, void *scratch) {
    const measuring *m = (const measuring *)(const void *)job;
    sth_segment *s = &m->segments[piece];
    sthi_exponents found;
    uint8_t table[STHI_TABLE_BYTES];
    (void)scratch;
    if (s->encoding != STH_TRANSFER_LOSSLESS) return STH_OK;
    sthi_exponents_count(s->dtype, m->place + s->place_offset, s->cols, &found);
    uint64_t plain = s->cols * element_bytes(s);
    s->stride = sthi_lossless_roomy(s->dtype, s->cols, sthi_exponents_choose(&found, table));
    if (sthi_lossless_pays(s->stride, plain)) return STH_OK;
    *s = (sth_segment){.encoding = STH_TRANSFER_VERBATIM, .dtype = s->dtype, .place_offset = s->place_offset,
                       .rows = 1, .cols = plain, .zeros = STH_TRANSFER_NONE};
    return STH_OK;
}

sth_status sthi_segments_fit(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, const void *place,
                             uint32_t threads, sth_segment *out, uint32_t capacity, uint32_t *out_count,
                             uint64_t *out_packed_bytes) {
    layout l = {.out = out, .capacity = capacity}, fitted = l;
    STHI_TRY(lay_out(&l, tensors, count, piece_of(piece_bytes), true));
    STHI_TRY(end_layout(&l, out_count, out_packed_bytes));
    if (!out) return STH_OK;
    measuring m = {.job = {.run = measure, .pieces = l.count}, .segments = out, .place = place};
    STHI_TRY(sthi_workers_once("packing", "sth-fit", threads, 0, &m.job));
    for (uint32_t i = 0; i < l.count; i++) put(&fitted, out[i]);
    return end_layout(&fitted, out_count, out_packed_bytes);
}

sth_status sthi_segments_of_rows(const sth_segment *whole, uint64_t piece_bytes, uint64_t packed_offset,
                                 sth_segment *out, uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_end) {
    layout l = {.out = out, .capacity = capacity, .packed = packed_offset};
    const char *wrong = wrong_shape(whole);
    if (!wrong) wrong = wrong_stride(whole);
    if (!wrong && whole->stride > BYTES_MOST / whole->rows) wrong = "is too large";
    if (wrong) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "a tensor to be laid out %s", wrong);
    split_rows(&l, *whole, piece_of(piece_bytes));
    return end_layout(&l, out_count, out_packed_end);
}

/* The first segment has the most rows. */
uint64_t sthi_segment_piece(const sth_segment *whole, uint64_t piece_bytes) {
    layout l = {0};
    sth_segment s = *whole;
    if (wrong_shape(&s)) return 0;
    if (s.encoding == STH_TRANSFER_VERBATIM) return round_to(sthi_min_u64(s.cols, piece_of(piece_bytes)), ALIGN);
    if (s.encoding == STH_TRANSFER_LOSSLESS && !s.stride) {
        s.cols = sthi_min_u64(s.cols, elements_of_piece(&s, piece_of(piece_bytes)));
        return round_to(plain_bytes(&s), ALIGN);
    }
    if (!s.stride) {
        s.stride = stride_of(&s);
        s.zeros = STH_TRANSFER_NONE;
    }
    if (wrong_stride(&s)) return 0;
    put(&l, rows_from(&s, 0, rows_of_piece(&s, piece_of(piece_bytes))));
    return l.packed;
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

void sthi_segment_decode_part(const sth_segment *s, const sthi_segment_parts *parts, uint64_t begin, uint64_t end,
                              void *out) {
    uint8_t *to = out;
    if (s->encoding == STH_TRANSFER_VERBATIM) {
        memcpy(to, parts->codes + begin, end - begin);
        return;
    }
    uint64_t each = element_bytes(s), at = begin / each, last = end / each;
    if (s->encoding == STH_TRANSFER_LOSSLESS) {
        sthi_lossless_unpack(s->dtype, parts->codes, s->stride, s->cols, at, last, to);
        return;
    }
    if (sthi_is_four_bits(s->encoding)) {
        sthi_four_decode(s, parts, at, last, to);
        return;
    }
    while (at < last) {
        uint64_t row = at / s->cols, k = at % s->cols, stop = sthi_min_u64(s->cols, k + (last - at));
        row_of r = {.codes = parts->codes + row * s->stride};
        if (s->encoding == STH_TRANSFER_INT4) r.group_scales = parts->scales + 2 * row * groups_of(s);
        else r.scale = f32_at(parts->scales, row);
        if (parts->zeros) r.zero = f32_at(parts->zeros, row);
        at += stop - k;
        for (; k < stop; k++, to += each) sthi_store(s->dtype, value(s, &r, k), to);
    }
}

void sthi_segment_decode(const sth_segment *s, const uint8_t *packed, uint64_t packed_begin, uint64_t begin,
                         uint64_t end, void *out) {
    sthi_segment_parts parts = sthi_segment_find(s, packed, packed_begin);
    sthi_segment_decode_part(s, &parts, begin, end, out);
}
