/* Fuzz target for packed values that nobody vouches for. Input: a byte for the dtype and the width of vectors, two for
 * the number of values, then the packed bytes, cut or filled up with zeros to a size that can be one.
 *
 * Property: unpacking reads and writes nothing outside, with the same values for every width and for every part; bytes
 * that are taken for right are those of their values, but for what lies behind the last value. Packing the values again
 * brings the same values. */
#include <stdlib.h>
#include <string.h>

#include "fuzz/files.h"
#include "base/processor.h"
#include "quant/lossless.h"
#include "stagehand/lossless.h"

static void *exactly(uint64_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    CHECK(p);
    return p;
}

static void check_again(sth_dtype dtype, const uint8_t *values, uint64_t n, uint64_t each) {
    uint64_t bytes;
    CHECK(sth_lossless_bytes(dtype, values, n, &bytes) == STH_OK);
    uint8_t *packed = exactly(bytes), *back = exactly(n * each);
    CHECK(sth_lossless_pack(dtype, values, n, packed, bytes) == STH_OK);
    CHECK(sth_lossless_check(dtype, packed, bytes, n) == STH_OK);
    CHECK(sth_lossless_unpack(dtype, packed, bytes, n, back) == STH_OK);
    CHECK(memcmp(back, values, n * each) == 0);
    free(packed);
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const sth_dtype dtypes[] = {STH_DTYPE_BF16, STH_DTYPE_F16, STH_DTYPE_F32};
    if (size < 3) return 0;
    sth_dtype dtype = dtypes[data[0] % 3];
    uint64_t n = (data[1] | (uint64_t)data[2] << 8) % 5000, each = dtype == STH_DTYPE_F32 ? 4 : 2;
    uint64_t bytes = sthi_lossless_bytes((int)dtype, n, size - 3);
    uint8_t *packed = exactly(bytes), *values = exactly(n * each), *other = exactly(n * each);
    memset(packed, 0, bytes);
    memcpy(packed, data + 3, size - 3 < bytes ? size - 3 : bytes);
    /* The table is far behind in the bytes: the last 16 of the input are it, so that a search meets one. */
    if (size >= 19) memcpy(packed + sthi_lossless_tiles(n) * sthi_lossless_record(sthi_lossless_form_of((int)dtype)),
                           data + size - 16, 16);
    sthi_processor_limit(STHI_SCALAR);
    CHECK(sth_lossless_unpack(dtype, packed, bytes, n, values) == STH_OK);
    sthi_processor_limit(STHI_VARIANTS);
    CHECK(sth_lossless_unpack(dtype, packed, bytes, n, other) == STH_OK);
    CHECK(memcmp(values, other, n * each) == 0);
    uint64_t begin = n ? data[0] % n : 0;
    sthi_lossless_unpack(dtype, packed, bytes, n, begin, n, other);
    CHECK(memcmp(values + begin * each, other, (n - begin) * each) == 0);
    sth_status status = sth_lossless_check(dtype, packed, bytes, n);
    CHECK(status == STH_OK || status == STH_CORRUPT_DATA);
    check_again(dtype, values, n, each);
    free(packed);
    free(values);
    free(other);
    return 0;
}
