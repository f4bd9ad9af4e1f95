/* Sizes as people write them, and arithmetic at its limits. */
#include "base/arith.h"

#include <string.h>

#include "support/check.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define KIB ((uint64_t)1024)

static void sizes_that_are_read(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } table[] = {
        {"0", 0},
        {"4096", 4096},
        {"4096B", 4096},
        {"512MB", 512000000},
        {"512 mb", 512000000},
        {"8GB", 8000000000},
        {"8G", 8000000000},
        {"8GiB", 8 * KIB * KIB * KIB},
        {"8Gi", 8 * KIB * KIB * KIB},
        {"8gib", 8 * KIB * KIB * KIB},
        {"8GIB", 8 * KIB * KIB * KIB},
        {"0.9999999999999999T", 999999999999}, /* not rounded up to the whole */
        {"1.5G", 1500000000},
        {"1.1GB", 1100000000},
        {"2.25MiB", 2359296},
        {"0.3K", 300},
        {"0.57K", 570},
        {"0.290K", 290},
        {"1.00000000000000000000000000000000001M", 1000000},
        {"9223372036854775807", INT64_MAX},
        {"0.5KiB", 512},
        {".5KiB", 512},
        {"1K", 1000},
        {"1KiB", 1024},
        {"2T", 2000000000000},
        {"2TiB", 2 * KIB * KIB * KIB * KIB},
        {"  3MiB  ", 3 * KIB * KIB},
    };
    for (size_t i = 0; i < COUNT(table); i++) {
        uint64_t bytes = 77;
        if (!sthi_parse_size(table[i].text, &bytes)) fail_msg("'%s' was refused", table[i].text);
        if (bytes != table[i].bytes)
            fail_msg("'%s' gave %llu", table[i].text, (unsigned long long)bytes);
    }
}

static void sizes_that_are_refused(void **state) {
    (void)state;
    static const char *const table[] = {
        NULL,   "",     " ",       "GB",   "-1",       "-1GB",  "+1GB", "nan",  "inf",  "infinity", "0x10",
        "8GBs", "8 GB x", "8X",    "1.5",  "1.5B",     "1e3",   "8GG",  "8iB",  "8,5G", "1..5G",    "1e3K",
        "1e400", "20000000000000000000", "9223372036854775808", "9300000000G", ".",
        "20000000000G", "18446744073709.6M" /* beyond 64 bits by the unit, and by the fraction */};
    for (size_t i = 0; i < COUNT(table); i++) {
        uint64_t bytes = 77;
        if (sthi_parse_size(table[i], &bytes))
            fail_msg("'%s' was read as %llu", table[i], (unsigned long long)bytes);
        assert_int_equal(bytes, 77);
    }
}

/* Byte counts above 2^53 are not all doubles: a whole number must still be read to the byte. */
static void whole_numbers_are_exact(void **state) {
    (void)state;
    uint64_t bytes = 0;
    assert_true(sthi_parse_size("9007199254740993", &bytes));
    assert_true(bytes == 9007199254740993u);
    assert_true(sthi_parse_size("1234567890123456789", &bytes));
    assert_true(bytes == 1234567890123456789u);
}

static void sizes_are_printed_with_their_unit(void **state) {
    (void)state;
    char buf[32];
    assert_string_equal(sthi_format_size(0, buf, sizeof buf), "0 B");
    assert_string_equal(sthi_format_size(512, buf, sizeof buf), "512 B");
    assert_string_equal(sthi_format_size(1023, buf, sizeof buf), "1023 B");
    assert_string_equal(sthi_format_size(1024, buf, sizeof buf), "1.00 KiB");
    assert_string_equal(sthi_format_size(1536, buf, sizeof buf), "1.50 KiB");
    assert_string_equal(sthi_format_size(3 * KIB * KIB * KIB, buf, sizeof buf), "3.00 GiB");
    assert_string_equal(sthi_format_size(5000 * KIB * KIB * KIB * KIB, buf, sizeof buf), "5000.00 TiB");
    char tiny[4];
    assert_string_equal(sthi_format_size(1536, tiny, sizeof tiny), "1.5");
}

