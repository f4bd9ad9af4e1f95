/* The JSONL file: the keys and numbers of a line, the bound on its size, whole lines after every kind of
 * failure, and what is refused. */
#define _GNU_SOURCE
#include "telemetry/jsonl.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "support/check.h"
#include "telemetry/telemetry.h"

static char folder[64], path[96];

static int make_folder(void **state) {
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/sth-telemetry-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/steps.jsonl", folder);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    sthi_fault_disarm_all();
    unlink(path);
    return rmdir(folder);
}

/* The whole file as a string, to be freed with free(). */
static char *file_text(void) {
    char *text = calloc(1, 1 << 20);
    FILE *f = fopen(path, "r");
    assert_non_null(text);
    assert_non_null(f);
    size_t n = fread(text, 1, (1 << 20) - 1, f);
    fclose(f);
    assert_true(n < (1 << 20) - 1);
    return text;
}

static void write_file(const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

/* Checks that each line is one JSON object; returns how many there are. */
static int count_lines(const char *text) {
    int lines = 0;
    for (const char *c = text; *c; lines++) {
        const char *end = strchr(c, '\n');
        assert_non_null(end);
        json_t *object = json_loadb(c, (size_t)(end - c), JSON_REJECT_DUPLICATES, NULL);
        assert_true(json_is_object(object));
        json_decref(object);
        c = end + 1;
    }
    return lines;
}

static sthi_jsonl *open_ok(uint64_t max_bytes) {
    sthi_jsonl *f = NULL;
    assert_ok(sthi_jsonl_open(path, max_bytes, &f));
    return f;
}

static void a_line_has_the_keys_of_the_list_in_order(void **state) {
    (void)state;
    static const char *const keys[] = {
#define KEY(field, unit, text) #field,
        STH_STEP_METRICS_LIST(KEY)
#undef KEY
    };
    sthi_jsonl *f = open_ok(1 << 20);
    sth_step_metrics m = {.step = 7, .h2d_bytes = 9663676416.0, .stall_time_ms = 0.1234567};
    assert_ok(sthi_jsonl_append(f, &m));
    sthi_jsonl_close(f, true);
    char *text = file_text();
    assert_int_equal(count_lines(text), 1);
    const char *at = text;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char want[64];
        snprintf(want, sizeof want, "%c\"%s\":", i ? ',' : '{', keys[i]);
        assert_memory_equal(at, want, strlen(want));
        at += strlen(want);
        at += strcspn(at, ",}");
    }
    assert_string_equal(at, "}\n");
    assert_non_null(strstr(text, "\"step\":7,"));
    assert_non_null(strstr(text, "\"h2d_bytes\":9663676416,"));
    assert_non_null(strstr(text, "\"stall_time_ms\":0.123457,"));
    free(text);
}

static void values_that_json_cannot_hold_become_null(void **state) {
    (void)state;
    sthi_jsonl *f = open_ok(1 << 20);
    sth_step_metrics m = {.step = 1e300,
                          .copy_time_ms = (double)NAN,
                          .stall_time_ms = (double)INFINITY,
                          .nan_count = (double)NAN,
                          .link_gb_s = -(double)INFINITY};
    assert_ok(sthi_jsonl_append(f, &m));
    sthi_jsonl_close(f, true);
    char *text = file_text();
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "\"step\":1e+300,"));
    assert_non_null(strstr(text, "\"copy_time_ms\":null,"));
    assert_non_null(strstr(text, "\"stall_time_ms\":null,"));
    assert_non_null(strstr(text, "\"nan_count\":null,"));
    assert_non_null(strstr(text, "\"link_gb_s\":null}"));
    free(text);
}

static void a_new_file_is_private_and_an_old_one_is_appended_to(void **state) {
    (void)state;
    for (int run = 0; run < 3; run++) {
        sthi_jsonl *f = open_ok(1 << 20);
        assert_ok(sthi_jsonl_append(f, &(sth_step_metrics){.step = run}));
        sthi_jsonl_close(f, true);
    }
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    char *text = file_text();
    assert_int_equal(count_lines(text), 3);
    free(text);
}

static void a_file_of_another_kind_is_left_alone(void **state) {
    (void)state;
    static const char *const others[] = {"weights, say", "{\"model\": 1}", "{", "\n"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        sthi_jsonl *file = NULL;
        write_file(others[i]);
        assert_int_equal(sthi_jsonl_open(path, 1 << 20, &file), STH_INVALID_ARGUMENT);
        assert_non_null(strstr(sth_last_error()->message, path));
        char *text = file_text();
        assert_string_equal(text, others[i]);
        free(text);
    }
}

