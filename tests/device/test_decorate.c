/* What stands before a device's name: check, fault, delay, trace and its replay. That they change nothing else is shown
 * by the contract suite, which runs on decorated devices (meson.build). */
#define _GNU_SOURCE
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/device.h"
#include "stagehand/stagehand.h"
#include "support/check.h"

enum { BYTES = 4096 };
static char folder[] = "/tmp/sth-decorate-XXXXXX";
static unsigned char host[2 * BYTES];

static sth_device *opened(const char *name) {
    sth_device *d;
    assert_ok(sth_device_open(name, NULL, &d));
    return d;
}

static bool said(const char *text) { return strstr(sth_last_error()->message, text) != NULL; }
static void forget_errors(void) { sthi_fail(STH_OK, NULL, 0, NULL, "nothing"); }

#define O(op, ...) (d->ops->op(d->self, __VA_ARGS__))

/* ---- names */

static void names_with_decorators(void **state) {
    (void)state;
    sth_device_info info;
    sth_device *d = opened("check+delay(seed=2,call_us=0)+fault(alloc=9+)+check+sim:0");
    assert_ok(sth_device_info_get(d, &info));
    assert_string_equal(info.backend, "sim");
    assert_true(d->capabilities & STH_CAP_HOST_IS_DEVICE);
    sth_device_close(d);
    assert_int_equal(sth_device_count("check+sim"), 1);

    static const struct {
        const char *name, *word;
    } bad[] = {
        {"chek+sim", "no decorator"},         {"+sim", "no decorator"},
        {"check+", "no back end"},            {"check", "no back end"},
        {"sim+check", "no back end"},         {"check+tpu", "tpu"},
        {"fault(copy=1)+sim", "copy=1"},      {"fault(copy_h2d=0)+sim", "copy_h2d=0"},
        {"fault(copy_h2d=x)+sim", "copy_h2d=x"}, {"fault(copy_h2d=+)+sim", "copy_h2d=+"},
        {"fault(free=1)+sim", "free=1"},      {"fault(now_ns=1)+sim", "now_ns=1"},
        {"fault(status=FINE)+sim", "status=FINE"}, {"fault(status=OK)+sim", "status=OK"},
        {"fault(copy_h2d)+sim", "key=value"}, {"delay(seed=-1)+sim", "seed=-1"},
        {"delay(call_us=99999999999)+sim", "call_us"}, {"slow(percent=99)+sim", "percent=99"},
        {"check(file=x)+sim", "log=PATH"},
        {"trace+sim", "file=PATH"},           {"trace(file=)+sim", "file=PATH"},
        {"trace(file=/nowhere/x)+sim", "/nowhere/x"}, {"check(log=/nowhere/x)+sim", "/nowhere/x"},
        {"fault(copy_h2d=1+sim", "fault"},    {"fault(copy_h2d=1)x+sim", "do not end"},
    };
    long live = sthi_alloc_live();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sth_device *none = NULL;
        forget_errors();
        if (sth_device_open(bad[i].name, NULL, &none) == STH_OK || !said(bad[i].word))
            fail_msg("%s: %s", bad[i].name, sth_last_error()->message);
        assert_null(none);
    }
    assert_int_equal(sthi_alloc_live(), live);
}

/* ---- check */

static void complains(sth_status rc, sth_status want, const char *call, const char *what) {
    const sth_error *e = sth_last_error();
    if (rc != want || strcmp(e->domain, "check") != 0 || strcmp(e->object, call) != 0 || !strstr(e->message, what))
        fail_msg("%s %s: %s", sth_status_name(rc), call, e->message);
}

static void complains_by_record(const char *call, const char *what) {
    complains(sth_last_error()->status, STH_INVALID_ARGUMENT, call, what);
    forget_errors();
}

