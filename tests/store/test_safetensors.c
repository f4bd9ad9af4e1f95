/* One safetensors file: what is accepted, what is refused, and whether the refusal names the culprit. */
#define _GNU_SOURCE
#include "support/check.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/memory.h"
#include "stagehand/checkpoint.h"
#include "store/file.h"
#include "store/sparse.h"
#include "store/tempfiles.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

#define GOOD                                                                \
    "{\"__metadata__\":{\"format\":\"pt\"},"                                \
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[16,28]},"  \
    "\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"      \
    "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[28,36]}," \
    "\"none\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[28,28]}}"
#define GOOD_DATA 36

static void assert_message(const char *label, const char *part) {
    const char *message = sth_last_error()->message;
    if (!strstr(message, part)) fail_msg("%s: the message does not say '%s': %s", label, part, message);
}

static void reads_a_good_file(void **state) {
    const char *path = temp_path(*state, "good.safetensors");
    write_safetensors(path, GOOD, GOOD_DATA);
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(path, &c));
    assert_int_equal(sth_checkpoint_tensor_count(c), 4);
    static const char *const order[] = {"a", "b", "none", "scalar"};
    for (uint64_t i = 0; i < 4; i++) assert_string_equal(sth_checkpoint_tensor(c, i)->name, order[i]);
    assert_null(sth_checkpoint_tensor(c, 4));
    const sth_tensor_info *b = sth_checkpoint_find(c, "b");
    assert_ptr_equal(b, sth_checkpoint_tensor(c, 1));
    assert_int_equal(b->dtype, STH_DTYPE_BF16);
    assert_int_equal(b->rank, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_int_equal(b->offset, 8 + strlen(GOOD) + 16);
    assert_true(b->scale == 1.0);
    assert_int_equal(sth_checkpoint_find(c, "scalar")->rank, 0);
    assert_null(sth_checkpoint_find(c, "__metadata__"));
    assert_null(sth_checkpoint_find(c, "c"));
    unsigned char got[12];
    assert_ok(sth_checkpoint_read(c, b->file, b->offset, b->bytes, got));
    for (uint64_t i = 0; i < 12; i++) assert_int_equal(got[i], pattern_byte(16 + i));
    assert_int_equal(sth_checkpoint_file_count(c), 1);
    assert_string_equal(sth_checkpoint_file_path(c, 0), path);
    assert_null(sth_checkpoint_file_path(c, 1));
    assert_int_equal(sth_checkpoint_hole_bytes(c, 0), 0);
    sth_checkpoint_close(c);
}

static void reads_every_dtype(void **state) {
    for (int d = 0; d < STH_DTYPE_COUNT; d++) {
        char header[160];
        uint32_t each = sth_dtype_bits((sth_dtype)d) / 8;
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%u]}}",
                 sth_dtype_name((sth_dtype)d), 3 * each);
        const char *path = temp_path(*state, "dtype.safetensors");
        write_safetensors(path, header, 3 * each);
        sth_checkpoint *c;
        assert_ok(sth_checkpoint_open(path, &c));
        assert_int_equal(sth_checkpoint_find(c, "t")->dtype, d);
        sth_checkpoint_close(c);
    }
    assert_string_equal(sth_dtype_name(STH_DTYPE_COUNT), "?");
    assert_int_equal(sth_dtype_bits(STH_DTYPE_COUNT), 0);
}

static void reads_a_file_without_tensors(void **state) {
    const char *path = temp_path(*state, "empty.safetensors");
    write_safetensors(path, "{}", 0);
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(path, &c));
    assert_int_equal(sth_checkpoint_tensor_count(c), 0);
    assert_null(sth_checkpoint_find(c, "a"));
    sth_checkpoint_close(c);
}

/* ---- hostile headers ---- */

#define T(dtype, shape, offsets) \
    "{\"evil\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

typedef struct hostile {
    const char *label, *header;
    size_t data;
    sth_status status;
    const char *says[2]; /* parts of the message beside the file */
} hostile;

