/* Indexes and folders: which files are opened, which tensor comes from where, and what an index may not
 * say. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stagehand/checkpoint.h"
#include "store/tempfiles.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define ONE(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}"
#define TWO(left, right)                                                     \
    "{\"" left "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}," \
    "\"" right "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}"

static void assert_says(const char *part) {
    const char *message = sth_last_error()->message;
    if (!strstr(message, part)) fail_msg("the message does not say '%s': %s", part, message);
}

static void refused(const char *path, sth_status status, const char *a, const char *b) {
    sth_checkpoint *c = NULL;
    sth_status got = sth_checkpoint_open(path, &c);
    if (got != status)
        fail_msg("%s: %s, expected %s: %s", path, sth_status_name(got), sth_status_name(status),
                 sth_last_error()->message);
    assert_says(a);
    assert_says(b);
}

/* Two shards; "moved" lies in both, and the index says the second. */
static const char *write_shards(const char *folder) {
    write_safetensors(temp_path(folder, "model-00001-of-00002.safetensors"), TWO("first", "moved"), 8);
    write_safetensors(temp_path(folder, "model-00002-of-00002.safetensors"), TWO("moved", "last"), 8);
    const char *index = temp_path(folder, "model.safetensors.index.json");
    write_text(index, "{\"metadata\":{\"total_size\":16},\"weight_map\":{"
                      "\"last\":\"model-00002-of-00002.safetensors\","
                      "\"moved\":\"model-00002-of-00002.safetensors\","
                      "\"first\":\"model-00001-of-00002.safetensors\"}}");
    return index;
}

static void check_shards(const char *path) {
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(path, &c));
    assert_int_equal(sth_checkpoint_file_count(c), 2);
    assert_int_equal(sth_checkpoint_tensor_count(c), 3);
    static const char *const order[] = {"first", "moved", "last"};
    for (uint64_t i = 0; i < 3; i++) assert_string_equal(sth_checkpoint_tensor(c, i)->name, order[i]);
    const sth_tensor_info *moved = sth_checkpoint_find(c, "moved");
    assert_int_equal(moved->file, 1);
    unsigned char got[4];
    assert_ok(sth_checkpoint_read(c, moved->file, moved->offset, 4, got));
    assert_int_equal(got[0], pattern_byte(0));
    sth_checkpoint_close(c);
}

static void the_index_decides(void **state) {
    check_shards(write_shards(*state));
    check_shards(*state);
}

static void the_diffusers_index_goes_first(void **state) {
    write_shards(*state);
    write_safetensors(temp_path(*state, "d.safetensors"), ONE("diffusion"), 4);
    write_text(temp_path(*state, "diffusion_pytorch_model.safetensors.index.json"),
               "{\"weight_map\":{\"diffusion\":\"d.safetensors\"}}");
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(*state, &c));
    assert_non_null(sth_checkpoint_find(c, "diffusion"));
    assert_int_equal(sth_checkpoint_tensor_count(c), 1);
    sth_checkpoint_close(c);
}

static void stray_shards_are_not_opened(void **state) {
    write_shards(*state);
    /* Each of these would fail if it were opened. */
    write_text(temp_path(*state, "model-00001-of-00003.safetensors"), "left over");
    write_text(temp_path(*state, "model-00001-of-00002.safetensors.tmp"), "half");
    write_text(temp_path(*state, "adapter_model.safetensors"), "adapter");
    int before = open_descriptors();
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(*state, &c));
    assert_int_equal(open_descriptors(), before + 2);
    sth_checkpoint_close(c);
    assert_int_equal(open_descriptors(), before);
    check_shards(*state);
}

static void a_folder_needs_one_answer(void **state) {
    refused(*state, STH_NOT_FOUND, *state, "no .safetensors file");
    write_safetensors(temp_path(*state, "only.safetensors"), ONE("a"), 4);
    write_text(temp_path(*state, ".only.safetensors"), "hidden");
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(*state, &c));
    assert_string_equal(sth_checkpoint_file_path(c, 0), temp_path(*state, "only.safetensors"));
    sth_checkpoint_close(c);
    write_safetensors(temp_path(*state, "second.safetensors"), ONE("b"), 4);
    refused(*state, STH_UNSUPPORTED, "only.safetensors", "second.safetensors");
}

static void a_missing_shard_is_named(void **state) {
    const char *index = write_shards(*state);
    assert_int_equal(unlink(temp_path(*state, "model-00002-of-00002.safetensors")), 0);
    refused(index, STH_NOT_FOUND, "model-00002-of-00002.safetensors", "open");
}

static void a_truncated_shard_is_named(void **state) {
    const char *index = write_shards(*state), *shard = temp_path(*state, "model-00002-of-00002.safetensors");
    cut_file(shard, file_bytes(shard) - 1);
    refused(index, STH_CORRUPT_DATA, "model-00002-of-00002.safetensors", "'last'");
}

