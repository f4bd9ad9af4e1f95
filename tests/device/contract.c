/* One suite for every back end: what the rest of the library relies on.
 *
 * It runs on the simulated device in real and in virtual time, and on "cuda" and "hip": the library named in
 * STAGEHAND_CUDA_LIBRARY or STAGEHAND_HIP_LIBRARY (CI names the stand-ins), else the system's driver, else skipped with
 * the reason. Named as the first argument: on that device alone, which may be of a back end in STAGEHAND_BACKENDS.
 * Device memory is only ever looked at through copies. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "device/fake_driver.h"
#include "support/check.h"

#define MIB ((uint64_t)1 << 20)
enum { CAPACITY = 64 << 20, PIN_LIMIT = 8 << 20, ROOM = 1 << 20 };

typedef struct world {
    const char *label, *device;
    bool virtual_time;
} world;

static world worlds[] = {
    {"sim", "sim", false}, {"sim in virtual time", "sim", true}, {"cuda", "cuda", false}, {"hip", "hip", false},
    {NULL, NULL, false}};
enum { WORLDS = sizeof worlds / sizeof *worlds };

typedef struct fixture {
    const world *world;
    char base[32]; /* the back end's name: the device's without decorators and number */
    bool simulated;
    bool fault_points; /* base/fault.h: in back ends of this build */
    sth_device *d;
    const sth_backend_ops *o;
    bool limited; /* memory and pinning have the limits above: every back end but a real GPU */
    long live_before;
    const fake_controls *driver; /* of the stand-in; NULL: there is none */
    char why_not[512];
    unsigned char *host, *back; /* ROOM bytes each */
} fixture;

/* ---- opening and closing */

static sth_status open_world(const world *w, sth_device **out) {
    sth_sim_options options;
    sth_sim_options_init(&options);
    options.memory_bytes = CAPACITY;
    options.pin_limit_bytes = PIN_LIMIT;
    options.link_bytes_per_s = 4000000000;
    options.virtual_time = w->virtual_time;
    return sth_device_open(w->device, &options, out);
}

static const char *library_variable(const fixture *f) {
    if (!strcmp(f->base, "cuda")) return "STAGEHAND_CUDA_LIBRARY";
    return strcmp(f->base, "hip") ? NULL : "STAGEHAND_HIP_LIBRARY";
}

static void find_stand_in(fixture *f) {
    const char *variable = library_variable(f), *path = variable ? getenv(variable) : NULL;
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    f->driver = library ? dlsym(library, FAKE_CONTROLS) : NULL;
    f->limited = f->simulated || f->driver;
    if (library) dlclose(library);
}

static int set_up(void **state) {
    const world *w = *state;
    fixture *f = calloc(1, sizeof *f);
    f->world = w;
    const char *last = strrchr(w->device, '+');
    snprintf(f->base, sizeof f->base, "%s", last ? last + 1 : w->device);
    f->base[strcspn(f->base, ":")] = 0;
    f->simulated = !strcmp(f->base, "sim");
    f->fault_points = f->simulated || !strcmp(f->base, "cuda") || !strcmp(f->base, "hip");
    f->host = sthi_pages_map(ROOM, 0);
    f->back = sthi_pages_map(ROOM, 0);
    for (int i = 0; i < ROOM; i++) f->host[i] = (unsigned char)(i * 7 + i / 251);
    f->live_before = sthi_alloc_live();
    if (open_world(w, &f->d) != STH_OK)
        snprintf(f->why_not, sizeof f->why_not, "%s", sth_last_error()->message);
    else f->o = f->d->ops;
    find_stand_in(f);
    if (f->driver) f->driver->schedule(7, 300); /* work comes late */
    *state = f;
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    sthi_fault_disarm_all();
    sth_device_close(f->d);
    long leaked = sthi_alloc_live() - f->live_before, left = f->driver ? f->driver->live() : 0;
    char why[256] = "";
    long complaints = f->driver ? f->driver->complaints(why, sizeof why) : 0;
    if (leaked || left || complaints)
        print_error("%ld host blocks and %ld driver objects were left behind; %ld complaints: %s\n", leaked, left,
                    complaints, why);
    if (f->driver) f->driver->reset();
    sthi_pages_unmap(f->host, ROOM);
    sthi_pages_unmap(f->back, ROOM);
    free(f);
    return leaked || left || complaints ? -1 : 0;
}

