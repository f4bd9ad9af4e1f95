/* The number formats of NVFP4: e2m1 codes, unsigned e4m3 scales, and the tiles in which the scales lie. */
#ifndef STHI_QUANT_NVFP4_H
#define STHI_QUANT_NVFP4_H
#include <stdbool.h>
#include <stdint.h>

#include "base/half.h"

static inline float sthi_e2m1_value(unsigned code) {
    static const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float m = magnitudes[code & 7];
    return code & 8 ? -m : m;
}

/* False for codes that readers decode to different values: a set sign, subnormals (exponent 0 but for 0 itself), and
 * 0x7f, which hardware takes for a NaN. */
static inline bool sthi_ue4m3_is_sure(unsigned code) { return code == 0 || (code >= 8 && code < 0x7f); }

/* 2^(e-7) (1 + m/8), for codes that are sure. */
static inline float sthi_ue4m3_value(unsigned code) {
    return code ? sthi_of_bits((uint32_t)((code >> 3) + 120) << 23 | (uint32_t)(code & 7) << 20) : 0;
}

/* Byte of the scale of row `row` and block `block` of 16 inputs, of `blocks` in a row: tiles of 128 rows by 4 blocks,
 * 512 bytes each. */
static inline uint64_t sthi_nvfp4_scale_at(uint64_t row, uint64_t block, uint64_t blocks) {
    uint64_t tiles = blocks / 4 + (blocks % 4 != 0);
    return (row / 128 * tiles + block / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + block % 4;
}
#endif
