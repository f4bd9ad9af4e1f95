/* Back ends that are not of this build: registered by the program, loaded from a path, named in the environment.
 *
 *     test-device-registry OWN NOT_A_BACK_END      two shared objects
 *
 * What is taken stays for the life of the process: the cases run in their order. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/device.h"
#include "device/entries.h"
#include "stagehand/stagehand.h"
#include "support/check.h"

static char *own;
static const char *other;
static int built_in; /* back ends of this build */

static bool said(const char *text) { return strstr(sth_last_error()->message, text) != NULL; }

static void opens(const char *name, const char *backend, int index) {
    sth_device *d;
    sth_device_info info;
    assert_ok(sth_device_open(name, NULL, &d));
    assert_ok(sth_device_info_get(d, &info));
    assert_string_equal(info.backend, backend);
    assert_int_equal(info.index, index);
    sth_device_close(d);
}

static void only_paths_are_loaded(void **state) {
    (void)state;
    const char *name = "untouched";
    assert_status(sth_backend_load("libown_backend.so", &name), STH_INVALID_ARGUMENT);
    assert_true(said("./libown_backend.so"));
    assert_status(sth_backend_load("", &name), STH_INVALID_ARGUMENT);
    assert_status(sth_backend_load("/nowhere/libown.so", &name), STH_BACKEND_UNAVAILABLE);
    assert_true(said("/nowhere/libown.so"));
    assert_status(sth_backend_load(other, &name), STH_BACKEND_UNAVAILABLE);
    assert_true(said("does not export stagehand_backend"));
    assert_string_equal(name, "untouched");
    assert_null(sth_backend_name(built_in));
}

static void the_environment_holds_absolute_paths(void **state) {
    (void)state;
    sth_device *d = NULL;
    assert_ok(sth_backend_load(NULL, NULL)); /* nothing is named */
    setenv("STAGEHAND_BACKENDS", "./libown_backend.so", 1);
    assert_status(sth_backend_load(NULL, NULL), STH_INVALID_ARGUMENT);
    assert_true(said("absolute") && said("./libown_backend.so"));
    assert_status(sth_device_open("own", NULL, &d), STH_BACKEND_UNAVAILABLE);
    assert_true(said("\"own\"") && said("absolute"));
    opens("sim", "sim", 0); /* what is known needs no environment */

    char paths[8192]; /* one that fails keeps no other from being loaded */
    snprintf(paths, sizeof paths, "/nowhere/libown.so::%s", own);
    setenv("STAGEHAND_BACKENDS", paths, 1);
    opens("own:1", "own", 1);
    assert_status(sth_backend_load(NULL, NULL), STH_BACKEND_UNAVAILABLE);
    assert_true(said("/nowhere/libown.so"));
    unsetenv("STAGEHAND_BACKENDS");
}

static void what_is_loaded_is_listed_and_opened_by_name(void **state) {
    (void)state;
    const char *name = NULL;
    assert_ok(sth_backend_load(own, &name)); /* again */
    assert_string_equal(name, "own");
    assert_string_equal(sth_backend_name(built_in), "own");
    assert_null(sth_backend_name(built_in + 1));
    assert_int_equal(sth_device_count("own"), 2);
    opens("own", "own", 0);
    sth_device *d = NULL;
    assert_status(sth_device_open("own:2", NULL, &d), STH_BACKEND_UNAVAILABLE);
    assert_null(d);
}

/* ---- registered */

static sth_backend_ops mine;
static uint32_t claimed;

static uint32_t claims(sth_backend_device *d) {
    (void)d;
    return claimed;
}

static void a_program_registers_its_own(void **state) {
    (void)state;
    mine = sthi_sim_ops;
    mine.backend = "sim";
    assert_status(sth_backend_register(&mine), STH_INVALID_STATE);
    assert_true(said("another name"));
    mine.backend = "cpu";
    assert_status(sth_backend_register(&mine), STH_INVALID_STATE);
    mine.backend = "mine";
    mine.alloc = NULL;
    assert_status(sth_backend_register(&mine), STH_INVALID_ARGUMENT);
    assert_true(said("\"mine\"") && said("has no alloc"));
    mine.alloc = sthi_sim_ops.alloc;
    mine.capabilities = claims;
    mine.ring_alloc = NULL;
    claimed = STH_CAP_PINNED_HOST;
    assert_ok(sth_backend_register(&mine));
    assert_ok(sth_backend_register(&mine));
    assert_string_equal(sth_backend_name(built_in + 1), "mine");
    assert_null(sth_backend_name(built_in + 2));
    opens("mine:0", "sim", 0);
    mine.backend = "mine-too"; /* another one at the same address */
    assert_ok(sth_backend_register(&mine));
    opens("mine-too", "sim", 0);
    mine.backend = "mine";
    assert_status(sth_backend_register(NULL), STH_INVALID_ARGUMENT);
}

static void a_device_may_not_claim_what_its_table_lacks(void **state) {
    (void)state;
    sth_device *d = NULL;
    claimed = STH_CAP_PINNED_HOST | STH_CAP_RING;
    assert_status(sth_device_open("mine", NULL, &d), STH_INVALID_ARGUMENT);
    assert_true(said("STH_CAP_RING") && said("ring_alloc"));
    assert_null(d);
}

