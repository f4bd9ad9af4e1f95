/* v1: a zip of a pickle and raw members. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdio.h>
#include <string.h>

#include "store/slabs.h"
#include "store/tempfiles.h"

static slab_files f;

static sth_quant *open_new(const char *folder) {
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_V1);
    assert_ok(sth_quant_open(slab_write(&f, folder), &slab));
    return slab;
}

static void layers_are_those_of_the_manifest(void **state) {
    sth_quant *slab = open_new(*state);
    assert_int_equal(sth_quant_get_format(slab), STH_QUANT_V1);
    assert_int_equal(sth_quant_layer_count(slab), 2);
    const sth_quant_layer *a = sth_quant_find(slab, "a"), *b = sth_quant_find(slab, "b");
    assert_ptr_equal(sth_quant_get_layer(slab, 0), a);
    assert_ptr_equal(sth_quant_get_layer(slab, 1), b);
    assert_null(sth_quant_get_layer(slab, 2));
    assert_null(sth_quant_find(slab, "c"));
    assert_int_equal(a->encoding, STH_ENCODING_INT8_ROW);
    assert_true(a->out == 3 && a->in == 10 && a->padded_in == 64 && a->group == 64 && !a->rank && !a->hadamard);
    assert_true(b->out == 2 && b->in == 64 && b->padded_in == 64);
    assert_non_null(a->parts[STH_QUANT_PART_BIAS]);
    assert_null(b->parts[STH_QUANT_PART_BIAS]);
    assert_int_equal(sth_quant_plain_count(slab), 0);
    sth_quant_close(slab);
}

static void parts_are_the_bytes_of_their_members(void **state) {
    sth_quant *slab = open_new(*state);
    sth_checkpoint *c = sth_quant_checkpoint(slab);
    unsigned char got[3 * 64];
    for (size_t i = 0; i < f.count; i++) {
        const slab_part *p = &f.parts[i];
        const sth_tensor_info *t = sth_checkpoint_find(c, p->name);
        assert_non_null(t);
        assert_int_equal(t->bytes, p->bytes);
        assert_ok(sth_checkpoint_read(c, t->file, t->offset, t->bytes, got));
        assert_memory_equal(got, f.data + p->at, p->bytes);
    }
    sth_quant_close(slab);
}

static void claims_that_do_not_add_up_are_refused(void **state) {
    static const slab_edit_case cases[] = {
        {"\x80\x02", "\x80\x04", STH_CORRUPT_DATA, "only protocol 2"},
        {"bp8", "bp9", STH_UNSUPPORTED, "quant_version 'bp9'"},
        {"manifest", "manifeSt", STH_CORRUPT_DATA, "not a slab"},
        {"CharStorage", "ByteStorage", STH_CORRUPT_DATA, "as the codes of its layer it must be I8 [3, 64]"},
        {"CharStorage", "LongStorage", STH_CORRUPT_DATA, "the pickle says 192 elements of I64"},
        {"CharStorage", "CharStorag_", STH_CORRUPT_DATA, "'torch.CharStorag_', which is no part of this format"},
        {"_rebuild_tensor_v2", "_rebuild_tensor_v3", STH_CORRUPT_DATA, "is not executed"},
        {"cpuM\300", "cpuM\301", STH_CORRUPT_DATA, "has 192 bytes; the pickle says 193 elements"},
        {"cpuM\300", "cpuM\277", STH_CORRUPT_DATA, "has 192 bytes; the pickle says 191 elements"},
        {"cpuM\300", "cpuJ\300", STH_CORRUPT_DATA, "pickle:"},
        {"outM\3", "outM\4", STH_CORRUPT_DATA, "it must be I8 [4, 64]"},
        {"inpM\12", "inpM\101", STH_CORRUPT_DATA, "its sizes in the manifest make no sense"},
        {"has_bias\x88", "has_bias\x89", STH_CORRUPT_DATA, "the manifest disagrees about its bias"},
        {"has_bias\x88", "has_biaS\x88", STH_CORRUPT_DATA, "the manifest disagrees about its bias"},
        {"zero_point", "zerO_point", STH_CORRUPT_DATA, "qweight, scale or zero_point is missing"},
        {"b}(", "a}(", STH_CORRUPT_DATA, "it is there twice"},
        {"b}(", "c}(", STH_CORRUPT_DATA, "in the manifest but not among the layers"},
        {"\x86M@", "\x86M?", STH_CORRUPT_DATA, "not stored row by row"},
        {"RtR", "Rt", STH_CORRUPT_DATA, "pickle:"},
        {"uu.", "uu", STH_CORRUPT_DATA, "its end is missing"},
        {"uu.", "uu..", STH_CORRUPT_DATA, "bytes follow its end"},
    };
    slab_check_edits(*state, STH_QUANT_V1, cases, sizeof cases / sizeof *cases);
}

/* Writes a zip of `members` and expects it to be refused. */
static void expect_refusal(const char *folder, const zip_file_member *members, size_t count, const char *says) {
    unsigned char file[1024];
    sth_quant *slab = NULL;
    const char *path = temp_path(folder, "z.fpk");
    write_bytes(path, file, zip_make(members, count, file, sizeof file));
    assert_status(sth_quant_open(path, &slab), STH_CORRUPT_DATA);
    if (!strstr(sth_last_error()->message, says)) fail_msg("%s, not %s", sth_last_error()->message, says);
}

