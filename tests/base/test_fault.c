/* Fault points: the n-th hit fails, once or from then on, and kinds do not touch each other. */
#include "base/fault.h"

#include "support/check.h"

static int disarm(void **state) {
    (void)state;
    sthi_fault_disarm_all();
    return 0;
}

static void nothing_fails_unless_armed(void **state) {
    (void)state;
    for (int kind = 0; kind < STHI_FAULT_KINDS; kind++)
        for (int i = 0; i < 3; i++) assert_false(sthi_fault_hit((sthi_fault_kind)kind));
}

static void the_nth_hit_fails_once(void **state) {
    (void)state;
    sthi_fault_arm(STHI_FAULT_READ, 3, false);
    assert_false(sthi_fault_hit(STHI_FAULT_READ));
    assert_false(sthi_fault_hit(STHI_FAULT_READ));
    assert_true(sthi_fault_hit(STHI_FAULT_READ));
    assert_false(sthi_fault_hit(STHI_FAULT_READ));
    assert_int_equal(sthi_fault_seen(STHI_FAULT_READ), 4);
}

static void for_ever_means_every_later_hit(void **state) {
    (void)state;
    sthi_fault_arm(STHI_FAULT_PIN, 2, true);
    assert_false(sthi_fault_hit(STHI_FAULT_PIN));
    for (int i = 0; i < 5; i++) assert_true(sthi_fault_hit(STHI_FAULT_PIN));
}

static void kinds_are_counted_apart(void **state) {
    (void)state;
    sthi_fault_arm(STHI_FAULT_WRITE, 1, false);
    assert_false(sthi_fault_hit(STHI_FAULT_READ));
    assert_false(sthi_fault_hit(STHI_FAULT_DEVICE_CALL));
    assert_int_equal(sthi_fault_seen(STHI_FAULT_WRITE), 0);
    assert_true(sthi_fault_hit(STHI_FAULT_WRITE));
}

static void arming_again_starts_the_count_afresh(void **state) {
    (void)state;
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, true);
    assert_true(sthi_fault_hit(STHI_FAULT_ALLOC));
    sthi_fault_arm(STHI_FAULT_ALLOC, 2, false);
    assert_int_equal(sthi_fault_seen(STHI_FAULT_ALLOC), 0);
    assert_false(sthi_fault_hit(STHI_FAULT_ALLOC));
    assert_true(sthi_fault_hit(STHI_FAULT_ALLOC));
    assert_false(sthi_fault_hit(STHI_FAULT_ALLOC));
}

static void disarming_ends_all_faults(void **state) {
    (void)state;
    for (int kind = 0; kind < STHI_FAULT_KINDS; kind++) sthi_fault_arm((sthi_fault_kind)kind, 1, true);
    sthi_fault_disarm_all();
    for (int kind = 0; kind < STHI_FAULT_KINDS; kind++)
        assert_false(sthi_fault_hit((sthi_fault_kind)kind));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(nothing_fails_unless_armed, disarm),
        cmocka_unit_test_teardown(the_nth_hit_fails_once, disarm),
        cmocka_unit_test_teardown(for_ever_means_every_later_hit, disarm),
        cmocka_unit_test_teardown(kinds_are_counted_apart, disarm),
        cmocka_unit_test_teardown(arming_again_starts_the_count_afresh, disarm),
        cmocka_unit_test_teardown(disarming_ends_all_faults, disarm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
