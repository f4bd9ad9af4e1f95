/* Packing without loss: every bit comes back, whatever the values are; every width of vectors has the same bytes; no
 * packed byte makes unpacking read or write outside; what is not packed bytes is found. An argument is the number of
 * arrays to try, instead of 100,000. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/processor.h"
#include "quant/lossless.h"
#include "quant/segment.h"
#include "stagehand/lossless.h"
#include "support/check.h"

enum { MOST = 5000, GUARD = 64 };
static const sth_dtype dtypes[] = {STH_DTYPE_BF16, STH_DTYPE_F16, STH_DTYPE_F32};
static uint64_t seed = 1, cases = 100000;

static uint32_t roll(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 32);
}

static uint64_t each_of(sth_dtype dtype) { return dtype == STH_DTYPE_F32 ? 4 : 2; }

/* Sum of uniform numbers: close to what weights are. */
static float weight(void) {
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(roll() & 0xffff) / 65536 - 0.5f;
    return sum * 0.02f;
}

static uint32_t bits_of(sth_dtype dtype, float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    if (dtype == STH_DTYPE_F32) return b;
    if (dtype == STH_DTYPE_BF16) return b >> 16;
    int exponent = (int)(b >> 23 & 255) - 112;
    if (exponent <= 0) return b >> 16 & 0x8000;
    return (b >> 16 & 0x8000) | (uint32_t)(exponent > 31 ? 31 : exponent) << 10 | (b >> 13 & 0x3ff);
}

/* What an array is full of. */
static uint32_t value(sth_dtype dtype, int kind) {
    static const uint32_t odd[] = {0, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 1,
                                   0x80000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x3f800000u};
    uint32_t special = odd[roll() % (sizeof odd / sizeof *odd)];
    switch (kind) {
    case 0: return bits_of(dtype, weight());
    case 1: return roll() >> (32 - 8 * each_of(dtype));                  /* any bits: nearly all are escapes */
    case 2: return dtype == STH_DTYPE_F32 ? special : special >> 16;    /* NaN, inf, subnormals, zeros */
    case 3: return roll() % 8 ? bits_of(dtype, weight()) : roll() >> (32 - 8 * each_of(dtype));
    case 4: return roll() % 2 ? 0 : bits_of(dtype, weight());           /* sparse */
    default: return 0;
    }
}

static void fill(sth_dtype dtype, uint8_t *values, uint64_t n, int kind) {
    uint32_t first = value(dtype, (int)(roll() % 5));
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = kind == 5 ? first : value(dtype, kind);
        memcpy(values + i * each_of(dtype), &bits, each_of(dtype));
    }
}

static uint64_t size_of(int how) {
    static const uint64_t edges[] = {0, 1, 2, 3, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 4096};
    return how % 3 ? edges[roll() % (sizeof edges / sizeof *edges)] : roll() % (how % 30 ? 300 : MOST);
}

static uint8_t values[MOST * 4] __attribute__((aligned(64))), packed[MOST * 6 + GUARD] __attribute__((aligned(64))),
    other[MOST * 6 + GUARD] __attribute__((aligned(64))), back[MOST * 4 + 2 * GUARD];

/* Exactly so many bytes, so that a sanitizer sees one that is read behind them. */
static void round_trip(sth_dtype dtype, uint64_t n, int kind, uint64_t more) {
    uint64_t bytes, at, each = each_of(dtype), off = roll() % 4;
    fill(dtype, values, n, kind);
    assert_ok(sth_lossless_bytes(dtype, values, n, &bytes));
    bytes += more;
    memset(packed, 0xA5, bytes + GUARD);
    memset(back, 0x5A, sizeof back);
    assert_ok(sth_lossless_pack(dtype, values, n, packed, bytes));
    for (uint64_t i = 0; i < GUARD; i++) assert_int_equal(packed[bytes + i], 0xA5);
    assert_ok(sth_lossless_check(dtype, packed, bytes, n));
    assert_ok(sth_lossless_unpack(dtype, packed, bytes, n, back + GUARD / 2 + off));
    if (memcmp(back + GUARD / 2 + off, values, n * each))
        fail_msg("dtype %d, %llu values of kind %d do not come back", (int)dtype, (unsigned long long)n, kind);
    for (uint64_t i = 0; i < GUARD / 2 + off; i++) assert_int_equal(back[i], 0x5A);
    for (uint64_t i = GUARD / 2 + off + n * each; i < sizeof back; i += 1 + i / 64) assert_int_equal(back[i], 0x5A);
    if (!n) return;
    uint64_t begin = roll() % n, end = begin + roll() % (n - begin + 1); /* a part of them */
    sthi_lossless_unpack(dtype, packed, bytes, n, begin, end, back);
    assert_memory_equal(back, values + begin * each, (end - begin) * each);
    assert_null(sthi_lossless_wrong(dtype, packed, bytes, n, &at));
}