static void check_finds_what_is_not_alive(void **state) {
    (void)state;
    sth_device *d = opened("check+sim"), *other = opened("check+sim");
    sth_devptr p, ring, alias, far;
    sth_stream s;
    sth_event *e, *theirs;
    uint64_t unit = d->ops->ring_granularity(d->self);
    assert_ok(O(alloc, BYTES, &p));
    assert_ok(O(ring_alloc, unit, &ring));
    assert_ok(O(stream_create, 0, &s));
    assert_ok(O(event_create, false, &e));
    assert_ok(other->ops->alloc(other->self, BYTES, &far));
    assert_ok(other->ops->event_create(other->self, false, &theirs));

    forget_errors();
    O(free, p, BYTES - 1);
    complains_by_record("free", "of 4096 bytes, and the call says a range of 4095");
    O(ring_free, p, BYTES);
    complains_by_record("ring_free", "and the call says a ring");
    O(free, far, BYTES);
    complains_by_record("free", "belongs to another device");
    O(event_destroy, theirs);
    complains_by_record("event_destroy", "belongs to another device");
    complains(O(event_record, theirs, s), STH_INVALID_ARGUMENT, "event_record", "belongs to another device");
    complains(O(copy_d2h, host, far, 1, s), STH_INVALID_ARGUMENT, "copy_d2h", "belongs to another device");
    assert_ok(O(copy_d2h_foreign, host, far, 1, s)); /* that is what it is for */
    assert_ok(O(stream_synchronize, s));

    forget_errors();
    O(free, p, BYTES);
    O(ring_free, ring, unit);
    O(stream_destroy, s);
    O(event_destroy, e);
    assert_int_equal(sth_last_error()->status, STH_OK);
    O(free, p, BYTES);
    complains_by_record("free", "was it ended before?");
    O(event_destroy, e);
    complains_by_record("event_destroy", "was it ended before?");
    O(stream_destroy, s);
    complains_by_record("stream_destroy", "was it ended before?");
    complains(O(stream_synchronize, s), STH_INVALID_ARGUMENT, "stream_synchronize", "stream 0x1 is not alive");
    O(poison, p, BYTES, 0);
    complains_by_record("poison", "is not alive");
    O(free, 0, 0);
    O(event_destroy, NULL);
    O(stream_destroy, 0);

    assert_ok(O(host_register, host, BYTES, &alias));
    complains(O(host_register, host + 1, BYTES, &alias), STH_INVALID_ARGUMENT, "host_register", "registered already");
    forget_errors();
    O(host_unregister, host, BYTES + 1);
    complains_by_record("host_unregister", "4097");
    O(host_unregister, host, BYTES);
    O(host_unregister, host, BYTES);
    complains_by_record("host_unregister", "was it ended before?");

    other->ops->free(other->self, far, BYTES);
    other->ops->event_destroy(other->self, theirs);
    sth_device_close(other);
    sth_device_close(d);
    assert_int_equal(sth_last_error()->status, STH_OK); /* nothing was left */
}

static void check_finds_what_is_out_of_bounds(void **state) {
    (void)state;
    sth_device *d = opened("check+sim");
    sth_devptr p, ring;
    uint64_t unit = d->ops->ring_granularity(d->self);
    assert_ok(O(alloc, BYTES, &p));
    assert_ok(O(ring_alloc, unit, &ring));
    complains(O(copy_h2d, p + 1, host, BYTES, 0), STH_INVALID_ARGUMENT, "copy_h2d", "4096 bytes from");
    complains(O(copy_d2h, host, p + BYTES, 1, 0), STH_INVALID_ARGUMENT, "copy_d2h", "not alive");
    complains(O(copy_h2d, p, NULL, 1, 0), STH_INVALID_ARGUMENT, "copy_h2d", "NULL");
    assert_ok(O(copy_h2d, p + 1, host, BYTES - 1, 0));
    assert_ok(O(copy_h2d, p + 1, NULL, 0, 0));
    assert_ok(O(copy_h2d, ring + unit - 10, host, 20, 0)); /* over the seam */
    complains(O(copy_h2d, ring + unit, host, unit + 1, 0), STH_INVALID_ARGUMENT, "copy_h2d", "out of the ring");
    sth_expand e = {.encoding = STH_TRANSFER_INT8, .dtype = STH_DTYPE_BF16, .rows = 2, .cols = 8, .stride = BYTES / 2,
                    .codes = p, .scales = p, .zeros = p, .place = ring, .place_bytes = 2 * unit};
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the place");
    e.place_bytes = 16;
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "a place of another size");
    e.place_bytes = 32;
    e.codes = p + 16;
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the packed bytes");
    e.codes = p;
    e.scales = p + BYTES - 4;
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the scales");
    e.scales = p;
    e.zeros = p + BYTES - 4;
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the zero points");
    e = (sth_expand){.encoding = STH_TRANSFER_FILE_INT4, .dtype = STH_DTYPE_BF16, .rows = 2, .cols = 16, .stride = 8,
                     .codes = p, .scales = p, .up = p + BYTES - 16, .down = p, .smooth = p, .place = ring,
                     .place_bytes = 64, .pitch = 4, .rank = 8, .group = 16, .factor = 1};
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the up factor");
    e.up = p;
    e.down = p + BYTES - 16;
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the down factor");
    e.down = p;
    e.smooth = p + BYTES - 16;
    complains(O(expand, &e, 0), STH_INVALID_ARGUMENT, "expand", "the smooth factors");
    O(free, p, BYTES);
    O(ring_free, ring, unit);
    sth_device_close(d);
}