static const hostile hostiles[] = {
    {"name twice",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]}}",
     8,
     STH_CORRUPT_DATA,
     {"duplicate", "\"a\""}},
    {"field twice",
     "{\"evil\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
     4,
     STH_CORRUPT_DATA,
     {"duplicate", "dtype"}},
    {"begin near 2^64",
     T("U8", "[16]", "[18446744073709551600,18446744073709551616]"),
     16,
     STH_CORRUPT_DATA,
     {"JSON", "18446744073709551600"}},
    {"begin near 2^63",
     T("U8", "[0]", "[9223372036854775807,9223372036854775807]"),
     16,
     STH_CORRUPT_DATA,
     {"evil", "truncated"}},
    {"negative begin", T("U8", "[4]", "[-4,0]"), 4, STH_CORRUPT_DATA, {"evil", "data_offsets"}},
    {"end before begin", T("U8", "[4]", "[4,0]"), 4, STH_CORRUPT_DATA, {"evil", "end before"}},
    {"text offsets", T("U8", "[4]", "[\"0\",\"4\"]"), 4, STH_CORRUPT_DATA, {"evil", "data_offsets"}},
    {"float offsets", T("U8", "[24]", "[0,24.0]"), 24, STH_CORRUPT_DATA, {"evil", "data_offsets"}},
    {"huge float offsets", T("U8", "[24]", "[0,1e300]"), 24, STH_CORRUPT_DATA, {"evil", "data_offsets"}},
    {"infinite offset", T("U8", "[24]", "[0,1e999]"), 24, STH_CORRUPT_DATA, {"JSON", "1e999"}},
    {"three offsets", T("U8", "[4]", "[0,4,8]"), 8, STH_CORRUPT_DATA, {"evil", "two numbers"}},
    {"no offsets",
     "{\"evil\":{\"dtype\":\"U8\",\"shape\":[4]}}",
     4,
     STH_CORRUPT_DATA,
     {"evil", "data_offsets"}},
    {"no dtype", "{\"evil\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, STH_CORRUPT_DATA, {"evil", "dtype"}},
    {"no shape",
     "{\"evil\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}",
     4,
     STH_CORRUPT_DATA,
     {"evil", "shape"}},
    {"dtype a number",
     "{\"evil\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}",
     4,
     STH_CORRUPT_DATA,
     {"evil", "dtype"}},
    {"product 2^64", T("U8", "[4294967296,4294967296]", "[0,0]"), 4, STH_CORRUPT_DATA, {"evil", "overflows"}},
    {"product 2^64 with a zero",
     T("U8", "[4294967296,0,4294967296]", "[0,0]"),
     4,
     STH_CORRUPT_DATA,
     {"evil", "overflows"}},
    {"bytes 2^65", T("F32", "[4611686018427387904,2]", "[0,0]"), 4, STH_CORRUPT_DATA, {"evil", "overflows"}},
    {"negative extent", T("U8", "[-1]", "[0,4]"), 4, STH_CORRUPT_DATA, {"evil", "extent 0"}},
    {"float extent", T("U8", "[2,2.0]", "[0,4]"), 4, STH_CORRUPT_DATA, {"evil", "extent 1"}},
    {"shape is text", T("U8", "\"4\"", "[0,4]"), 4, STH_CORRUPT_DATA, {"evil", "shape"}},
    {"too many dimensions",
     T("U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4]", "[0,4]"),
     4,
     STH_UNSUPPORTED,
     {"evil", "17 dimensions"}},
    {"four bits that do not fit", T("F4", "[9]", "[0,4]"), 4, STH_CORRUPT_DATA, {"evil", "F4"}},
    {"unknown dtype past the end", T("Q9", "[8]", "[0,4000]"), 4, STH_CORRUPT_DATA, {"evil", "truncated"}},
    {"size mismatch", T("BF16", "[3]", "[0,4]"), 4, STH_CORRUPT_DATA, {"evil", "6 bytes"}},
    {"entry is a list", "{\"evil\":[1,2]}", 4, STH_CORRUPT_DATA, {"evil", "not an object"}},
    {"overlap",
     "{\"left\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"right\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
     8,
     STH_CORRUPT_DATA,
     {"left", "right"}},
    {"same range twice",
     "{\"left\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"right\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
     8,
     STH_CORRUPT_DATA,
     {"left", "right"}},
    {"one inside another, an empty one between",
     "{\"left\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
     "\"empty\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]},"
     "\"right\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]}}",
     8,
     STH_CORRUPT_DATA,
     {"left", "right"}},
    {"past the end", T("U8", "[100]", "[0,100]"), 60, STH_CORRUPT_DATA, {"evil", "100 bytes wanted"}},
    {"wholly past the end", T("U8", "[4]", "[100,104]"), 60, STH_CORRUPT_DATA, {"evil", "0 found"}},
    {"empty past the end", T("U8", "[0]", "[100,100]"), 60, STH_CORRUPT_DATA, {"evil", "truncated"}},
    {"metadata a list", "{\"__metadata__\":[]}", 0, STH_CORRUPT_DATA, {"__metadata__", "object"}},
    {"metadata of numbers", "{\"__metadata__\":{\"k\":1}}", 0, STH_CORRUPT_DATA, {"__metadata__", "'k'"}},
    {"a list", "[1]", 0, STH_CORRUPT_DATA, {"header", "object"}},
    {"no JSON", "\x80\x02}q", 0, STH_CORRUPT_DATA, {"JSON", "byte"}},
    {"empty header", "", 0, STH_CORRUPT_DATA, {"JSON", "byte"}},
    {"text behind", "{} {}", 0, STH_CORRUPT_DATA, {"JSON", "end of file"}},
    {"NUL in a name", "{\"e\\u0000vil\":1}", 0, STH_CORRUPT_DATA, {"JSON", "NUL"}},
    {"invalid UTF-8", "{\"\xff\":1}", 0, STH_CORRUPT_DATA, {"JSON", "decode"}},
};

