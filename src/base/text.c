/* Text that grows by doubling. No locks. */
#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/memory.h"

enum { FIRST = 1024 };

/* Room for `more` bytes and the 0. */
static bool reserve(sthi_text *t, size_t more) {
    size_t capacity = t->capacity ? t->capacity : FIRST;
    while (capacity - t->count <= more) capacity *= 2;
    if (capacity == t->capacity) return true;
    char *bytes = sthi_realloc(t->bytes, capacity, 1);
    if (!bytes) return !(t->failed = true);
    t->bytes = bytes;
    t->capacity = capacity;
    return true;
}

void sthi_text_put(sthi_text *t, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    if (n < 0) t->failed = true;
    else if (!t->failed && reserve(t, (size_t)n)) {
        (void)vsnprintf(t->bytes + t->count, (size_t)n + 1, format, again);
        t->count += (size_t)n;
    }
    va_end(again);
    va_end(args);
}

char *sthi_text_take(sthi_text *t) {
    char *bytes = t->bytes;
    if (t->failed) {
        sthi_free(bytes);
        bytes = NULL;
    }
    *t = (sthi_text){0};
    return bytes;
}

void sthi_text_escaped(sthi_text *t, const char *plain) {
    for (const char *c = plain; *c; c++) {
        switch (*c) {
        case '&': sthi_text_put(t, "&amp;"); break;
        case '<': sthi_text_put(t, "&lt;"); break;
        case '>': sthi_text_put(t, "&gt;"); break;
        case '"': sthi_text_put(t, "&quot;"); break;
        default: sthi_text_put(t, "%c", (unsigned char)*c < 0x20 ? ' ' : *c);
        }
    }
}
