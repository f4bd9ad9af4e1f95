/* Sizes of what files hold in 4 bits (FILE_INT4, FILE_NVFP4): the one rule for segments, back ends and replays.
 * Pure. */
#ifndef STHI_DEVICE_FOUR_BITS_H
#define STHI_DEVICE_FOUR_BITS_H
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/arith.h"
#include "stagehand/transfer.h"

/* Stands in each file of C that tells encodings apart: a new one does not build before all of them know it. */
#define STHI_KNOWS_ENCODINGS(count) \
    _Static_assert(STH_TRANSFER_COUNT == (count), "a new encoding: docs/quantised-transfer.md names each place of one")

enum {
    STHI_FOUR_TOGETHER = 16,  /* codes of a row that share a scale, at least */
    STHI_FOUR_HADAMARD = 8192, /* the largest matrix that kernels have */
    STHI_FOUR_RANK = 65535,
    STHI_TILE_ROWS = 128, STHI_TILE_COLS = 64, STHI_TILE_BYTES = 512 /* of NVFP4's scales */
};

typedef struct sthi_four_shape {
    int encoding; /* sth_transfer */
    uint64_t rows, cols, stride, pitch;
    uint32_t rank, group, hadamard;
    float factor;
    bool smooth;
} sthi_four_shape;

typedef struct sthi_four_bytes {
    uint64_t codes, scales, up, down, smooth;
} sthi_four_bytes;

static inline bool sthi_is_four_bits(int encoding) {
    return encoding == STH_TRANSFER_FILE_INT4 || encoding == STH_TRANSFER_FILE_NVFP4;
}

/* Of the tiles that hold the scales of so many rows. The product does not overflow for rows x cols that do not. */
static inline uint64_t sthi_tiles_bytes(uint64_t rows, uint64_t cols) {
    return (rows / STHI_TILE_ROWS + (rows % STHI_TILE_ROWS != 0)) *
           (cols / STHI_TILE_COLS + (cols % STHI_TILE_COLS != 0)) * STHI_TILE_BYTES;
}

static inline bool sthi_four_hadamard_ok(uint64_t size, uint64_t cols) {
    if (!size) return true;
    return size >= STHI_FOUR_TOGETHER && size <= STHI_FOUR_HADAMARD && !(size & (size - 1)) && cols % size == 0;
}

/* NULL with the bytes of each part, or what is wrong. */
static inline const char *sthi_four_wrong_sizes(const sthi_four_shape *s, sthi_four_bytes *out) {
    bool int4 = s->encoding == STH_TRANSFER_FILE_INT4;
    uint64_t all;
    *out = (sthi_four_bytes){0};
    if (!s->rows || !s->cols) return "is empty";
    if (s->cols > UINT32_MAX || s->rank > STHI_FOUR_RANK || !sthi_mul_u64(s->rows, s->cols, &all) ||
        all > UINT64_MAX / 64)
        return "is too large";
    if (!s->group || s->group % STHI_FOUR_TOGETHER || s->cols % s->group || (!int4 && s->group != STHI_FOUR_TOGETHER))
        return "has groups that are not some of 16 inputs that make up a row";
    if (!sthi_four_hadamard_ok(s->hadamard, s->cols)) return "has a Hadamard matrix of an impossible size";
    if (s->stride < s->cols / 2 || s->stride % 8) return "has an impossible stride";
    if (int4 ? s->pitch < 2 * s->rows || s->pitch % 2 : s->pitch != 0) return "has an impossible pitch of scales";
    if (!isfinite(s->factor)) return "has a factor that is not finite";
    if (!sthi_mul_u64(s->rows, s->stride, &out->codes) || !sthi_mul_u64(s->rows, 2 * (uint64_t)s->rank, &out->up))
        return "is too large";
    out->scales = sthi_tiles_bytes(s->rows, s->cols);
    if (int4 && (!sthi_mul_u64(s->cols / s->group - 1, s->pitch, &out->scales) ||
                 !sthi_add_u64(out->scales, 2 * s->rows, &out->scales)))
        return "is too large";
    out->down = 2 * s->cols * s->rank;
    out->smooth = s->smooth ? 2 * s->cols : 0;
    return NULL;
}
#endif