static void without_flush_what_is_pending_is_dropped(void **state) {
    (void)state;
    sthi_jsonl *f = open_ok(1 << 20);
    assert_ok(sthi_jsonl_append(f, &(sth_step_metrics){.step = 1}));
    sthi_jsonl_close(f, false);
    char *text = file_text();
    assert_string_equal(text, "");
    free(text);
}

static void a_torn_last_line_does_not_spoil_the_next(void **state) {
    (void)state;
    write_file("{\"step\":1,\"h2d");
    sthi_jsonl *f = open_ok(1 << 20);
    assert_ok(sthi_jsonl_append(f, &(sth_step_metrics){.step = 2}));
    sthi_jsonl_close(f, true);
    char *text = file_text(), *second = strchr(text, '\n');
    assert_non_null(second);
    assert_int_equal(count_lines(second + 1), 1);
    free(text);
}

/* For every bound in a range that ends within, at and after lines. */
static void the_bound_holds_and_the_last_line_says_so(void **state) {
    (void)state;
    for (uint64_t bound = 19; bound < 3000; bound += 37) {
        sthi_jsonl *f = open_ok(bound);
        for (int i = 0; i < 20; i++) assert_ok(sthi_jsonl_append(f, &(sth_step_metrics){.step = i}));
        sthi_jsonl_close(f, true);
        char *text = file_text();
        size_t length = strlen(text), tail = strlen(STHI_JSONL_TRUNCATED);
        assert_true(length <= bound && length >= tail);
        assert_string_equal(text + length - tail, STHI_JSONL_TRUNCATED);
        int lines = count_lines(text);
        size_t line = strcspn(text, "\n") + 1;
        if (lines > 1) assert_true(length + line > bound); /* one more would not have fitted */
        free(text);
        unlink(path);
    }
    write_file("");
}

/* For every bound in a range, and with each write in turn failing: all of the lines, or none and whole ones before. */
static void lines_made_elsewhere_are_added_whole_up_to_the_bound(void **state) {
    (void)state;
    static const char lines[] = "{\"step_id\":1}\n{\"event\":\"x\"}\n";
    const size_t length = sizeof lines - 1, tail = sizeof STHI_JSONL_TRUNCATED - 1;
    unlink(path);
    for (uint64_t bound = tail; bound < 5 * length + tail; bound++) {
        bool full = false;
        size_t added = 0;
        for (; !full; added++) assert_ok(sthi_jsonl_append_text(path, bound, lines, length, &full));
        char *text = file_text();
        assert_int_equal(strlen(text), (added - 1) * length + tail);
        assert_true(strlen(text) <= bound && strlen(text) + length > bound);
        assert_string_equal(text + strlen(text) - tail, STHI_JSONL_TRUNCATED);
        free(text);
        full = false;
        assert_ok(sthi_jsonl_append_text(path, bound, lines, length, &full));
        assert_true(full);
        unlink(path);
    }
    write_file("{\"step\":1");
    for (unsigned n = 1; n <= 2; n++) {
        bool full = false;
        sthi_fault_arm(STHI_FAULT_WRITE, n, false);
        assert_status(sthi_jsonl_append_text(path, 1 << 20, lines, length, &full), STH_IO);
        sthi_fault_disarm_all();
        assert_int_equal(sthi_alloc_live(), 0);
    }
    bool full = true;
    assert_ok(sthi_jsonl_append_text(path, 1 << 20, lines, length, &full));
    char *text = file_text();
    assert_false(full);
    assert_string_equal(text, "{\"step\":1\n{\"step_id\":1}\n{\"event\":\"x\"}\n");
    free(text);
    write_file("");
}

enum { WRITERS = 4, EACH_WRITES = 200 };

static void *write_lines(void *arg) {
    bool *failed = arg, full = false;
    for (int i = 0; i < EACH_WRITES; i++)
        if (sthi_jsonl_append_text(path, 1 << 20, "{\"step_id\":1}\n", 14, &full) != STH_OK || full) *failed = true;
    return NULL;
}