static void every_bit_comes_back(void **state) {
    (void)state;
    uint64_t n = cases / few_under_tsan(60, 1) / (UNDER_ASAN ? 5 : 1);
    for (uint64_t i = 0; i < n; i++)
        round_trip(dtypes[i % 3], size_of((int)(i / 3 % 300)), (int)(roll() % 6), roll() % 4 ? 0 : 16 * (roll() % 9));
}

static void every_width_has_the_same_bytes(void **state) {
    (void)state;
    if (!sthi_processor_limit(STHI_AVX2)) skip_because("the processor has one width of vectors");
    for (int i = 0; i < 600; i++) {
        sth_dtype dtype = dtypes[i % 3];
        uint64_t n = size_of(i), bytes;
        fill(dtype, values, n, i / 3 % 6);
        assert_ok(sth_lossless_bytes(dtype, values, n, &bytes));
        sthi_processor_limit(STHI_SCALAR);
        assert_ok(sth_lossless_pack(dtype, values, n, packed, bytes));
        sthi_processor_limit(STHI_AVX2);
        assert_ok(sth_lossless_pack(dtype, values, n, other, bytes));
        assert_memory_equal(packed, other, bytes);
        for (uint64_t k = 0; k < bytes; k++) packed[k] = roll() % 3 ? packed[k] : (uint8_t)roll(); /* hostile ones */
        sthi_lossless_unpack(dtype, packed, bytes, n, 0, n, back);
        sthi_processor_limit(STHI_SCALAR);
        sthi_lossless_unpack(dtype, packed, bytes, n, 0, n, other);
        sthi_processor_limit(STHI_AVX2);
        assert_memory_equal(back, other, n * each_of(dtype));
    }
}

/* Every byte of short arrays, changed: found, or the values are what the changed bytes say, as those of the record. */
static void changed_bytes_are_found_or_are_other_values(void **state) {
    (void)state;
    for (int d = 0; d < 3; d++) {
        uint64_t n = 300, bytes, found = 0, each = each_of(dtypes[d]), tiles_end;
        fill(dtypes[d], values, n, 3);
        assert_ok(sth_lossless_bytes(dtypes[d], values, n, &bytes));
        assert_ok(sth_lossless_pack(dtypes[d], values, n, packed, bytes));
        tiles_end = sthi_lossless_record(sthi_lossless_form_of((int)dtypes[d]));
        for (uint64_t i = 0; i < bytes; i++) {
            packed[i] ^= 0x10;
            bool wrong = sth_lossless_check(dtypes[d], packed, bytes, n) != STH_OK;
            assert_ok(sth_lossless_unpack(dtypes[d], packed, bytes, n, back));
            if (i >= tiles_end + 7 && i < tiles_end + STHI_TABLE_BYTES + 4 && !wrong)
                fail_msg("byte %llu is not looked at", (unsigned long long)i);
            found += wrong;
            packed[i] ^= 0x10;
        }
        assert_true(found > 12);
        assert_ok(sth_lossless_unpack(dtypes[d], packed, bytes, n, back));
        assert_memory_equal(back, values, n * each);
    }
}

static void sizes_that_are_none_are_refused(void **state) {
    (void)state;
    uint64_t bytes;
    memset(values, 0, sizeof values);
    assert_ok(sth_lossless_bytes(STH_DTYPE_BF16, values, 2000, &bytes));
    assert_int_equal(bytes, 2 * 1408 + 16 + 16);
    assert_status(sth_lossless_bytes(STH_DTYPE_I8, values, 10, &bytes), STH_UNSUPPORTED);
    assert_status(sth_lossless_bytes(STH_DTYPE_BF16, values, (uint64_t)1 << 32, &bytes), STH_INVALID_ARGUMENT);
    assert_status(sth_lossless_pack(STH_DTYPE_BF16, values, 2000, packed, bytes - 16), STH_INVALID_ARGUMENT);
    assert_status(sth_lossless_pack(STH_DTYPE_BF16, values, 2000, packed, bytes + 8), STH_INVALID_ARGUMENT);
    assert_status(sth_lossless_unpack(STH_DTYPE_BF16, packed, bytes - 16, 2000, back), STH_INVALID_ARGUMENT);
    assert_status(sth_lossless_check(STH_DTYPE_BF16, NULL, bytes, 2000), STH_INVALID_ARGUMENT);
    fill(STH_DTYPE_BF16, values, 2000, 1);
    assert_status(sth_lossless_pack(STH_DTYPE_BF16, values, 2000, packed, bytes + 160), STH_UNSUPPORTED);
}

