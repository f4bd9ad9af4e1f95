/* v2 and SVDQuant: one safetensors file and a manifest beside it, every claim of which is
 * checked. */
#include "support/check.h"

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
    assert_int_equal(sth_quant_plain_count(slab), 1);
    assert_string_equal(sth_quant_plain(slab, 0)->name, "norm");
    assert_null(sth_quant_plain(slab, 1));
    return slab;
}

static void check_part(const sth_quant_layer *l, sth_quant_part part, const char *name) {
    assert_non_null(l->parts[part]);
    assert_string_equal(l->parts[part]->name, name);
}

static void v2_is_opened_by_either_name(void **state) {
    sth_quant *slab = open_new(*state, STH_QUANT_V2), *other = NULL;
    const sth_quant_layer *a = sth_quant_find(slab, "a");
    assert_int_equal(sth_quant_layer_count(slab), 2);
    assert_true(a->out == 3 && a->in == 10 && a->padded_in == 64 && a->encoding == STH_ENCODING_INT8_ROW);
    check_part(a, STH_QUANT_PART_CODES, "a.qweight");
    check_part(a, STH_QUANT_PART_SCALES, "a.scale");
    check_part(a, STH_QUANT_PART_ZERO_POINTS, "a.zero_point");
    check_part(a, STH_QUANT_PART_BIAS, "a.bias");
    assert_null(sth_quant_find(slab, "b")->parts[STH_QUANT_PART_BIAS]);
    assert_ok(sth_quant_open(temp_path(*state, "m.manifest.json"), &other));
    assert_int_equal(sth_quant_layer_count(other), 2);
    sth_quant_close(other);
    sth_quant_close(slab);
}

static void svdquant_layers_have_groups_and_factors(void **state) {
    sth_quant *slab = open_new(*state, STH_QUANT_SVDQUANT);
    const sth_quant_layer *a = sth_quant_find(slab, "a");
    assert_true(a->out == 24 && a->in == 32 && a->group == 16 && a->rank == 5 && !a->hadamard);
    assert_int_equal(a->encoding, STH_ENCODING_INT4_GROUP);
    check_part(a, STH_QUANT_PART_SCALES, "a.wscales");
    check_part(a, STH_QUANT_PART_LORA_DOWN, "a.lora_down");
    check_part(a, STH_QUANT_PART_LORA_UP, "a.lora_up");
    check_part(a, STH_QUANT_PART_SMOOTH, "a.smooth");
    check_part(a, STH_QUANT_PART_BIAS, "a.bias");
    sth_quant_close(slab);
}

static void hybrid_layers_are_of_two_kinds(void **state) {
    sth_quant *slab = open_new(*state, STH_QUANT_SVDQUANT_HYBRID);
    const sth_quant_layer *a = sth_quant_find(slab, "a"), *b = sth_quant_find(slab, "b");
    assert_int_equal(a->encoding, STH_ENCODING_INT4_GROUP);
    assert_int_equal(b->encoding, STH_ENCODING_INT4_ROW_HADAMARD);
    assert_true(b->group == 16 && b->hadamard == 16 && b->rank == 1);
    check_part(b, STH_QUANT_PART_SCALES, "b.wscale");
    assert_null(b->parts[STH_QUANT_PART_SMOOTH]);
    sth_quant_close(slab);
}

/* The manifest is text under a key of the header's metadata, and no file stands beside. */
static void svdquants_manifest_may_be_in_the_header_alone(void **state) {
    char text[SLAB_TEXT] = "{\"__metadata__\":{\"svdquant_manifest\":\"", *to = text + strlen(text);
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_SVDQUANT);
    for (const char *p = f.beside.bytes; *p; p++) {
        if (*p == '"') *to++ = '\\';
        *to++ = *p;
    }
    strcpy(to, "\"},");
    slab_edit(&f, "{", text);
    f.beside.count = 0;
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    assert_int_equal(sth_quant_get_format(slab), STH_QUANT_SVDQUANT);
    assert_int_equal(sth_quant_layer_count(slab), 1);
    sth_quant_close(slab);
}

