/* float32 to and from the 16-bit formats, one value at a time. The reference for the vector variants. */
#ifndef STHI_BASE_HALF_H
#define STHI_BASE_HALF_H
#include <stdint.h>
#include <string.h>

static inline uint32_t sthi_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float sthi_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float sthi_from_bf16(uint16_t h) { return sthi_of_bits((uint32_t)h << 16); }

static inline uint16_t sthi_to_bf16(float x) {
    uint32_t b = sthi_bits_of(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((b >> 16) | 0x40u); /* NaN must not become Inf */
    return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

/* Rounds away from zero with a probability of the part cut off; `random`: 16 bits. NaN and Inf stay. */
static inline uint16_t sthi_to_bf16_at_random(float x, uint32_t random) {
    uint32_t b = sthi_bits_of(x);
    if ((b & 0x7f800000u) == 0x7f800000u) return sthi_to_bf16(x);
    return (uint16_t)((b + random) >> 16);
}

static inline float sthi_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) { /* Inf; NaN, made quiet as the processor does */
        uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0;
        return sthi_of_bits(sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | quiet);
    }
    if (rest >= 0x400u) return sthi_of_bits(sign | ((rest << 13) + 0x38000000u));
    float small = (float)rest * 0x1p-24f; /* 0 and subnormals, exact */
    return sthi_of_bits(sign | sthi_bits_of(small));
}

static inline uint16_t sthi_to_f16(float x) {
    uint32_t b = sthi_bits_of(x), sign = (b >> 16) & 0x8000u, rest = b & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to Inf */
    if (rest >= 0x38800000u)
        return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
    /* Below 2^-14: adding 0.5 leaves the value in steps of 2^-24 in the low bits, rounded to even. */
    float shifted = sthi_of_bits(rest) + 0.5f;
    return (uint16_t)(sign | (sthi_bits_of(shifted) - 0x3f000000u));
}
#endif
