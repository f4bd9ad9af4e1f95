/* Random numbers by counter: a function of key and index, so that it does not matter who asks, or when. The
 * finaliser is Stafford's variant 13 of MurmurHash3's, over a Weyl sequence, as in SplitMix64. */
#ifndef STHI_BASE_RANDOM_H
#define STHI_BASE_RANDOM_H
#include <stddef.h>
#include <stdint.h>

static inline uint64_t sthi_mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
static inline uint64_t sthi_random64(uint64_t key, uint64_t index) {
    return sthi_mix64(key + (index + 1) * 0x9e3779b97f4a7c15u);
}
/* 16 bits for element `index`: four elements share one number. */
static inline uint32_t sthi_random16(uint64_t key, uint64_t index) {
    return (uint32_t)(sthi_random64(key, index / 4) >> (16 * (index % 4))) & 0xffffu;
}
/* Those of the elements first .. first + n; first and n are multiples of 4. */
static inline void sthi_random16_fill(uint16_t *out, uint64_t key, uint64_t first, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        uint64_t four = sthi_random64(key, (first + i) / 4);
        for (int j = 0; j < 4; j++) out[i + j] = (uint16_t)(four >> (16 * j));
    }
}
#endif
