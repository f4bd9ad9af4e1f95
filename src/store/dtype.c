/* The dtype table, made from STH_DTYPE_LIST. Every type is a whole number of bytes. */
#include "store/dtype.h"

#include <string.h>

static const struct {
    const char *name;
    uint32_t bits;
} dtypes[] = {
#define STHI_DTYPE_ROW(name, text, bits) {text, bits},
    STH_DTYPE_LIST(STHI_DTYPE_ROW)
#undef STHI_DTYPE_ROW
};

#define STHI_DTYPE_WHOLE(name, text, bits) \
    _Static_assert((bits) % 8 == 0, #name " is not a whole number of bytes");
STH_DTYPE_LIST(STHI_DTYPE_WHOLE)
#undef STHI_DTYPE_WHOLE

static bool known(sth_dtype dtype) { return (unsigned)dtype < STH_DTYPE_COUNT; }

const char *sthi_dtype_name(sth_dtype dtype) { return known(dtype) ? dtypes[dtype].name : "?"; }
uint32_t sthi_dtype_bits(sth_dtype dtype) { return known(dtype) ? dtypes[dtype].bits : 0; }

bool sthi_dtype_find(const char *name, sth_dtype *out) {
    for (unsigned i = 0; i < STH_DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) != 0) continue;
        *out = (sth_dtype)i;
        return true;
    }
    return false;
}