static void check_finds_events_that_were_not_recorded(void **state) {
    (void)state;
    sth_device *d = opened("check+sim");
    sth_event *e, *timed;
    bool done;
    int64_t ns;
    assert_ok(O(event_create, false, &e));
    assert_ok(O(event_create, true, &timed));
    complains(O(stream_wait, 0, e), STH_INVALID_STATE, "stream_wait", "never recorded");
    complains(O(event_query, e, &done), STH_INVALID_STATE, "event_query", "never recorded");
    complains(O(event_synchronize, e), STH_INVALID_STATE, "event_synchronize", "never recorded");
    assert_ok(O(event_record, e, 0));
    assert_ok(O(stream_wait, 0, e));
    complains(O(event_elapsed_ns, e, e, &ns), STH_INVALID_STATE, "event_elapsed_ns", "without timing");
    complains(O(event_elapsed_ns, timed, timed, &ns), STH_INVALID_STATE, "event_elapsed_ns", "never recorded");
    O(event_destroy, e);
    O(event_destroy, timed);
    sth_device_close(d);
}

static void check_tells_what_is_left_and_keeps_a_log(void **state) {
    (void)state;
    char name[128], path[96], text[2048];
    sth_devptr p, q;
    sth_event *e;
    snprintf(path, sizeof path, "%s/log", folder);
    snprintf(name, sizeof name, "check(log=%s)+sim", path);
    sth_device *d = opened(name);
    assert_ok(O(alloc, BYTES, &p));
    assert_ok(O(alloc, 77, &q));
    assert_ok(O(event_create, false, &e));
    O(free, q, 78);
    O(event_destroy, e);
    forget_errors();
    sth_device_close(d);
    complains(sth_last_error()->status, STH_INVALID_STATE, "close", "2 of memory left");
    FILE *f = fopen(path, "r");
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    assert_int_equal(strncmp(text, "free: ", 6), 0);
    assert_non_null(strstr(text, "\nclose: 2 of memory left"));
    assert_null(strstr(text, "event"));
}

/* ---- fault */

static sth_status copy_up(sth_device *d, sth_devptr p) { return O(copy_h2d, p, host, BYTES, 0); }

static void fault_fails_the_nth_call(void **state) {
    (void)state;
    sth_device *d = opened("fault(copy_h2d=3,copy_d2h=2+,status=IO,native=7)+sim");
    sth_devptr p;
    assert_ok(O(alloc, BYTES, &p));
    for (int n = 1; n < 9; n++) {
        assert_status(copy_up(d, p), n == 3 ? STH_IO : STH_OK);
        if (n == 3) {
            assert_string_equal(sth_last_error()->domain, "fault");
            assert_int_equal(sth_last_error()->native_code, 7);
            assert_true(said("copy_h2d: call 3"));
        }
        assert_status(O(copy_d2h, host, p, BYTES, 0), n >= 2 ? STH_IO : STH_OK);
    }
    O(free, p, BYTES);
    sth_device_close(d);

    p = 5; /* outputs are set only on success, and a call that fails has not reached the device */
    d = opened("fault(alloc=1)+check+sim");
    assert_status(O(alloc, BYTES, &p), STH_DEVICE_ERROR);
    assert_int_equal(p, 5);
    forget_errors();
    sth_device_close(d);
    assert_int_equal(sth_last_error()->status, STH_OK);
    assert_status(sth_device_open("fault(info=1)+sim", NULL, &d), STH_DEVICE_ERROR); /* open asks for it */
}

/* ---- delay */

static void delay_makes_time_pass(void **state) {
    (void)state;
    sth_sim_options o;
    sth_sim_options_init(&o);
    o.virtual_time = true;
    int64_t took[3];
    static const char *const names[3] = {"delay(seed=5,call_us=0,stream_us=1000)+sim",
                                         "delay(seed=5,call_us=0,stream_us=1000)+sim",
                                         "delay(seed=6,call_us=0,stream_us=1000)+sim"};
    for (int i = 0; i < 3; i++) {
        sth_device *d;
        sth_devptr p;
        assert_ok(sth_device_open(names[i], &o, &d));
        assert_ok(O(alloc, BYTES, &p));
        int64_t begin = sth_device_now_ns(d);
        for (int k = 0; k < 20; k++) assert_ok(copy_up(d, p));
        took[i] = sth_device_now_ns(d) - begin;
        O(free, p, BYTES);
        sth_device_close(d);
    }
    assert_true(took[0] > 20 * 2000 + 1000000 && took[0] < 20 * 1010000);
    assert_int_equal(took[0], took[1]); /* the same seed, the same delays */
    assert_int_not_equal(took[0], took[2]);
}

