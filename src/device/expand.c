#include "device/expand.h"

#include "base/arith.h"
#include "base/error.h"
#include "device/four_bits.h"
#include "device/lossless.h"
#include "stagehand/transfer.h"

STHI_KNOWS_ENCODINGS(7);

enum { GROUP = 64, VECTOR = 16 }; /* inputs that share a scale of INT4; what codes and places are aligned to */

static bool has_dtype(const sth_expand *e) {
    return e->dtype == STH_DTYPE_F32 || e->dtype == STH_DTYPE_BF16 || e->dtype == STH_DTYPE_F16;
}

static const char *wrong_four(const sth_expand *e, sthi_expand_bytes *out) {
    sthi_four_shape shape = {.encoding = e->encoding, .rows = e->rows, .cols = e->cols, .stride = e->stride,
                             .pitch = e->pitch, .rank = e->rank, .group = e->group, .hadamard = e->hadamard,
                             .factor = e->factor, .smooth = true};
    sthi_four_bytes four;
    const char *wrong = sthi_four_wrong_sizes(&shape, &four);
    *out = (sthi_expand_bytes){.codes = four.codes, .scales = four.scales, .up = four.up, .down = four.down,
                               .smooth = four.smooth};
    return wrong;
}

static const char *wrong_lossless(const sth_expand *e, sthi_expand_bytes *out) {
    out->codes = e->stride;
    if (e->rows != 1) return "is lossless and has more than one row";
    return sthi_lossless_has_size(e->dtype, e->cols, e->stride) ? NULL : "has an impossible stride";
}

/* cols fits 32 bits: only products with rows can overflow. */
static const char *wrong_eight(const sth_expand *e, sthi_expand_bytes *out) {
    uint64_t groups = (e->cols + GROUP - 1) / GROUP;
    bool int4 = e->encoding == STH_TRANSFER_INT4;
    bool odd = e->stride % VECTOR && e->encoding != STH_TRANSFER_INT8;
    if (e->stride < (int4 ? groups * (GROUP / 2) : e->cols) || odd) return "has an impossible stride";
    if (!sthi_mul_u64(e->rows, e->stride, &out->codes) || !sthi_mul_u64(e->rows, int4 ? 2 * groups : 4, &out->scales))
        return "is too large";
    out->zeros = e->encoding == STH_TRANSFER_INT8 ? 4 * e->rows : 0; /* as many bytes as its scales */
    return NULL;
}

static const char *wrong_packed(const sth_expand *e, sthi_expand_bytes *out) {
    uint64_t row = e->cols * (e->dtype == STH_DTYPE_F32 ? 4 : 2), place;
    if (!has_dtype(e)) return "has a dtype that is not F32, BF16 or F16";
    const char *wrong;
    if (sthi_is_four_bits(e->encoding)) wrong = wrong_four(e, out);
    else wrong = e->encoding == STH_TRANSFER_LOSSLESS ? wrong_lossless(e, out) : wrong_eight(e, out);
    if (wrong) return wrong;
    if (!sthi_mul_u64(e->rows, row, &place)) return "is too large";
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

static const char *wrong_addresses(const sth_expand *e, const sthi_expand_bytes *bytes) {
    bool verbatim = e->encoding == STH_TRANSFER_VERBATIM;
    if (!e->codes || !e->place) return "has no codes or no place";
    bool scales = !verbatim && e->encoding != STH_TRANSFER_LOSSLESS;
    if (scales != (e->scales != 0)) return "has scales where there are none, or none where it needs them";
    if (e->zeros && e->encoding != STH_TRANSFER_INT8) return "has zero points, which only int8 has";
    if ((bytes->up && !e->up) || (bytes->down && !e->down)) return "has no factors, and a rank";
    if (verbatim) return NULL;
    sth_devptr all = e->codes | e->scales | e->zeros | e->place;
    if (sthi_is_four_bits(e->encoding)) all |= e->smooth | (e->rank ? e->up | e->down : 0);
    return all % VECTOR ? "has a part that is not aligned to 16 bytes" : NULL;
}

sth_status sthi_expand_check(const sth_expand *e, const char *domain, sthi_expand_bytes *out) {
    const char *wrong = sthi_expand_wrong_sizes(e, out);
    if (!wrong) wrong = wrong_addresses(e, out);
    if (wrong) return sthi_fail(STH_INVALID_ARGUMENT, domain, 0, "expand", "an expansion %s", wrong);
#define ONLY_WHAT_IS_THERE(part, name) \
    if (!e->part) out->part = 0;
    STHI_EXPAND_PARTS(ONLY_WHAT_IS_THERE)
#undef ONLY_WHAT_IS_THERE
    return STH_OK;
}
