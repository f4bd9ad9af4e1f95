/* Host images that are written without a word reach the device all the same. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "load/fingerprint.h"
#include "runtime/epoch.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/step_calls.h"
#include "stream/world.h"

static const uint64_t FOUR[4] = {40000, 12288, 65536, 8192};
static const uint32_t FORWARD[4] = {0, 1, 2, 3};

static void ok(sth_status rc) {
    if (rc != STH_OK) fail_msg("%s: %s", sth_status_name(rc), sth_last_error()->message);
}

/* Units of `flags` that all stay on the device, used in a few steps. */
static void open_world(world *w, bool writable, uint32_t flags, bool read_only, uint64_t pin_limit) {
    world_spec spec = world_default(4, FOUR, 300000);
    spec.writable = writable;
    spec.read_only = read_only;
    spec.pin_limit = pin_limit;
    spec.flags = flags;
    ok(world_open(w, &spec));
    for (int i = 0; i < 3; i++) ok(world_step(w, FORWARD, 4, 1000));
}

static uint64_t copies(world *w) {
    sth_runtime_stats s;
    sthi_runtime_stats(w->runtime, &s);
    return s.copies;
}

static void rewrite_and_step(world *w) {
    for (uint8_t version = 1; version < 4; version++) {
        for (uint32_t i = 0; i < 4; i++) world_fill(w, i, version);
        ok(world_step(w, FORWARD, 4, 1000));
    }
}

static void test_resident_units_follow_silent_writes(void **state) {
    (void)state;
    for (int writable = 0; writable < 2; writable++)
        for (uint64_t pin_limit = 0; pin_limit < 2; pin_limit++) { /* 1 byte: nothing is pinned, all is staged */
            world w;
            open_world(&w, writable, writable ? 0 : STH_UNIT_WATCHED, false, pin_limit);
            rewrite_and_step(&w);
            world_close(&w);
        }
}

static void test_units_that_are_not_written_are_not_copied_again(void **state) {
    (void)state;
    world w;
    open_world(&w, false, STH_UNIT_WATCHED, false, 0);
    uint64_t before = copies(&w);
    for (int i = 0; i < 4; i++) ok(world_step(&w, FORWARD, 4, 1000));
    assert_int_equal(copies(&w), before);
    world_fill(&w, 2, 1);
    ok(world_step(&w, FORWARD, 4, 1000));
    assert_int_equal(copies(&w), before + 1);
    world_close(&w);
}

static void test_a_fence_asks_again_within_a_step(void **state) {
    (void)state;
    world w;
    open_world(&w, false, STH_UNIT_WATCHED, false, 0);
    ok(sthi_step_begin(w.runtime));
    ok(world_use(&w, 0, 1000));
    world_fill(&w, 0, 1);
    ok(sthi_runtime_fence(w.runtime));
    ok(world_use(&w, 0, 1000));
    ok(sthi_step_end(w.runtime));
    world_close(&w);
}

static void test_a_silent_write_to_a_read_only_image_is_an_error_by_name(void **state) {
    (void)state;
    world w;
    open_world(&w, true, 0, true, 0);
    world_fill(&w, 1, 1);
    for (int again = 0; again < 2; again++) { /* until the write is said */
        assert_int_equal(world_step(&w, FORWARD, 4, 1000), STH_INVALID_STATE);
        assert_non_null(strstr(sth_last_error()->message, w.runtime->units[1].name));
        ok(sthi_step_end(w.runtime));
    }
    ok(sthi_unit_mark_written(w.runtime, 1));
    ok(world_step(&w, FORWARD, 4, 1000));
    world_close(&w);
}

static void test_samples_cover_both_ends_and_small_images_whole(void **state) {
    (void)state;
    enum { BIG = 1 << 20, SMALL = 16 << 10 };
    uint8_t *image = sthi_zalloc(BIG, 1);
    assert_non_null(image);
    for (uint64_t i = 0; i < SMALL; i += 501) {
        uint64_t before = sthi_fingerprint(image, SMALL);
        image[i] ^= 1;
        assert_true(sthi_fingerprint(image, SMALL) != before);
    }
    for (uint64_t bytes = SMALL + 1; bytes < BIG; bytes = bytes * 3 / 2 + 7) {
        uint64_t before = sthi_fingerprint(image, bytes);
        image[0] ^= 1;
        uint64_t first = sthi_fingerprint(image, bytes);
        assert_true(first != before);
        image[bytes - 1] ^= 1;
        assert_true(sthi_fingerprint(image, bytes) != first);
        memset(image + bytes / 3, 7, bytes / 64); /* a stretch longer than the distance between samples */
        assert_true(sthi_fingerprint(image, bytes) != first);
        memset(image, 0, bytes);
    }
    sthi_free(image);
}

static void test_each_tensor_of_a_unit_has_samples(void **state) {
    (void)state;
    enum { WEIGHT = 1 << 20, BIAS = 48, PLACE = WEIGHT + 2 * 512 };
    sth_unit_tensor tensors[3] = {{"weight", 0}, {"bias", WEIGHT}, {"scale", WEIGHT + 512}};
    sthi_unit u = {.tensors = tensors, .tensor_count = 3};
    uint8_t *image = sthi_zalloc(PLACE, 1);
    assert_non_null(image);
    uint64_t before = sthi_fingerprint_place(&u, image, PLACE);
    for (uint64_t i = 0; i < BIAS; i++)
        for (uint32_t t = 0; t < 3; t++) { /* of the weight its first line */
            uint8_t *byte = image + tensors[t].place_offset + i;
            *byte ^= 1;
            assert_true(sthi_fingerprint_place(&u, image, PLACE) != before);
            *byte ^= 1;
        }
    assert_true(sthi_fingerprint_place(&u, image, PLACE) == before);
    sthi_free(image);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resident_units_follow_silent_writes),
        cmocka_unit_test(test_units_that_are_not_written_are_not_copied_again),
        cmocka_unit_test(test_a_fence_asks_again_within_a_step),
        cmocka_unit_test(test_a_silent_write_to_a_read_only_image_is_an_error_by_name),
        cmocka_unit_test(test_samples_cover_both_ends_and_small_images_whole),
        cmocka_unit_test(test_each_tensor_of_a_unit_has_samples),
    };
    return cmocka_run_group_tests_name("stream/fingerprint", tests, NULL, NULL);
}