/* The fixture, or a skipped case where there is no such device. CI's stand-in and what is named must be there. */
static fixture *begin(void **state) {
    fixture *f = *state;
    if (f->d) return f;
    const char *variable = library_variable(f);
    if ((variable && getenv(variable)) || f->world == &worlds[WORLDS - 1]) fail_msg("%s", f->why_not);
    skip_because(f->why_not);
    return NULL;
}

/* ---- shorthands */

static sth_stream new_stream(fixture *f) {
    sth_stream s;
    assert_ok(f->o->stream_create(f->d->self, 0, &s));
    assert_int_not_equal(s, 0);
    return s;
}

static sth_event *new_event(fixture *f, bool timing) {
    sth_event *e;
    assert_ok(f->o->event_create(f->d->self, timing, &e));
    return e;
}

static sth_devptr new_memory(fixture *f, uint64_t bytes) {
    sth_devptr p;
    assert_ok(f->o->alloc(f->d->self, bytes, &p));
    return p;
}

static uint64_t free_bytes(fixture *f) {
    sth_device_info info;
    assert_ok(sth_device_info_get(f->d, &info));
    return info.memory_free;
}

/* ---- what it is */

static void says_what_it_is(void **state) {
    fixture *f = begin(state);
    sth_device_info info;
    assert_ok(sth_device_info_get(f->d, &info));
    assert_string_equal(info.backend, f->base);
    assert_true(info.name[0]);
    assert_true(info.memory_free <= info.memory_total);
    assert_int_equal(info.capabilities, f->d->capabilities);
    assert_int_equal(!!(info.capabilities & STH_CAP_VIRTUAL_TIME), f->world->virtual_time);
    assert_true(sth_device_count(f->world->device) >= 1);
    if (f->limited) assert_int_equal(info.memory_total, CAPACITY);
}

static void lives_until_its_last_reference(void **state) {
    fixture *f = begin(state);
    sth_device_retain(f->d);
    sth_device_close(f->d);
    sth_device_info info;
    assert_ok(sth_device_info_get(f->d, &info));
    assert_true(sth_device_now_ns(f->d) >= 0);
}

/* ---- memory */

static void memory_is_aligned_and_disjoint(void **state) {
    fixture *f = begin(state);
    static const uint64_t sizes[] = {1, 511, 512, 513, 4096, 4097, 1 << 20};
    enum { N = sizeof sizes / sizeof *sizes };
    sth_devptr p[N];
    for (int i = 0; i < N; i++) {
        p[i] = new_memory(f, sizes[i]);
        assert_int_equal(p[i] % 512, 0);
        for (int j = 0; j < i; j++) assert_true(p[i] + sizes[i] <= p[j] || p[j] + sizes[j] <= p[i]);
    }
    for (int i = 0; i < N; i++) f->o->free(f->d->self, p[i], sizes[i]);
    sth_devptr none;
    assert_status(f->o->alloc(f->d->self, 0, &none), STH_INVALID_ARGUMENT);
}

static void capacity_is_exact(void **state) {
    fixture *f = begin(state);
    sth_devptr p = 0, q = 0;
    if (!f->limited) {
        sth_device_info info;
        assert_ok(sth_device_info_get(f->d, &info));
        assert_status(f->o->alloc(f->d->self, 2 * info.memory_total, &p), STH_OUT_OF_DEVICE_MEMORY);
        return;
    }
    p = new_memory(f, CAPACITY - 100);
    assert_int_equal(free_bytes(f), 100);
    assert_status(f->o->alloc(f->d->self, 101, &q), STH_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(sth_last_error()->message, "101 bytes"));
    q = new_memory(f, 100);
    f->o->free(f->d->self, p, CAPACITY - 100);
    f->o->free(f->d->self, q, 100);
    assert_int_equal(free_bytes(f), CAPACITY);
}

