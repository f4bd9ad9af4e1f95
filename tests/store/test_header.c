/* The reader of usual headers beside jansson: where it takes a text, jansson takes it too and finds the same in it. */
#include "store/header.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "store/json.h"
#include "support/check.h"

#define ENTRY(name) "\"" name "\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]}"

/* Number of tensors; -1: odd. */
static int count(const char *text, size_t bytes) {
    char *room = malloc(bytes + 1);
    sthi_header header;
    sth_tensor_info t;
    int n = 0;
    assert_non_null(room);
    sthi_header_begin(&header, text, bytes, room);
    while (sthi_header_next(&header, &t)) n++;
    free(room);
    return header.odd ? -1 : n;
}

static void takes_what_writers_write(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int tensors;
    } cases[] = {
        {"{}", 0},
        {"{" ENTRY("a") "}", 1},
        {" {\n" ENTRY("a") " ,\t" ENTRY("b.c") "}   ", 2},
        {"{\"__metadata__\":{\"format\":\"pt\",\"x\":\"}\\\"{\"}," ENTRY("a") "}", 1},
        {"{" ENTRY("a") ",\"__metadata__\":{}}", 1},
        {"{\"a\":{\"data_offsets\":[0,4],\"shape\":[],\"dtype\":\"F32\"}}", 1},
        {"{\"a\":{\"dtype\":\"Q9\",\"shape\":[7],\"data_offsets\":[5,8]}}", 1},
        {"{" ENTRY("\xc3\xa4") "}", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(count(cases[i].text, strlen(cases[i].text)), cases[i].tensors);
}

static void leaves_the_rest_to_another_parser(void **state) {
    (void)state;
    static const char *const odd[] = {
        "", "{", "}", "[]", "{}x", "{} {}", "{,}", "{" ENTRY("a") ",}", "{" ENTRY("a") "", "{" ENTRY("a\\n") "}",
        "{" ENTRY("\xff") "}", "{" ENTRY("a") ENTRY("b") "}", "{\"a\":{}}", "{\"a\":[]}", "{\"a\":null}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1000000000000000000],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}",
        "{\"__metadata__\":null}", "{\"__metadata__\":{}", "{\"__metadata__\":{},\"__metadata__\":{}}",
        "{\"__metadata__\":{\"x\":\"}}",
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        if (count(odd[i], strlen(odd[i])) != -1) fail_msg("taken: %s", odd[i]);
}

static void check_same(json_t *root, const sth_tensor_info *t) {
    const json_t *entry = json_object_get(root, t->name), *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    assert_string_equal(json_string_value(json_object_get(entry, "dtype")), t->spelling);
    assert_int_equal(json_array_size(shape), t->rank);
    for (int d = 0; d < t->rank; d++)
        assert_int_equal(json_integer_value(json_array_get(shape, (size_t)d)), t->shape[d]);
    assert_int_equal(json_integer_value(json_array_get(offsets, 0)), t->offset);
    assert_int_equal(json_integer_value(json_array_get(offsets, 1)), t->offset + t->bytes);
}

/* Headers with some bytes changed, taken out or put in. */
static void what_it_takes_is_what_jansson_finds(void **state) {
    (void)state;
    static const char good[] = "{\"__metadata__\":{\"a\":\"b\\n\"}, " ENTRY("a") "," ENTRY("b\xc3\xa4") ","
                               "\"c\":{\"dtype\":\"F4\",\"shape\":[2,10],\"data_offsets\":[24,34]}} ";
    static const char bytes[] = "{}[]\",:0123456789 \\ab\n\x01\xc3\xff.-";
    char text[2 * sizeof good], room[2 * sizeof good];
    uint64_t drawn = 0;
    int taken = 0;
    for (int round = 0; round < 60000; round++) {
        size_t n = sizeof good - 1;
        memcpy(text, good, n);
        for (int change = 0; change < 1 + round % 3; change++) {
            size_t at = (size_t)(sthi_random64(4, drawn++) % n);
            char c = bytes[sthi_random64(4, drawn++) % (sizeof bytes - 1)];
            uint64_t how = sthi_random64(4, drawn++) % 3;
            if (how == 0) text[at] = c;
            else if (how == 1) memmove(text + at, text + at + 1, --n - at);
            else memmove(text + at + 1, text + at, n++ - at), text[at] = c;
        }
        if (count(text, n) < 0) continue;
        sthi_header header;
        sth_tensor_info t;
        int tensors = 0;
        json_error_t why;
        json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
        if (!root && json_error_code(&why) == json_error_duplicate_key) continue; /* found by the table of names */
        sthi_header_begin(&header, text, n, room);
        for (; sthi_header_next(&header, &t); tensors++)
            if (root) check_same(root, &t);
        if (!root) { /* the metadata is for jansson to look at */
            assert_non_null(header.metadata);
            assert_null(json_loadb(header.metadata, header.metadata_bytes, 0, NULL));
            continue;
        }
        assert_true((size_t)tensors + (header.metadata != NULL) == json_object_size(root));
        taken++;
        json_decref(root);
    }
    assert_true(taken > 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_what_writers_write),
        cmocka_unit_test(leaves_the_rest_to_another_parser),
        cmocka_unit_test(what_it_takes_is_what_jansson_finds),
    };
    return cmocka_run_group_tests_name("store/header", tests, NULL, NULL);
}
