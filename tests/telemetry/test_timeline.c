/* The recording: its ring, its texts, its file, and what is left where something fails. */
#include "telemetry/timeline.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "support/check.h"

static char path[64];

static int begin(void **state) {
    static long live;
    live = sthi_alloc_live();
    *state = &live;
    snprintf(path, sizeof path, "/tmp/sth-timeline-%d.json", (int)getpid());
    return 0;
}

static int end(void **state) {
    sthi_fault_disarm_all();
    (void)unlink(path);
    return sthi_alloc_live() == *(long *)*state && !sthi_timeline_on() ? 0 : -1;
}

static sth_status open_for(uint32_t events) {
    sth_timeline_options options;
    sthi_timeline_options_init(&options);
    options.path = path;
    options.events = events;
    return sthi_timeline_begin(&options);
}

static void put(const char *source, const char *name, int64_t step) {
    int64_t now = sthi_timeline_now();
    sthi_slice slice = {.track = STHI_TRACK_COMPUTE, .source = source, .name = name, .begin_ns = now, .end_ns = now + 5,
                        .step = step};
    sthi_timeline_slice(&slice);
}

/* The slices of the file, in its order. The caller gives `*out_all` back. */
static json_t *slices(json_t **out_all) {
    json_error_t error;
    json_t *event, *found = json_array();
    size_t i;
    *out_all = json_load_file(path, 0, &error);
    if (!*out_all) fail_msg("line %d: %s", error.line, error.text);
    json_array_foreach(json_object_get(*out_all, "traceEvents"), i, event)
        if (!strcmp(json_string_value(json_object_get(event, "ph")), "X")) json_array_append(found, event);
    return found;
}

static const char *name_at(json_t *events, size_t i) {
    return json_string_value(json_object_get(json_array_get(events, i), "name"));
}

static void the_newest_events_stay(void **state) {
    (void)state;
    char name[32];
    uint64_t lost = 0;
    json_t *all;
    assert_int_equal(open_for(1024), STH_OK);
    for (int i = 0; i < 3000; i++) {
        snprintf(name, sizeof name, "unit %d", i);
        put("model", name, i);
    }
    assert_int_equal(sthi_timeline_end(&lost), STH_OK);
    assert_int_equal(lost, 3000 - 1024);
    json_t *events = slices(&all);
    assert_int_equal(json_array_size(events), 1024);
    assert_string_equal(name_at(events, 0), "unit 1976");
    assert_string_equal(name_at(events, 1023), "unit 2999");
    json_decref(events);
    json_decref(all);
}

static void what_began_before_is_left_out(void **state) {
    (void)state;
    json_t *all;
    int64_t before = sthi_timeline_now() - 1;
    assert_int_equal(open_for(1024), STH_OK);
    sthi_timeline_since((sthi_mark){before, false}, STHI_TRACK_CALL, "host", "early", 0);
    sthi_timeline_since((sthi_mark){0, false}, STHI_TRACK_CALL, "host", "unmarked", 0);
    sthi_timeline_counter("host", "early", before, 1);
    put("model", "in time", 0);
    assert_int_equal(sthi_timeline_end(NULL), STH_OK);
    json_t *events = slices(&all);
    assert_int_equal(json_array_size(events), 1);
    assert_string_equal(name_at(events, 0), "in time");
    assert_int_equal(json_array_size(json_object_get(all, "traceEvents")), 3); /* and two names */
    json_decref(events);
    json_decref(all);
}

/* What came in when nothing was recorded is nowhere. */
static void without_a_recording_nothing_happens(void **state) {
    (void)state;
    assert_int_equal(sthi_timeline_mark("what", "name").begin_ns, 0);
    put("model", "lost", 0);
    assert_int_equal(sthi_timeline_end(NULL), STH_INVALID_STATE);
}

