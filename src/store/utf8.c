/* UTF-8 as RFC 3629 has it. Pure. */
#include "store/utf8.h"

#include <stdint.h>

/* Bytes of a character by its first one; 0 where none begins so. */
static size_t length_of(unsigned char first) {
    if (first < 0x80) return 1;
    if (first >> 5 == 6) return 2;
    if (first >> 4 == 14) return 3;
    return first >> 3 == 30 ? 4 : 0;
}

/* Bytes of the character at p, of which `left` are there; 0 where it is not one. */
static size_t character(const unsigned char *p, size_t left) {
    static const uint32_t smallest[] = {0, 0x01, 0x80, 0x800, 0x10000};
    size_t n = length_of(p[0]);
    if (n == 0 || n > left) return 0;
    uint32_t value = n == 1 ? p[0] : p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (p[i] >> 6 != 2) return 0;
        value = value << 6 | (p[i] & 0x3fu);
    }
    bool surrogate = value >= 0xd800 && value <= 0xdfff;
    return value >= smallest[n] && value <= 0x10ffff && !surrogate ? n : 0;
}

bool sthi_utf8_is_text(const char *text, size_t bytes) {
    const unsigned char *p = (const unsigned char *)text;
    for (size_t at = 0, n; at < bytes; at += n) {
        n = character(p + at, bytes - at);
        if (!n) return false;
    }
    return true;
}
