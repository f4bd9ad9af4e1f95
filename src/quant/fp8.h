/* e4m3fn: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, the largest value is 448. */
#ifndef STHI_QUANT_FP8_H
#define STHI_QUANT_FP8_H
#include <stdint.h>

#include "base/half.h"

/* 2^120 moves the exponent from that of float32 to that of e4m3; exact, of subnormals too. 0x7f and 0xff, which stand
 * for NaN, give 480: encoders do not make them. */
static inline float sthi_e4m3_value(unsigned code) {
    float magnitude = sthi_of_bits((uint32_t)(code & 0x7f) << 20) * 0x1p120f;
    return code & 0x80 ? -magnitude : magnitude;
}

/* The nearest code, ties to the even one; what is beyond 448 becomes it. x is finite. */
static inline uint8_t sthi_e4m3_code(float x) {
    uint32_t b = sthi_bits_of(x), sign = b >> 24 & 0x80, rest = b & 0x7fffffffu;
    if (rest >= sthi_bits_of(448.0f)) return (uint8_t)(sign | 0x7e);
    if (rest < sthi_bits_of(0x1p-6f)) { /* subnormals: steps of 2^-9, rounded by the low bits of 2^14 */
        float shifted = sthi_of_bits(rest) + 0x1p14f;
        return (uint8_t)(sign | (sthi_bits_of(shifted) - sthi_bits_of(0x1p14f)));
    }
    rest += 0x7ffffu + (rest >> 20 & 1u);
    return (uint8_t)(sign | ((rest >> 20) - (120u << 3)));
}
#endif