static void several_writers_add_whole_lines_at_once(void **state) {
    (void)state;
    sthi_thread threads[WRITERS];
    bool failed[WRITERS] = {false};
    unlink(path);
    for (int i = 0; i < WRITERS; i++) assert_ok(sthi_thread_start(&threads[i], "writer", write_lines, &failed[i]));
    for (int i = 0; i < WRITERS; i++) sthi_thread_join(threads[i]);
    for (int i = 0; i < WRITERS; i++) assert_false(failed[i]);
    char *text = file_text();
    assert_int_equal(count_lines(text), WRITERS * EACH_WRITES);
    assert_int_equal(strlen(text), 14 * WRITERS * EACH_WRITES);
    free(text);
    write_file("");
}

static void more_than_the_buffer_is_written_in_whole_lines(void **state) {
    (void)state;
    sthi_jsonl *f = open_ok(1 << 20);
    for (int i = 0; i < 500; i++) assert_ok(sthi_jsonl_append(f, &(sth_step_metrics){.step = i}));
    char *text = file_text();
    int before = count_lines(text);
    assert_true(before > 0 && before < 500);
    free(text);
    sthi_jsonl_close(f, true);
    text = file_text();
    assert_int_equal(count_lines(text), 500);
    free(text);
}

static void a_file_that_is_full_already_is_reported_once(void **state) {
    (void)state;
    write_file("{\"step\":1}\n");
    sthi_telemetry *t = NULL;
    assert_ok(sthi_telemetry_create(path, 20, &t));
    assert_status(sthi_telemetry_push(t, &(sth_step_metrics){.step = 1}), STH_IO);
    assert_non_null(strstr(sth_last_error()->message, "telemetry_max_bytes"));
    assert_ok(sthi_telemetry_push(t, &(sth_step_metrics){.step = 2}));
    assert_int_equal(sthi_telemetry_count(t), 2);
    sthi_telemetry_destroy(t, true);
    char *text = file_text();
    assert_string_equal(text, "{\"step\":1}\n");
    free(text);
}

/* Pushes 300 steps; returns how many pushes failed, each of which must have said IO and the path. */
static int push_many(sthi_telemetry *t) {
    int failures = 0;
    for (int i = 0; i < 300; i++) {
        sth_status status = sthi_telemetry_push(t, &(sth_step_metrics){.step = i});
        if (status == STH_OK) continue;
        assert_int_equal(status, STH_IO);
        assert_string_equal(sth_last_error()->object, path);
        failures++;
    }
    assert_int_equal(sthi_telemetry_count(t), 100);
    return failures;
}

static void a_failing_write_is_reported_once_and_ends_the_writing(void **state) {
    (void)state;
    for (uint64_t n = 1; n <= 3; n++) {
        sthi_telemetry *t = NULL;
        assert_ok(sthi_telemetry_create(path, 1 << 20, &t));
        sthi_fault_arm(STHI_FAULT_WRITE, n, false);
        assert_int_equal(push_many(t), 1);
        assert_int_equal(sthi_fault_seen(STHI_FAULT_WRITE), n);
        sthi_fault_disarm_all();
        uint64_t lost = sthi_telemetry_lost(t);
        assert_ok(sthi_telemetry_flush(t));
        sthi_telemetry_destroy(t, true);
        char *text = file_text();
        int lines = count_lines(text);
        assert_true(n == 1 ? lines == 0 : lines > 0 && lines < 300);
        assert_int_equal(lines + (int)lost, 300);
        free(text);
        unlink(path);
    }
    write_file("");
}

/* The system stops the write in the middle of a line, as a full disk does. */
static void a_write_that_stops_half_way_leaves_whole_lines(void **state) {
    (void)state;
    struct rlimit old;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    sthi_telemetry *t = NULL;
    assert_ok(sthi_telemetry_create(path, 1 << 20, &t));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &(struct rlimit){20001, old.rlim_max}), 0);
    int failures = push_many(t);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    uint64_t lost = sthi_telemetry_lost(t);
    sthi_telemetry_destroy(t, true);
    assert_int_equal(failures, 1);
    char *text = file_text();
    int lines = count_lines(text);
    assert_true(lines > 0);
    assert_int_equal(lines + (int)lost, 300);
    free(text);
}