static void a_tensor_missing_from_its_shard_is_named(void **state) {
    const char *index = write_shards(*state);
    write_safetensors(temp_path(*state, "model-00002-of-00002.safetensors"), ONE("moved"), 4);
    refused(index, STH_CORRUPT_DATA, "'last'", "model-00002-of-00002.safetensors");
}

static void bad_indexes_are_refused(void **state) {
    static const struct {
        const char *text;
        sth_status status;
        const char *says;
    } bad[] = {
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"}}", STH_CORRUPT_DATA, "duplicate"},
        {"{\"weight_map\":{}}", STH_CORRUPT_DATA, "weight_map"},
        {"{\"weight_map\":[]}", STH_CORRUPT_DATA, "weight_map"},
        {"{\"weight_map\":{\"a\":7}}", STH_CORRUPT_DATA, "'a'"},
        {"{\"metadata\":{}}", STH_UNSUPPORTED, "weight_map"},
        {"7", STH_CORRUPT_DATA, "JSON"},
        {"", STH_CORRUPT_DATA, "JSON"},
        {"{\"weight_map\":{\"a\":\"x.saf", STH_CORRUPT_DATA, "JSON"},
    };
    const char *index = temp_path(*state, "bad.safetensors.index.json");
    for (size_t i = 0; i < COUNT(bad); i++) {
        write_text(index, bad[i].text);
        refused(index, bad[i].status, index, bad[i].says);
    }
}

static void an_index_cannot_name_files_elsewhere(void **state) {
    const char *inner = temp_path(*state, "inner");
    assert_int_equal(mkdir(inner, 0700), 0);
    write_safetensors(temp_path(*state, "secret.safetensors"), ONE("a"), 4);
    write_safetensors(temp_path(*state, "inner/b.safetensors"), ONE("a"), 4);
    static const char *const outside[] = {
        "../secret.safetensors", "/etc/passwd",      "",   "./b.safetensors",
        "x/../b.safetensors",    "x//b.safetensors", "..", "inner/../../secret.sf",
        "b.safetensors/"};
    const char *index = temp_path(*state, "inner/x.index.json");
    for (size_t i = 0; i < COUNT(outside); i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"weight_map\":{\"a\":\"%s\"}}", outside[i]);
        write_text(index, text);
        refused(index, STH_CORRUPT_DATA, index, "not a plain name");
        snprintf(text, sizeof text, "[{\"layer_id\":0,\"path\":\"%s\",\"offset\":0,\"nbytes\":4}]",
                 outside[i]);
        write_text(index, text);
        refused(index, STH_CORRUPT_DATA, index, "not a plain name");
    }
}

static void shards_may_lie_in_a_subfolder(void **state) {
    assert_int_equal(mkdir(temp_path(*state, "sub"), 0700), 0);
    write_safetensors(temp_path(*state, "sub/b.safetensors"), ONE("a"), 4);
    const char *index = temp_path(*state, "x.index.json");
    write_text(index, "{\"weight_map\":{\"a\":\"sub/b.safetensors\"}}");
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(index, &c));
    sth_checkpoint_close(c);
}

/* ---- layer index ---- */

static const char *write_layers(const char *folder, const char *text) {
    unsigned char bytes[64];
    for (unsigned i = 0; i < sizeof bytes; i++) bytes[i] = pattern_byte(i);
    write_bytes(temp_path(folder, "layers.bin"), bytes, sizeof bytes);
    write_bytes(temp_path(folder, "more.bin"), bytes, 32);
    const char *index = temp_path(folder, "layers.json");
    write_text(index, text);
    return index;
}

static void reads_a_layer_index(void **state) {
    static const char entries[] =
        "[{\"layer_id\":7,\"path\":\"layers.bin\",\"offset\":8,\"nbytes\":16},"
        "{\"layer_id\":1,\"name\":\"q\",\"path\":\"more.bin\",\"offset\":0,\"nbytes\":12,\"dtype\":\"I8\","
        "\"shape\":[3,4],\"scale\":0.25},"
        "{\"layer_id\":2,\"name\":\"flat\",\"path\":\"layers.bin\",\"offset\":0,\"nbytes\":8,\"dtype\":"
        "\"F32\","
        "\"shape\":null}]";
    char wrapped[sizeof entries + 16];
    snprintf(wrapped, sizeof wrapped, "{\"layers\":%s}", entries);
    const char *texts[] = {entries, wrapped};
    for (size_t i = 0; i < 2; i++) {
        sth_checkpoint *c;
        assert_ok(sth_checkpoint_open(write_layers(*state, texts[i]), &c));
        assert_int_equal(sth_checkpoint_file_count(c), 2);
        static const char *const order[] = {"flat", "7", "q"};
        for (uint64_t t = 0; t < 3; t++) assert_string_equal(sth_checkpoint_tensor(c, t)->name, order[t]);
        const sth_tensor_info *raw = sth_checkpoint_find(c, "7"), *q = sth_checkpoint_find(c, "q");
        assert_int_equal(raw->dtype, STH_DTYPE_U8);
        assert_int_equal(raw->rank, 1);
        assert_int_equal(raw->shape[0], 16);
        assert_int_equal(q->dtype, STH_DTYPE_I8);
        assert_int_equal(q->shape[1], 4);
        assert_true(q->scale == 0.25 && raw->scale == 1.0);
        assert_int_equal(sth_checkpoint_find(c, "flat")->shape[0], 2);
        assert_int_equal(sth_checkpoint_hole_bytes(c, 0), 64 - 24);
        assert_int_equal(sth_checkpoint_hole_bytes(c, 1), 32 - 12);
        unsigned char got[16];
        assert_ok(sth_checkpoint_read(c, raw->file, raw->offset, raw->bytes, got));
        assert_int_equal(got[0], pattern_byte(8));
        sth_checkpoint_close(c);
    }
}

