/* Sizes as people write them. */
#include "base/arith.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static const char *skip_spaces(const char *text) {
    while (isspace((unsigned char)*text)) text++;
    return text;
}

/* Reads "K", "kB", "KiB", "B" or nothing; returns what follows it. */
static const char *read_unit(const char *text, uint64_t *out_scale) {
    static const char *const letters = "KMGT";
    const char *hit = *text ? strchr(letters, toupper((unsigned char)*text)) : NULL;
    *out_scale = 1;
    if (hit) {
        bool binary = text[1] == 'i' || text[1] == 'I';
        for (const char *l = letters; l <= hit; l++) *out_scale *= binary ? 1024 : 1000;
        text += binary ? 2 : 1;
    }
    return *text == 'B' || *text == 'b' ? text + 1 : text;
}

/* Digits are read one by one, not by strtod: that would round above 2^53 and follow the host program's
 * locale in what a decimal point is. */
bool sthi_parse_size(const char *text, uint64_t *out) {
    if (!text) return false;
    text = skip_spaces(text);
    uint64_t whole = 0, scale = 1, bytes = 0;
    double fraction = 0, place = 1; /* place: power of ten, 15 digits at most, so both are exact */
    const char *first = text;
    for (; is_digit(*text); text++)
        if (!sthi_mul_u64(whole, 10, &whole) || !sthi_add_u64(whole, (uint64_t)(*text - '0'), &whole))
            return false;
    bool any = text > first, point = *text == '.';
    if (point)
        for (text++; is_digit(*text); text++, any = true)
            if (place < 1e15) fraction = fraction * 10 + (*text - '0'), place *= 10;
    if (!any) return false;
    text = skip_spaces(read_unit(skip_spaces(text), &scale));
    if (*text || (point && scale == 1)) return false;
    if (!sthi_mul_u64(whole, scale, &bytes)) return false;
    if (!sthi_add_u64(bytes, (uint64_t)(fraction * (double)scale / place), &bytes)) return false;
    if (bytes > INT64_MAX) return false;
    *out = bytes;
    return true;
}

char *sthi_format_size(uint64_t bytes, char *buf, size_t cap) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double n = (double)bytes;
    int u = 0;
    while (n >= 1024 && u < 4) n /= 1024, u++;
    snprintf(buf, cap, u ? "%.2f %s" : "%.0f %s", n, units[u]);
    return buf;
}

sthi_size_text sthi_size(uint64_t bytes) {
    sthi_size_text out;
    (void)sthi_format_size(bytes, out.text, sizeof out.text);
    return out;
}