/* Fewer than what is gathered: the flush writes them, and says what is wrong. */
static void a_flush_that_fails_is_reported_once_and_counts_what_is_lost(void **state) {
    (void)state;
    sthi_telemetry *t = NULL;
    assert_ok(sthi_telemetry_create(path, 1 << 20, &t));
    for (int i = 0; i < 3; i++) assert_ok(sthi_telemetry_push(t, &(sth_step_metrics){.step = i}));
    assert_ok(sthi_telemetry_flush(t));
    for (int i = 0; i < 5; i++) assert_ok(sthi_telemetry_push(t, &(sth_step_metrics){.step = i}));
    assert_int_equal(sthi_telemetry_lost(t), 0);
    sthi_fault_arm(STHI_FAULT_WRITE, 1, true);
    assert_status(sthi_telemetry_flush(t), STH_IO);
    assert_ok(sthi_telemetry_flush(t));
    assert_ok(sthi_telemetry_push(t, &(sth_step_metrics){.step = 9}));
    assert_int_equal(sthi_telemetry_lost(t), 6);
    sthi_fault_disarm_all();
    sthi_telemetry_destroy(t, true);
    char *text = file_text();
    assert_int_equal(count_lines(text), 3);
    free(text);
    unlink(path);
    write_file("");
}

static void what_a_full_file_does_not_take_is_counted(void **state) {
    (void)state;
    sthi_telemetry *t = NULL;
    assert_ok(sthi_telemetry_create(path, 4000, &t));
    for (int i = 0; i < 50; i++) assert_ok(sthi_telemetry_push(t, &(sth_step_metrics){.step = i}));
    uint64_t lost = sthi_telemetry_lost(t);
    sthi_telemetry_destroy(t, true);
    char *text = file_text();
    assert_int_equal(count_lines(text) - 1 + (int)lost, 50); /* the last line says that it is full */
    free(text);
}

static void assert_refused(const char *at, sth_status want, const char *word) {
    sthi_jsonl *f = NULL;
    assert_status(sthi_jsonl_open(at, 1 << 20, &f), want);
    assert_null(f);
    assert_non_null(strstr(sth_last_error()->message, at));
    assert_non_null(strstr(sth_last_error()->message, word));
}

static void what_is_not_a_regular_file_is_refused(void **state) {
    (void)state;
    char target[128];
    long live = sthi_alloc_live();
    snprintf(target, sizeof target, "%s/target", folder);
    assert_int_equal(symlink(target, path), 0);
    assert_refused(path, STH_UNSUPPORTED, "symbolic link");
    assert_int_equal(access(target, F_OK), -1);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_refused(path, STH_UNSUPPORTED, "regular");
    unlink(path);
    sthi_jsonl_close(open_ok(1 << 20), true);
    assert_int_equal(link(path, target), 0);
    assert_refused(path, STH_UNSUPPORTED, "another name");
    unlink(target);
    assert_refused("/dev/null", STH_UNSUPPORTED, "regular");
    assert_refused(folder, STH_IO, "directory");
    assert_refused("/nowhere/at/all.jsonl", STH_NOT_FOUND, "No such file");
    assert_int_equal(sthi_alloc_live(), live);
}

static void two_writers_of_one_file_are_refused(void **state) {
    (void)state;
    sthi_jsonl *f = open_ok(1 << 20);
    assert_refused(path, STH_INVALID_STATE, "another");
    sthi_jsonl_close(f, true);
    sthi_jsonl_close(open_ok(1 << 20), true);
}

static void a_bound_without_room_is_refused(void **state) {
    (void)state;
    sthi_jsonl *f = NULL;
    assert_status(sthi_jsonl_open(path, 18, &f), STH_INVALID_ARGUMENT);
    assert_int_equal(access(path, F_OK), -1);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(a_line_has_the_keys_of_the_list_in_order),
        CASE(values_that_json_cannot_hold_become_null),
        CASE(a_new_file_is_private_and_an_old_one_is_appended_to),
        CASE(a_file_of_another_kind_is_left_alone),
        CASE(without_flush_what_is_pending_is_dropped),
        CASE(a_torn_last_line_does_not_spoil_the_next),
        CASE(the_bound_holds_and_the_last_line_says_so),
        CASE(lines_made_elsewhere_are_added_whole_up_to_the_bound),
        CASE(several_writers_add_whole_lines_at_once),
        CASE(more_than_the_buffer_is_written_in_whole_lines),
        CASE(a_file_that_is_full_already_is_reported_once),
        CASE(a_failing_write_is_reported_once_and_ends_the_writing),
        CASE(a_write_that_stops_half_way_leaves_whole_lines),
        CASE(a_flush_that_fails_is_reported_once_and_counts_what_is_lost),
        CASE(what_a_full_file_does_not_take_is_counted),
        CASE(what_is_not_a_regular_file_is_refused),
        CASE(two_writers_of_one_file_are_refused),
        CASE(a_bound_without_room_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