/* ---- slow */

/* In virtual time: what a copy of 1 MB takes each way, and the bytes that arrive. */
static void slow_takes_its_percents_of_the_link(void **state) {
    (void)state;
    enum { MEGABYTE = 1000000 };
    static unsigned char from[MEGABYTE], to[MEGABYTE];
    static const struct {
        const char *name;
        int64_t percent;
    } cases[] = {{"sim", 100}, {"slow(percent=100)+sim", 100}, {"slow+sim", 200}, {"check+slow(percent=460)+sim", 460}};
    for (size_t i = 0; i < MEGABYTE; i++) from[i] = (unsigned char)(i * 7 + i / 1000);
    int64_t took[4][2];
    for (size_t k = 0; k < 4; k++) {
        sth_sim_options options;
        sth_sim_options_init(&options);
        options.virtual_time = true;
        options.link_bytes_per_s = 1e9;
        sth_device *d = NULL;
        sth_devptr p;
        assert_ok(sth_device_open(cases[k].name, &options, &d));
        assert_ok(O(alloc, MEGABYTE, &p));
        memset(to, 0, MEGABYTE);
        for (int way = 0; way < 2; way++) {
            sth_event *e[2];
            for (int i = 0; i < 2; i++) assert_ok(O(event_create, true, &e[i]));
            assert_ok(O(event_record, e[0], 0));
            if (way) assert_ok(O(copy_d2h, to, p, MEGABYTE, 0));
            else assert_ok(O(copy_h2d, p, from, MEGABYTE, 0));
            assert_ok(O(event_record, e[1], 0));
            assert_ok(O(event_synchronize, e[1]));
            assert_ok(O(event_elapsed_ns, e[0], e[1], &took[k][way]));
            for (int i = 0; i < 2; i++) O(event_destroy, e[i]);
        }
        assert_memory_equal(from, to, MEGABYTE);
        O(free, p, MEGABYTE);
        sth_device_close(d);
    }
    for (size_t k = 1; k < 4; k++)
        for (int way = 0; way < 2; way++) {
            int64_t want = took[0][way] * cases[k].percent / 100;
            assert_in_range(took[k][way], want - want / 50, want + want / 50);
        }
}

/* ---- trace and replay */

static void nothing(const sth_expand *e) { (void)e; }

/* A little of everything, with calls that fail among it. */
static void be_busy(sth_device *d) {
    sth_devptr p, ring, none, alias;
    sth_stream s;
    sth_event *e, *f;
    int64_t ns;
    bool done;
    uint64_t unit = d->ops->ring_granularity ? d->ops->ring_granularity(d->self) : 0;
    assert_ok(O(alloc, BYTES, &p));
    if (unit) assert_ok(O(ring_alloc, unit, &ring));
    assert_int_not_equal(O(alloc, 0, &none), STH_OK);
    assert_ok(O(host_register, host, BYTES, &alias));
    assert_int_not_equal(O(host_register, host + 8, 64, &alias), STH_OK);
    assert_ok(O(stream_create, -1, &s));
    assert_ok(O(event_create, true, &e));
    assert_ok(O(event_create, true, &f));
    assert_int_not_equal(O(event_query, e, &done), STH_OK);
    assert_ok(O(event_record, e, s));
    assert_ok(O(copy_h2d, p + 512, host + 100, 1000, s));
    assert_ok(O(copy_d2h, host + BYTES, p, BYTES, s)); /* to memory that is not registered */
    assert_ok(O(event_record, f, s));
    assert_ok(O(stream_wait, 0, f));
    assert_ok(O(event_synchronize, f));
    assert_ok(O(event_elapsed_ns, e, f, &ns));
    if (unit) assert_ok(O(copy_h2d, ring + unit - 8, host, 16, 0));
    if (d->ops->sim_compute) assert_ok(O(sim_compute, s, 1000));
    if (unit) {
        sth_expand x = {.rows = 1, .cols = 64, .codes = p, .place = ring, .place_bytes = 64, .reference = nothing};
        assert_ok(d->ops->expand_ready(d->self));
        assert_ok(O(expand, &x, s));
        sth_expand four = {.encoding = STH_TRANSFER_FILE_INT4, .dtype = STH_DTYPE_BF16, .rows = 2, .cols = 32,
                           .stride = 16, .codes = p, .scales = p + 512, .up = p + 1024, .down = p + 1536, .place = ring,
                           .place_bytes = 128, .pitch = 4, .rank = 8, .group = 16, .hadamard = 32, .factor = 1,
                           .reference = nothing};
        if (d->capabilities & STH_CAP_EXPAND_FILES) assert_ok(O(expand, &four, s));
        O(ring_free, ring, unit);
    }
    assert_ok(O(stream_synchronize, s));
    assert_ok(O(stream_synchronize, 0));
    O(event_destroy, e);
    O(event_destroy, f);
    O(stream_destroy, s);
    O(host_unregister, host, BYTES);
    O(free, p, BYTES);
}