static void expect_refused(const char *label, const char *path, sth_status status, const char *a,
                           const char *b) {
    sth_checkpoint *c = NULL;
    sth_status got = sth_checkpoint_open(path, &c);
    if (got != status)
        fail_msg("%s: %s, expected %s (%s)", label, sth_status_name(got), sth_status_name(status),
                 sth_last_error()->message);
    assert_null(c);
    assert_message(label, path);
    assert_message(label, a);
    assert_message(label, b);
    assert_string_equal(sth_last_error()->object, path);
}

/* As the format's own reader has it: tensors follow one another, up to the end of the file. */
static void refuses_bytes_that_belong_to_no_tensor(void **state) {
    static const struct {
        int x[2], y[2];
        size_t bytes;
        const char *why;
    } cases[] = {
        {{2, 6}, {6, 10}, 10, "the header, ends at"},
        {{0, 4}, {6, 10}, 10, "'y' begins at"},
        {{0, 4}, {4, 8}, 9, "1 bytes from byte"},
        {{0, 8}, {4, 4}, 8, "'y' begins at"}, /* an empty one inside another */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char header[256];
        const int *x = cases[i].x, *y = cases[i].y;
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]},"
                 "\"y\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}     ",
                 x[1] - x[0], x[0], x[1], y[1] - y[0], y[0], y[1]);
        const char *path = temp_path(*state, "holes.safetensors");
        write_safetensors(path, header, cases[i].bytes);
        expect_refused(cases[i].why, path, STH_CORRUPT_DATA, "holes.safetensors", cases[i].why);
    }
    const char *path = temp_path(*state, "none.safetensors");
    write_safetensors(path, "{\"__metadata__\":{}}", 1);
    expect_refused("no tensor", path, STH_CORRUPT_DATA, "none.safetensors", "1 bytes from byte");
}

/* Each is bytes of the length that the offsets say; where its bits are known, they are checked. */
static void takes_a_dtype_that_is_not_known_for_bytes(void **state) {
    static const struct {
        const char *dtype, *shape, *why;
        unsigned bytes;
    } cases[] = {
        {"F4", "[2,3]", NULL, 3},       {"F6_E2M3", "[4]", NULL, 3},      {"F6_E3M2", "[4]", NULL, 3},
        {"F4", "[3]", "a part of", 1},  {"F6_E2M3", "[4]", "need 3", 4},  {"Q4_K", "[256]", NULL, 144},
        {"f32", "[1]", NULL, 7},        {"", "[]", NULL, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char header[256];
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[0,%u]},"
                 "\"y\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[%u,%u]}}",
                 cases[i].dtype, cases[i].shape, cases[i].bytes, cases[i].bytes, cases[i].bytes + 2);
        const char *path = temp_path(*state, "other.safetensors");
        write_safetensors(path, header, cases[i].bytes + 2);
        if (cases[i].why) {
            expect_refused(cases[i].dtype, path, STH_CORRUPT_DATA, "'x'", cases[i].why);
            continue;
        }
        sth_checkpoint *c;
        assert_ok(sth_checkpoint_open(path, &c));
        const sth_tensor_info *x = sth_checkpoint_find(c, "x");
        assert_int_equal(x->dtype, STH_DTYPE_OTHER);
        assert_string_equal(x->spelling, cases[i].dtype);
        assert_int_equal(x->bytes, cases[i].bytes);
        assert_string_equal(sth_checkpoint_find(c, "y")->spelling, "U8");
        sth_checkpoint_close(c);
    }
}