static void a_second_free_is_an_error_and_changes_nothing(void **state) {
    fixture *f = begin(state);
    sth_devptr p = new_memory(f, 4096);
    f->o->free(f->d->self, p, 4096);
    uint64_t before = free_bytes(f);
    sthi_fail(STH_OK, NULL, 0, NULL, "nothing yet");
    f->o->free(f->d->self, p, 4096);
    assert_int_equal(sth_last_error()->status, STH_INVALID_ARGUMENT);
    if (f->limited) assert_int_equal(free_bytes(f), before);
    f->o->free(f->d->self, 0, 0);
}

static void a_ring_wraps(void **state) {
    fixture *f = begin(state);
    uint64_t unit = f->o->ring_granularity ? f->o->ring_granularity(f->d->self) : 0;
    sth_devptr p = 0;
    if (!(f->d->capabilities & STH_CAP_RING)) {
        assert_int_equal(unit, 0);
        if (f->o->ring_alloc) assert_status(f->o->ring_alloc(f->d->self, 1 << 21, &p), STH_UNSUPPORTED);
        return;
    }
    assert_true(unit > 0);
    uint64_t n = unit >= ROOM ? unit : ROOM, before = free_bytes(f);
    assert_int_equal(n % unit, 0);
    assert_status(f->o->ring_alloc(f->d->self, n + 1, &p), STH_INVALID_ARGUMENT);
    assert_ok(f->o->ring_alloc(f->d->self, n, &p));
    assert_int_equal(p % 512, 0);
    if (f->limited && !f->driver) assert_int_equal(before - free_bytes(f), n);

    sth_stream s = new_stream(f);
    enum { LOW = 3000, HIGH = 5000 };
    assert_ok(f->o->copy_h2d(f->d->self, p + n - LOW, f->host, LOW + HIGH, s)); /* over the seam */
    assert_ok(f->o->copy_d2h(f->d->self, f->back, p + n - LOW, LOW, s));
    assert_ok(f->o->copy_d2h(f->d->self, f->back + LOW, p, HIGH, s)); /* the other name of the same bytes */
    assert_ok(f->o->stream_synchronize(f->d->self, s));
    assert_memory_equal(f->back, f->host, LOW + HIGH);
    assert_ok(f->o->copy_h2d(f->d->self, p + 8, f->host + 77, 100, s));
    assert_ok(f->o->copy_d2h(f->d->self, f->back, p + n + 8, 100, s));
    assert_ok(f->o->stream_synchronize(f->d->self, s));
    assert_memory_equal(f->back, f->host + 77, 100);
    f->o->stream_destroy(f->d->self, s);
    f->o->ring_free(f->d->self, p, n);
    if (f->limited) assert_int_equal(free_bytes(f), before);
}

/* ---- registered host memory */

static void registers_host_memory(void **state) {
    fixture *f = begin(state);
    sth_devptr alias = 1;
    if (!(f->d->capabilities & STH_CAP_PINNED_HOST)) skip_because("the device cannot pin host memory");
    assert_ok(f->o->host_register(f->d->self, f->host, ROOM, &alias));
    assert_int_equal(!!alias, !!(f->d->capabilities & STH_CAP_MAPPED_HOST));
    assert_status(f->o->host_register(f->d->self, f->host + 4096, 4096, &alias), STH_INVALID_ARGUMENT);
    sthi_fail(STH_OK, NULL, 0, NULL, "nothing yet");
    f->o->host_unregister(f->d->self, f->back, ROOM);
    assert_int_equal(sth_last_error()->status, STH_INVALID_ARGUMENT);
    f->o->host_unregister(f->d->self, f->host, ROOM);
    assert_ok(f->o->host_register(f->d->self, f->host, ROOM, &alias));
    f->o->host_unregister(f->d->self, f->host, ROOM);
}

static void pinning_has_a_limit_that_is_told(void **state) {
    fixture *f = begin(state);
    if (!f->limited) skip_because("a real driver has no limit that a test may reach");
    unsigned char *big = sthi_pages_map(PIN_LIMIT, 0);
    sth_devptr alias;
    assert_ok(f->o->host_register(f->d->self, f->host, ROOM, &alias));
    assert_status(f->o->host_register(f->d->self, big, PIN_LIMIT, &alias), STH_OUT_OF_PINNED_MEMORY);
    assert_non_null(strstr(sth_last_error()->message, "8388608 bytes of host memory"));
    assert_non_null(strstr(sth_last_error()->message, "pin"));
    f->o->host_unregister(f->d->self, f->host, ROOM);
    assert_ok(f->o->host_register(f->d->self, big, PIN_LIMIT, &alias));
    f->o->host_unregister(f->d->self, big, PIN_LIMIT);
    sthi_pages_unmap(big, PIN_LIMIT);
}