/* The lines without their times. */
static char *read_trace(const char *path) {
    static char text[1 << 16];
    char *out = calloc(1, sizeof text);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(text, sizeof text, f)) {
        char *us = strstr(text, ",\"us\":"), *ns = strstr(text, ",\"ns\":");
        if (us) strcpy(us, "}\n");
        if (ns) strcpy(ns, "...\n");
        strcat(out, text);
    }
    fclose(f);
    return out;
}

static void traced(const char *file, const char *device, char *name, char *path) {
    snprintf(path, 96, "%s/%s", folder, file);
    snprintf(name, 160, "trace(file=%s)+%s", path, device);
}

static void a_replay_makes_the_same_calls(void **state) {
    (void)state;
    char name[160], again[160], first[96], second[96];
    sth_replay_report report = {.size = sizeof report};
    traced("first", "sim", name, first);
    traced("second", "check+sim", again, second);
    sth_device *d = opened(name);
    be_busy(d);
    sth_device_close(d);
    d = opened(again);
    assert_ok(sth_trace_replay(first, d, &report));
    forget_errors();
    sth_device_close(d);
    assert_int_equal(sth_last_error()->status, STH_OK); /* nothing was left */
    char *a = read_trace(first), *b = read_trace(second);
    assert_string_equal(a, b);
    int lines = 0;
    for (char *c = a; *c; c++) lines += *c == '\n';
    assert_int_equal(report.calls, lines - 1);
    assert_true(lines > 25);
    assert_int_equal(report.skipped, 0);
    assert_int_equal(report.different, 0);
    assert_string_equal(report.first_different, "");
    free(a);
    free(b);
}

static void a_replay_counts_what_is_different(void **state) {
    (void)state;
    char path[96];
    sth_replay_report report = {.size = sizeof report};
    snprintf(path, sizeof path, "%s/first", folder); /* of the case before */
    long live = sthi_alloc_live();
    sth_device *d = opened("check+fault(stream_create=1)+sim");
    assert_ok(sth_trace_replay(path, d, &report));
    assert_true(report.skipped >= 5); /* what uses the stream, its end included */
    assert_true(report.different >= 1);
    assert_non_null(strstr(report.first_different, "stream_create was OK and is DEVICE_ERROR"));
    forget_errors();
    sth_device_close(d);
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(sth_last_error()->status, STH_OK);
}

static void what_is_no_trace_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *text;
        sth_status status;
    } files[] = {
        {"", STH_CORRUPT_DATA},
        {"hello\n", STH_CORRUPT_DATA},
        {"{}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":2}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n[]\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"jump\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"open\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"free\",\"memory\":\"x1\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"free\",\"memory\":7}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"expand\",\"stream\":\"s0\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"alloc\",\"bytes\":8,\"made\":\"m99999999999\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"alloc\",\"bytes\":8,\"made\":\"s1\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"alloc\",\"bytes\":8,\"made\":\"m1\"}\n"
         "{\"call\":\"alloc\",\"bytes\":8,\"made\":\"m1\"}\n", STH_CORRUPT_DATA},
        {"{\"stagehand_trace\":1}\n{\"call\":\"alloc\",\"bytes\":8,\"status\":\"IO\"}\n", STH_OK},
        {"{\"stagehand_trace\":1}\n{\"call\":\"alloc\",\"bytes\":8,\"made\":\"m1\"}\n"
         "{\"call\":\"copy_d2h\",\"memory\":\"m1+1\",\"host\":\"?\",\"bytes\":8,\"stream\":\"s0\"}\n", STH_OK},
        {"{\"stagehand_trace\":1}\n{\"call\":\"free\",\"memory\":\"m3+0\",\"bytes\":8}\n", STH_OK}, /* skipped */
    };
    char path[96];
    sth_replay_report report = {.size = sizeof report};
    long live = sthi_alloc_live();
    sth_device *d = opened("check+sim");
    snprintf(path, sizeof path, "%s/bad", folder);
    assert_status(sth_trace_replay(path, d, &report), STH_NOT_FOUND);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        FILE *f = fopen(path, "w");
        fputs(files[i].text, f);
        fclose(f);
        if (sth_trace_replay(path, d, &report) != files[i].status)
            fail_msg("file %zu: %s", i, sth_last_error()->message);
    }
    report.size = 3;
    assert_status(sth_trace_replay(path, d, &report), STH_INVALID_ARGUMENT);
    forget_errors();
    sth_device_close(d);
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(sth_last_error()->status, STH_OK);
}