static void bad_layer_indexes_are_refused(void **state) {
#define ENTRY(fields) "[{\"layer_id\":0,\"path\":\"layers.bin\"" fields "}]"
    static const struct {
        const char *text;
        sth_status status;
        const char *says;
    } bad[] = {
        {ENTRY(",\"offset\":60,\"nbytes\":8"), STH_CORRUPT_DATA, "layers.bin: tensor '0' is truncated"},
        {ENTRY(",\"offset\":9223372036854775807,\"nbytes\":9223372036854775807"), STH_CORRUPT_DATA,
         "truncated"},
        {ENTRY(",\"offset\":-1,\"nbytes\":8"), STH_CORRUPT_DATA, "offset"},
        {ENTRY(",\"offset\":0,\"nbytes\":8.0"), STH_CORRUPT_DATA, "nbytes"},
        {ENTRY(",\"offset\":0"), STH_CORRUPT_DATA, "nbytes"},
        {ENTRY(",\"nbytes\":0"), STH_CORRUPT_DATA, "offset"},
        {ENTRY(",\"offset\":0,\"nbytes\":7,\"dtype\":\"F32\""), STH_CORRUPT_DATA, "7 bytes"},
        {ENTRY(",\"offset\":0,\"nbytes\":8,\"dtype\":\"F32\",\"shape\":[3]"), STH_CORRUPT_DATA, "12 bytes"},
        {ENTRY(",\"offset\":0,\"nbytes\":7,\"dtype\":\"F4\",\"shape\":[13]"), STH_CORRUPT_DATA, "a part of"},
        {"[]", STH_CORRUPT_DATA, "no tensor"},
        {"{\"layers\":[]}", STH_CORRUPT_DATA, "no tensor"},
        {"{\"entries\":[]}", STH_CORRUPT_DATA, "no tensor"},
        {ENTRY(",\"offset\":0,\"nbytes\":8,\"scale\":0"), STH_CORRUPT_DATA, "scale"},
        {ENTRY(",\"offset\":0,\"nbytes\":8,\"scale\":\"1\""), STH_CORRUPT_DATA, "scale"},
        {"[{\"path\":\"layers.bin\",\"offset\":0,\"nbytes\":8}]", STH_CORRUPT_DATA, "name"},
        {"[{\"layer_id\":0,\"offset\":0,\"nbytes\":8}]", STH_CORRUPT_DATA, "path"},
        {"[7]", STH_CORRUPT_DATA, "entry 0"},
        {"[{\"layer_id\":0,\"path\":\"layers.bin\",\"offset\":0,\"nbytes\":8},"
         "{\"layer_id\":1,\"path\":\"layers.bin\",\"offset\":4,\"nbytes\":8}]",
         STH_CORRUPT_DATA, "overlap"},
        {"[{\"layer_id\":0,\"path\":\"layers.bin\",\"offset\":0,\"nbytes\":8},"
         "{\"layer_id\":0,\"path\":\"more.bin\",\"offset\":0,\"nbytes\":8}]",
         STH_CORRUPT_DATA, "'0' is described twice"},
        {"[{\"layer_id\":0,\"path\":\"absent.bin\",\"offset\":0,\"nbytes\":8}]", STH_NOT_FOUND, "absent.bin"},
    };
    for (size_t i = 0; i < COUNT(bad); i++) {
        const char *index = write_layers(*state, bad[i].text);
        refused(index, bad[i].status, *state, bad[i].says);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_index_decides, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(the_diffusers_index_goes_first, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(stray_shards_are_not_opened, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_folder_needs_one_answer, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_missing_shard_is_named, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_truncated_shard_is_named, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_tensor_missing_from_its_shard_is_named, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(bad_indexes_are_refused, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(an_index_cannot_name_files_elsewhere, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(shards_may_lie_in_a_subfolder, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(reads_a_layer_index, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(bad_layer_indexes_are_refused, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
