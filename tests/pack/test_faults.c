/* Each allocation, read and write fails in turn, until packing, verifying and unpacking come through: nothing leaks, no
 * result appears unless it is whole, and after a failed write nothing is left at all. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "pack/models.h"
#include "stagehand/pack.h"
#include "stagehand/quant.h"
#include "store/tempfiles.h"

typedef struct scene {
    const char *folder, *model;
    sth_pack_format format;
    const char *result, *other; /* the two files that are made */
} scene;

static sth_status pack_once(const scene *s) { return model_pack(s->model, s->result, s->format); }

static void check_whole(const scene *s) {
    sth_verify_result result;
    assert_ok(sth_verify(s->result, s->model, NULL, NULL, &result));
    assert_int_equal(result.checksums_wrong + result.checksums_missing + result.missing + result.stored_differ, 0);
    assert_true(model_is_there(s->other));
}

static void remove_results(const scene *s) {
    char partial[600];
    snprintf(partial, sizeof partial, "rm -rf '%s.partial'", s->result);
    unlink(s->result);
    unlink(s->other);
    assert_int_equal(system(partial), 0);
}

static int fail_each(const scene *s, sthi_fault_kind kind) {
    for (uint64_t n = 1;; n++) {
        long live = sthi_alloc_live();
        int open = open_descriptors();
        sthi_fault_arm(kind, n, false);
        sth_status status = pack_once(s);
        bool hit = sthi_fault_seen(kind) >= n;
        sthi_fault_disarm_all();
        assert_int_equal(sthi_alloc_live(), live);
        assert_int_equal(open_descriptors(), open);
        if (model_is_there(s->result)) check_whole(s);
        else assert_true(status != STH_OK && *sth_last_error()->message);
        if (status != STH_OK && !model_is_there(s->result)) {
            assert_ok(pack_once(s)); /* on from there, or anew */
            check_whole(s);
        }
        remove_results(s);
        if (!hit) return (int)n;
    }
}

static void with_each(scene s) {
    assert_true(fail_each(&s, STHI_FAULT_ALLOC) > 20);
    assert_true(fail_each(&s, STHI_FAULT_READ) > 5);
    assert_true(fail_each(&s, STHI_FAULT_WRITE) > 10);
    assert_true(fail_each(&s, STHI_FAULT_THREAD) > 1);
}

static void packing_v2_fails_at_every_point(void **state) {
    char model[512], result[512], other[512];
    snprintf(model, sizeof model, "%s", model_write(*state));
    snprintf(result, sizeof result, "%s/r.safetensors", (char *)*state);
    snprintf(other, sizeof other, "%s/r.manifest.json", (char *)*state);
    with_each((scene){*state, model, STH_PACK_V2, result, other});
}

static void packing_an_index_fails_at_every_point(void **state) {
    char model[512], result[512], other[512];
    snprintf(model, sizeof model, "%s", model_write(*state));
    snprintf(result, sizeof result, "%s/r.json", (char *)*state);
    snprintf(other, sizeof other, "%s/r.bin", (char *)*state);
    with_each((scene){*state, model, STH_PACK_LAYER_INDEX, result, other});
}

/* The disk is full from the n-th write on. */
static void a_full_disk_leaves_nothing(void **state) {
    char model[512], result[512];
    snprintf(model, sizeof model, "%s", model_write(*state));
    snprintf(result, sizeof result, "%s/r.safetensors", (char *)*state);
    scene s = {*state, model, STH_PACK_V2, result, result};
    int before = model_entries(*state), failed = 0;
    for (uint64_t n = 1; n < 12; n++) {
        sthi_fault_arm(STHI_FAULT_WRITE, n, true);
        sth_status status = pack_once(&s);
        sthi_fault_disarm_all();
        assert_status(status, STH_IO);
        assert_int_equal(model_entries(*state), before);
        failed++;
    }
    assert_int_equal(failed, 11);
}

static void verifying_and_unpacking_fail_at_every_point(void **state) {
    char model[512], result[512], back[512], partial[600];
    sth_verify_result found;
    snprintf(model, sizeof model, "%s", model_write(*state));
    snprintf(result, sizeof result, "%s/r.safetensors", (char *)*state);
    snprintf(back, sizeof back, "%s/back.safetensors", (char *)*state);
    snprintf(partial, sizeof partial, "rm -rf '%s.partial'", back);
    sth_pack_options options;
    sth_pack_options_init(&options);
    options.threads = 1;
    assert_ok(sth_pack(model, result, &options));
    static const sthi_fault_kind kinds[] = {STHI_FAULT_ALLOC, STHI_FAULT_READ, STHI_FAULT_WRITE, STHI_FAULT_THREAD};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (uint64_t n = 1, more = 1; more; n++) {
            long live = sthi_alloc_live();
            sthi_fault_arm(kinds[k], n, false);
            sth_status verified = sth_verify(result, model, &options, NULL, &found);
            more = sthi_fault_seen(kinds[k]) >= n;
            sthi_fault_arm(kinds[k], n, false);
            sth_status unpacked = sth_unpack(result, back, &options);
            more |= sthi_fault_seen(kinds[k]) >= n;
            sthi_fault_disarm_all();
            assert_true(more || (verified == STH_OK && unpacked == STH_OK));
            assert_int_equal(sthi_alloc_live(), live);
            assert_int_equal(model_is_there(back) || unpacked != STH_OK, 1);
            unlink(back);
            assert_int_equal(system(partial), 0);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(packing_v2_fails_at_every_point, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(packing_an_index_fails_at_every_point, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_full_disk_leaves_nothing, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(verifying_and_unpacking_fail_at_every_point, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
