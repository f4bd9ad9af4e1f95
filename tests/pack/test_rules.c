/* Rules of packing: which tensors become layers, what is refused and leaves nothing, what an
 * interrupted call leaves, and what verifying finds. */
#define _GNU_SOURCE
#include "support/check.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"
#include "pack/models.h"
#include "stagehand/quant.h"
#include "store/tempfiles.h"

typedef struct scene {
    char in[512], out[512], partial[520];
} scene;

static scene make_scene(const char *folder) {
    scene s;
    model_reset();
    snprintf(s.in, sizeof s.in, "%s", model_write(folder));
    snprintf(s.out, sizeof s.out, "%s/r.safetensors", folder);
    snprintf(s.partial, sizeof s.partial, "%s.partial", s.out);
    return s;
}

static void expect_layers(const char *path, uint64_t layers, uint64_t plain) {
    sth_quant *slab = NULL;
    assert_ok(sth_quant_open(path, &slab));
    assert_int_equal(sth_quant_layer_count(slab), layers);
    assert_int_equal(sth_quant_plain_count(slab), plain);
    sth_quant_close(slab);
}

/* ---- which ---- */

static void skipped_tensors_stay_as_they_are(void **state) {
    scene s = make_scene(*state);
    sth_pack_options options = model_options(STH_PACK_V2);
    options.skip = "^a\\.";
    assert_ok(sth_pack(s.in, s.out, &options));
    expect_layers(s.out, 1, 3); /* a.weight, a.bias, c */
    options.skip = "(";
    assert_status(sth_pack(s.in, temp_path(*state, "s.safetensors"), &options), STH_INVALID_ARGUMENT);
    assert_non_null(strstr(sth_last_error()->message, "must be a regular expression"));
}