/* Normal weights take 0.70 of bf16, 0.89 of f16, 0.85 of f32; a sample says so, too. */
static void sizes_are_those_of_the_documentation(void **state) {
    (void)state;
    static const double most[] = {0.72, 0.90, 0.86};
    enum { N = 1 << 17 };
    uint8_t *many = malloc(N * 4);
    assert_non_null(many);
    for (int d = 0; d < 3; d++) {
        uint64_t bytes, plain = N * each_of(dtypes[d]);
        fill(dtypes[d], many, N, 0);
        assert_ok(sth_lossless_bytes(dtypes[d], many, N, &bytes));
        double share = (double)bytes / (double)plain;
        if (share > most[d] || share < most[d] - 0.06) fail_msg("dtype %d: %.3f", d, share);
        uint64_t estimate = sth_lossless_estimate(dtypes[d], many, N);
        if (fabs((double)estimate - (double)bytes) > 0.01 * (double)plain)
            fail_msg("dtype %d: %llu estimated, %llu", d, (unsigned long long)estimate, (unsigned long long)bytes);
        fill(dtypes[d], many, N, 1);
        assert_int_equal(sth_lossless_estimate(dtypes[d], many, N), plain);
    }
    assert_int_equal(sth_lossless_estimate(STH_DTYPE_I8, many, N), N);
    free(many);
}

/* ---- segments */

enum { PLACE = 40000 * 2, PIECE = 16384 };

static void segments_hold_what_shrinks(void **state) {
    (void)state;
    static uint8_t place[PLACE] __attribute__((aligned(16))), got[PLACE] __attribute__((aligned(16)));
    sth_segment tensors[] = {
        {.encoding = STH_TRANSFER_LOSSLESS, .dtype = STH_DTYPE_BF16, .rows = 1, .cols = 20001},
        {.encoding = STH_TRANSFER_VERBATIM, .place_offset = 40016, .rows = 1, .cols = 100},
        {.encoding = STH_TRANSFER_LOSSLESS, .dtype = STH_DTYPE_F32, .place_offset = 40128, .rows = 1, .cols = 9000}};
    sth_segment s[64];
    uint32_t count, again;
    uint64_t bytes, most, lossless = 0;
    fill(STH_DTYPE_BF16, place, 20001, 0);
    fill(STH_DTYPE_BF16, place + 2 * 8192, 4000, 1); /* in the third segment */
    fill(STH_DTYPE_F32, place + 40128, 9000, 0);
    assert_status(sth_transfer_layout(tensors, 3, PIECE, s, 64, &count, &bytes), STH_INVALID_ARGUMENT);
    assert_ok(sth_transfer_fit(tensors, 3, PIECE, NULL, 1, NULL, 0, &count, &most));
    assert_ok(sth_transfer_fit(tensors, 3, PIECE, place, 2, s, 64, &again, &bytes));
    assert_int_equal(count, again);
    assert_int_equal(count, 3 + 1 + 3);
    assert_true(bytes < most && bytes < sizeof place * 9 / 10);
    for (uint32_t i = 0; i < count; i++) lossless += s[i].encoding == STH_TRANSFER_LOSSLESS;
    assert_int_equal(lossless, 4); /* but that of any bits, the bytes, and 808 values, which fill no tile */
    assert_int_equal(s[1].encoding, STH_TRANSFER_VERBATIM);
    assert_ok(sthi_segments_check(s, count, sizeof place, bytes, "x"));
    uint8_t *image = malloc(bytes);
    assert_non_null(image);
    assert_ok(sth_transfer_encode(s, count, place, image, 2, NULL));
    memcpy(got, place, sizeof place);
    for (uint32_t i = 0; i < count; i++) memset(got + s[i].place_offset, 0, sthi_segment_place_bytes(&s[i]));
    assert_ok(sth_transfer_decode(s, count, image, got));
    assert_memory_equal(got, place, sizeof place);
    place[0] ^= 1; /* a little fits */
    assert_ok(sth_transfer_encode(s, count, place, image, 1, NULL));
    assert_ok(sth_transfer_decode(s, count, image, got));
    assert_memory_equal(got, place, sizeof place);
    fill(STH_DTYPE_BF16, place, 8192, 1); /* any bits do not */
    assert_status(sth_transfer_encode(s, count, place, image, 1, NULL), STH_UNSUPPORTED);
    sth_segment bad = s[0];
    bad.stride -= 16 * (bad.cols / 16);
    assert_status(sthi_segments_check(&bad, 1, sizeof place, bytes, "x"), STH_INVALID_ARGUMENT);
    bad = s[0], bad.rows = 2;
    assert_status(sthi_segments_check(&bad, 1, sizeof place, bytes, "x"), STH_INVALID_ARGUMENT);
    bad = s[0], bad.scales = 0;
    assert_status(sthi_segments_check(&bad, 1, sizeof place, bytes, "x"), STH_INVALID_ARGUMENT);
    bad = s[0], bad.stride = bytes * 2 / 16 * 16;
    assert_status(sthi_segments_check(&bad, 1, sizeof place, bytes, "x"), STH_INVALID_ARGUMENT);
    free(image);
}

int main(int argc, char **argv) {
    if (argc > 1) cases = strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bit_comes_back),
        cmocka_unit_test(every_width_has_the_same_bytes),
        cmocka_unit_test(changed_bytes_are_found_or_are_other_values),
        cmocka_unit_test(sizes_that_are_none_are_refused),
        cmocka_unit_test(sizes_are_those_of_the_documentation),
        cmocka_unit_test(segments_hold_what_shrinks),
    };
    return cmocka_run_group_tests_name("lossless", tests, NULL, NULL);
}
