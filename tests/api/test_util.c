/* Sizes as people write them, through the public functions. */
#include "support/check.h"

#include <string.h>

#include "stagehand/util.h"

static void reads_sizes(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},
                {"4096", 4096},
                {"8GB", 8000000000},
                {"8GiB", 8589934592},
                {"1.5G", 1500000000},
                {"512 MiB", 536870912},
                {"2Ki", 2048},
                {"100B", 100}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        uint64_t bytes = 1;
        assert_ok(sth_parse_size(good[i].text, &bytes));
        assert_int_equal(bytes, good[i].bytes);
    }
}

static void refuses_what_is_no_size(void **state) {
    (void)state;
    static const char *const bad[] = {"",     " ",    "-1",   "8QB", "GB", "1.5",
                                      "0x10", "8GB!", "1e30", "nan", "inf"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint64_t bytes = 77;
        assert_status(sth_parse_size(bad[i], &bytes), STH_INVALID_ARGUMENT);
        assert_int_equal(bytes, 77);
        assert_non_null(strstr(sth_last_error()->message, bad[i]));
    }
    uint64_t bytes;
    assert_status(sth_parse_size(NULL, &bytes), STH_INVALID_ARGUMENT);
    assert_status(sth_parse_size("1", NULL), STH_INVALID_ARGUMENT);
}

static void writes_sizes(void **state) {
    (void)state;
    char text[24];
    assert_string_equal(sth_format_size(512, text, sizeof text), "512 B");
    assert_string_equal(sth_format_size((uint64_t)3 << 30, text, sizeof text), "3.00 GiB");
    assert_string_equal(sth_format_size(UINT64_MAX, text, sizeof text), "16777216.00 TiB");
    assert_string_equal(sth_format_size(1536, text, 4), "1.5");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_sizes),
        cmocka_unit_test(refuses_what_is_no_size),
        cmocka_unit_test(writes_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
