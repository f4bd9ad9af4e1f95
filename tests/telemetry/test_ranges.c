/* Ranges for a profiler: there where one is attached, with the names of what they are, and nowhere else. */
#define _GNU_SOURCE
#include "support/check.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stagehand/stagehand.h"
#include "telemetry/ranges.h"

enum { UNITS = 6, BYTES = 65536, STEPS = 4 };

/* STH_TEST_PROFILER: "works", "refuses" or "missing", as the build's test gives it. */
static bool attached(void) { return strcmp(getenv("STH_TEST_PROFILER"), "works") == 0; }

static void run(void) {
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.virtual_time = true;
    sim.link_bytes_per_s = 1000000000;
    sth_device *device;
    sth_runtime *runtime;
    sth_arena *arena;
    sth_runtime_options options;
    sth_runtime_options_init(&options);
    options.budget = 3 * BYTES;
    options.name = "model";
    assert_ok(sth_device_open("sim", &sim, &device));
    assert_ok(sth_runtime_create(device, &options, &runtime));
    assert_ok(sth_arena_create(device, UNITS * BYTES, &arena));
    for (uint32_t i = 0; i < UNITS; i++) {
        char name[16];
        void *host;
        uint32_t number;
        snprintf(name, sizeof name, "u%u", i);
        assert_ok(sth_arena_reserve(arena, BYTES, &host));
        memset(host, 1, BYTES);
        const sth_unit_desc desc = {.name = name, .bytes = BYTES, .host = host, .arena = arena};
        assert_ok(sth_runtime_add_unit(runtime, &desc, &number));
    }
    assert_ok(sth_arena_finish(arena));
    assert_ok(sth_runtime_seal(runtime));
    for (int s = 0; s < STEPS; s++) {
        assert_ok(sth_step_begin(runtime));
        for (uint32_t i = 0; i < UNITS; i++) {
            sth_lease lease;
            assert_ok(sth_unit_acquire(runtime, i, 0, &lease));
            assert_ok(sth_sim_compute(device, 0, 10000));
            sth_lease_release(runtime, &lease);
        }
        assert_ok(sth_step_end(runtime));
    }
    sth_runtime_destroy(runtime);
    sth_arena_release(arena);
    sth_device_close(device);
}

static int times(char (*text)[160], int count, const char *wanted) {
    int n = 0;
    for (int i = 0; i < count; i++) n += strcmp(text[i], wanted) == 0;
    return n;
}

static void a_profiler_sees_steps_uses_and_copies_by_name(void **state) {
    (void)state;
    run();
    assert_int_equal((sthi_onlookers() & STHI_PROFILED) != 0, attached());
    if (!attached()) return;
    void *library = dlopen(getenv("NVTX_INJECTION64_PATH"), RTLD_LAZY | RTLD_NOLOAD);
    assert_non_null(library);
    char(*text)[160] = dlsym(library, "fake_profiler_text");
    int count = *(int *)dlsym(library, "fake_profiler_count"), ended = *(int *)dlsym(library, "fake_profiler_ended");
    assert_true(count > 0);
    assert_int_equal(count, ended);
    assert_int_equal(times(text, count, "~stagehand: step model"), STEPS);
    assert_int_equal(times(text, count, "stagehand: step begin model"), STEPS);
    assert_int_equal(times(text, count, "stagehand: step end model"), STEPS);
    int copies = 0;
    for (int i = 0; i < UNITS; i++) {
        char name[40];
        snprintf(name, sizeof name, "stagehand: acquire u%d", i);
        assert_int_equal(times(text, count, name), STEPS);
        snprintf(name, sizeof name, "stagehand: copy u%d", i);
        copies += times(text, count, name);
        assert_true(times(text, count, name) >= 1);
    }
    assert_true(copies > UNITS); /* what streams comes again */
    assert_true(*(int *)dlsym(library, "fake_profiler_deepest") >= 2);
    (void)dlclose(library);
}

static void a_second_runtime_does_not_attach_again(void **state) {
    (void)state;
    unsigned before = sthi_onlookers();
    run();
    assert_int_equal(sthi_onlookers(), before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_profiler_sees_steps_uses_and_copies_by_name),
        cmocka_unit_test(a_second_runtime_does_not_attach_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