static void embeddings_are_read_by_rows_and_stay(void **state) {
    scene s = make_scene(*state);
    write_safetensors(s.in, "{\"tok_embed.weight\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 16);
    assert_ok(model_pack(s.in, s.out, STH_PACK_V2));
    expect_layers(s.out, 0, 1);
}

static void small_weights_are_nothing_for_v3(void **state) {
    scene s = make_scene(*state);
    assert_status(model_pack(s.in, temp_path(*state, "v3"), STH_PACK_V3_INT4), STH_UNSUPPORTED);
    assert_non_null(strstr(sth_last_error()->message, "nothing to quantise"));
    assert_int_equal(model_entries(*state), 1);
}

/* ---- refusals ---- */

static void values_that_are_not_finite_are_refused_by_byte(void **state) {
    scene s = make_scene(*state);
    uint32_t infinity = 0x7f800000;
    char byte[32];
    memcpy(model_bytes("a.weight") + 4 * 21, &infinity, sizeof infinity);
    model_write(*state);
    assert_status(model_pack(s.in, s.out, STH_PACK_V2), STH_UNSUPPORTED);
    snprintf(byte, sizeof byte, "byte %llu:", (unsigned long long)(file_bytes(s.in) - MODEL_DATA + 4 * 21));
    if (!strstr(sth_last_error()->message, byte)) fail_msg("%s (%s)", sth_last_error()->message, byte);
    assert_int_equal(model_entries(*state), 1); /* the model alone */
    assert_ok(model_pack(s.in, temp_path(*state, "r.json"), STH_PACK_LAYER_INDEX)); /* which copies */
}

static void nothing_that_exists_is_overwritten(void **state) {
    scene s = make_scene(*state);
    write_text(s.out, "mine");
    assert_status(model_pack(s.in, s.out, STH_PACK_V2), STH_INVALID_ARGUMENT);
    assert_int_equal(unlink(s.out), 0);
    write_text(temp_path(*state, "r.manifest.json"), "mine");
    assert_status(model_pack(s.in, s.out, STH_PACK_V2), STH_INVALID_ARGUMENT);
    assert_int_equal(file_bytes(temp_path(*state, "r.manifest.json")), 4);
    assert_int_equal(model_entries(*state), 2);
}

static void names_and_options_that_fit_no_format_are_refused(void **state) {
    scene s = make_scene(*state);
    sth_pack_options options = model_options(STH_PACK_V2);
    assert_status(model_pack(s.in, temp_path(*state, "r.json"), STH_PACK_V2), STH_INVALID_ARGUMENT);
    assert_status(model_pack(s.in, temp_path(*state, "r.bin"), STH_PACK_LAYER_INDEX), STH_INVALID_ARGUMENT);
    assert_status(model_pack(s.in, temp_path(*state, ".safetensors"), STH_PACK_V2), STH_INVALID_ARGUMENT);
    assert_status(model_pack(temp_path(*state, "absent"), s.out, STH_PACK_V2), STH_NOT_FOUND);
    options.threads = 257;
    assert_status(sth_pack(s.in, s.out, &options), STH_INVALID_ARGUMENT);
    options = model_options(STH_PACK_FORMAT_COUNT);
    assert_status(sth_pack(s.in, s.out, &options), STH_INVALID_ARGUMENT);
    options = model_options(STH_PACK_V2);
    options.dtype = STH_DTYPE_I8;
    assert_status(sth_unpack(s.in, s.out, &options), STH_INVALID_ARGUMENT);
    options = model_options(STH_PACK_V2);
    options.size--;
    assert_status(sth_pack(s.in, s.out, &options), STH_INVALID_ARGUMENT);
    assert_int_equal(model_entries(*state), 1);
}

static void a_partial_folder_that_is_a_link_or_holds_others_is_left_alone(void **state) {
    scene s = make_scene(*state);
    const char *elsewhere = temp_path(*state, "elsewhere");
    assert_int_equal(mkdir(elsewhere, 0700), 0);
    assert_int_equal(symlink(elsewhere, s.partial), 0);
    assert_true(model_pack(s.in, s.out, STH_PACK_V2) != STH_OK);
    assert_int_equal(model_entries(elsewhere), 0);
    assert_int_equal(unlink(s.partial), 0);
    assert_int_equal(mkdir(s.partial, 0700), 0);
    write_text(temp_path(s.partial, "thesis"), "mine");
    assert_status(model_pack(s.in, s.out, STH_PACK_V2), STH_INVALID_ARGUMENT);
    assert_int_equal(file_bytes(temp_path(s.partial, "thesis")), 4);
    assert_false(model_is_there(s.out));
}

/* ---- interruptions ---- */

typedef struct stopper {
    int calls, last; /* the call at which the function says stop */
    uint64_t left;
} stopper;

static bool stop_at(void *context, const char *tensor, uint64_t done, uint64_t total) {
    stopper *s = context;
    assert_non_null(tensor);
    assert_true(done <= total);
    s->left = total - done;
    return ++s->calls < s->last;
}

static sth_status pack_until(const scene *s, stopper *stop) {
    sth_pack_options options = model_options(STH_PACK_V2);
    options.progress = stop_at;
    options.context = stop;
    return sth_pack(s->in, s->out, &options);
}

static void a_stopped_call_goes_on_where_it_was(void **state) {
    scene s = make_scene(*state);
    char whole[512];
    snprintf(whole, sizeof whole, "%s/whole.safetensors", (char *)*state);
    assert_ok(model_pack(s.in, whole, STH_PACK_V2));
    stopper all = {.last = 100};
    assert_ok(pack_until(&s, &all));
    assert_true(all.calls >= 3);
    for (int at = 1; at < all.calls; at++) {
        stopper first = {.last = at}, second = {.last = 100};
        unlink(s.out);
        unlink(temp_path(*state, "r.manifest.json"));
        assert_status(pack_until(&s, &first), STH_SHUT_DOWN);
        assert_false(model_is_there(s.out));
        assert_int_equal(model_is_there(s.partial), at > 1); /* before the first item nothing is worth keeping */
        assert_ok(pack_until(&s, &second));
        assert_int_equal(second.calls, all.calls - (at - 1));
        assert_int_equal(second.left, 0);
        assert_true(model_same(s.out, whole));
        assert_false(model_is_there(s.partial));
    }
}

/* What a state file says is believed where it is this work's own; else all is made anew. */
static void a_state_that_makes_no_sense_is_as_good_as_none(void **state) {
    static const char *const states[] = {"", "{", "[]", "{\"identity\":7}", "{\"files\":[\"../model.safetensors\"]}",
                                         "{\"identity\":\"x\",\"items\":18446744073709551615,\"notes\":{}}"};
    scene s = make_scene(*state);
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        stopper first = {.last = 2};
        assert_status(pack_until(&s, &first), STH_SHUT_DOWN);
        write_text(temp_path(s.partial, "state.json"), states[i]);
        assert_ok(model_pack(s.in, s.out, STH_PACK_V2));
        expect_layers(s.out, 2, 1);
        assert_true(model_is_there(s.in));
        unlink(s.out);
        unlink(temp_path(*state, "r.manifest.json"));
    }
}