static sth_status replayed(sth_device *d, const char *path, const char *first, const char *last,
                           sth_replay_report *report) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "{\"stagehand_trace\":1,\"backend\":\"sim\"}\n%s%s\n", first, last);
    fclose(f);
    *report = (sth_replay_report){.size = sizeof *report};
    return sth_trace_replay(path, d, report);
}

/* What no device was ever asked reaches none. */
static void a_hostile_trace_is_corrupt(void **state) {
    (void)state;
    static const char made[] = "{\"call\":\"event_create\",\"number\":1,\"bytes\":64,\"made\":\"e1\"}\n"
                               "{\"call\":\"event_record\",\"event\":\"e1\",\"stream\":\"s0\"}\n";
    static const char *const lines[] = {
        "{\"call\":\"event_record\",\"stream\":\"s0\"}",
        "{\"call\":\"stream_wait\",\"stream\":\"s0\",\"event\":null}",
        "{\"call\":\"event_query\"}",
        "{\"call\":\"event_synchronize\",\"event\":\"e0\"}",
        "{\"call\":\"event_elapsed_ns\"}",
        "{\"call\":\"event_elapsed_ns\",\"event\":\"e1\"}",
        "{\"call\":\"event_elapsed_ns\",\"other\":\"e1\"}",
        "{\"call\":\"event_query\",\"event\":\"e1+8\"}", /* no address inside an event */
        "{\"call\":\"sim_compute\",\"stream\":\"s0\",\"number\":9000000000000000000}",
        "{\"call\":\"sim_compute\",\"stream\":\"s0\",\"number\":10000000001}",
        "{\"call\":\"host_register\",\"host\":\"?\",\"bytes\":0,\"made\":\"h1\"}",
        "{\"call\":\"host_register\",\"host\":\"?\"}",
    };
    char path[96], where[128];
    sth_replay_report report;
    long live = sthi_alloc_live();
    sth_device *d = opened("sim");
    snprintf(path, sizeof path, "%s/bad", folder);
    snprintf(where, sizeof where, "%s, line 4", path);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        if (replayed(d, path, made, lines[i], &report) != STH_CORRUPT_DATA || !said(where))
            fail_msg("line %zu: %s", i, sth_last_error()->message);
        assert_int_equal(report.calls, 2);
    }
    /* Events that the trace itself does not know, or that could not be made here, are left out. */
    assert_ok(replayed(d, path, made, "{\"call\":\"event_query\",\"event\":\"?\"}", &report));
    assert_int_equal(report.skipped, 1);
    assert_ok(replayed(d, path, made, "{\"call\":\"event_elapsed_ns\",\"event\":\"e1\",\"other\":\"e2\"}", &report));
    assert_int_equal(report.skipped, 1);
    /* A copy that nobody waited for, and its host memory ends. */
    assert_ok(replayed(d, path,
                       "{\"call\":\"alloc\",\"bytes\":65536,\"made\":\"m1\"}\n"
                       "{\"call\":\"stream_create\",\"made\":\"s1\"}\n"
                       "{\"call\":\"host_register\",\"host\":\"?\",\"bytes\":65536,\"made\":\"h1\"}\n"
                       "{\"call\":\"sim_compute\",\"stream\":\"s1\",\"number\":20000000}\n"
                       "{\"call\":\"copy_h2d\",\"memory\":\"m1\",\"host\":\"h1\",\"bytes\":65536,\"stream\":\"s1\"}\n",
                       "{\"call\":\"host_unregister\",\"host\":\"h1\",\"bytes\":65536}", &report));
    assert_int_equal(report.calls, 6);
    sth_device_close(d);
    assert_int_equal(sthi_alloc_live(), live);
}

typedef struct expansion {
    int64_t encoding, dtype;
    uint64_t rows, cols, stride, place_bytes;
    const char *codes, *scales, *zeros, *place; /* m1: 4096 bytes */
    sth_status status;
    bool skipped;
    const char *more; /* fields of 4 bits */
} expansion;

#define FOUR(pitch, rank, group, hadamard)                                                                    \
    ",\"up\":\"m1+2560\",\"down\":\"m1+3072\",\"smooth\":null,\"pitch\":" pitch ",\"rank\":" rank ",\"group\":" group \
    ",\"hadamard\":" hadamard
#define FOUR_BITS                                                                                              \
    x.encoding = STH_TRANSFER_FILE_INT4, x.stride = 16, x.zeros = "null", x.more = FOUR("4", "8", "16", "32")