static void a_file_without_a_manifest_is_no_slab(void **state) {
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_V2);
    f.beside.count = 0;
    const char *path = slab_write(&f, *state);
    assert_status(sth_quant_open(path, &slab), STH_UNSUPPORTED);
    assert_ok(sth_quant_open_if_slab(path, &slab));
    assert_null(slab);
    assert_status(sth_quant_open(temp_path(*state, "absent.safetensors"), &slab), STH_NOT_FOUND);
    assert_ok(sth_quant_open_if_slab(temp_path(*state, "absent.safetensors"), &slab));
    assert_null(slab);
    write_text(temp_path(*state, "m.manifest.json"), "{\"method\":\"other\"}");
    assert_status(sth_quant_open_if_slab(path, &slab), STH_UNSUPPORTED); /* a slab, but of an unknown kind */
}

static void claims_of_v2_that_do_not_add_up_are_refused(void **state) {
    static const slab_edit_case cases[] = {
        {"\"quant_version\":", "\"quant_versioN\":", STH_UNSUPPORTED, "no manifest that is known"},
        {"\"kernel_abi_version\":1", "\"kernel_abi_version\":2", STH_UNSUPPORTED, "newer than 1"},
        {"\"kernel_abi_version\":1", "\"kernel_abi_version\":-1", STH_CORRUPT_DATA, "missing or no number"},
        {"\"model_signature\":\"s\"", "\"model_signature\":1", STH_CORRUPT_DATA, "model_signature"},
        {"\"layers\":[", "\"layers\":[7,", STH_CORRUPT_DATA, "layer 0 has no canonical_name"},
        {"\"layer_count\":2", "\"layer_count\":3", STH_CORRUPT_DATA, "layer_count is not"},
        {"_bytes\":320", "_bytes\":321", STH_CORRUPT_DATA, "total_qweight_bytes is not"},
        {"_name\":\"b\"", "_name\":\"a\"", STH_CORRUPT_DATA, "is described twice"},
        {"\"orig_shape\":[3,10]", "\"orig_shape\":[3,0]", STH_CORRUPT_DATA, "or no sizes"},
        {"\"orig_shape\":[3,10]", "\"orig_shape\":[3,65]", STH_CORRUPT_DATA, "packed_shape is not orig_shape padded"},
        {"\"orig_shape\":[3,10]", "\"orig_shape\":[3]", STH_CORRUPT_DATA, "or no sizes"},
        {"\"packed_shape\":[3,64]", "\"packed_shape\":[3,128]", STH_CORRUPT_DATA, "it must be I8 [3, 128]"},
        {"\"packed_shape\":[3,64]", "\"packed_shape\":[4,64]", STH_CORRUPT_DATA, "packed_shape is not"},
        {"\"pad_k\":64", "\"pad_k\":48", STH_CORRUPT_DATA, "multiple of pad_k"},
        {"\"quant_bits\":8", "\"quant_bits\":4", STH_UNSUPPORTED, "only 8 bits"},
        {"\"quant_axis\":0", "\"quant_axis\":\"0\"", STH_CORRUPT_DATA, "quant_axis is missing"},
        {"per_row_symmetric", "per_tensor", STH_UNSUPPORTED, "per_row_symmetric"},
        {"a.scale\",\"zero", "a.scalE\",\"zero", STH_CORRUPT_DATA, "'a.scalE' (scales) is missing"},
        {"\"scale_key\":\"b.scale\"", "\"scale_key\":9", STH_CORRUPT_DATA, "scale_key is missing or no text"},
        {"\"scale_key\":\"b.scale\"", "\"scale_key\":\"b.zero_point\"", STH_CORRUPT_DATA, "is used twice"},
        {"\"bias_key\":null", "\"bias_key\":\"norm\"", STH_CORRUPT_DATA, "as the bias of its layer it must be F32 [2]"},
        {"\"F32\",\"shape\":[2]", "\"F32\",\"shape\":[2,1]", STH_CORRUPT_DATA, "is F32 [2, 1]"},
        {"\"a.scale\":{\"dtype\":\"F32\"", "\"a.scale\":{\"dtype\":\"I32\"", STH_CORRUPT_DATA, "is I32 [3]"},
    };
    slab_check_edits(*state, STH_QUANT_V2, cases, sizeof cases / sizeof *cases);
}

