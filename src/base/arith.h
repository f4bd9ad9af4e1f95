/* Checked size arithmetic: sizes from outside go through these. Those with an output return false on overflow and
 * leave it alone. */
#ifndef STHI_BASE_ARITH_H
#define STHI_BASE_ARITH_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Every tensor starts at a multiple of this in arenas and places (bytes). */
#define STHI_ALIGN 512u

static inline bool sthi_add_u64(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_add_overflow(a, b, out);
}
static inline bool sthi_mul_u64(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
/* The same for sums that may be as large as can be: UINT64_MAX on overflow; 0 below 0. */
static inline uint64_t sthi_plus(uint64_t a, uint64_t b) {
    uint64_t sum;
    return sthi_add_u64(a, b, &sum) ? sum : UINT64_MAX;
}
static inline uint64_t sthi_times(uint64_t a, uint64_t b) {
    uint64_t product;
    return sthi_mul_u64(a, b, &product) ? product : UINT64_MAX;
}
static inline uint64_t sthi_minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }
/* Rounds up to a multiple of `unit` (> 0). */
static inline bool sthi_round_up(uint64_t n, uint64_t unit, uint64_t *out) {
    uint64_t r = n % unit;
    return r == 0 ? (*out = n, true) : sthi_add_u64(n, unit - r, out);
}
static inline bool sthi_range_inside(uint64_t off, uint64_t len, uint64_t total) {
    return off <= total && len <= total - off;
}
static inline uint64_t sthi_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t sthi_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Reads "512MB", "8GiB", "1.5G", "4096". K M G T and KB MB GB TB are powers of 1000, KiB MiB GiB TiB
 * (and Ki Mi Gi Ti) powers of 1024, a bare number is bytes. False for anything else: negative numbers,
 * fractions of a byte, text behind the unit. */
bool sthi_parse_size(const char *text, uint64_t *out);
/* Writes "3.00 GiB" or "512 B" into buf and returns buf. */
char *sthi_format_size(uint64_t bytes, char *buf, size_t cap);
/* The same by value, for the arguments of a printf: sthi_size(n).text. */
typedef struct sthi_size_text {
    char text[32];
} sthi_size_text;
sthi_size_text sthi_size(uint64_t bytes);
static inline double sthi_ms(int64_t ns) { return (double)ns / 1e6; }
#endif
