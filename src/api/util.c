/* Exported functions of stagehand/util.h over base/. */
#include "stagehand/util.h"

#include "base/arith.h"
#include "base/error.h"
#include "base/natural.h"

_Static_assert(STH_ALIGN == STHI_ALIGN, "one alignment");

sth_status sth_parse_size(const char *text, uint64_t *out_bytes) {
    uint64_t bytes = 0;
    if (!out_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_parse_size needs an address for the result");
    if (!sthi_parse_size(text, &bytes))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, text,
                         "'%.80s' is not a size; write it like 8GB, 512MiB or 4096", text ? text : "");
    *out_bytes = bytes;
    return STH_OK;
}

char *sth_format_size(uint64_t bytes, char *buffer, size_t capacity) {
    if (!buffer) return NULL;
    return sthi_format_size(bytes, buffer, capacity);
}

int sth_compare_natural(const char *a, const char *b) { return sthi_compare_natural(a ? a : "", b ? b : ""); }
