/* The watermark of saved activations. */
#include "core/watermark.h"
#include "support/check.h"

#include "base/arith.h"
#include "base/random.h"

static sth_watermark mark_of(uint64_t high, uint64_t low, uint64_t budget) {
    sth_watermark m;
    sthi_watermark_init(&m, high, low, budget > 0, budget);
    return m;
}

static void without_a_budget_it_stays(void **state) {
    (void)state;
    sth_watermark m = mark_of(6500, 6300, 0);
    assert_false(sthi_watermark_follow(&m, 9000, true));
    assert_int_equal(m.high, 6500);
    assert_int_equal(sthi_watermark_low(&m), 6300);
}

static void it_comes_down_at_once_and_goes_up_by_halves(void **state) {
    (void)state;
    sth_watermark m = mark_of(6500, 6300, 7000); /* a 128th is 54: it aims at 6946 */
    assert_false(sthi_watermark_follow(&m, 0, true));
    assert_true(sthi_watermark_follow(&m, 7246, true));
    assert_int_equal(m.high, 6200);
    assert_int_equal(sthi_watermark_low(&m), 6000);
    assert_false(sthi_watermark_follow(&m, 6946, true));
    assert_false(sthi_watermark_follow(&m, 6946 - 54, true)); /* passes differ by as much */
    assert_true(sthi_watermark_follow(&m, 6500, true));
    assert_int_equal(m.high, 6200); /* more was too much */
    m.patience = 0;
    assert_true(sthi_watermark_follow(&m, 6546, true));
    assert_int_equal(m.high, 6400);
    assert_true(sthi_watermark_follow(&m, 6545, true));
    assert_int_equal(m.high, 6601); /* halves are rounded up */
}

static void what_was_too_much_is_forgotten_after_100_passes(void **state) {
    (void)state;
    sth_watermark m = mark_of(6500, 6300, 7000);
    assert_true(sthi_watermark_follow(&m, 7246, true));
    for (int pass = 0; pass < 100; pass++) {
        (void)sthi_watermark_follow(&m, 6500, true);
        assert_int_equal(m.high, 6200);
    }
    assert_true(sthi_watermark_follow(&m, 6546, true));
    assert_int_equal(m.high, 6400);
}

static void it_does_not_go_up_where_nothing_was_moved(void **state) {
    (void)state;
    sth_watermark m = mark_of(6500, 6300, 7000);
    assert_false(sthi_watermark_follow(&m, 100, false));
    assert_true(sthi_watermark_follow(&m, 8000, false)); /* down it does */
    assert_int_equal(m.high, 6500 - (8000 - 6946));
}

static void it_stays_between_an_eighth_of_the_budget_and_all_of_it(void **state) {
    (void)state;
    sth_watermark m = mark_of(6500, 6300, 7000);
    assert_true(sthi_watermark_follow(&m, UINT64_MAX, true));
    assert_int_equal(m.high, 875);
    m = mark_of(6900, 6300, 7000);
    assert_true(sthi_watermark_follow(&m, 1, true));
    assert_int_equal(m.high, 7000);
}

static void a_limit_takes_the_band_along_and_ends_with_the_limit(void **state) {
    (void)state;
    const sth_watermark given = mark_of(1000, 900, 0);
    sth_watermark m = given;
    assert_false(sthi_watermark_limit(&m, &given, 1000));
    assert_true(sthi_watermark_limit(&m, &given, 500));
    assert_true(m.high == 500 && m.band == 50);
    assert_false(sthi_watermark_limit(&m, &given, 500));
    assert_true(sthi_watermark_limit(&m, &given, 0));
    assert_true(m.high == 0 && sthi_watermark_low(&m) == 0);
    assert_true(sthi_watermark_limit(&m, &given, UINT64_MAX));
    assert_true(m.high == 1000 && m.band == 100);
    const sth_watermark none = mark_of(0, 0, 0);
    m = none;
    assert_false(sthi_watermark_limit(&m, &none, 10));
}

static void below_a_limit_it_goes_on_following(void **state) {
    (void)state;
    const sth_watermark given = mark_of(6500, 6300, 7000);
    sth_watermark m = given;
    assert_true(sthi_watermark_limit(&m, &given, 3500));
    assert_true(m.high == 3500 && m.budget == 3500);
    assert_true(sthi_watermark_follow(&m, 3573, true)); /* it aims at 3473 */
    assert_int_equal(m.high, 3400);
    assert_false(sthi_watermark_limit(&m, &given, 7000)); /* the mark itself comes up from pass to pass */
    assert_int_equal(m.budget, 7000);
}

static void random_passes_keep_the_mark_in_its_bounds(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        uint64_t budget = 1000 + sthi_random64(seed, 0) % 1000000, high = budget - budget / 16;
        const sth_watermark given = mark_of(high, high - budget / 32, budget);
        sth_watermark m = given;
        for (uint64_t i = 1; i < 400; i++) {
            uint64_t before = m.high, peak = sthi_random64(seed, i) % (2 * budget), most = m.budget;
            if (i % 50 == 0) (void)sthi_watermark_limit(&m, &given, sthi_random64(seed, 1000 + i) % (2 * budget));
            before = m.high;
            most = m.budget;
            if (!sthi_watermark_follow(&m, peak, true)) {
                assert_int_equal(m.high, before);
                continue;
            }
            assert_true(m.high <= most && m.high >= most / 8 && sthi_watermark_low(&m) <= m.high);
            if (peak > most - most / 128) assert_true(m.high <= sthi_max_u64(before, most / 8));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_budget_it_stays),
        cmocka_unit_test(it_comes_down_at_once_and_goes_up_by_halves),
        cmocka_unit_test(what_was_too_much_is_forgotten_after_100_passes),
        cmocka_unit_test(it_does_not_go_up_where_nothing_was_moved),
        cmocka_unit_test(it_stays_between_an_eighth_of_the_budget_and_all_of_it),
        cmocka_unit_test(a_limit_takes_the_band_along_and_ends_with_the_limit),
        cmocka_unit_test(below_a_limit_it_goes_on_following),
        cmocka_unit_test(random_passes_keep_the_mark_in_its_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
