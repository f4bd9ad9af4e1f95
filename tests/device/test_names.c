/* Devices by name, options, and arguments of the public functions that are wrong. */
#include <string.h>

#include "base/memory.h"
#include "stagehand/device.h"
#include "support/check.h"

static void names_are_understood(void **state) {
    (void)state;
    static const char *const good[] = {"sim", "cpu", "sim:0", "cpu:0"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        sth_device *d;
        sth_device_info info;
        assert_ok(sth_device_open(good[i], NULL, &d));
        assert_ok(sth_device_info_get(d, &info));
        assert_string_equal(info.backend, "sim");
        assert_int_equal(info.index, 0);
        assert_int_equal(info.memory_total, (uint64_t)8 << 30);
        sth_device_close(d);
    }
    assert_string_equal(sth_backend_name(0), "sim");
    assert_string_equal(sth_backend_name(1), "cuda");
    assert_string_equal(sth_backend_name(2), "hip");
    assert_null(sth_backend_name(3));
    assert_null(sth_backend_name(-1));
    assert_int_equal(sth_device_count("sim"), 1);
    assert_int_equal(sth_device_count("cpu"), 1);
}

static void wrong_names_are_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *name;
        sth_status status;
    } bad[] = {
        {"", STH_BACKEND_UNAVAILABLE},      {"tpu", STH_BACKEND_UNAVAILABLE},
        {"si", STH_BACKEND_UNAVAILABLE},    {"simulator", STH_BACKEND_UNAVAILABLE},
        {"sim:1", STH_BACKEND_UNAVAILABLE}, {"sim:", STH_INVALID_ARGUMENT},
        {"sim:x", STH_INVALID_ARGUMENT},    {"sim:0x", STH_INVALID_ARGUMENT},
        {"sim:-1", STH_INVALID_ARGUMENT},   {"sim:99999999999", STH_INVALID_ARGUMENT},
        {"cuda:1:2", STH_INVALID_ARGUMENT}, {"cpu: 0", STH_INVALID_ARGUMENT},
        {"hip:x", STH_INVALID_ARGUMENT},    {"rocm", STH_BACKEND_UNAVAILABLE},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sth_device *d = NULL;
        assert_status(sth_device_open(bad[i].name, NULL, &d), bad[i].status);
        assert_null(d);
        assert_true(strlen(sth_last_error()->message) > 20);
    }
    assert_int_equal(sth_device_count("tpu"), 0);
    assert_int_equal(sth_last_error()->status, STH_BACKEND_UNAVAILABLE);
}

static void options_of_another_size(void **state) {
    (void)state;
    sth_sim_options o;
    sth_device *d;
    sth_device_info info;
    sth_sim_options_init(&o);
    assert_int_equal(o.size, sizeof o);
    assert_true(o.poison);
    o.memory_bytes = 4096;
    o.copy_latency_ns = -5;
    assert_status(sth_device_open("sim", &o, &d), STH_INVALID_ARGUMENT);
    o.size = offsetof(sth_sim_options, link_bytes_per_s); /* an older caller: the rest stays at its default */
    assert_ok(sth_device_open("sim", &o, &d));
    assert_ok(sth_device_info_get(d, &info));
    assert_int_equal(info.memory_total, 4096);
    sth_device_close(d);
    o.size = sizeof o + 1;
    assert_status(sth_device_open("sim", &o, &d), STH_INVALID_ARGUMENT);
    o.size = 0;
    assert_status(sth_device_open("sim", &o, &d), STH_INVALID_ARGUMENT);
    sth_sim_options_init(&o);
    o.memory_bytes = 0;
    assert_status(sth_device_open("sim", &o, &d), STH_INVALID_ARGUMENT);
}

static void null_arguments_are_refused(void **state) {
    (void)state;
    sth_device *d;
    sth_devptr p;
    double rate;
    sth_device_info info;
    assert_ok(sth_device_open("sim", NULL, &d));
    assert_status(sth_device_open(NULL, NULL, &d), STH_INVALID_ARGUMENT);
    assert_status(sth_device_open("sim", NULL, NULL), STH_INVALID_ARGUMENT);
    assert_status(sth_device_info_get(NULL, &info), STH_INVALID_ARGUMENT);
    assert_status(sth_device_info_get(d, NULL), STH_INVALID_ARGUMENT);
    assert_status(sth_device_alloc(NULL, 1, &p), STH_INVALID_ARGUMENT);
    assert_status(sth_device_alloc(d, 1, NULL), STH_INVALID_ARGUMENT);
    assert_status(sth_device_measure_h2d(NULL, 1, 1, true, &rate), STH_INVALID_ARGUMENT);
    assert_status(sth_device_measure_h2d(d, 1, 1, true, NULL), STH_INVALID_ARGUMENT);
    assert_status(sth_sim_compute(NULL, 0, 1), STH_INVALID_ARGUMENT);
    assert_status(sth_sim_compute(d, 0, -1), STH_INVALID_ARGUMENT);
    assert_int_equal(sth_device_now_ns(NULL), 0);
    assert_int_equal(sth_device_count(NULL), 0);
    assert_int_equal(sth_last_error()->status, STH_INVALID_ARGUMENT);
    sth_device_free(NULL, 0, 0);
    sth_device_retain(NULL);
    sth_device_close(NULL);
    sth_sim_options_init(NULL);
    assert_ok(sth_device_alloc(d, 100, &p));
    assert_int_equal(p % 512, 0);
    sth_device_free(d, p, 100);
    sth_device_close(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_understood),
        cmocka_unit_test(wrong_names_are_refused_by_name),
        cmocka_unit_test(options_of_another_size),
        cmocka_unit_test(null_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
