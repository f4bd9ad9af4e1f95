/* The runtime on a checked device: at its end it uses nothing that has ended before it, neither the callers' streams
 * nor its own. (The other tests of this folder have been run on check+sim too; these are what they found.) */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/device.h"
#include "stagehand/stagehand.h"
#include "support/check.h"

enum { UNITS = 6, UNIT = 16 << 10 };

typedef struct fixture {
    char log[64];
    sth_device *device;
    sth_arena *arena;
    sth_runtime *runtime;
} fixture;

static void open_all(fixture *f, const char *outside) {
    char name[160];
    snprintf(f->log, sizeof f->log, "/tmp/sth-checked-XXXXXX");
    int fd = mkstemp(f->log);
    assert_true(fd >= 0);
    close(fd);
    snprintf(name, sizeof name, "%scheck(log=%s)+sim", outside, f->log);
    assert_ok(sth_device_open(name, NULL, &f->device));
    assert_ok(sth_arena_create(f->device, UNITS * UNIT, &f->arena));
    sth_runtime_options o;
    sth_runtime_options_init(&o);
    o.budget = 3 * UNIT;
    o.link_bytes_per_s = 1e9; /* not measured, which waits for events */
    assert_ok(sth_runtime_create(f->device, &o, &f->runtime));
    for (int i = 0; i < UNITS; i++) {
        void *image;
        uint32_t unit;
        assert_ok(sth_arena_reserve(f->arena, UNIT, &image));
        memset(image, i, UNIT);
        assert_ok(sth_runtime_add_unit(
            f->runtime, &(sth_unit_desc){.name = "unit", .bytes = UNIT, .host = image, .arena = f->arena}, &unit));
    }
    assert_ok(sth_arena_finish(f->arena));
    assert_ok(sth_runtime_seal(f->runtime));
}

/* Closes what is left; the log must be empty. */
static void close_all(fixture *f) {
    sth_runtime_destroy(f->runtime);
    sth_arena_release(f->arena);
    sth_device_close(f->device);
    char text[512];
    FILE *log = fopen(f->log, "r");
    size_t n = fread(text, 1, sizeof text - 1, log);
    text[n] = 0;
    fclose(log);
    unlink(f->log);
    assert_string_equal(text, "");
}

static void use(fixture *f, uint32_t unit, sth_stream stream) {
    sth_lease lease;
    assert_ok(sth_unit_acquire(f->runtime, unit, stream, &lease));
    sth_lease_release(f->runtime, &lease);
}

static void a_callers_stream_may_end_before_the_runtime(void **state) {
    (void)state;
    fixture f;
    sth_stream stream;
    open_all(&f, "");
    assert_ok(f.device->ops->stream_create(f.device->self, 0, &stream));
    for (int step = 0; step < 3; step++) {
        assert_ok(sth_step_begin(f.runtime));
        for (uint32_t i = 0; i < UNITS; i++) use(&f, i, stream);
        if (step < 2) assert_ok(sth_step_end(f.runtime));
    }
    assert_ok(sth_runtime_poll(f.runtime)); /* notes the uses that have ended; the step stays open */
    f.device->ops->stream_destroy(f.device->self, stream);
    close_all(&f);
}

static void a_lease_may_end_behind_the_runtime_also_when_waiting_fails(void **state) {
    (void)state;
    fixture f;
    sth_lease lease;
    open_all(&f, "fault(event_synchronize=1+)+");
    assert_ok(sth_step_begin(f.runtime));
    assert_ok(sth_unit_acquire(f.runtime, 0, 0, &lease));
    sth_runtime *runtime = f.runtime;
    sth_runtime_destroy(f.runtime);
    f.runtime = NULL;
    sth_lease_release(runtime, &lease);
    close_all(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_callers_stream_may_end_before_the_runtime),
        cmocka_unit_test(a_lease_may_end_behind_the_runtime_also_when_waiting_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
