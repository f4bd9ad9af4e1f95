/* The reference of what files hold in 4 bits. The order of operations is that of decoder.c, which works by whole rows
 * and is what this is compared with:
 *
 *   v = q * s, or (magnitude * s) * factor with the sign;  v as float64 times H, rounded to float32;
 *   w = v + sum over r = 0, 1, ... of up[r] * down[r], the sum in float32;  w / smooth;  NaN: the one with bits
 *   0x7fc00000
 *
 * Values are made a tile at a time: as many whole blocks of H, of one row or of several, as the stack holds. Factors
 * are widened once for the rows of a tile. Pure; no locks. */
#include "quant/four_bits.h"

#include <string.h>

#include "base/half.h"
#include "quant/hadamard.h"
#include "quant/nvfp4.h"
#include "quant/rank_row.h"
#include "quant/store.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

STHI_KNOWS_ENCODINGS(7);

enum { TILE = STHI_FOUR_HADAMARD, LEAST_COLS = 256, MOST_ROWS = TILE / LEAST_COLS, COLS = 64, RANKS = 32 };

typedef struct tile {
    uint64_t row, col, rows, cols; /* of the segment */
    float v[TILE];                 /* [rows, cols] */
} tile;

static float bf16_at(const uint8_t *p, uint64_t i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, sizeof h);
    return sthi_from_bf16(h);
}

const char *sthi_four_wrong(const sth_segment *s, sthi_four_bytes *out) {
    sthi_four_shape shape = {.encoding = (int)s->encoding, .rows = s->rows, .cols = s->cols, .stride = s->stride,
                             .pitch = s->pitch, .rank = s->rank, .group = s->group, .hadamard = s->hadamard,
                             .factor = s->factor, .smooth = s->smooth != STH_TRANSFER_NONE};
    return sthi_four_wrong_sizes(&shape, out);
}

/* ---- codes */

static float value_of(const sth_segment *s, unsigned code, float scale) {
    if (s->encoding == STH_TRANSFER_FILE_NVFP4) return sthi_e2m1_value(code) * scale * s->factor;
    return (float)((int)(code ^ 8u) - 8) * scale;
}

static float scale_of(const sth_segment *s, const sthi_segment_parts *p, uint64_t row, uint64_t col) {
    if (s->encoding == STH_TRANSFER_FILE_NVFP4)
        return sthi_ue4m3_value(p->scales[sthi_nvfp4_scale_at(row, col / 16, s->cols / 16)]);
    return bf16_at(p->scales + col / s->group * s->pitch, row);
}

static void widen_codes(const sth_segment *s, const sthi_segment_parts *p, const tile *t, uint64_t row, float *out) {
    const uint8_t *codes = p->codes + row * s->stride + t->col / 2;
    for (uint64_t k = 0; k < t->cols; k += STHI_FOUR_TOGETHER) {
        float scale = scale_of(s, p, row, t->col + k);
        for (uint64_t i = k; i < k + STHI_FOUR_TOGETHER; i += 2) {
            out[i] = value_of(s, codes[i / 2] & 15u, scale);
            out[i + 1] = value_of(s, codes[i / 2] >> 4, scale);
        }
    }
}

/* ---- H and factors */

static void rotate(uint64_t size, float *v, uint64_t count) {
    double wide[TILE];
    for (uint64_t k = 0; k < count; k++) wide[k] = v[k];
    sthi_hadamard(wide, count, size);
    for (uint64_t k = 0; k < count; k++) v[k] = (float)wide[k];
}

/* out[r][k] = down[col + k][rank + r] */
static void widen_down(const sth_segment *s, const uint8_t *down, uint64_t col, uint64_t rank, uint64_t cols,
                       uint64_t ranks, float *out) {
    for (uint64_t k = 0; k < cols; k++)
        for (uint64_t r = 0; r < ranks; r++) out[r * cols + k] = bf16_at(down, (col + k) * s->rank + rank + r);
}

/* Inputs [k, k + cols) of the tile. */
static void add_some(const sth_segment *s, const sthi_segment_parts *p, tile *t, uint64_t k, uint64_t cols) {
    float sums[MOST_ROWS * COLS], down[RANKS * COLS];
    memset(sums, 0, t->rows * cols * sizeof *sums);
    for (uint64_t rank = 0; rank < s->rank; rank += RANKS) {
        uint64_t ranks = sthi_min_u64(RANKS, s->rank - rank);
        widen_down(s, p->down, t->col + k, rank, cols, ranks, down);
        for (uint64_t i = 0; i < t->rows; i++)
            sthi_rank_add(p->up + 2 * ((t->row + i) * s->rank + rank), down, ranks, cols, sums + i * cols);
    }
    for (uint64_t i = 0; i < t->rows; i++)
        for (uint64_t c = 0; c < cols; c++) t->v[i * t->cols + k + c] += sums[i * cols + c];
}

static void fill(const sth_segment *s, const sthi_segment_parts *p, tile *t) {
    for (uint64_t i = 0; i < t->rows; i++) widen_codes(s, p, t, t->row + i, t->v + i * t->cols);
    if (s->hadamard) rotate(s->hadamard, t->v, t->rows * t->cols);
    for (uint64_t k = 0; s->rank && k < t->cols; k += COLS) add_some(s, p, t, k, sthi_min_u64(COLS, t->cols - k));
    for (uint64_t i = 0; p->smooth && i < t->rows; i++)
        for (uint64_t k = 0; k < t->cols; k++) t->v[i * t->cols + k] /= bf16_at(p->smooth, t->col + k);
}

/* ---- the whole */

/* What of the tile lies in [begin, end). */
static void put(const sth_segment *s, const tile *t, uint64_t begin, uint64_t end, uint8_t *out) {
    uint64_t each = s->dtype == STH_DTYPE_F32 ? 4 : 2;
    for (uint64_t i = 0; i < t->rows; i++) {
        uint64_t first = (t->row + i) * s->cols + t->col;
        uint64_t from = sthi_max_u64(begin, first), stop = sthi_min_u64(end, first + t->cols);
        for (uint64_t at = from; at < stop; at++) {
            float x = t->v[i * t->cols + (at - first)];
            sthi_store(s->dtype, x != x ? sthi_of_bits(0x7fc00000u) : x, out + (at - begin) * each);
        }
    }
}

void sthi_four_decode(const sth_segment *s, const sthi_segment_parts *p, uint64_t begin, uint64_t end, uint8_t *out) {
    tile t;
    if (begin >= end) return;
    uint64_t wide = sthi_max_u64(LEAST_COLS, s->hadamard), rows = TILE / wide, last = (end - 1) / s->cols + 1;
    for (t.row = begin / s->cols; t.row < last; t.row += rows) {
        t.rows = sthi_min_u64(rows, last - t.row);
        for (t.col = 0; t.col < s->cols; t.col += wide) {
            t.cols = sthi_min_u64(wide, s->cols - t.col);
            if (t.row * s->cols + t.col >= end || (t.row + t.rows - 1) * s->cols + t.col + t.cols <= begin) continue;
            fill(s, p, &t);
            put(s, &t, begin, end, out);
        }
    }
}