static const expansion good_expansion = {STH_TRANSFER_INT8, STH_DTYPE_BF16, 2, 32, 32, 128, "\"m1+0\"", "\"m1+512\"",
                                         "\"m1+1024\"", "\"m1+2048\"", STH_OK, false, ""};

static void check_expansion(sth_device *d, const char *path, int number, const expansion *x) {
    char line[768];
    sth_replay_report report;
    snprintf(line, sizeof line,
             "{\"call\":\"expand\",\"stream\":\"s0\",\"encoding\":%" PRId64 ",\"dtype\":%" PRId64 ",\"rows\":%" PRIu64
             ",\"cols\":%" PRIu64 ",\"stride\":%" PRIu64 ",\"place_bytes\":%" PRIu64
             ",\"codes\":%s,\"scales\":%s,\"zeros\":%s,\"place\":%s%s,\"status\":\"OK\"}",
             x->encoding, x->dtype, x->rows, x->cols, x->stride, x->place_bytes, x->codes, x->scales, x->zeros,
             x->place, x->more);
    sth_status rc = replayed(d, path, "{\"call\":\"alloc\",\"bytes\":4096,\"made\":\"m1\"}\n", line, &report);
    bool right = rc == x->status && report.skipped == x->skipped && report.different == 0;
    if (rc == STH_OK) right &= report.calls == (x->skipped ? 1u : 2u);
    if (!right) fail_msg("expansion %d: %s, %s", number, sth_status_name(rc), sth_last_error()->message);
}

static void expansions_of_a_trace_are_checked(void **state) {
    (void)state;
    char path[96];
    sth_device *d = opened("sim");
    int number = 0;
    snprintf(path, sizeof path, "%s/bad", folder);
#define EXPANSION(...)                                      \
    do {                                                    \
        expansion x = good_expansion;                       \
        __VA_ARGS__;                                        \
        check_expansion(d, path, number++, &x);             \
    } while (0)
#define CORRUPT(...) EXPANSION(__VA_ARGS__; x.status = STH_CORRUPT_DATA)
#define SKIPPED(...) EXPANSION(__VA_ARGS__; x.skipped = true)
    EXPANSION((void)x);
    CORRUPT(x.encoding = 77);
    CORRUPT(x.encoding = (INT64_C(1) << 32) + 1); /* not int8 when it is cut */
    CORRUPT(x.encoding = -1);
    CORRUPT(x.dtype = 999);
    CORRUPT(x.dtype = (INT64_C(1) << 32) + STH_DTYPE_BF16);
    CORRUPT(x.rows = 0);
    CORRUPT(x.rows = 3);
    CORRUPT(x.rows = (UINT64_C(1) << 57) + 2); /* rows * cols * 2 wraps to what the place has */
    CORRUPT(x.rows = UINT64_C(1) << 62; x.stride = 64);
    CORRUPT(x.cols = (UINT64_C(1) << 32) + 32; x.stride = x.cols);
    CORRUPT(x.stride = 16);
    CORRUPT(x.encoding = STH_TRANSFER_FP8; x.stride = 33; x.zeros = "null");
    EXPANSION(x.stride = 33);
    CORRUPT(x.place_bytes = 64);
    CORRUPT(x.encoding = STH_TRANSFER_VERBATIM; x.stride = 0);              /* two rows */
    CORRUPT(x.encoding = STH_TRANSFER_VERBATIM; x.rows = 1; x.stride = 0);  /* 32 bytes and 128 */
    SKIPPED(x.codes = "\"m1+4064\"");
    SKIPPED(x.scales = "\"m1+4092\"");
    SKIPPED(x.zeros = "\"m1+4092\"");
    SKIPPED(x.place = "\"m1+4000\"");
    SKIPPED(x.place = "\"?\"");
    SKIPPED(x.codes = "\"?\"");
    EXPANSION(x.encoding = STH_TRANSFER_FP8; x.zeros = "null");
    EXPANSION(x.encoding = STH_TRANSFER_INT4; x.zeros = "null");
    EXPANSION(FOUR_BITS);
    /* 16 rows are possible: the pitch only has to be enough. */
    EXPANSION(FOUR_BITS; x.more = FOUR("64", "8", "16", "32"));
    CORRUPT(FOUR_BITS; x.more = "");
    CORRUPT(FOUR_BITS; x.more = FOUR("2", "8", "16", "32"));
    CORRUPT(FOUR_BITS; x.more = FOUR("4", "4294967297", "16", "32")); /* 1 when it is cut */
    CORRUPT(FOUR_BITS; x.more = FOUR("4", "8", "8", "32"));
    CORRUPT(FOUR_BITS; x.more = FOUR("4", "8", "16", "64"));
    CORRUPT(FOUR_BITS; x.stride = 24; x.more = FOUR("9223372036854775807", "8", "16", "32"));
    SKIPPED(FOUR_BITS; x.more = FOUR("4", "900", "16", "32")); /* the factors run out of the memory */
    EXPANSION(x.encoding = STH_TRANSFER_VERBATIM; x.rows = 1; x.cols = 128; x.stride = 0;
              x.scales = x.zeros = "null");
#undef SKIPPED
#undef CORRUPT
#undef EXPANSION
    sth_device_close(d);
}