static void addition_stops_at_the_limit(void **state) {
    (void)state;
    uint64_t out = 5;
    assert_true(sthi_add_u64(UINT64_MAX - 1, 1, &out));
    assert_true(out == UINT64_MAX);
    assert_false(sthi_add_u64(UINT64_MAX, 1, &(uint64_t){0}));
    assert_false(sthi_add_u64(1, UINT64_MAX, &(uint64_t){0}));
}

static void multiplication_stops_at_the_limit(void **state) {
    (void)state;
    uint64_t out = 5;
    assert_true(sthi_mul_u64(UINT64_MAX, 1, &out));
    assert_true(out == UINT64_MAX);
    assert_true(sthi_mul_u64(UINT64_MAX, 0, &out));
    assert_true(out == 0);
    assert_true(sthi_mul_u64(UINT32_MAX, UINT32_MAX, &out));
    assert_true(out == (uint64_t)UINT32_MAX * UINT32_MAX);
    assert_false(sthi_mul_u64((uint64_t)1 << 32, (uint64_t)1 << 32, &out));
    assert_false(sthi_mul_u64(UINT64_MAX, 2, &out));
}

static void rounding_up_keeps_multiples_and_refuses_overflow(void **state) {
    (void)state;
    uint64_t out = 0;
    assert_true(sthi_round_up(0, 512, &out));
    assert_true(out == 0);
    assert_true(sthi_round_up(1, 512, &out));
    assert_true(out == 512);
    assert_true(sthi_round_up(512, 512, &out));
    assert_true(out == 512);
    assert_true(sthi_round_up(10, 7, &out));
    assert_true(out == 14);
    assert_true(sthi_round_up(UINT64_MAX - 511, 512, &out));
    assert_true(out == UINT64_MAX - 511);
    out = 9;
    assert_false(sthi_round_up(UINT64_MAX - 510, 512, &out));
    assert_false(sthi_round_up(UINT64_MAX, 512, &out));
}

static void a_range_is_inside_only_when_its_end_is(void **state) {
    (void)state;
    assert_true(sthi_range_inside(0, 0, 0));
    assert_true(sthi_range_inside(0, 10, 10));
    assert_true(sthi_range_inside(10, 0, 10));
    assert_true(sthi_range_inside(UINT64_MAX, 0, UINT64_MAX));
    assert_false(sthi_range_inside(0, 11, 10));
    assert_false(sthi_range_inside(11, 0, 10));
    assert_false(sthi_range_inside(5, 6, 10));
    assert_false(sthi_range_inside(UINT64_MAX, 2, 10));
    assert_false(sthi_range_inside(2, UINT64_MAX, 10));
}

static void the_smaller_and_the_larger(void **state) {
    (void)state;
    assert_true(sthi_min_u64(1, UINT64_MAX) == 1);
    assert_true(sthi_min_u64(UINT64_MAX, 1) == 1);
    assert_true(sthi_max_u64(1, UINT64_MAX) == UINT64_MAX);
    assert_true(sthi_max_u64(UINT64_MAX, 1) == UINT64_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_that_are_read),
        cmocka_unit_test(sizes_that_are_refused),
        cmocka_unit_test(whole_numbers_are_exact),
        cmocka_unit_test(sizes_are_printed_with_their_unit),
        cmocka_unit_test(addition_stops_at_the_limit),
        cmocka_unit_test(multiplication_stops_at_the_limit),
        cmocka_unit_test(rounding_up_keeps_multiples_and_refuses_overflow),
        cmocka_unit_test(a_range_is_inside_only_when_its_end_is),
        cmocka_unit_test(the_smaller_and_the_larger),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
