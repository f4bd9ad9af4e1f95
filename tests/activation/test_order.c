/* Order and plan: what a pass says of the next. */
#include "activation/order.h"
#include "base/memory.h"
#include "support/check.h"

static const uint64_t MIB = 1 << 20;

static void save(sthi_order *o, uint64_t bytes, int64_t at_ns, bool gone) {
    uint32_t ordinal;
    assert_true(sthi_order_save(o, (sthi_saved){.bytes = bytes, .saved_ns = at_ns}, &ordinal));
    o->now.saved[ordinal].gone = gone;
}

static void expect(const sthi_order *o, const int *want, int count) {
    uint32_t ordinal;
    for (int i = 0; i < count; i++) {
        assert_true(sthi_order_next(o, (uint32_t)i, &ordinal));
        assert_int_equal(ordinal, want[i]);
    }
    assert_false(sthi_order_next(o, (uint32_t)count, &ordinal));
}

static void without_a_last_pass_the_last_saved_is_first(void **state) {
    (void)state;
    sthi_order o = {0};
    sthi_order_pass(&o, 0);
    for (int i = 0; i < 4; i++) save(&o, 1, 1, false);
    expect(&o, (int[]){3, 2, 1, 0}, 4);
    sthi_order_ask(&o, 2, 1);
    expect(&o, (int[]){1, 0}, 2);
    sthi_order_fini(&o);
}

static void the_order_of_the_last_pass_goes_on_where_backward_is(void **state) {
    (void)state;
    sthi_order o = {0};
    static const uint32_t asked[] = {2, 0, 3, 0, 1};
    sthi_order_pass(&o, 0);
    for (int i = 0; i < 4; i++) save(&o, 1, 1, false);
    for (int i = 0; i < 5; i++) sthi_order_ask(&o, asked[i], i + 1);
    sthi_order_pass(&o, 0);
    for (int i = 0; i < 4; i++) save(&o, 1, 1, false);
    expect(&o, (int[]){2, 0, 3, 0, 1}, 5);
    sthi_order_ask(&o, 0, 1); /* 2 was left out */
    expect(&o, (int[]){3, 0, 1}, 3);
    sthi_order_ask(&o, 9, 1); /* unheard of */
    expect(&o, (int[]){3, 0, 1}, 3);
    sthi_order_ask(&o, 1, 1);
    expect(&o, NULL, 0);
    sthi_order_pass(&o, 0);
    sthi_order_pass(&o, 0); /* a forward alone teaches nothing */
    save(&o, 1, 1, false);
    expect(&o, (int[]){0, 9, 1}, 3);
    sthi_order_fini(&o);
}

/* Even the smaller, needed soon, and kept so far. */
static void the_plan_takes_what_can_be_computed_again_first(void **state) {
    (void)state;
    sthi_order o = {0};
    sthi_order_pass(&o, 0);
    for (int i = 0; i < 5; i++) save(&o, i < 2 ? 2 * MIB : MIB, i, i < 2);
    o.now.saved[3].recomputable = o.now.saved[4].recomputable = true;
    for (uint32_t i = 5; i-- > 0;) sthi_order_ask(&o, i, 20 - i);
    o.now.spare = 0;
    sthi_order_pass(&o, 1e6);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(sthi_order_plan_says_go(&o, i, i < 2 ? 2 * MIB : MIB), i != 1 && i != 2);
    sthi_order_fini(&o);
}

/* Among what the link has time for: bytes times the time until they are asked for. */
static void the_plan_takes_what_is_large_and_needed_late(void **state) {
    (void)state;
    sthi_order o = {0};
    sthi_order_pass(&o, 0);
    save(&o, 1 * MIB, 0 + 1, false);
    save(&o, 8 * MIB, 1000000, true);
    save(&o, 8 * MIB, 2000000, false);
    save(&o, 8 * MIB, 30000000, false); /* needed at once */
    save(&o, 1 * MIB, 4000000, true);
    o.now.spare = 0;
    static const uint32_t asked[] = {3, 4, 1, 2, 0};
    static const int64_t at_ns[] = {30500000, 31000000, 40000000, 50000000, 60000000};
    for (int i = 0; i < 5; i++) sthi_order_ask(&o, asked[i], at_ns[i]);
    sthi_order_pass(&o, 1e9);
    /* 9 MiB were spilled: number 2 has the most benefit, then number 1. */
    static const bool want[] = {false, true, true, false, false};
    for (uint32_t i = 0; i < 5; i++) {
        uint64_t bytes = i == 0 || i == 4 ? MIB : 8 * MIB;
        assert_int_equal(sthi_order_plan_says_go(&o, i, bytes), want[i]);
        assert_false(sthi_order_plan_says_go(&o, i, bytes + 1));
    }
    assert_false(sthi_order_plan_says_go(&o, 5, MIB));
    sthi_order_fini(&o);
}

static void room_that_was_left_is_used(void **state) {
    (void)state;
    sthi_order o = {0};
    sthi_order_pass(&o, 0);
    for (int i = 0; i < 8; i++) save(&o, MIB, i + 1, true);
    for (uint32_t i = 8; i-- > 0;) sthi_order_ask(&o, i, 100);
    o.now.spare = 3 * MIB;
    sthi_order_pass(&o, 0);
    for (uint32_t i = 0; i < 8; i++) assert_int_equal(sthi_order_plan_says_go(&o, i, MIB), i < 5);
    sthi_order_fini(&o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_last_pass_the_last_saved_is_first),
        cmocka_unit_test(the_order_of_the_last_pass_goes_on_where_backward_is),
        cmocka_unit_test(the_plan_takes_what_can_be_computed_again_first),
        cmocka_unit_test(the_plan_takes_what_is_large_and_needed_late),
        cmocka_unit_test(room_that_was_left_is_used),
    };
    return cmocka_run_group_tests_name("activation order", tests, NULL, NULL);
}