/* The device itself refuses what does not agree. */
static void the_simulated_device_checks_expansions(void **state) {
    (void)state;
    sth_device *d = opened("sim");
    sth_devptr p;
    assert_ok(O(alloc, BYTES, &p));
    sth_expand e = {.encoding = STH_TRANSFER_INT8, .dtype = STH_DTYPE_F32, .rows = 2, .cols = 32, .stride = 32,
                    .codes = p, .scales = p + 512, .place = p + 1024, .place_bytes = 256, .reference = nothing};
    assert_ok(O(expand, &e, 0));
    sth_expand bad[] = {e, e, e, e, e, e, e};
    bad[0].rows = (UINT64_C(1) << 57) + 2;
    bad[1].cols += UINT64_C(1) << 32;
    bad[2].scales = 0;
    bad[3].scales = p + BYTES;
    bad[4].codes = p + 8;
    bad[5].encoding = STH_TRANSFER_FP8, bad[5].zeros = p;
    bad[6].place = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (O(expand, &bad[i], 0) != STH_INVALID_ARGUMENT) fail_msg("expansion %zu is taken", i);
    O(free, p, BYTES);
    sth_device_close(d);
}

static void a_trace_that_cannot_be_written_says_so_at_the_end(void **state) {
    (void)state;
    char name[160], path[96];
    struct rlimit before, small;
    traced("first", "sim", name, path);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){.rlim_cur = 8192, /* rings are files, too */ .rlim_max = before.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    sth_device *d = opened(name);
    for (int i = 0; i < 20; i++) be_busy(d); /* all calls pass */
    forget_errors();
    sth_device_close(d);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(sth_last_error()->status, STH_IO);
    assert_true(said("first ends early"));
}

/* Neither a file that holds something else nor what a link leads to is emptied for a trace. */
static void a_trace_empties_earlier_traces_alone(void **state) {
    (void)state;
    char name[160], path[96], other[160];
    sth_device *d = NULL;
    traced("second", "sim", name, path);
    snprintf(other, sizeof other, "%s/bad", folder);
    unlink(path);
    FILE *f = fopen(other, "w");
    assert_non_null(f);
    fputs("a model", f);
    fclose(f);
    assert_int_equal(link(other, path), 0);
    assert_int_equal(sth_device_open(name, NULL, &d), STH_UNSUPPORTED);
    unlink(path);
    assert_int_equal(symlink(other, path), 0);
    assert_int_equal(sth_device_open(name, NULL, &d), STH_UNSUPPORTED);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(sth_device_open(name, NULL, &d), STH_UNSUPPORTED);
    unlink(path);
    assert_int_equal(rename(other, path), 0);
    assert_int_equal(sth_device_open(name, NULL, &d), STH_INVALID_ARGUMENT);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, strlen("a model"));
    unlink(path);
    for (int i = 0; i < 2; i++) {
        d = opened(name);
        be_busy(d);
        sth_device_close(d);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 0777, 0600);
    }
}

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    static const char *const files[] = {"log", "first", "second", "bad"};
    char path[96];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        (void)unlink(path);
    }
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_with_decorators),
        cmocka_unit_test(check_finds_what_is_not_alive),
        cmocka_unit_test(check_finds_what_is_out_of_bounds),
        cmocka_unit_test(check_finds_events_that_were_not_recorded),
        cmocka_unit_test(check_tells_what_is_left_and_keeps_a_log),
        cmocka_unit_test(fault_fails_the_nth_call),
        cmocka_unit_test(delay_makes_time_pass),
        cmocka_unit_test(slow_takes_its_percents_of_the_link),
        cmocka_unit_test(a_replay_makes_the_same_calls),
        cmocka_unit_test(a_replay_counts_what_is_different),
        cmocka_unit_test(what_is_no_trace_is_refused),
        cmocka_unit_test(a_hostile_trace_is_corrupt),
        cmocka_unit_test(expansions_of_a_trace_are_checked),
        cmocka_unit_test(the_simulated_device_checks_expansions),
        cmocka_unit_test(a_trace_that_cannot_be_written_says_so_at_the_end),
        cmocka_unit_test(a_trace_empties_earlier_traces_alone),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
