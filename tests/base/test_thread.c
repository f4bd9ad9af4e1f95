/* Threads, conditions and the clock: signals stay with the caller, waits end in time, faults are values. */
#define _GNU_SOURCE
#include "base/thread.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "support/check.h"

#define MS ((int64_t)1000000)

typedef struct box {
    sthi_mutex mutex;
    sthi_cond cond;
    int value;
    char name[16];
    sigset_t blocked;
} box;

static int make_box(void **state) {
    static box b;
    memset(&b, 0, sizeof b);
    sthi_mutex_init(&b.mutex);
    sthi_cond_init(&b.cond);
    *state = &b;
    return 0;
}

static int drop_box(void **state) {
    box *b = *state;
    sthi_cond_fini(&b->cond);
    sthi_mutex_fini(&b->mutex);
    sthi_fault_disarm_all();
    return 0;
}

static void *look_around(void *arg) {
    box *b = arg;
    pthread_getname_np(pthread_self(), b->name, sizeof b->name);
    pthread_sigmask(SIG_SETMASK, NULL, &b->blocked);
    return NULL;
}

static void a_thread_blocks_all_signals(void **state) {
    box *b = *state;
    sthi_thread t;
    assert_ok(sthi_thread_start(&t, "sth-test", look_around, b));
    sthi_thread_join(t);
    const int signals[] = {SIGINT, SIGTERM, SIGALRM, SIGUSR1, SIGHUP};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        assert_true(sigismember(&b->blocked, signals[i]));
    sigset_t own;
    pthread_sigmask(SIG_SETMASK, NULL, &own);
    assert_false(sigismember(&own, SIGINT));
}

static void a_thread_that_cannot_start_is_an_error(void **state) {
    sthi_thread t;
    sthi_fault_arm(STHI_FAULT_THREAD, 1, false);
    assert_status(sthi_thread_start(&t, "sth-test", look_around, *state), STH_OUT_OF_HOST_MEMORY);
    assert_string_equal(sth_last_error()->object, "sth-test");
    assert_ok(sthi_thread_start(&t, "sth-test", look_around, *state));
    sthi_thread_join(t);
}

static void *add_many(void *arg) {
    box *b = arg;
    for (int i = 0; i < 10000; i++) {
        sthi_lock(&b->mutex);
        b->value++;
        sthi_unlock(&b->mutex);
    }
    return NULL;
}

static void the_lock_keeps_counts_whole(void **state) {
    box *b = *state;
    sthi_thread t[4];
    for (int i = 0; i < 4; i++) assert_ok(sthi_thread_start(&t[i], "adder", add_many, b));
    for (int i = 0; i < 4; i++) sthi_thread_join(t[i]);
    assert_int_equal(b->value, 40000);
}

static void *answer(void *arg) {
    box *b = arg;
    sthi_lock(&b->mutex);
    while (b->value != 1) sthi_cond_wait(&b->cond, &b->mutex);
    b->value = 2;
    sthi_cond_broadcast(&b->cond);
    sthi_unlock(&b->mutex);
    return NULL;
}

static void a_wait_ends_with_the_signal(void **state) {
    box *b = *state;
    sthi_thread t;
    assert_ok(sthi_thread_start(&t, "answer", answer, b));
    sthi_lock(&b->mutex);
    b->value = 1;
    sthi_cond_broadcast(&b->cond);
    bool in_time = true;
    while (b->value != 2 && in_time) in_time = sthi_cond_wait_for(&b->cond, &b->mutex, 20000 * MS);
    assert_int_equal(b->value, 2);
    sthi_unlock(&b->mutex);
    sthi_thread_join(t);
}

static void a_wait_without_a_signal_ends_by_the_clock(void **state) {
    box *b = *state;
    sthi_lock(&b->mutex);
    int64_t start = sthi_now_ns();
    while (sthi_cond_wait_for(&b->cond, &b->mutex, 20 * MS)) start = sthi_now_ns();
    assert_true(sthi_now_ns() - start >= 20 * MS);
    sthi_unlock(&b->mutex);
}

static void sleep_is_never_short(void **state) {
    (void)state;
    int64_t start = sthi_now_ns();
    sthi_sleep_ns(5 * MS);
    assert_true(sthi_now_ns() - start >= 5 * MS);
    start = sthi_now_ns();
    sthi_sleep_ns(0);
    sthi_sleep_ns(-3600000 * MS);
    assert_true(sthi_now_ns() - start < 3600000 * MS);
}

static void a_child_process_can_tell_that_it_is_one(void **state) {
    (void)state;
    unsigned before = sthi_fork_depth();
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(sthi_fork_depth() == before ? 1 : 0);
    int how = -1;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    assert_int_equal(sthi_fork_depth(), before);
}

static void there_is_at_least_one_processor(void **state) {
    (void)state;
    assert_true(sthi_cpu_count() >= 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_thread_blocks_all_signals, make_box, drop_box),
        cmocka_unit_test_setup_teardown(a_thread_that_cannot_start_is_an_error, make_box, drop_box),
        cmocka_unit_test_setup_teardown(the_lock_keeps_counts_whole, make_box, drop_box),
        cmocka_unit_test_setup_teardown(a_wait_ends_with_the_signal, make_box, drop_box),
        cmocka_unit_test_setup_teardown(a_wait_without_a_signal_ends_by_the_clock, make_box, drop_box),
        cmocka_unit_test(sleep_is_never_short),
        cmocka_unit_test(a_child_process_can_tell_that_it_is_one),
        cmocka_unit_test(there_is_at_least_one_processor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