/* ---- copies and order */

static void copies_are_exact_to_the_byte(void **state) {
    fixture *f = begin(state);
    static const uint64_t sizes[] = {0, 1, 2, 511, 512, 4097, 65536, ROOM - 1024};
    sth_stream s = new_stream(f);
    sth_devptr p = new_memory(f, ROOM);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t n = sizes[i];
        memset(f->back, 0x5A, ROOM);
        assert_ok(f->o->copy_h2d(f->d->self, p, f->back, ROOM, s));
        assert_ok(f->o->copy_h2d(f->d->self, p + 512, f->host + 3, n, s));
        assert_ok(f->o->stream_synchronize(f->d->self, s));
        assert_ok(f->o->copy_d2h(f->d->self, f->back, p, ROOM, s));
        assert_ok(f->o->stream_synchronize(f->d->self, s));
        for (int k = 0; k < 512; k++) assert_int_equal(f->back[k], 0x5A);
        assert_memory_equal(f->back + 512, f->host + 3, n);
        for (int k = 0; k < 512; k++) assert_int_equal(f->back[512 + n + (uint64_t)k], 0x5A);
    }
    f->o->free(f->d->self, p, ROOM);
    f->o->stream_destroy(f->d->self, s);
}

static void copies_on_the_default_stream(void **state) {
    fixture *f = begin(state);
    sth_devptr p = new_memory(f, ROOM);
    assert_ok(f->o->copy_h2d(f->d->self, p, f->host, ROOM, 0));
    assert_ok(f->o->copy_d2h(f->d->self, f->back, p, ROOM, 0));
    assert_ok(f->o->stream_synchronize(f->d->self, 0));
    assert_memory_equal(f->back, f->host, ROOM);
    f->o->free(f->d->self, p, ROOM);
}

static void a_stream_runs_in_order(void **state) {
    fixture *f = begin(state);
    enum { LAPS = 40, N = 16384 };
    sth_stream s = new_stream(f);
    sth_devptr p = new_memory(f, N);
    for (int lap = 0; lap < LAPS; lap++) {
        assert_ok(f->o->copy_h2d(f->d->self, p, f->host + lap, N, s));
        assert_ok(f->o->copy_d2h(f->d->self, f->back + lap * N, p, N, s));
    }
    assert_ok(f->o->stream_synchronize(f->d->self, s));
    for (int lap = 0; lap < LAPS; lap++) assert_memory_equal(f->back + lap * N, f->host + lap, N);
    f->o->free(f->d->self, p, N);
    f->o->stream_destroy(f->d->self, s);
}

/* Two streams share one place: one fills it, the other empties it, events keep them apart. */
static void events_order_streams(void **state) {
    fixture *f = begin(state);
    enum { LAPS = 40, N = 16384 };
    sth_stream up = new_stream(f), down = new_stream(f);
    assert_int_not_equal(up, down);
    sth_event *filled = new_event(f, false), *emptied = new_event(f, false);
    sth_devptr p = new_memory(f, N);
    for (int lap = 0; lap < LAPS; lap++) {
        if (lap) assert_ok(f->o->stream_wait(f->d->self, up, emptied));
        assert_ok(f->o->copy_h2d(f->d->self, p, f->host + lap, N, up));
        assert_ok(f->o->event_record(f->d->self, filled, up));
        assert_ok(f->o->stream_wait(f->d->self, down, filled));
        assert_ok(f->o->copy_d2h(f->d->self, f->back + lap * N, p, N, down));
        assert_ok(f->o->event_record(f->d->self, emptied, down));
    }
    assert_ok(f->o->stream_wait(f->d->self, 0, emptied));
    assert_ok(f->o->stream_synchronize(f->d->self, 0));
    for (int lap = 0; lap < LAPS; lap++) assert_memory_equal(f->back + lap * N, f->host + lap, N);
    f->o->free(f->d->self, p, N);
    f->o->event_destroy(f->d->self, filled);
    f->o->event_destroy(f->d->self, emptied);
    f->o->stream_destroy(f->d->self, up);
    f->o->stream_destroy(f->d->self, down);
}