static void streams_through_another_back_end(void **state) {
    (void)state;
    double rate = 0;
    sth_device *d;
    assert_ok(sth_device_open("own", NULL, &d));
    assert_ok(sth_device_measure_h2d(d, 1 << 20, 3, true, &rate));
    assert_true(rate > 0);
    assert_int_equal(d->default_cap, (uint64_t)256 << 20); /* its memory is nobody else's */
    sth_device_close(d);
}

/* ---- a back end that has nothing but what is required */

static sth_backend_ops bare = {.abi = STH_BACKEND_ABI, .size = sizeof bare, .backend = "bare"};

static uint32_t nothing(sth_backend_device *d) {
    (void)d;
    return 0;
}

static void only_what_is_required(void) {
    for (int i = 0; i < STHI_ENTRY_COUNT; i++)
        if (sthi_entries[i].needed)
            memcpy((char *)&bare + sthi_entries[i].offset, (const char *)&sthi_sim_ops + sthi_entries[i].offset,
                   sizeof(void (*)(void)));
    bare.capabilities = nothing;
}

enum { UNITS = 6, UNIT = 64 << 10 };

static void step_through(sth_runtime *rt, sth_device *d, unsigned char *const images[UNITS]) {
    static unsigned char seen[UNIT];
    assert_ok(sth_step_begin(rt));
    for (uint32_t i = 0; i < UNITS; i++) {
        sth_lease lease;
        assert_ok(sth_unit_acquire(rt, i, 0, &lease));
        assert_ok(d->ops->copy_d2h(d->self, seen, lease.address, UNIT, 0));
        sth_lease_release(rt, &lease);
        assert_memory_equal(seen, images[i], UNIT);
    }
    assert_ok(sth_step_end(rt));
}

/* "bare" does not say that it is the host's memory, so a framework may have made what check does not know. */
static void memory_of_others_passes_a_check(void) {
    static unsigned char bytes[64];
    sth_device *checked, *second;
    sth_devptr ours, theirs;
    assert_ok(sth_device_open("check+bare", NULL, &checked));
    assert_ok(sth_device_open("check+bare", NULL, &second));
    sth_backend_device *self = checked->self;
    assert_ok(checked->ops->alloc(self, 64, &ours));
    assert_ok(second->ops->alloc(second->self, 64, &theirs));
    assert_status(checked->ops->copy_h2d(self, ours + 1, bytes, 64, 0), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->domain, "check");
    assert_status(checked->ops->copy_h2d(self, theirs, bytes, 64, 0), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->domain, "check");
    assert_true(said("belongs to another device"));
    assert_status(checked->ops->copy_h2d(self, (uintptr_t)bytes, bytes, 64, 0), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->domain, "sim"); /* it went through to the device */
    assert_status(checked->ops->stream_synchronize(self, 999), STH_INVALID_ARGUMENT);
    assert_string_equal(sth_last_error()->domain, "sim");
    checked->ops->free(self, ours, 64);
    second->ops->free(second->self, theirs, 64);
    sth_device_close(second);
    sth_device_close(checked);
}

static void what_is_optional_may_be_missing(void **state) {
    (void)state;
    only_what_is_required();
    sth_device *d;
    sth_arena *arena;
    sth_runtime *rt;
    sth_runtime_options o;
    double rate = 0;
    assert_ok(sth_backend_register(&bare));
    assert_ok(sth_device_open("bare", NULL, &d));
    assert_status(sth_device_measure_h2d(d, 4096, 1, true, &rate), STH_UNSUPPORTED);
    assert_ok(sth_device_measure_h2d(d, 4096, 1, false, &rate));
    assert_status(sth_sim_compute(d, 0, 1), STH_UNSUPPORTED);
    memory_of_others_passes_a_check();

    assert_ok(sth_arena_create(d, UNITS * UNIT, &arena));
    sth_runtime_options_init(&o);
    o.budget = 3 * UNIT;
    assert_ok(sth_runtime_create(d, &o, &rt));
    unsigned char *images[UNITS];
    uint32_t unit;
    for (int i = 0; i < UNITS; i++) {
        char name[16];
        snprintf(name, sizeof name, "unit %d", i);
        assert_ok(sth_arena_reserve(arena, UNIT, (void **)&images[i]));
        for (int k = 0; k < UNIT; k++) images[i][k] = (unsigned char)(k * 3 + i * 11);
        sth_unit_desc desc = {.name = name, .bytes = UNIT, .host = images[i], .arena = arena};
        if (i % 2) desc.arena = NULL; /* staged through slabs */
        assert_ok(sth_runtime_add_unit(rt, &desc, &unit));
    }
    assert_ok(sth_arena_finish(arena));
    assert_string_not_equal(sth_arena_pin_error(arena), "");
    assert_ok(sth_runtime_seal(rt));
    for (int step = 0; step < 4; step++) step_through(rt, d, images);
    sth_runtime_destroy(rt);
    sth_arena_release(arena);
    sth_device_close(d);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    own = realpath(argv[1], NULL); /* the environment wants it absolute */
    other = argv[2];
    unsetenv("STAGEHAND_BACKENDS");
    while (sth_backend_name(built_in)) built_in++;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_paths_are_loaded),
        cmocka_unit_test(the_environment_holds_absolute_paths),
        cmocka_unit_test(what_is_loaded_is_listed_and_opened_by_name),
        cmocka_unit_test(a_program_registers_its_own),
        cmocka_unit_test(a_device_may_not_claim_what_its_table_lacks),
        cmocka_unit_test(streams_through_another_back_end),
        cmocka_unit_test(what_is_optional_may_be_missing),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(own);
    return failed;
}
