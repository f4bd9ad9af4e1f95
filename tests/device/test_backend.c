/* A back end's table is looked at before its first call: what is wrong with it is named. */
#include <stdio.h>
#include <string.h>

#include "device/device.h"
#include "device/entries.h"
#include "support/check.h"

typedef void (*entry)(void);

static const uint32_t EVERY_CAPABILITY = STH_CAP_PINNED_HOST | STH_CAP_RING | STH_CAP_EXPAND;

static sth_backend_ops without(size_t i) {
    sth_backend_ops table = sthi_sim_ops;
    entry none = NULL;
    memcpy((char *)&table + sthi_entries[i].offset, &none, sizeof none);
    return table;
}

static bool says(const char *a, const char *b) {
    const char *message = sth_last_error()->message;
    return strstr(message, a) && strstr(message, b);
}

static void ours_are_complete(void **state) {
    (void)state;
    for (int i = 0; sthi_backend_at(i); i++) {
        assert_ok(sthi_backend_check(sthi_backend_at(i)));
        assert_ok(sthi_backend_check_capabilities(sthi_backend_at(i), EVERY_CAPABILITY));
    }
}

static void a_missing_entry_is_named(void **state) {
    (void)state;
    char name[64];
    for (size_t i = 0; i < STHI_ENTRY_COUNT; i++) {
        sth_backend_ops table = without(i);
        snprintf(name, sizeof name, "has no %s", sthi_entries[i].name);
        assert_int_equal(sthi_backend_check(&table), sthi_entries[i].needed ? STH_INVALID_ARGUMENT : STH_OK);
        if (sthi_entries[i].needed) assert_true(says(name, "required"));
        bool needed = sthi_entries[i].capability;
        assert_int_equal(sthi_backend_check_capabilities(&table, EVERY_CAPABILITY),
                         needed ? STH_INVALID_ARGUMENT : STH_OK);
        if (needed) assert_true(says(name, "STH_CAP_"));
        assert_ok(sthi_backend_check_capabilities(&table, EVERY_CAPABILITY & ~sthi_entries[i].capability));
    }
}

static void another_version_is_refused(void **state) {
    (void)state;
    sth_backend_ops table = {.abi = STH_BACKEND_ABI + 1}; /* nothing behind it is looked at */
    assert_status(sthi_backend_check(&table), STH_UNSUPPORTED);
    assert_true(says("version 2", "version 1"));
    assert_status(sthi_backend_check(NULL), STH_INVALID_ARGUMENT);
}

static void a_table_of_any_later_size_is_taken(void **state) {
    (void)state;
    sth_backend_ops table = sthi_sim_ops, whole;
    table.size = offsetof(sth_backend_ops, sim_compute);
    assert_status(sthi_backend_check(&table), STH_INVALID_ARGUMENT);
    assert_true(says("bytes", "sizeof(sth_backend_ops)"));
    struct {
        sth_backend_ops table;
        entry from_the_future;
    } longer = {.table = sthi_sim_ops};
    longer.table.size = sizeof longer;
    assert_ok(sthi_backend_check(&longer.table));
    sthi_backend_complete(&longer.table, &whole);
    assert_int_equal(whole.size, sizeof whole);
    assert_ptr_equal(whole.sim_compute, sthi_sim_ops.sim_compute);
}

static void names_are_plain(void **state) {
    (void)state;
    static const char *const bad[] = {NULL, "", "Sim", "a b", "sim:0", "check+sim", "../sim", "abcdefghijklmnop"};
    sth_backend_ops table = sthi_sim_ops;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        table.backend = bad[i];
        assert_status(sthi_backend_check(&table), STH_INVALID_ARGUMENT);
    }
    table.backend = "own_device-2";
    assert_ok(sthi_backend_check(&table));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ours_are_complete),
        cmocka_unit_test(a_missing_entry_is_named),
        cmocka_unit_test(another_version_is_refused),
        cmocka_unit_test(a_table_of_any_later_size_is_taken),
        cmocka_unit_test(names_are_plain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