/* ---- events */

static void an_unrecorded_event_is_an_error(void **state) {
    fixture *f = begin(state);
    bool done;
    sth_event *e = new_event(f, true);
    sth_stream s = new_stream(f);
    assert_status(f->o->stream_wait(f->d->self, s, e), STH_INVALID_STATE);
    assert_status(f->o->stream_wait(f->d->self, 0, e), STH_INVALID_STATE);
    assert_status(f->o->event_query(f->d->self, e, &done), STH_INVALID_STATE);
    assert_status(f->o->event_synchronize(f->d->self, e), STH_INVALID_STATE);
    assert_ok(f->o->event_record(f->d->self, e, s));
    assert_ok(f->o->stream_wait(f->d->self, s, e));
    assert_ok(f->o->event_synchronize(f->d->self, e));
    assert_ok(f->o->event_query(f->d->self, e, &done));
    assert_true(done);
    f->o->event_destroy(f->d->self, e);
    f->o->event_destroy(f->d->self, NULL);
    f->o->stream_destroy(f->d->self, s);
}

static void a_later_recording_replaces_an_earlier_one(void **state) {
    fixture *f = begin(state);
    sth_event *e = new_event(f, false);
    sth_stream s = new_stream(f);
    sth_devptr p = new_memory(f, ROOM);
    assert_ok(f->o->event_record(f->d->self, e, s));
    assert_ok(f->o->event_synchronize(f->d->self, e));
    assert_ok(f->o->copy_h2d(f->d->self, p, f->host, ROOM, s));
    assert_ok(f->o->copy_d2h(f->d->self, f->back, p, ROOM, s));
    assert_ok(f->o->event_record(f->d->self, e, s));
    assert_ok(f->o->event_synchronize(f->d->self, e));
    assert_memory_equal(f->back, f->host, ROOM);
    f->o->event_destroy(f->d->self, e);
    f->o->free(f->d->self, p, ROOM);
    f->o->stream_destroy(f->d->self, s);
}

static void an_event_may_go_while_others_wait_for_it(void **state) {
    fixture *f = begin(state);
    sth_stream up = new_stream(f), down = new_stream(f);
    sth_devptr p = new_memory(f, ROOM);
    sth_event *e = new_event(f, false);
    assert_ok(f->o->copy_h2d(f->d->self, p, f->host, ROOM, up));
    assert_ok(f->o->event_record(f->d->self, e, up));
    assert_ok(f->o->stream_wait(f->d->self, down, e));
    f->o->event_destroy(f->d->self, e);
    assert_ok(f->o->copy_d2h(f->d->self, f->back, p, ROOM, down));
    assert_ok(f->o->stream_synchronize(f->d->self, down));
    assert_memory_equal(f->back, f->host, ROOM);
    f->o->stream_destroy(f->d->self, up);
    f->o->stream_destroy(f->d->self, down);
    f->o->free(f->d->self, p, ROOM);
}

static void timing_events_time(void **state) {
    fixture *f = begin(state);
    sth_event *a = new_event(f, true), *b = new_event(f, true), *untimed = new_event(f, false);
    sth_stream s = new_stream(f);
    sth_devptr p = new_memory(f, ROOM);
    int64_t ns = -1;
    assert_status(f->o->event_elapsed_ns(f->d->self, a, b, &ns), STH_INVALID_STATE);
    assert_ok(f->o->event_record(f->d->self, a, s));
    assert_ok(f->o->copy_h2d(f->d->self, p, f->host, ROOM, s));
    assert_ok(f->o->event_record(f->d->self, b, s));
    assert_ok(f->o->event_record(f->d->self, untimed, s));
    assert_ok(f->o->event_synchronize(f->d->self, untimed));
    assert_ok(f->o->event_elapsed_ns(f->d->self, a, b, &ns));
    assert_true(ns >= 0 && ns < (int64_t)10000000000);
    if (f->simulated) assert_true(ns >= ROOM / 4);
    assert_status(f->o->event_elapsed_ns(f->d->self, a, untimed, &ns), STH_INVALID_STATE);
    f->o->event_destroy(f->d->self, a);
    f->o->event_destroy(f->d->self, b);
    f->o->event_destroy(f->d->self, untimed);
    f->o->free(f->d->self, p, ROOM);
    f->o->stream_destroy(f->d->self, s);
}