static void zips_of_something_else_are_refused(void **state) {
    const zip_file_member none[] = {{"m/readme", "x", 1}}, empty[] = {{"m/data.pkl", "\x80\x02}.", 4}},
                          two[] = {{"m/data.pkl", "\x80\x02}.", 4}, {"n/data.pkl", "", 0}};
    expect_refusal(*state, none, 1, "it has no member data.pkl");
    expect_refusal(*state, two, 2, "two members named data.pkl");
    expect_refusal(*state, empty, 1, "not a slab");
}

static void a_byte_order_other_than_little_is_refused(void **state) {
    unsigned char file[1024];
    sth_quant *slab = NULL;
    const char *path = temp_path(*state, "z.fpk");
    const zip_file_member big[] = {{"m/data.pkl", "\x80\x02}.", 4}, {"m/byteorder", "big", 3}};
    write_bytes(path, file, zip_make(big, 2, file, sizeof file));
    assert_status(sth_quant_open(path, &slab), STH_UNSUPPORTED);
    const zip_file_member little[] = {{"m/data.pkl", "\x80\x02}.", 4}, {"m/byteorder", "little", 6}};
    write_bytes(path, file, zip_make(little, 2, file, sizeof file));
    assert_status(sth_quant_open(path, &slab), STH_CORRUPT_DATA); /* on to the pickle */
}

/* Each byte but the data's own, flipped: opening fails, or gives what it gave before; it never
 * gets further. */
static void no_flipped_byte_is_believed_blindly(void **state) {
    static unsigned char file[4 * SLAB_DATA];
    slab_make(&f, STH_QUANT_V1);
    const char *path = slab_write(&f, *state);
    size_t size = (size_t)file_bytes(path), refused = 0;
    FILE *in = fopen(path, "rb");
    assert_int_equal(fread(file, 1, size, in), size);
    fclose(in);
    for (size_t i = 0; i < size; i += few_under_tsan(101, 29)) {
        sth_quant *slab = NULL;
        file[i] ^= 0x11;
        write_bytes(path, file, size);
        file[i] ^= 0x11;
        sth_status status = sth_quant_open(path, &slab);
        refused += status != STH_OK;
        assert_true((status == STH_OK) == (slab != NULL));
        assert_true(status == STH_OK || status == STH_CORRUPT_DATA || status == STH_UNSUPPORTED);
        for (uint64_t l = 0; slab && l < sth_quant_layer_count(slab); l++) {
            float out[3 * 64];
            const sth_quant_layer *layer = sth_quant_get_layer(slab, l);
            assert_true(layer->out <= 3 && layer->in <= 64);
            (void)sth_quant_decode(slab, layer, STH_DTYPE_F32, out, 1);
        }
        sth_quant_close(slab);
    }
    assert_true(refused > size / 200);
}

static void every_allocation_and_read_may_fail(void **state) {
    slab_make(&f, STH_QUANT_V1);
    slab_check_faults(slab_write(&f, *state));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(layers_are_those_of_the_manifest, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(parts_are_the_bytes_of_their_members, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(claims_that_do_not_add_up_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(zips_of_something_else_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_byte_order_other_than_little_is_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(no_flipped_byte_is_believed_blindly, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(every_allocation_and_read_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
