/* The failure record: one per thread, complete, bounded, and movable to another thread. */
#include "base/error.h"

#include <string.h>

#include "base/thread.h"
#include "support/check.h"

static void *look_at_fresh_record(void *arg) {
    *(sth_error *)arg = *sth_last_error();
    sth_error *seen = arg;
    /* The strings die with the thread: keep only whether they are as promised. */
    seen->native_code = seen->domain && seen->object && seen->message && !*seen->object && !*seen->message;
    return NULL;
}

static void a_thread_without_failures_says_ok(void **state) {
    (void)state;
    sth_error seen = {.status = STH_IO};
    sthi_thread thread;
    assert_ok(sthi_thread_start(&thread, "fresh", look_at_fresh_record, &seen));
    sthi_thread_join(thread);
    assert_int_equal(seen.status, STH_OK);
    assert_true(seen.native_code);
}

static void a_failure_is_recorded_whole(void **state) {
    (void)state;
    assert_int_equal(sthi_fail(STH_IO, "errno", 5, "a.safetensors", "byte %d of %s", 12, "a"), STH_IO);
    const sth_error *e = sth_last_error();
    assert_int_equal(e->status, STH_IO);
    assert_int_equal(e->native_code, 5);
    assert_string_equal(e->domain, "errno");
    assert_string_equal(e->object, "a.safetensors");
    assert_string_equal(e->message, "byte 12 of a");
}

static void missing_domain_and_object_have_stand_ins(void **state) {
    (void)state;
    sthi_fail(STH_STALE, NULL, 0, NULL, "x");
    assert_string_equal(sth_last_error()->domain, "stagehand");
    assert_string_equal(sth_last_error()->object, "");
}

static void memory_that_is_missing_is_told_in_one_phrase(void **state) {
    (void)state;
    assert_int_equal(sthi_no_memory("a.safetensors", "opening %s", "a.safetensors"), STH_OUT_OF_HOST_MEMORY);
    const sth_error *e = sth_last_error();
    assert_int_equal(e->status, STH_OUT_OF_HOST_MEMORY);
    assert_string_equal(e->domain, "stagehand");
    assert_string_equal(e->object, "a.safetensors");
    assert_string_equal(e->message, "no host memory for opening a.safetensors");
    assert_int_equal(sthi_no_memory_in("sim", NULL, "%u events", 2), STH_OUT_OF_HOST_MEMORY);
    e = sth_last_error();
    assert_string_equal(e->domain, "sim");
    assert_string_equal(e->object, "");
    assert_string_equal(e->message, "no host memory for 2 events");
    assert_int_equal(sthi_no_memory(e->object, "what %s", e->message), STH_OUT_OF_HOST_MEMORY);
    assert_string_equal(sth_last_error()->message, "no host memory for what no host memory for 2 events");
}

static void a_record_may_be_built_from_the_one_before(void **state) {
    (void)state;
    sthi_fail(STH_IO, "errno", 2, "inner", "cause");
    const sth_error *e = sth_last_error();
    sthi_fail(STH_NOT_FOUND, e->domain, e->native_code, e->object, "outer: %s", e->message);
    e = sth_last_error();
    assert_int_equal(e->status, STH_NOT_FOUND);
    assert_string_equal(e->domain, "errno");
    assert_string_equal(e->object, "inner");
    assert_string_equal(e->message, "outer: cause");
}

static void long_texts_are_cut_and_end(void **state) {
    (void)state;
    char text[2000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    sthi_fail(STH_IO, text, 0, text, "%s", text);
    const sth_error *e = sth_last_error();
    sthi_error_copy sizes;
    assert_int_equal(strlen(e->domain), sizeof sizes.domain - 1);
    assert_int_equal(strlen(e->object), sizeof sizes.object - 1);
    assert_int_equal(strlen(e->message), sizeof sizes.message - 1);
}

typedef struct passage {
    sthi_error_copy copy;
    sth_status seen_before;
} passage;

static void *fail_elsewhere(void *arg) {
    passage *p = arg;
    p->seen_before = sth_last_error()->status;
    sthi_fail(STH_DEVICE_ERROR, "sim", 7, "unit 3", "the other thread failed");
    sthi_error_save(&p->copy);
    return NULL;
}

static void threads_have_records_of_their_own(void **state) {
    (void)state;
    sthi_fail(STH_IO, "errno", 5, "mine", "mine");
    passage p = {.seen_before = STH_IO};
    sthi_thread thread;
    assert_ok(sthi_thread_start(&thread, "other", fail_elsewhere, &p));
    sthi_thread_join(thread);
    assert_int_equal(p.seen_before, STH_OK);
    assert_string_equal(sth_last_error()->message, "mine");

    assert_int_equal(sthi_error_restore(&p.copy), STH_DEVICE_ERROR);
    const sth_error *e = sth_last_error();
    assert_int_equal(e->status, STH_DEVICE_ERROR);
    assert_int_equal(e->native_code, 7);
    assert_string_equal(e->object, "unit 3");
    assert_string_equal(e->message, "the other thread failed");
}

static sth_status tries(sth_status inner, int *reached) {
    STHI_TRY(inner);
    *reached = 1;
    return STH_OK;
}

static void try_returns_the_first_failure(void **state) {
    (void)state;
    int reached = 0;
    assert_int_equal(tries(STH_STALE, &reached), STH_STALE);
    assert_int_equal(reached, 0);
    assert_int_equal(tries(STH_OK, &reached), STH_OK);
    assert_int_equal(reached, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thread_without_failures_says_ok),
        cmocka_unit_test(a_failure_is_recorded_whole),
        cmocka_unit_test(missing_domain_and_object_have_stand_ins),
        cmocka_unit_test(memory_that_is_missing_is_told_in_one_phrase),
        cmocka_unit_test(a_record_may_be_built_from_the_one_before),
        cmocka_unit_test(long_texts_are_cut_and_end),
        cmocka_unit_test(threads_have_records_of_their_own),
        cmocka_unit_test(try_returns_the_first_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
