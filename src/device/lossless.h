/* Sizes of losslessly packed values (LOSSLESS, docs/lossless.md): the one rule for segments, back ends and replays.
 * Pure. */
#ifndef STHI_DEVICE_LOSSLESS_H
#define STHI_DEVICE_LOSSLESS_H
#include <stdbool.h>

#include "base/arith.h"
#include "stagehand/checkpoint.h"

enum {
    STHI_TILE_ELEMENTS = 1024, /* share a start among the escapes */
    STHI_TABLE_BYTES = 16,     /* 7 exponents, 0, the version, 0, ... */
    STHI_LOSSLESS_VERSION = 1,
    STHI_LOSSLESS_PIECE = 2 << 20, /* of a file: bytes of the values that are packed together */
    STHI_LOSSLESS_LEAST = 4096     /* elements: fewer gain nothing */
};

/* How an element of a dtype is taken apart. bits: of the dtype; 0: it is not packed. */
typedef struct sthi_lossless_form {
    uint32_t bits;
    uint32_t bytes;  /* whole bytes of sign and mantissa */
    uint32_t planes; /* bits of the code, and of sign and mantissa beside the bytes */
} sthi_lossless_form;

static inline sthi_lossless_form sthi_lossless_form_of(int dtype) {
    switch (dtype) {
    case STH_DTYPE_BF16: return (sthi_lossless_form){16, 1, 3};
    case STH_DTYPE_F16: return (sthi_lossless_form){16, 1, 6};
    case STH_DTYPE_F32: return (sthi_lossless_form){32, 3, 3};
    default: return (sthi_lossless_form){0, 0, 0};
    }
}

/* Of a tile: 128 bytes for each bit that an element has in it. */
static inline uint64_t sthi_lossless_record(sthi_lossless_form form) {
    return STHI_TILE_ELEMENTS / 8 * (8 * form.bytes + form.planes);
}

static inline uint64_t sthi_lossless_tiles(uint64_t elements) {
    return elements / STHI_TILE_ELEMENTS + (elements % STHI_TILE_ELEMENTS != 0);
}

/* All but the escapes: records, table, starts. For up to 2^56 elements; a form that packs. */
static inline uint64_t sthi_lossless_fixed(sthi_lossless_form form, uint64_t elements) {
    uint64_t tiles = sthi_lossless_tiles(elements);
    return tiles * sthi_lossless_record(form) + STHI_TABLE_BYTES + (tiles * 4 + 15) / 16 * 16;
}

static inline uint64_t sthi_lossless_bytes(int dtype, uint64_t elements, uint64_t escapes) {
    return (sthi_lossless_fixed(sthi_lossless_form_of(dtype), elements) + escapes + 15) / 16 * 16;
}

/* With room for values that change a little: one escape more for 256 elements. */
static inline uint64_t sthi_lossless_roomy(int dtype, uint64_t elements, uint64_t escapes) {
    return sthi_lossless_bytes(dtype, elements, escapes + elements / 256);
}

/* Whether so many elements can be packed in so many bytes, with room for any number of escapes. */
static inline bool sthi_lossless_has_size(int dtype, uint64_t elements, uint64_t bytes) {
    sthi_lossless_form form = sthi_lossless_form_of(dtype);
    return form.bits && elements <= UINT32_MAX && bytes % 16 == 0 && bytes >= sthi_lossless_fixed(form, elements) &&
           bytes <= UINT64_MAX / 16;
}

/* Pieces of a file: the elements of a whole one, and how many a tensor has. A form that packs. */
static inline uint64_t sthi_lossless_together(sthi_lossless_form form) { return STHI_LOSSLESS_PIECE / (form.bits / 8); }

static inline uint64_t sthi_lossless_pieces(sthi_lossless_form form, uint64_t elements) {
    uint64_t together = sthi_lossless_together(form);
    return elements / together + (elements % together != 0);
}

/* Where it shrinks by less than a tenth, expanding it costs more than the link gains. */
static inline bool sthi_lossless_pays(uint64_t packed, uint64_t plain) { return packed <= plain - plain / 10; }
#endif