static void refuses_hostile_headers(void **state) {
    long live = sthi_alloc_live();
    int descriptors = open_descriptors();
    for (size_t i = 0; i < COUNT(hostiles); i++) {
        const hostile *h = &hostiles[i];
        const char *path = temp_path(*state, "hostile.safetensors");
        write_safetensors(path, h->header, h->data);
        expect_refused(h->label, path, h->status, h->says[0], h->says[1]);
    }
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(open_descriptors(), descriptors);
}

static void refuses_deep_nesting(void **state) {
    const char *path = temp_path(*state, "deep.safetensors");
    size_t n = 100000;
    char *header = malloc(2 * n + 16);
    assert_non_null(header);
    strcpy(header, "{\"deep\":");
    memset(header + 8, '[', n);
    memset(header + 8 + n, ']', n);
    strcpy(header + 8 + 2 * n, "}");
    write_safetensors(path, header, 0);
    free(header);
    expect_refused("nesting", path, STH_CORRUPT_DATA, "JSON", "depth");
}

static void refuses_lying_lengths(void **state) {
    static const struct {
        const char *label;
        unsigned char length[8];
        const char *says;
    } lies[] = {
        {"one more than there is", {3}, "3 bytes wanted"},
        {"limit of the format", {0, 0xE1, 0xF5, 0x05}, "100000000 bytes wanted"},
        {"above the limit", {1, 0xE1, 0xF5, 0x05}, "claims 100000001"},
        {"2^63", {0, 0, 0, 0, 0, 0, 0, 0x80}, "claims 9223372036854775808"},
        {"2^64 - 1", {255, 255, 255, 255, 255, 255, 255, 255}, "claims 18446744073709551615"},
        {"2^64 - 8, which wraps", {248, 255, 255, 255, 255, 255, 255, 255}, "claims"},
    };
    for (size_t i = 0; i < COUNT(lies); i++) {
        unsigned char file[10];
        memcpy(file, lies[i].length, 8);
        memcpy(file + 8, "{}", 2);
        const char *path = temp_path(*state, "length.safetensors");
        write_bytes(path, file, sizeof file);
        expect_refused(lies[i].label, path, STH_CORRUPT_DATA, "header", lies[i].says);
    }
}

/* ---- truncation ---- */

static void refuses_truncated_files(void **state) {
    const char *path = temp_path(*state, "cut.safetensors");
    write_safetensors(path, GOOD, GOOD_DATA);
    uint64_t full = file_bytes(path), header_end = full - GOOD_DATA;
    static const struct {
        uint64_t by;
        const char *tensor; /* NULL: the cut is in the header */
        const char *says;
    } cuts[] = {{1, "scalar", "8 bytes wanted"},
                {4, "scalar", "4 found"},
                {7, "scalar", "1 found"},
                {8, "scalar", "0 found"},
                {9, "b", "12 bytes wanted"},
                {20, "b", "0 found"},
                {36, "a", "0 found"},
                {40, NULL, "header"}};
    for (size_t i = 0; i < COUNT(cuts); i++) {
        write_safetensors(path, GOOD, GOOD_DATA);
        cut_file(path, full - cuts[i].by);
        expect_refused("cut", path, STH_CORRUPT_DATA, cuts[i].tensor ? cuts[i].tensor : "truncated",
                       cuts[i].says);
    }
    for (uint64_t size = 0; size < header_end; size += size < 12 ? 1 : 13) {
        write_safetensors(path, GOOD, GOOD_DATA);
        cut_file(path, size);
        expect_refused("cut in the header", path, STH_CORRUPT_DATA, "truncated",
                       size < 8 ? "8 bytes" : "header");
    }
}

static void refuses_a_file_cut_at_a_page(void **state) {
    const char *path = temp_path(*state, "page.safetensors");
    write_safetensors(path, T("U8", "[20000]", "[0,20000]"), 20000);
    cut_file(path, 4 * 4096);
    expect_refused("page", path, STH_CORRUPT_DATA, "evil", "20000 bytes wanted");
}

/* ---- holes in the file ---- */

#define SPARSE_BYTES 65536