static void claims_of_svdquant_that_do_not_add_up_are_refused(void **state) {
    static const slab_edit_case cases[] = {
        {"\"group\":16", "\"group\":0", STH_CORRUPT_DATA, "its sizes make no sense"},
        {"\"group\":16", "\"group\":12", STH_CORRUPT_DATA, "multiple of group"},
        {"\"group\":16", "\"group\":32", STH_CORRUPT_DATA, "it must be BF16 [1, 24]"},
        {"\"group\":16", "\"grouP\":16", STH_CORRUPT_DATA, "the group is missing"},
        {"\"hadamard\":\"sylvester\"", "\"hadamard\":\"paley\"", STH_UNSUPPORTED, "Sylvester"},
        {"\"kind\":\"w4a4\"", "\"kind\":\"w8a8\"", STH_CORRUPT_DATA, "neither w4a4 nor w4a16"},
        {"\"out\":2,\"in\":16,\"rank\":1", "\"out\":2,\"in\":24,\"rank\":1", STH_CORRUPT_DATA, "power of two"},
        {"\"out\":2,\"in\":16,\"rank\":1", "\"out\":2,\"in\":16,\"rank\":0", STH_CORRUPT_DATA, "make no sense"},
        {"\"out\":2,\"in\":16,\"rank\":1", "\"out\":2,\"in\":16,\"rank\":2", STH_CORRUPT_DATA, "BF16 [16, 2]"},
        {"\"in\":32,", "\"in\":\"32\",", STH_CORRUPT_DATA, "in, out, rank or group is missing"},
        {"\"passthrough\":[\"norm\"]", "\"passthrough\":[\"form\"]", STH_CORRUPT_DATA, "'form' is not in"},
        {"\"passthrough\":[\"norm\"]", "\"passthrough\":7", STH_CORRUPT_DATA, "passthrough is missing"},
        {"\"b.wscale\":", "\"b.wscales\":", STH_CORRUPT_DATA, "'b.wscale' (scales) is missing"},
        {"\"a.smooth\":", "\"a.smootH\":", STH_CORRUPT_DATA, "'a.smooth' (smooth) is missing"},
    };
    slab_check_edits(*state, STH_QUANT_SVDQUANT_HYBRID, cases, sizeof cases / sizeof *cases);
}

static void only_four_bits_of_svdquant_are_known(void **state) {
    static const slab_edit_case cases[] = {
        {"\"quant_bits\":4", "\"quant_bits\":8", STH_UNSUPPORTED, "only quant_bits of 4"},
    };
    slab_check_edits(*state, STH_QUANT_SVDQUANT, cases, 1);
}

static void every_allocation_and_read_may_fail(void **state) {
    for (int format = STH_QUANT_V2; format <= STH_QUANT_SVDQUANT_HYBRID; format++) {
        slab_make(&f, (sth_quant_format)format);
        slab_check_faults(slab_write(&f, *state));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(v2_is_opened_by_either_name, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(svdquant_layers_have_groups_and_factors, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(hybrid_layers_are_of_two_kinds, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(svdquants_manifest_may_be_in_the_header_alone, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_file_without_a_manifest_is_no_slab, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(claims_of_v2_that_do_not_add_up_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(claims_of_svdquant_that_do_not_add_up_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(only_four_bits_of_svdquant_are_known, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(every_allocation_and_read_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
