/* When to ask again for what was refused. */
#include "core/backoff.h"
#include "support/check.h"

#define SECOND INT64_C(1000000000)

static void waits_double_from_half_a_second_to_64(void **state) {
    (void)state;
    sthi_backoff b = {0};
    int64_t now = -7 * SECOND, wait = SECOND;
    assert_true(sthi_backoff_due(&b, now)); /* at once, whatever the clock says */
    for (int i = 0; i < 10; i++, wait *= 2) {
        int64_t want = wait < 64 * SECOND ? wait : 64 * SECOND;
        sthi_backoff_asked(&b, now, true);
        assert_false(sthi_backoff_due(&b, now + want - 1));
        now += want;
        assert_true(sthi_backoff_due(&b, now));
    }
}

static void looks_that_find_nothing_to_ask_for_come_every_half_a_second(void **state) {
    (void)state;
    sthi_backoff b = {0};
    for (int64_t now = 0; now < 5 * SECOND; now += SECOND / 10)
        assert_int_equal(sthi_backoff_due(&b, now), now % (SECOND / 2) == 0);
}

static void what_was_had_ends_the_long_waits(void **state) {
    (void)state;
    for (int how = 0; how < 2; how++) {
        sthi_backoff b = {0};
        for (int i = 0; i < 5; i++) sthi_backoff_asked(&b, 0, true);
        assert_false(sthi_backoff_due(&b, 16 * SECOND - 1));
        if (how) sthi_backoff_reset(&b);
        else sthi_backoff_asked(&b, 15 * SECOND + SECOND / 2, false);
        assert_true(sthi_backoff_due(&b, 16 * SECOND));
        assert_false(sthi_backoff_due(&b, 16 * SECOND + SECOND / 2 - 1));
        assert_true(sthi_backoff_due(&b, 16 * SECOND + SECOND / 2));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waits_double_from_half_a_second_to_64),
        cmocka_unit_test(looks_that_find_nothing_to_ask_for_come_every_half_a_second),
        cmocka_unit_test(what_was_had_ends_the_long_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
