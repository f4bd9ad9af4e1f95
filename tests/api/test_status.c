/* Status names and texts, and the version. */
#include <stdio.h>
#include <string.h>

#include "stagehand/stagehand.h"
#include "support/check.h"

static const sth_status all[] = {
#define VALUE(name, value, class, text) STH_##name,
    STH_STATUS_LIST(VALUE)
#undef VALUE
};
#define COUNT (sizeof all / sizeof *all)

static void success_is_zero_and_failures_are_negative(void **state) {
    (void)state;
    assert_int_equal(all[0], 0);
    for (size_t i = 1; i < COUNT; i++) assert_true(all[i] < 0);
}

static void every_status_has_a_name_and_a_text_of_its_own(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT; i++) {
        assert_string_not_equal(sth_status_name(all[i]), "UNKNOWN");
        assert_true(strlen(sth_status_text(all[i])) > 0);
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(all[i], all[j]);
            assert_string_not_equal(sth_status_name(all[i]), sth_status_name(all[j]));
            assert_string_not_equal(sth_status_text(all[i]), sth_status_text(all[j]));
        }
    }
    assert_string_equal(sth_status_name(STH_OK), "OK");
    assert_string_equal(sth_status_name(STH_BUDGET_TOO_SMALL), "BUDGET_TOO_SMALL");
    assert_string_equal(sth_status_text(STH_OK), "success");
}

static void other_values_are_unknown(void **state) {
    (void)state;
    const int values[] = {1, -9, -9999, 1000};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        assert_string_equal(sth_status_name((sth_status)values[i]), "UNKNOWN");
        assert_string_equal(sth_status_text((sth_status)values[i]), "unknown status");
    }
}

static void the_library_is_of_the_headers_version(void **state) {
    (void)state;
    char want[32];
    snprintf(want, sizeof want, "%d.%d.%d", STH_VERSION_MAJOR, STH_VERSION_MINOR, STH_VERSION_PATCH);
    assert_string_equal(sth_version(), want);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(success_is_zero_and_failures_are_negative),
        cmocka_unit_test(every_status_has_a_name_and_a_text_of_its_own),
        cmocka_unit_test(other_values_are_unknown),
        cmocka_unit_test(the_library_is_of_the_headers_version),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