static void every_name_is_a_json_string(void **state) {
    (void)state;
    static char longest[4000];
    json_t *all;
    memset(longest, 'x', sizeof longest - 1);
    memcpy(longest + 500, "\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc", 14); /* round where it is cut */
    assert_int_equal(open_for(1024), STH_OK);
    put("a \"model\"\\", "tab\tquote\"", 0);
    put("m", "\xff\xfe no text", 0);
    put("m", longest, 0);
    put("m", longest + 1, 0);
    assert_int_equal(sthi_timeline_end(NULL), STH_OK);
    json_t *events = slices(&all);
    assert_string_equal(name_at(events, 0), "tab?quote\"");
    assert_string_equal(name_at(events, 1), "?? no text");
    assert_true(strlen(name_at(events, 2)) > 500);
    json_decref(events);
    json_decref(all);
}

/* For n = 1, 2, 3, ... the n-th allocation fails: a recording that cannot begin leaves nothing, and one that has begun
 * goes on. */
static void without_memory_nothing_is_left(void **state) {
    (void)state;
    bool begun = false;
    for (uint64_t n = 1; n < 60; n++) {
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = open_for(1024);
        begun = rc == STH_OK;
        if (begun) {
            put("model", "unit", 0);
            put("model", "another", 0);
            rc = sthi_timeline_end(NULL);
        }
        sthi_fault_disarm_all();
        assert_true(rc == STH_OK || rc == STH_OUT_OF_HOST_MEMORY);
        assert_false(sthi_timeline_on());
    }
    assert_true(begun);
}

static void a_path_that_cannot_be_is_refused(void **state) {
    (void)state;
    sth_timeline_options options;
    sthi_timeline_options_init(&options);
    options.path = "/dev/full";
    assert_int_equal(sthi_timeline_begin(&options), STH_UNSUPPORTED);
    options.path = "/tmp/no/such/folder/run.json";
    assert_int_equal(sthi_timeline_begin(&options), STH_NOT_FOUND);
    options.path = path;
    options.events = 7;
    assert_int_equal(sthi_timeline_begin(&options), STH_INVALID_ARGUMENT);
    assert_int_equal(open_for(1024), STH_OK);
    assert_int_equal(open_for(1024), STH_INVALID_STATE);
    assert_int_equal(sthi_timeline_end(NULL), STH_OK);
}

enum { THREADS = 4, EACH = 2000 };

static void *record(void *arg) {
    for (int i = 0; i < EACH; i++) {
        sthi_mark begun = sthi_timeline_mark("optimizer", arg);
        sthi_timeline_since(begun, STHI_TRACK_OPTIMIZER, "optimizer", arg, 8);
    }
    return NULL;
}

static void threads_have_lines_of_their_own(void **state) {
    (void)state;
    static char names[THREADS][16];
    sthi_thread threads[THREADS];
    json_t *all, *event, *lines = json_object();
    size_t i;
    assert_int_equal(open_for(THREADS * EACH), STH_OK);
    for (int t = 0; t < THREADS; t++) {
        snprintf(names[t], sizeof names[t], "adamw-%d", t);
        assert_int_equal(sthi_thread_start(&threads[t], names[t], record, names[t]), STH_OK);
    }
    for (int t = 0; t < THREADS; t++) sthi_thread_join(threads[t]);
    assert_int_equal(sthi_timeline_end(NULL), STH_OK);
    json_t *events = slices(&all);
    assert_int_equal(json_array_size(events), THREADS * EACH);
    json_array_foreach(events, i, event) json_object_set(lines, name_at(events, i), json_object_get(event, "tid"));
    assert_int_equal(json_object_size(lines), THREADS);
    json_array_foreach(events, i, event)
        assert_true(json_equal(json_object_get(lines, name_at(events, i)), json_object_get(event, "tid")));
    json_decref(lines);
    json_decref(events);
    json_decref(all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_newest_events_stay, begin, end),
        cmocka_unit_test_setup_teardown(what_began_before_is_left_out, begin, end),
        cmocka_unit_test_setup_teardown(without_a_recording_nothing_happens, begin, end),
        cmocka_unit_test_setup_teardown(every_name_is_a_json_string, begin, end),
        cmocka_unit_test_setup_teardown(without_memory_nothing_is_left, begin, end),
        cmocka_unit_test_setup_teardown(a_path_that_cannot_be_is_refused, begin, end),
        cmocka_unit_test_setup_teardown(threads_have_lines_of_their_own, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
