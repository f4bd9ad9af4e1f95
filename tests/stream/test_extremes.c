/* Arguments of the public interface at the ends of their types: an error that names them, or the right result. */
#include <math.h>
#include <string.h>

#include "stagehand/stagehand.h"
#include "support/check.h"

static sth_device *open_sim(void) {
    sth_sim_options o;
    sth_device *d;
    sth_sim_options_init(&o);
    o.virtual_time = true;
    o.memory_bytes = 64 << 20;
    assert_ok(sth_device_open("sim", &o, &d));
    return d;
}

static sth_runtime_options usual(void) {
    sth_runtime_options o;
    sth_runtime_options_init(&o);
    o.budget = 1 << 20;
    return o;
}

static void a_latency_beyond_an_hour_is_refused(void **state) {
    (void)state;
    sth_sim_options o;
    sth_device *d;
    sth_sim_options_init(&o);
    o.copy_latency_ns = INT64_MAX;
    assert_status(sth_device_open("sim", &o, &d), STH_INVALID_ARGUMENT);
    d = open_sim();
    assert_status(sth_sim_compute(d, 0, INT64_MAX), STH_INVALID_ARGUMENT);
    assert_status(sth_sim_compute(d, 0, -1), STH_INVALID_ARGUMENT);
    sth_device_close(d);
}

static void a_layout_that_no_memory_holds_is_refused(void **state) {
    (void)state;
    uint32_t count;
    uint64_t bytes;
    for (int encoding = 0; encoding < STH_TRANSFER_COUNT; encoding++) {
        sth_segment s = {.encoding = (sth_transfer)encoding, .dtype = STH_DTYPE_F32, .rows = 1, .cols = UINT64_MAX};
        assert_status(sth_transfer_layout(&s, 1, 1, NULL, 0, &count, &bytes), STH_INVALID_ARGUMENT);
        s.cols = UINT64_MAX / 16;
        assert_status(sth_transfer_layout(&s, 1, 512, NULL, 0, &count, &bytes), STH_INVALID_ARGUMENT);
        s.cols = 64, s.rows = encoding ? UINT64_MAX : 1, s.place_offset = encoding ? 0 : UINT64_MAX - 15;
        assert_status(sth_transfer_layout(&s, 1, 512, NULL, 0, &count, &bytes), STH_INVALID_ARGUMENT);
    }
}

static void odd_options_are_refused_by_name(void **state) {
    (void)state;
    sth_device *d = open_sim();
    sth_runtime *rt;
#define REFUSES(field, value)                                                      \
    do {                                                                           \
        sth_runtime_options o = usual();                                           \
        o.field = (value);                                                         \
        assert_status(sth_runtime_create(d, &o, &rt), STH_INVALID_ARGUMENT);       \
        assert_non_null(strstr(sth_last_error()->message, #field));                \
    } while (0)
    REFUSES(policy, (sth_policy)77);
    REFUSES(link_bytes_per_s, NAN);
    REFUSES(link_bytes_per_s, INFINITY);
    REFUSES(link_bytes_per_s, -1);
    REFUSES(least_room, UINT64_MAX);
    REFUSES(reader_threads, 100000);
    REFUSES(stages, 2);
    REFUSES(stages, 18);
#undef REFUSES
    sth_device_close(d);
}

static void chunks_of_any_size_copy_a_pageable_unit(void **state) {
    (void)state;
    static unsigned char image[40000];
    memset(image, 7, sizeof image);
    for (int i = 0; i < 3; i++) {
        sth_device *d = open_sim();
        sth_runtime *rt;
        sth_runtime_options o = usual();
        uint32_t unit;
        o.chunk_bytes = (uint64_t[]){UINT64_MAX, UINT64_MAX - 511, 1}[i];
        o.staging_bytes = 1 << 20;
        sth_unit_desc u = {.name = "unit", .bytes = sizeof image, .host = image};
        sth_lease lease;
        assert_ok(sth_runtime_create(d, &o, &rt));
        assert_ok(sth_runtime_add_unit(rt, &u, &unit));
        assert_ok(sth_runtime_seal(rt));
        assert_ok(sth_step_begin(rt));
        assert_ok(sth_unit_acquire(rt, unit, 0, &lease));
        assert_memory_equal((void *)(uintptr_t)lease.address, image, sizeof image);
        sth_lease_release(rt, &lease);
        assert_ok(sth_step_end(rt));
        sth_runtime_destroy(rt);
        sth_device_close(d);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_latency_beyond_an_hour_is_refused),
        cmocka_unit_test(a_layout_that_no_memory_holds_is_refused),
        cmocka_unit_test(odd_options_are_refused_by_name),
        cmocka_unit_test(chunks_of_any_size_copy_a_pageable_unit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
