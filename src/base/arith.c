/* Sizes as people write them. */
#include "base/arith.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool sthi_parse_size(const char *text, uint64_t *out) {
    if (!text) return false;
    while (isspace((unsigned char)*text)) text++;
    if (!isdigit((unsigned char)*text) && *text != '.') return false;
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) return false;
    char *end = NULL;
    double n = strtod(text, &end);
    if (end == text || !isfinite(n) || n < 0) return false;
    bool fraction = memchr(text, '.', (size_t)(end - text)) || memchr(text, 'e', (size_t)(end - text)) ||
                    memchr(text, 'E', (size_t)(end - text));
    while (isspace((unsigned char)*end)) end++;
    static const char *const letters = "KMGT";
    uint64_t scale = 1;
    const char *hit = *end ? strchr(letters, toupper((unsigned char)*end)) : NULL;
    if (hit) {
        bool binary = end[1] == 'i' || end[1] == 'I';
        for (const char *l = letters; l <= hit; l++) scale *= binary ? 1024 : 1000;
        end += binary ? 2 : 1;
        if (*end == 'B' || *end == 'b') end++;
    } else if (*end == 'B' || *end == 'b') {
        end++;
    }
    while (isspace((unsigned char)*end)) end++;
    if (*end) return false;
    if (scale == 1 && fraction) return false;
    double bytes = n * (double)scale;
    if (bytes >= 9.2e18) return false;
    *out = (uint64_t)bytes;
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