/* ---- threads, processes, the end */

typedef struct errand {
    fixture *f;
    sth_status status;
} errand;

static sth_status there_and_back(fixture *f) {
    sth_stream s;
    sth_devptr p;
    STHI_TRY(f->o->alloc(f->d->self, ROOM, &p));
    sth_status status = f->o->stream_create(f->d->self, -1, &s);
    if (status == STH_OK) {
        status = f->o->copy_h2d(f->d->self, p, f->host, ROOM, s);
        if (status == STH_OK) status = f->o->copy_d2h(f->d->self, f->back, p, ROOM, s);
        if (status == STH_OK) status = f->o->stream_synchronize(f->d->self, s);
        f->o->stream_destroy(f->d->self, s);
    }
    f->o->free(f->d->self, p, ROOM);
    return status;
}

static void *run_errand(void *arg) {
    errand *e = arg;
    e->status = there_and_back(e->f);
    return NULL;
}

static void other_threads_may_use_it(void **state) {
    fixture *f = begin(state);
    errand e = {f, STH_INTERNAL};
    sthi_thread t;
    assert_ok(sthi_thread_start(&t, "errand", run_errand, &e));
    sthi_thread_join(t);
    assert_int_equal(e.status, STH_OK);
    assert_memory_equal(f->back, f->host, ROOM);
}

