#include "device/expand.h"

#include "base/arith.h"
#include "base/error.h"
#include "stagehand/transfer.h"

enum { GROUP = 64, VECTOR = 16 }; /* inputs that share a scale of INT4; what codes and places are aligned to */

static bool has_dtype(const sth_expand *e) {
    return e->dtype == STH_DTYPE_F32 || e->dtype == STH_DTYPE_BF16 || e->dtype == STH_DTYPE_F16;
}

/* cols fits 32 bits: only products with rows can overflow. */
static const char *wrong_packed(const sth_expand *e, sthi_expand_bytes *out) {
    uint64_t groups = (e->cols + GROUP - 1) / GROUP;
    bool int4 = e->encoding == STH_TRANSFER_INT4;
    uint64_t least = int4 ? groups * (GROUP / 2) : e->cols, row = e->cols * (e->dtype == STH_DTYPE_F32 ? 4 : 2), place;
    if (!has_dtype(e)) return "has a dtype that is not F32, BF16 or F16";
    if (e->stride < least || e->stride % VECTOR) return "has an impossible stride";
    if (!sthi_mul_u64(e->rows, e->stride, &out->codes) || !sthi_mul_u64(e->rows, row, &place) ||
        !sthi_mul_u64(e->rows, int4 ? 2 * groups : 4, &out->scales))
        return "is too large";
    out->zeros = e->encoding == STH_TRANSFER_INT8 ? 4 * e->rows : 0; /* as many bytes as its scales */
    return place == e->place_bytes ? NULL : "has a place of another size than its rows and columns";
}

const char *sthi_expand_wrong_sizes(const sth_expand *e, sthi_expand_bytes *out) {
    *out = (sthi_expand_bytes){0};
    if (e->encoding < 0 || e->encoding >= STH_TRANSFER_COUNT) return "has an encoding that there is none of";
    if (!e->rows || !e->cols) return "is empty";
    if (e->encoding == STH_TRANSFER_VERBATIM) {
        out->codes = e->place_bytes;
        if (e->rows != 1 || e->stride) return "is verbatim and has more than one row, or a stride";
        return e->cols == e->place_bytes ? NULL : "has a place of another size than its rows and columns";
    }
    return e->cols > UINT32_MAX ? "is too large" : wrong_packed(e, out);
}

static const char *wrong_addresses(const sth_expand *e) {
    bool verbatim = e->encoding == STH_TRANSFER_VERBATIM;
    if (!e->codes || !e->place) return "has no codes or no place";
    if (verbatim != !e->scales) return "has scales where there are none, or none where it needs them";
    if (e->zeros && e->encoding != STH_TRANSFER_INT8) return "has zero points, which only int8 has";
    if (verbatim) return NULL;
    return (e->codes | e->scales | e->zeros | e->place) % VECTOR ? "has a part that is not aligned to 16 bytes" : NULL;
}

sth_status sthi_expand_check(const sth_expand *e, const char *domain, sthi_expand_bytes *out) {
    const char *wrong = sthi_expand_wrong_sizes(e, out);
    if (!wrong) wrong = wrong_addresses(e);
    return wrong ? sthi_fail(STH_INVALID_ARGUMENT, domain, 0, "expand", "an expansion %s", wrong) : STH_OK;
}
