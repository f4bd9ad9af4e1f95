/* An invariant that is broken ends the program in builds that check them, and costs nothing in
 * all others. */
#include "support/check.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/invariant.h"

#ifdef STHI_INVARIANTS
static const bool checked = true;
#else
static const bool checked = false;
#endif

static bool called;

static bool call(bool value) {
    called = true;
    return value;
}

static void sanitizer_builds_check(void **state) {
    (void)state;
    if (UNDER_ASAN || UNDER_TSAN) assert_true(checked);
    called = false;
    STHI_INVARIANT(call(true));
    assert_int_equal(called, checked);
}

static void a_broken_one_says_where_and_ends_the_program(void **state) {
    (void)state;
    char said[512] = "";
    int ends[2], status = 0, line = __LINE__;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], 2);
        STHI_INVARIANT(1 + 1 == 3);
        _exit(0);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], said, sizeof said - 1);
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!checked) {
        assert_true(n == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        return;
    }
    char place[64];
    snprintf(place, sizeof place, "test_invariant.c:%d: ", line + 5);
    assert_non_null(strstr(said, place));
    assert_non_null(strstr(said, "1 + 1 == 3"));
    assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sanitizer_builds_check),
        cmocka_unit_test(a_broken_one_says_where_and_ends_the_program),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