/* The header alone, then the file's length set: all data is a hole, but for `written` bytes at its end. */
static void write_sparse(const char *path, size_t written) {
    write_safetensors(path, T("U8", "[65536]", "[0,65536]"), 0);
    uint64_t full = file_bytes(path) + SPARSE_BYTES;
    int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)full), 0);
    static const char zeros[SPARSE_BYTES];
    assert_int_equal(pwrite(fd, zeros, written, (off_t)(full - written)), (ssize_t)written);
    assert_int_equal(close(fd), 0);
}

static void refuses_weights_that_were_never_written(void **state) {
    const char *path = temp_path(*state, "sparse.safetensors");
    write_sparse(path, 0);
    sthi_file file;
    assert_ok(sthi_file_open(path, &file));
    bool telling = sthi_sparse_is_telling(&file);
    sthi_file_close(&file);
    if (!telling) {
        print_message("# skip: this file system does not tell holes from zeros\n");
        skip();
    }
    expect_refused("hole", path, STH_CORRUPT_DATA, "evil", "never written");
    sth_checkpoint *c;
    write_sparse(path, SPARSE_BYTES); /* zeros that were written are weights */
    assert_ok(sth_checkpoint_open(path, &c));
    sth_checkpoint_close(c);
    write_sparse(path, SPARSE_BYTES / 2); /* and so are small holes in what was written */
    assert_ok(sth_checkpoint_open(path, &c));
    sth_checkpoint_close(c);
}

/* ---- what is not a file ---- */

static void refuses_what_is_not_a_model(void **state) {
    sth_checkpoint *c;
    assert_status(sth_checkpoint_open(temp_path(*state, "absent.safetensors"), &c), STH_NOT_FOUND);
    assert_message("absent", "absent.safetensors");
    assert_int_not_equal(sth_last_error()->native_code, 0);

    const char *pipe = temp_path(*state, "pipe.safetensors");
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_status(sth_checkpoint_open(pipe, &c), STH_UNSUPPORTED);
    assert_message("pipe", "not a regular file");
    assert_status(sth_checkpoint_open("/dev/zero", &c), STH_UNSUPPORTED);

    const char *other = temp_path(*state, "model.gguf");
    write_text(other, "GGUF\x03\x01\x02\x03\x04\x05\x06\x07");
    assert_status(sth_checkpoint_open(other, &c), STH_UNSUPPORTED);
    assert_message("gguf", "model.gguf");

    assert_status(sth_checkpoint_open(NULL, &c), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_open("", &c), STH_INVALID_ARGUMENT);
    assert_status(sth_checkpoint_open(other, NULL), STH_INVALID_ARGUMENT);
    sth_checkpoint_close(NULL);
}

static void opens_a_safetensors_file_of_any_name(void **state) {
    const char *path = temp_path(*state, "6f9ab3d1c0ffee");
    write_safetensors(path, GOOD, GOOD_DATA);
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(path, &c));
    sth_checkpoint_close(c);
}

/* ---- size ---- */

static void opens_twenty_thousand_tensors_quickly(void **state) {
    enum { TENSORS = 20000 };
    const char *path = temp_path(*state, "many.safetensors");
    char *header = malloc(TENSORS * 128), *at = header;
    assert_non_null(header);
    for (int i = 0; i < TENSORS; i++)
        at += sprintf(
            at, "%c\"model.layers.%d.weight\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[%d,%d]}",
            i ? ',' : '{', i, 3 * (TENSORS - 1 - i), 3 * (TENSORS - i));
    strcpy(at, "}");
    write_safetensors(path, header, 3 * TENSORS);
    free(header);
    clock_t start = clock(); /* of the process: other work on the machine does not count */
    sth_checkpoint *c;
    assert_ok(sth_checkpoint_open(path, &c));
    for (int i = 0; i < TENSORS; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.weight", i);
        assert_int_equal(sth_checkpoint_find(c, name)->offset, file_bytes(path) - 3 * (uint64_t)(i + 1));
    }
    sth_checkpoint_close(c);
    assert_true(clock() - start < 5 * CLOCKS_PER_SEC); /* it takes 0.05 s; quadratic would be minutes */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(reads_a_good_file, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(reads_every_dtype, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_bytes_that_belong_to_no_tensor, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(takes_a_dtype_that_is_not_known_for_bytes, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(reads_a_file_without_tensors, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_hostile_headers, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_deep_nesting, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_lying_lengths, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_truncated_files, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_a_file_cut_at_a_page, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_weights_that_were_never_written, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(refuses_what_is_not_a_model, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(opens_a_safetensors_file_of_any_name, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(opens_twenty_thousand_tensors_quickly, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
