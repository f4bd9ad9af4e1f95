/* Exported functions of stagehand/lossless.h: checks arguments, then calls src/quant. */
#include "stagehand/lossless.h"

#include "base/error.h"
#include "quant/lossless.h"
#include "store/dtype.h"

typedef unsigned long long ull;

static sth_status check_values(sth_dtype dtype, const void *values, uint64_t count) {
    if (!sthi_lossless_form_of((int)dtype).bits)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, NULL, "values of dtype %s are not packed; BF16, F16 and F32 are",
                         sth_dtype_name(dtype));
    if (count > UINT32_MAX || (count && !values))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "%llu values at %p: give at most 2^32 - 1 of them, and where they are", (ull)count, values);
    return STH_OK;
}

static sth_status check_packed(sth_dtype dtype, const void *packed, uint64_t bytes, uint64_t count,
                               const void *values) {
    STHI_TRY(check_values(dtype, values, count));
    if (packed && sthi_lossless_has_size((int)dtype, count, bytes)) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                     "%llu bytes at %p cannot be %llu packed values of dtype %s: at least %llu, a multiple of 16",
                     (ull)bytes, packed, (ull)count, sth_dtype_name(dtype),
                     (ull)sthi_lossless_bytes((int)dtype, count, 0));
}

sth_status sth_lossless_bytes(sth_dtype dtype, const void *values, uint64_t count, uint64_t *out_bytes) {
    sthi_exponents found;
    uint8_t table[STHI_TABLE_BYTES];
    STHI_TRY(check_values(dtype, values, count));
    if (!out_bytes) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_lossless_bytes needs out_bytes");
    sthi_exponents_count(dtype, values, count, &found);
    *out_bytes = sthi_lossless_bytes((int)dtype, count, sthi_exponents_choose(&found, table));
    return STH_OK;
}

uint64_t sth_lossless_estimate(sth_dtype dtype, const void *values, uint64_t count) {
    if ((unsigned)dtype >= STH_DTYPE_COUNT || count > UINT64_MAX / 64) return UINT64_MAX;
    return values ? sthi_lossless_estimate(dtype, values, count) : sthi_lossless_usual(dtype, count);
}

sth_status sth_lossless_pack(sth_dtype dtype, const void *values, uint64_t count, void *packed, uint64_t bytes) {
    STHI_TRY(check_packed(dtype, packed, bytes, count, values));
    if (sthi_lossless_pack(dtype, values, count, packed, bytes)) return STH_OK;
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, NULL,
                     "%llu values do not fit %llu bytes: ask sth_lossless_bytes() for their size", (ull)count,
                     (ull)bytes);
}

sth_status sth_lossless_unpack(sth_dtype dtype, const void *packed, uint64_t bytes, uint64_t count, void *out_values) {
    STHI_TRY(check_packed(dtype, packed, bytes, count, out_values));
    sthi_lossless_unpack(dtype, packed, bytes, count, 0, count, out_values);
    return STH_OK;
}

sth_status sth_lossless_check(sth_dtype dtype, const void *packed, uint64_t bytes, uint64_t count) {
    uint64_t at;
    STHI_TRY(check_packed(dtype, packed, bytes, count, packed));
    const char *wrong = sthi_lossless_wrong(dtype, packed, bytes, count, &at);
    return wrong ? sthi_fail(STH_CORRUPT_DATA, NULL, 0, NULL, "packed values: byte %llu %s", (ull)at, wrong) : STH_OK;
}