/* A state of this very work that speaks of more items than there are. */
static void a_state_that_says_too_much_is_as_good_as_none(void **state) {
    scene s = make_scene(*state);
    char text[4096] = "";
    stopper first = {.last = 2};
    assert_status(pack_until(&s, &first), STH_SHUT_DOWN);
    FILE *f = fopen(temp_path(s.partial, "state.json"), "rb");
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    char *items = strstr(text, "\"items\":1");
    assert_non_null(items);
    items[8] = '9';
    write_text(temp_path(s.partial, "state.json"), text);
    assert_ok(model_pack(s.in, s.out, STH_PACK_V2));
    expect_layers(s.out, 2, 1);
}

static void a_changed_source_is_packed_anew(void **state) {
    scene s = make_scene(*state);
    sth_verify_result found;
    stopper first = {.last = 3};
    assert_status(pack_until(&s, &first), STH_SHUT_DOWN);
    memset(model_bytes("a.weight"), 0x41, 256);
    model_write(*state);
    assert_ok(model_pack(s.in, s.out, STH_PACK_V2));
    assert_ok(sth_verify(s.out, s.in, NULL, NULL, &found));
    assert_int_equal(found.checksums_wrong + found.stored_differ + found.missing, 0);
    assert_true(found.worst_rel_l2 < 0.01);
}

/* ---- verifying ---- */

static void flip(const char *path, uint64_t at) {
    unsigned char byte;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static void verifying_finds_a_flipped_bit(void **state) {
    scene s = make_scene(*state);
    sth_verify_result found;
    assert_ok(model_pack(s.in, s.out, STH_PACK_V2));
    assert_ok(sth_verify(s.out, s.in, NULL, NULL, &found));
    assert_int_equal(found.tensors, 4); /* two layers, a bias, c */
    assert_int_equal(found.checksums_wrong + found.checksums_missing, 0);
    flip(s.out, file_bytes(s.out) - 1);
    assert_ok(sth_verify(s.out, s.in, NULL, NULL, &found));
    assert_int_equal(found.checksums_wrong, 1);
    assert_ok(model_pack(s.in, temp_path(*state, "r.json"), STH_PACK_LAYER_INDEX));
    flip(temp_path(*state, "r.bin"), 0);
    assert_ok(sth_verify(temp_path(*state, "r.json"), s.in, NULL, NULL, &found));
    assert_int_equal(found.checksums_wrong, 1);
    assert_int_equal(found.stored_differ, 1);
}

static void verifying_finds_what_one_side_lacks(void **state) {
    scene s = make_scene(*state);
    sth_verify_result found;
    const char *other = temp_path(*state, "other.safetensors");
    write_safetensors(other, "{\"c\":{\"dtype\":\"U8\",\"shape\":[40],\"data_offsets\":[0,40]},"
                             "\"d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[40,41]}}",
                      41);
    assert_ok(model_pack(s.in, s.out, STH_PACK_V2));
    assert_ok(sth_verify(s.out, other, NULL, NULL, &found));
    assert_int_equal(found.missing, 4); /* layers a and b, a's bias; d */
    assert_int_equal(found.stored_differ, 1); /* c has other bytes */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(skipped_tensors_stay_as_they_are, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(embeddings_are_read_by_rows_and_stay, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(small_weights_are_nothing_for_v3, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(values_that_are_not_finite_are_refused_by_byte, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(nothing_that_exists_is_overwritten, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(names_and_options_that_fit_no_format_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_partial_folder_that_is_a_link_or_holds_others_is_left_alone, temp_setup,
                                        temp_teardown),
        cmocka_unit_test_setup_teardown(a_stopped_call_goes_on_where_it_was, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_state_that_makes_no_sense_is_as_good_as_none, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_state_that_says_too_much_is_as_good_as_none, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_changed_source_is_packed_anew, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(verifying_finds_a_flipped_bit, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(verifying_finds_what_one_side_lacks, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
