/* Layers in 4 bits, made up: their parts, and a packed image of them. */
#ifndef TESTS_FOUR_WORLD_H
#define TESTS_FOUR_WORLD_H
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "quant/four_bits.h"

enum { FOUR_MOST = 1 << 21 };

typedef struct four_world {
    sth_segment whole; /* one segment with every part that the layer has */
    uint64_t bytes;    /* of its packed image */
    uint8_t packed[FOUR_MOST] __attribute__((aligned(512)));
} four_world;

static uint64_t four_seed = 1;
static inline uint32_t four_roll(void) {
    four_seed = four_seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(four_seed >> 32);
}

static inline void four_numbers(uint8_t *at, uint64_t count, int low, int high, bool negative) {
    for (uint64_t i = 0; i < count; i++) {
        float x = ldexpf(1 + (float)(four_roll() % 256) / 256, low + (int)(four_roll() % (uint32_t)(high - low + 1)));
        uint16_t h = sthi_to_bf16(negative && four_roll() % 2 ? -x : x);
        if (four_roll() % 64 == 0 && negative) h = (uint16_t)(four_roll() % 2 << 15); /* zeros of both signs */
        memcpy(at + 2 * i, &h, sizeof h);
    }
}

/* wild: scales and factors of every size, so that sums overflow and become NaN. */
static inline void four_make(four_world *w, sth_segment shape, bool wild) {
    uint64_t tensor_end;
    uint32_t count;
    bool nvfp4 = shape.encoding == STH_TRANSFER_FILE_NVFP4;
    shape.stride = shape.cols / 2;
    shape.pitch = nvfp4 ? 0 : 2 * shape.rows;
    shape.zeros = STH_TRANSFER_NONE;
    shape.factor = nvfp4 ? 0x1.8p-7f : 1;
    if (sthi_segments_of_rows(&shape, UINT64_MAX / 2, 0, &w->whole, 1, &count, &tensor_end) != STH_OK || count != 1 ||
        tensor_end > FOUR_MOST)
        abort();
    w->bytes = tensor_end;
    const sth_segment *s = &w->whole;
    for (uint64_t i = 0; i < tensor_end; i++) w->packed[i] = (uint8_t)four_roll();
    if (nvfp4)
        for (uint64_t i = 0; i < sthi_tiles_bytes(s->rows, s->cols); i++)
            w->packed[s->scales + i] = (uint8_t)(four_roll() % 16 ? 8 + four_roll() % 0x77 : 0);
    else four_numbers(w->packed + s->scales, s->rows * (s->cols / s->group), wild ? -133 : -12, wild ? 127 : -4, true);
    if (s->rank) four_numbers(w->packed + s->up, s->rows * s->rank, wild ? -70 : -6, wild ? 100 : 0, true);
    if (s->rank) four_numbers(w->packed + s->down, s->cols * s->rank, wild ? -70 : -6, wild ? 100 : 0, true);
    if (s->smooth != STH_TRANSFER_NONE)
        four_numbers(w->packed + s->smooth, s->cols, wild ? -100 : -3, wild ? 100 : 3, false);
}

/* The shapes that are tried: every part there and not, ranks that are no multiple of 8, every kind of tile. */
static const sth_segment four_shapes[] = {
#define SHAPE(kind, r, c, g, k, h, s)                                                                               \
    {.encoding = STH_TRANSFER_FILE_##kind, .rows = r, .cols = c, .group = g, .rank = k, .hadamard = h, .smooth = s}
    SHAPE(INT4, 33, 256, 64, 32, 256, STH_TRANSFER_NONE), /* v3 */
    SHAPE(INT4, 5, 768, 32, 8, 256, STH_TRANSFER_NONE),
    SHAPE(INT4, 17, 96, 48, 5, 0, 0),                     /* SVDQuant W4A16 */
    SHAPE(INT4, 3, 528, 16, 32, 0, STH_TRANSFER_NONE),
    SHAPE(INT4, 2, 272, 272, 0, 0, 0),
    SHAPE(INT4, 6, 16, 16, 3, 16, STH_TRANSFER_NONE),     /* W4A4: H is as large as a row */
    SHAPE(INT4, 9, 128, 128, 16, 128, STH_TRANSFER_NONE),
    SHAPE(INT4, 9, 512, 512, 16, 512, STH_TRANSFER_NONE),
    SHAPE(INT4, 5, 1024, 1024, 12, 1024, STH_TRANSFER_NONE),
    SHAPE(INT4, 3, 2048, 2048, 40, 2048, STH_TRANSFER_NONE),
    SHAPE(INT4, 2, 4096, 4096, 8, 4096, STH_TRANSFER_NONE),
    SHAPE(INT4, 2, 8192, 8192, 9, 8192, STH_TRANSFER_NONE),
    SHAPE(NVFP4, 33, 256, 16, 32, 256, STH_TRANSFER_NONE),
    SHAPE(NVFP4, 130, 512, 16, 1, 256, STH_TRANSFER_NONE),
#undef SHAPE
};
enum { FOUR_SHAPES = sizeof four_shapes / sizeof *four_shapes };
static const sth_dtype four_dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
#endif
