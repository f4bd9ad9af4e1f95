/* What every C test includes: cmocka with the headers it wants first, and shorthands for statuses. */
#ifndef TESTS_SUPPORT_CHECK_H
#define TESTS_SUPPORT_CHECK_H
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "stagehand/status.h"

/* Fails with the error's own message when `expr` is not STH_OK. */
#define assert_ok(expr)                                                                            \
    do {                                                                                           \
        sth_status assert_ok_ = (expr);                                                            \
        if (assert_ok_ != STH_OK)                                                                  \
            fail_msg("%s: %s (%s)", #expr, sth_status_name(assert_ok_), sth_last_error()->message); \
    } while (0)

/* Fails when `expr` is not the status `want`. */
#define assert_status(expr, want)                                                                  \
    do {                                                                                           \
        sth_status assert_status_ = (expr);                                                        \
        if (assert_status_ != (want))                                                              \
            fail_msg("%s: %s, expected %s", #expr, sth_status_name(assert_status_),                \
                     sth_status_name(want));                                                       \
    } while (0)

#if defined(__SANITIZE_ADDRESS__)
#define UNDER_ASAN true
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define UNDER_ASAN true
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN true
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN true
#endif
#endif
#ifndef UNDER_ASAN
#define UNDER_ASAN false
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN false /* where it is true all is some twenty times slower: loops take fewer cases */
#endif

/* Four times as many generated cases in `make test-full`. */
static inline unsigned cases_to_try(unsigned count) { return getenv("STH_TEST_FULL") ? 4 * count : count; }

/* `all`, but `few` under the thread sanitizer in `make test`, whose full run tries all there, too. */
static inline unsigned few_under_tsan(unsigned few, unsigned all) {
    return UNDER_TSAN && !getenv("STH_TEST_FULL") ? few : all;
}

/* The same under either sanitizer. */
static inline unsigned few_under_sanitizers(unsigned few, unsigned all) {
    return UNDER_ASAN && !getenv("STH_TEST_FULL") ? few : few_under_tsan(few, all);
}

/* Ends the case as skipped; `reason` says why, and is printed by tests/run.py. */
#define skip_because(reason)             \
    do {                                 \
        print_message("# skip: %s\n", reason); \
        skip();                          \
    } while (0)
#endif
