/* v3: a folder of shards, int4 or NVFP4, whose layers are told by the names of tensors; the plan
 * must agree. */
#include "support/check.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "store/slabs.h"
#include "store/tempfiles.h"

static slab_files f;

static sth_quant *open_new(const char *folder, sth_quant_format format) {
    sth_quant *slab = NULL;
    slab_make(&f, format);
    assert_ok(sth_quant_open(slab_write(&f, folder), &slab));
    assert_int_equal(sth_quant_get_format(slab), format);
    assert_int_equal(sth_quant_layer_count(slab), 1);
    assert_int_equal(sth_quant_plain_count(slab), 1);
    return slab;
}

static void sizes_are_told_by_shapes(void **state) {
    sth_quant *slab = open_new(*state, STH_QUANT_V3_INT4);
    const sth_quant_layer *a = sth_quant_find(slab, "a");
    assert_int_equal(a->encoding, STH_ENCODING_INT4_GROUP_HADAMARD);
    assert_true(a->out == 3 && a->in == 256 && a->padded_in == 256 && a->group == 64 && a->rank == 2);
    assert_int_equal(a->hadamard, 256);
    sth_quant_close(slab);
    slab = open_new(*state, STH_QUANT_V3_NVFP4);
    a = sth_quant_find(slab, "a");
    assert_int_equal(a->encoding, STH_ENCODING_NVFP4_HADAMARD);
    assert_true(a->out == 24 && a->in == 256 && a->group == 16 && a->rank == 2 && a->hadamard == 256);
    assert_non_null(a->parts[STH_QUANT_PART_GLOBAL_SCALE]);
    sth_quant_close(slab);
}

static void a_folder_may_have_an_index(void **state) {
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_V3_INT4);
    slab_write(&f, *state);
    assert_int_equal(rename(temp_path(*state, "m.safetensors"), temp_path(*state, "part.safetensors")), 0);
    write_text(temp_path(*state, "model.safetensors.index.json"),
               "{\"weight_map\":{\"a.qweight\":\"part.safetensors\",\"a.wscales\":\"part.safetensors\","
               "\"a.lora_down\":\"part.safetensors\",\"a.lora_up\":\"part.safetensors\"}}");
    assert_ok(sth_quant_open(*state, &slab));
    assert_int_equal(sth_quant_layer_count(slab), 1);
    assert_int_equal(sth_quant_plain_count(slab), 0); /* the index leaves "norm" out */
    sth_quant_close(slab);
}

static void a_folder_without_a_plan_is_read_unless_its_build_broke_off(void **state) {
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_V3_INT4);
    f.beside.count = 0;
    slab_write(&f, *state);
    assert_ok(sth_quant_open(*state, &slab));
    sth_quant_close(slab);
    slab = NULL;
    write_text(temp_path(*state, "squareq-plan.partial.json"), "{}");
    assert_status(sth_quant_open(*state, &slab), STH_CORRUPT_DATA);
    assert_non_null(strstr(sth_last_error()->message, "not built to its end"));
}

static void int4_tensors_that_do_not_fit_are_refused(void **state) {
    static const slab_edit_case cases[] = {
        {"\"shape\":[3,128]", "\"shape\":[384]", STH_CORRUPT_DATA, "codes need two extents"},
        {"\"shape\":[3,128]", "\"shape\":[4,96]", STH_CORRUPT_DATA, "multiple of 256"},
        {"\"shape\":[4,3]", "\"shape\":[3,4]", STH_CORRUPT_DATA, "one for each group"},
        {"\"shape\":[4,3]", "\"shape\":[2,6]", STH_CORRUPT_DATA, "it must be BF16 [2, 3]"},
        {"\"a.wscales\"", "\"a.wscaleS\"", STH_CORRUPT_DATA, "wscales are missing"},
        {"\"a.lora_down\"", "\"a.lora_dowN\"", STH_CORRUPT_DATA, "lora_down is missing"},
        {"\"a.lora_up\"", "\"a.lora_uP\"", STH_CORRUPT_DATA, "'a.lora_up' (lora_up) is missing"},
        {"\"shape\":[256,2]", "\"shape\":[2,256]", STH_CORRUPT_DATA, "it must be BF16 [256, 256]"},
        {"\"a.qweight\":{\"dtype\":\"U8\"", "\"a.qweight\":{\"dtype\":\"I8\"", STH_CORRUPT_DATA, "must be U8"},
        {"\"a.qweight\"", "\"a.qweighT\"", STH_UNSUPPORTED, "not a slab"},
        {"\"plan_version\":1", "\"plan_version\":2", STH_UNSUPPORTED, "plan_version 2"},
        {"\"plan_version\":1", "\"plan_versioN\":1", STH_CORRUPT_DATA, "no plan_version"},
        {"\"a.weight\":", "\"b.weight\":", STH_CORRUPT_DATA, "does not list it"},
        {"\"layers\":{", "\"layers\":{\"b\":1,", STH_CORRUPT_DATA, "another number of layers"},
        {"\"rank\":2", "\"rank\":3", STH_CORRUPT_DATA, "another size, rank or format"},
        {"\"out\":3", "\"out\":4", STH_CORRUPT_DATA, "another size, rank or format"},
        {"squareq_w4_v1", "squareq_nvfp4_v1", STH_CORRUPT_DATA, "another size, rank or format"},
    };
    slab_check_edits(*state, STH_QUANT_V3_INT4, cases, sizeof cases / sizeof *cases);
}

static void nvfp4_tensors_that_do_not_fit_are_refused(void **state) {
    static const slab_edit_case cases[] = {
        {"\"a.nvs\":{\"dtype\":\"U8\"", "\"a.nvs\":{\"dtype\":\"I8\"", STH_CORRUPT_DATA, "not U8 tiles"},
        {"\"a.nvs\"", "\"a.nvS\"", STH_CORRUPT_DATA, "its scales (.nvs) are missing"},
        {"\"a.nvg\"", "\"a.nvG\"", STH_CORRUPT_DATA, "'a.nvg' (global_scale) is missing"},
        {"\"a.nvg\":{\"dtype\":\"F32\"", "\"a.nvg\":{\"dtype\":\"I32\"", STH_CORRUPT_DATA, "it must be F32 [1]"},
        {"\"shape\":[24,128]", "\"shape\":[8,384]", STH_CORRUPT_DATA, "not U8 tiles"},
        {"squareq_nvfp4_v1", "squareq_w4_v1", STH_CORRUPT_DATA, "another size, rank or format"},
    };
    slab_check_edits(*state, STH_QUANT_V3_NVFP4, cases, sizeof cases / sizeof *cases);
}

/* The tiles hold the same bytes by any shape. */
static void tiles_may_have_any_shape(void **state) {
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_V3_NVFP4);
    slab_edit(&f, "\"shape\":[128,16]", "\"shape\":[2048]");
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    sth_quant_close(slab);
}

static void every_allocation_and_read_may_fail(void **state) {
    for (int format = STH_QUANT_V3_INT4; format <= STH_QUANT_V3_NVFP4; format++) {
        slab_make(&f, (sth_quant_format)format);
        slab_check_faults(slab_write(&f, *state));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sizes_are_told_by_shapes, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_folder_may_have_an_index, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_folder_without_a_plan_is_read_unless_its_build_broke_off, temp_setup,
                                        temp_teardown),
        cmocka_unit_test_setup_teardown(int4_tensors_that_do_not_fit_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(nvfp4_tensors_that_do_not_fit_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(tiles_may_have_any_shape, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(every_allocation_and_read_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
