/* Turns of threads that ask for room. */
#include "core/turns.h"
#include "support/check.h"

static void the_first_that_came_is_first_until_it_ends(void **state) {
    (void)state;
    sthi_turns turns = {NULL};
    sthi_turn a, b, c;
    assert_false(sthi_turns_is_first(&turns, 1));
    sthi_turns_add(&turns, &a, 1, 10);
    sthi_turns_add(&turns, &b, 2, 20);
    sthi_turns_add(&turns, &c, 3, 30);
    assert_true(sthi_turns_is_first(&turns, 1));
    assert_false(sthi_turns_is_first(&turns, 2));
    assert_ptr_equal(sthi_turns_end(&turns, 2), &b); /* it has given up */
    assert_ptr_equal(sthi_turns_end(&turns, 1), &a);
    assert_true(sthi_turns_is_first(&turns, 3));
    assert_int_equal(sthi_turns_find(&turns, 3)->until_ns, 30);
    assert_null(sthi_turns_find(&turns, 1));
    assert_ptr_equal(sthi_turns_end(&turns, 3), &c);
    assert_null(turns.first);
}

static void a_turn_inside_a_turn_is_the_same_one(void **state) {
    (void)state;
    sthi_turns turns = {NULL};
    sthi_turn a, b;
    sthi_turns_add(&turns, &a, 1, 0);
    sthi_turns_add(&turns, &b, 2, 0);
    sthi_turns_find(&turns, 1)->depth++;
    assert_null(sthi_turns_end(&turns, 1));
    assert_true(sthi_turns_is_first(&turns, 1));
    assert_ptr_equal(sthi_turns_end(&turns, 1), &a);
    assert_true(sthi_turns_is_first(&turns, 2));
    assert_null(sthi_turns_end(&turns, 1)); /* it has none any more */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_that_came_is_first_until_it_ends),
        cmocka_unit_test(a_turn_inside_a_turn_is_the_same_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
