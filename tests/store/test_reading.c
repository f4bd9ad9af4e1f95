/* Reading after open: files that change, vanish or fail underneath, and every allocation and read that can
 * fail while opening. */
#define _GNU_SOURCE
#include "support/check.h"

#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "stagehand/checkpoint.h"
#include "store/tempfiles.h"

#define DATA 4096
#define HEADER "{\"w\":{\"dtype\":\"U8\",\"shape\":[4096],\"data_offsets\":[0,4096]}}"

static sth_checkpoint *open_new(const char *path) {
    sth_checkpoint *c;
    write_safetensors(path, HEADER, DATA);
    assert_ok(sth_checkpoint_open(path, &c));
    return c;
}

static sth_status read_w(sth_checkpoint *c, unsigned char *out) {
    const sth_tensor_info *w = sth_checkpoint_find(c, "w");
    return sth_checkpoint_read(c, w->file, w->offset, w->bytes, out);
}

static void assert_original(const unsigned char *bytes) {
    for (uint64_t i = 0; i < DATA; i++) assert_int_equal(bytes[i], pattern_byte(i));
}

static void expect_changed(sth_checkpoint *c, const char *path) {
    unsigned char got[DATA];
    assert_status(read_w(c, got), STH_CHANGED_DATA);
    assert_string_equal(sth_last_error()->object, path);
    assert_non_null(strstr(sth_last_error()->message, path));
    sth_checkpoint_close(c);
}

/* Writes one byte in place at the end; the size stays. */
static void rewrite_in_place(const char *path) {
    int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "X", 1, (off_t)file_bytes(path) - 1), 1);
    assert_int_equal(close(fd), 0);
}

static void a_rewritten_file_is_refused(void **state) {
    const char *path = temp_path(*state, "w.safetensors");
    /* Right after the file was written: the worst case for the resolution of the file's time. */
    for (int i = 0; i < 20; i++) {
        sth_checkpoint *c = open_new(path);
        rewrite_in_place(path);
        expect_changed(c, path);
    }
}

static void a_truncated_file_is_refused(void **state) {
    const char *path = temp_path(*state, "w.safetensors");
    sth_checkpoint *c = open_new(path);
    cut_file(path, 0);
    expect_changed(c, path);
    c = open_new(path);
    cut_file(path, file_bytes(path) - 1);
    expect_changed(c, path);
}

static void a_grown_file_is_refused(void **state) {
    const char *path = temp_path(*state, "w.safetensors");
    sth_checkpoint *c = open_new(path);
    cut_file(path, file_bytes(path) + 1);
    expect_changed(c, path);
}

static void a_replaced_or_deleted_file_gives_its_old_bytes(void **state) {
    const char *path = temp_path(*state, "w.safetensors"), *other = temp_path(*state, "new.safetensors");
    unsigned char got[DATA];
    sth_checkpoint *c = open_new(path);
    write_text(other, "something else");
    assert_int_equal(rename(other, path), 0);
    assert_ok(read_w(c, got));
    assert_original(got);
    assert_int_equal(unlink(path), 0);
    assert_ok(read_w(c, got));
    assert_original(got);
    sth_checkpoint_close(c);
}

static void a_failed_read_names_the_place(void **state) {
    const char *path = temp_path(*state, "w.safetensors");
    unsigned char got[DATA];
    sth_checkpoint *c = open_new(path);
    sthi_fault_arm(STHI_FAULT_READ, 1, false);
    assert_status(read_w(c, got), STH_IO);
    sthi_fault_disarm_all();
    assert_non_null(strstr(sth_last_error()->message, path));
    assert_non_null(strstr(sth_last_error()->message, "4096 bytes at byte"));
    assert_int_not_equal(sth_last_error()->native_code, 0);
    assert_ok(read_w(c, got)); /* the next read is not affected */
    assert_original(got);
    sth_checkpoint_close(c);
}

static void reads_outside_the_file_are_the_callers_mistake(void **state) {
    const char *path = temp_path(*state, "w.safetensors");
    sth_checkpoint *c = open_new(path);
    uint64_t size = file_bytes(path);
    unsigned char got[4];
    assert_status(sth_checkpoint_read(c, 0, size - 3, 4, got), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_read(c, 0, UINT64_MAX, 4, got), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_read(c, 0, 4, UINT64_MAX, got), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_read(c, 1, 0, 4, got), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_read(c, 0, 0, 4, NULL), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_read(NULL, 0, 0, 4, got), STH_INVALID_ARGUMENT);
    assert_ok(sth_checkpoint_read(c, 0, size, 0, NULL));
    assert_ok(sth_checkpoint_read(c, 0, size - 4, 4, got));
    sth_checkpoint_close(c);
}

/* ---- every failure on the way ---- */

/* Opens with the n-th effect of a kind failing, for n = 1, 2, ..., until it succeeds. */
static void fail_each(const char *path, sthi_fault_kind kind, sth_status expected) {
    long live = sthi_alloc_live();
    int descriptors = open_descriptors();
    uint64_t n = 1;
    for (;; n++) {
        sth_checkpoint *c = NULL;
        sthi_fault_arm(kind, n, false);
        sth_status status = sth_checkpoint_open(path, &c);
        bool hit = sthi_fault_seen(kind) >= n;
        sthi_fault_disarm_all();
        if (status == STH_OK) sth_checkpoint_close(c);
        else assert_null(c);
        assert_int_equal(sthi_alloc_live(), live);
        assert_int_equal(open_descriptors(), descriptors);
        if (!hit) {
            assert_int_equal(status, STH_OK);
            break;
        }
        /* The JSON parser takes some of its own failed allocations for mistakes in the text. */
        bool parser = kind == STHI_FAULT_ALLOC && status == STH_CORRUPT_DATA &&
                      strcmp(sth_last_error()->domain, "json") == 0;
        if (status != expected && !parser)
            fail_msg("failure %llu of %s: %s, expected %s (%s)", (unsigned long long)n, path,
                     sth_status_name(status), sth_status_name(expected), sth_last_error()->message);
    }
    assert_true(n > 1);
}

static void write_model(const char *folder) {
    write_safetensors(temp_path(folder, "a.safetensors"),
                      "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                      "\"old\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
                      8);
    write_safetensors(temp_path(folder, "b.safetensors"),
                      "{\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    write_text(temp_path(folder, "model.safetensors.index.json"),
               "{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}");
    write_text(temp_path(folder, "layers.json"),
               "[{\"layer_id\":0,\"path\":\"a.safetensors\",\"offset\":8,\"nbytes\":4},"
               "{\"layer_id\":1,\"path\":\"b.safetensors\",\"offset\":8,\"nbytes\":4}]");
}

static void every_allocation_and_read_may_fail(void **state) {
    write_model(*state);
    /* The parser's allocations fail with ours. */
    json_set_alloc_funcs(sthi_alloc, sthi_free);
    const char *paths[] = {*state, temp_path(*state, "a.safetensors"), temp_path(*state, "layers.json")};
    for (size_t i = 0; i < 3; i++) {
        fail_each(paths[i], STHI_FAULT_ALLOC, STH_OUT_OF_HOST_MEMORY);
        fail_each(paths[i], STHI_FAULT_READ, STH_IO);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_rewritten_file_is_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_truncated_file_is_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_grown_file_is_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_replaced_or_deleted_file_gives_its_old_bytes, temp_setup,
                                        temp_teardown),
        cmocka_unit_test_setup_teardown(a_failed_read_names_the_place, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(reads_outside_the_file_are_the_callers_mistake, temp_setup,
                                        temp_teardown),
        cmocka_unit_test_setup_teardown(every_allocation_and_read_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
