/* How much host memory may be pinned. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/device.h"
#include "device/pinning.h"
#include "host/arena.h"
#include "support/check.h"

#define GB UINT64_C(1000000000)
static const uint64_t MIB = 1 << 20;

static void the_reserve_is_a_fifth_and_at_least_four_gigabytes(void **state) {
    (void)state;
    assert_int_equal(sthi_pin_reserve(0, 0), 4 * GB);
    assert_int_equal(sthi_pin_reserve(10 * GB, 9 * GB), 4 * GB);
    assert_int_equal(sthi_pin_reserve(10 * GB, 30 * GB), 8 * GB);
    assert_int_equal(sthi_pin_reserve(UINT64_MAX, 2), UINT64_MAX / 5); /* the system does not say */
}

/* Whether a region of so many bytes may be pinned, with `available` left beside it. */
static bool may_pin(uint64_t bytes, uint64_t available) {
    sthi_memory_assume(available);
    bool may = sthi_may_pin(bytes);
    sthi_memory_assume(0);
    return may;
}

static void memory_is_left_for_the_rest_of_the_machine(void **state) {
    (void)state;
    assert_true(may_pin(256 * MIB, 1)); /* staging and small models */
    assert_false(may_pin(256 * MIB + 1, 1));
    assert_true(may_pin(GB, 4 * GB));
    assert_false(may_pin(GB, 4 * GB - 1));
    assert_non_null(strstr(sthi_error_last()->message, "4000000000 to the rest of the machine"));
    assert_true(may_pin(40 * GB, 10 * GB)); /* of 50 */
    assert_false(may_pin(41 * GB, 10 * GB));
}

/* An arena of four windows on a machine with so much memory; returns the bytes of it that are pinned. */
static uint64_t pinned_of_arena(sth_device *device, uint64_t available, sth_arena **out) {
    void *p;
    sthi_memory_assume(available);
    assert_ok(sthi_arena_create(device, 1024 * MIB, out));
    for (int i = 0; i < 4; i++) assert_ok(sthi_arena_reserve(*out, 256 * MIB, &p));
    assert_ok(sthi_arena_finish(*out));
    sthi_memory_assume(0);
    return sthi_arena_pinned_bytes(*out);
}

static void an_arena_pins_what_it_may(void **state) {
    (void)state;
    sth_sim_options options;
    sth_device *device;
    sth_arena *first, *second;
    sthi_sim_options_init(&options);
    assert_ok(sthi_device_open("sim", &options, &device));
    assert_int_equal(pinned_of_arena(device, 8 * GB, &first), 1024 * MIB);
    assert_string_equal(sthi_arena_pin_error(first), "");
    assert_int_equal(pinned_of_arena(device, 3 * GB, &second), 0); /* the first one counts */
    assert_non_null(strstr(sthi_arena_pin_error(second), "1073741824 are pinned"));
    sthi_arena_release(first);
    sthi_arena_release(second);
    assert_int_equal(pinned_of_arena(device, 3 * GB, &second), 256 * MIB); /* nothing is pinned any more */
    sthi_arena_release(second);
    sthi_device_release(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_reserve_is_a_fifth_and_at_least_four_gigabytes),
        cmocka_unit_test(memory_is_left_for_the_rest_of_the_machine),
        cmocka_unit_test(an_arena_pins_what_it_may),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