static void a_forked_child_gets_errors(void **state) {
    fixture *f = begin(state);
    sth_devptr p = new_memory(f, 4096), q;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bool refused = f->o->copy_h2d(f->d->self, p, f->host, 16, 0) == STH_INVALID_STATE &&
                       f->o->alloc(f->d->self, 16, &q) == STH_INVALID_STATE;
        f->o->free(f->d->self, p, 4096);
        sth_device_close(f->d);
        _exit(refused ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    assert_ok(f->o->copy_h2d(f->d->self, p, f->host, 16, 0));
    f->o->free(f->d->self, p, 4096);
}

static void close_waits_for_pending_work(void **state) {
    fixture *f = begin(state);
    sth_device *d;
    assert_ok(open_world(f->world, &d));
    sth_stream s;
    sth_devptr p;
    assert_ok(f->o->alloc(d->self, ROOM, &p));
    assert_ok(f->o->stream_create(d->self, 0, &s));
    for (int i = 0; i < 4; i++) assert_ok(f->o->copy_h2d(d->self, p, f->host + i, ROOM - 4, s));
    assert_ok(f->o->copy_d2h(d->self, f->back, p, ROOM - 4, s));
    if (!f->simulated) { /* there a context is shared and keeps what is left in it */
        f->o->stream_destroy(d->self, s);
        f->o->free(d->self, p, ROOM);
    }
    sth_device_close(d);
    assert_memory_equal(f->back, f->host + 3, ROOM - 4);
}

/* ---- faults */

typedef struct belongings {
    sth_devptr memory, ring;
    uint64_t ring_bytes;
    sth_stream streams[2];
    sth_event *events[2];
    bool pinned;
} belongings;

static sth_status use_everything(fixture *f, belongings *b) {
    sth_devptr alias;
    int64_t ns;
    bool done;
    b->ring_bytes = f->o->ring_granularity(f->d->self);
    STHI_TRY(f->o->alloc(f->d->self, ROOM, &b->memory));
    if (b->ring_bytes) STHI_TRY(f->o->ring_alloc(f->d->self, b->ring_bytes, &b->ring));
    STHI_TRY(f->o->host_register(f->d->self, f->host, ROOM, &alias));
    b->pinned = true;
    for (int i = 0; i < 2; i++) STHI_TRY(f->o->stream_create(f->d->self, 0, &b->streams[i]));
    for (int i = 0; i < 2; i++) STHI_TRY(f->o->event_create(f->d->self, true, &b->events[i]));
    STHI_TRY(f->o->event_record(f->d->self, b->events[0], b->streams[0]));
    STHI_TRY(f->o->copy_h2d(f->d->self, b->memory, f->host, 4096, b->streams[0]));
    STHI_TRY(f->o->event_record(f->d->self, b->events[1], b->streams[0]));
    STHI_TRY(f->o->stream_wait(f->d->self, b->streams[1], b->events[1]));
    STHI_TRY(f->o->copy_d2h(f->d->self, f->back, b->memory, 4096, b->streams[1]));
    STHI_TRY(f->o->stream_synchronize(f->d->self, b->streams[1]));
    STHI_TRY(f->o->event_query(f->d->self, b->events[1], &done));
    STHI_TRY(f->o->event_synchronize(f->d->self, b->events[1]));
    return f->o->event_elapsed_ns(f->d->self, b->events[0], b->events[1], &ns);
}

static void give_up(fixture *f, const belongings *b) {
    for (int i = 0; i < 2; i++) {
        f->o->event_destroy(f->d->self, b->events[i]);
        if (b->streams[i]) f->o->stream_destroy(f->d->self, b->streams[i]);
    }
    if (b->pinned) f->o->host_unregister(f->d->self, f->host, ROOM);
    if (b->ring) f->o->ring_free(f->d->self, b->ring, b->ring_bytes);
    if (b->memory) f->o->free(f->d->self, b->memory, ROOM);
}

/* Fails the first, second, ... point of one kind until the whole use passes; returns how many it met. */
static int fault_loop(fixture *f, sthi_fault_kind kind) {
    uint64_t before = free_bytes(f);
    for (uint64_t n = 1;; n++) {
        belongings b = {0};
        sthi_fault_arm(kind, n, false);
        sth_status status = use_everything(f, &b);
        uint64_t met = sthi_fault_seen(kind);
        sthi_fault_disarm_all();
        if (status != STH_OK) assert_true(sth_last_error()->message[0]);
        give_up(f, &b);
        if (f->limited) assert_int_equal(free_bytes(f), before);
        assert_int_equal(status == STH_OK, met < n);
        if (status == STH_OK) return (int)n - 1;
        assert_true(n < 1000);
    }
}

static void every_failure_is_clean(void **state) {
    fixture *f = begin(state);
    if (!f->fault_points) skip_because("this back end has no fault points");
    assert_true(fault_loop(f, STHI_FAULT_DEVICE_CALL) >= 13);
    assert_int_equal(fault_loop(f, STHI_FAULT_PIN), 1);
    assert_int_equal(fault_loop(f, STHI_FAULT_DEVICE_ALLOC), f->d->capabilities & STH_CAP_RING ? 2 : 1);
    assert_true(fault_loop(f, STHI_FAULT_ALLOC) >= 2);
    bool workers = f->simulated && !f->world->virtual_time;
    assert_int_equal(fault_loop(f, STHI_FAULT_THREAD), workers ? 2 : 0);
    assert_ok(there_and_back(f));
    assert_memory_equal(f->back, f->host, ROOM);
}

/* ---- measurement */

static void the_link_can_be_measured(void **state) {
    fixture *f = begin(state);
    double pinned = 0, pageable = 0;
    assert_ok(sth_device_measure_h2d(f->d, MIB, 3, true, &pinned));
    assert_ok(sth_device_measure_h2d(f->d, MIB, 3, false, &pageable));
    assert_true(pinned > 0 && pageable > 0);
    if (f->simulated) assert_true(pinned <= 4e9);
    assert_status(sth_device_measure_h2d(f->d, 0, 3, true, &pinned), STH_INVALID_ARGUMENT);
    assert_status(sth_device_measure_h2d(f->d, MIB, 0, true, &pinned), STH_INVALID_ARGUMENT);
    for (uint64_t n = 1; n < 30; n++) {
        sthi_fault_arm(STHI_FAULT_DEVICE_CALL, n, false);
        bool failed = sth_device_measure_h2d(f->d, 4096, 1, true, &pinned) != STH_OK;
        assert_int_equal(failed, sthi_fault_seen(STHI_FAULT_DEVICE_CALL) >= n);
        sthi_fault_disarm_all();
    }
}

static void the_link_can_be_measured_in_both_directions(void **state) {
    fixture *f = begin(state);
    sth_link_rates rates = {0}, kept = {1, 2, 3, 4};
    assert_ok(sth_device_measure_link(f->d, MIB, 3, &rates));
    assert_true(rates.up > 0 && rates.down > 0 && rates.both > 0 && rates.pin >= 0);
    if (f->simulated) {
        assert_true(rates.up <= 4e9 && rates.down <= 4e9);
        assert_true(rates.both <= 8e9);
    }
    if (f->simulated && f->world->virtual_time) { /* each way has a lane of its own */
        assert_true(rates.both > 1.9 * rates.up);
        assert_true(rates.down > 0.99 * rates.up && rates.down < 1.01 * rates.up);
    }
    assert_status(sth_device_measure_link(f->d, 1, 3, &kept), STH_INVALID_ARGUMENT);
    assert_status(sth_device_measure_link(f->d, MIB, 0, &kept), STH_INVALID_ARGUMENT);
    for (uint64_t n = 1; n < 60; n++) {
        sthi_fault_arm(STHI_FAULT_DEVICE_CALL, n, false);
        bool failed = sth_device_measure_link(f->d, 4096, 1, &kept) != STH_OK;
        assert_int_equal(failed, sthi_fault_seen(STHI_FAULT_DEVICE_CALL) >= n);
        if (failed) assert_true(kept.up == 1 && kept.pin == 4);
        else kept = (sth_link_rates){1, 2, 3, 4};
        sthi_fault_disarm_all();
    }
}

static const struct {
    const char *name;
    CMUnitTestFunction run;
} cases[] = {
#define CASE(f)                                                                                              \
    {                                                                                                        \
#f, f                                                                                                \
    }
    CASE(says_what_it_is),
    CASE(lives_until_its_last_reference),
    CASE(memory_is_aligned_and_disjoint),
    CASE(capacity_is_exact),
    CASE(a_second_free_is_an_error_and_changes_nothing),
    CASE(a_ring_wraps),
    CASE(registers_host_memory),
    CASE(pinning_has_a_limit_that_is_told),
    CASE(copies_are_exact_to_the_byte),
    CASE(copies_on_the_default_stream),
    CASE(a_stream_runs_in_order),
    CASE(events_order_streams),
    CASE(an_unrecorded_event_is_an_error),
    CASE(a_later_recording_replaces_an_earlier_one),
    CASE(an_event_may_go_while_others_wait_for_it),
    CASE(timing_events_time),
    CASE(other_threads_may_use_it),
    CASE(a_forked_child_gets_errors),
    CASE(close_waits_for_pending_work),
    CASE(every_failure_is_clean),
    CASE(the_link_can_be_measured),
    CASE(the_link_can_be_measured_in_both_directions),
#undef CASE
};
enum { CASES = sizeof cases / sizeof *cases };

int main(int argc, char **argv) {
    static struct CMUnitTest tests[WORLDS * CASES];
    static char names[WORLDS * CASES][96];
    const char *only = argc > 1 ? argv[1] : NULL; /* a device */
    size_t n = 0;
    bool known = !only;
    for (size_t w = 0; w < WORLDS - 1; w++) known = known || !strcmp(only, worlds[w].device);
    if (!known) worlds[WORLDS - 1] = (world){only, only, false};
    setenv("FAKE_DRIVER_MEMORY", "67108864", 1);
    setenv("FAKE_DRIVER_PIN_LIMIT", "8388608", 1);
    for (size_t w = 0; w < WORLDS; w++) {
        if (!worlds[w].device || (only && strcmp(only, worlds[w].device))) continue;
        for (size_t c = 0; c < CASES; c++, n++) {
            snprintf(names[n], sizeof names[n], "%s: %s", worlds[w].label, cases[c].name);
            tests[n] = (struct CMUnitTest){names[n], cases[c].run, set_up, tear_down, &worlds[w]};
        }
    }
    return _cmocka_run_group_tests("device contract", tests, n, NULL, NULL);
}
