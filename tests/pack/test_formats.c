/* Each format from a checkpoint, read again by its own reader: bytes where they are kept, and
 * the definition of the encoding where they are not. */
#define _GNU_SOURCE
#include "support/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/half.h"
#include "base/random.h"
#include "pack/models.h"
#include "stagehand/quant.h"
#include "store/tempfiles.h"

static void read_tensor(sth_checkpoint *c, const char *name, uint64_t bytes, void *out) {
    const sth_tensor_info *t = sth_checkpoint_find(c, name);
    assert_non_null(t);
    assert_int_equal(t->bytes, bytes);
    assert_ok(sth_checkpoint_read(c, t->file, t->offset, t->bytes, out));
}

/* Element k of a row of a.weight (F32) or b.weight (BF16). */
static float weight(bool b, uint64_t row, uint64_t k) {
    float x;
    uint16_t half;
    memcpy(&x, model_bytes("a.weight") + 4 * (16 * row + k) % 512, sizeof x);
    memcpy(&half, model_bytes("b.weight") + (b ? 2 * (4 * row + k) : 0), sizeof half);
    return b ? sthi_from_bf16(half) : x;
}

static void check_int8(sth_checkpoint *c, const char *name, bool b) {
    uint64_t rows = b ? 4 : 8, columns = b ? 4 : 16;
    signed char codes[8 * 64];
    float scales[8], zeros[8];
    char tensor[32];
    snprintf(tensor, sizeof tensor, "%s.qweight", name);
    read_tensor(c, tensor, rows * 64, codes);
    snprintf(tensor, sizeof tensor, "%s.scale", name);
    read_tensor(c, tensor, rows * 4, scales);
    snprintf(tensor, sizeof tensor, "%s.zero_point", name);
    read_tensor(c, tensor, rows * 4, zeros);
    for (uint64_t r = 0; r < rows; r++) {
        float most = 0;
        for (uint64_t k = 0; k < columns; k++) most = fmaxf(most, fabsf(weight(b, r, k)));
        assert_true(scales[r] == fmaxf(most / 127, 1e-8f) && zeros[r] == 0);
        for (uint64_t k = 0; k < 64; k++) {
            float q = k < columns ? rintf(weight(b, r, k) * (1 / scales[r])) : 0;
            assert_int_equal(codes[64 * r + k], (int)fmaxf(-127, fminf(127, q)));
        }
    }
}

static void v2_holds_rounded_rows_and_all_else_as_it_was(void **state) {
    char in[512], out[512];
    sth_quant *slab = NULL;
    float bias[8];
    unsigned char c[40];
    snprintf(in, sizeof in, "%s", model_write(*state));
    snprintf(out, sizeof out, "%s/r.safetensors", (char *)*state);
    assert_ok(model_pack(in, out, STH_PACK_V2));
    assert_ok(sth_quant_open(out, &slab));
    assert_int_equal(sth_quant_get_format(slab), STH_QUANT_V2);
    assert_int_equal(sth_quant_layer_count(slab), 2);
    assert_int_equal(sth_quant_plain_count(slab), 1);
    sth_checkpoint *made = sth_quant_checkpoint(slab);
    check_int8(made, "a", false);
    check_int8(made, "b", true);
    read_tensor(made, "a.bias", sizeof bias, bias);
    for (int i = 0; i < 8; i++) {
        uint16_t half;
        memcpy(&half, model_bytes("a.bias") + 2 * i, sizeof half);
        assert_true(bias[i] == sthi_from_bf16(half));
    }
    read_tensor(made, "c", sizeof c, c);
    assert_memory_equal(c, model_bytes("c"), sizeof c);
    sth_quant_close(slab);
}

static void an_index_holds_each_tensor_on_pages_of_its_own(void **state) {
    char in[512], out[512];
    sth_checkpoint *from = NULL, *made = NULL;
    unsigned char left[512], right[512];
    snprintf(in, sizeof in, "%s", model_write(*state));
    snprintf(out, sizeof out, "%s/r.json", (char *)*state);
    assert_ok(model_pack(in, out, STH_PACK_LAYER_INDEX));
    assert_ok(sth_checkpoint_open(in, &from));
    assert_ok(sth_checkpoint_open(out, &made));
    assert_int_equal(sth_checkpoint_tensor_count(made), 4);
    for (uint64_t i = 0; i < 4; i++) {
        const sth_tensor_info *t = sth_checkpoint_tensor(from, i), *u = sth_checkpoint_find(made, t->name);
        assert_non_null(u);
        assert_true(u->offset % 4096 == 0 && u->dtype == t->dtype && u->rank == t->rank && u->bytes == t->bytes);
        assert_memory_equal(u->shape, t->shape, sizeof *t->shape * (size_t)t->rank);
        read_tensor(from, t->name, t->bytes, left);
        read_tensor(made, t->name, t->bytes, right);
        assert_memory_equal(left, right, t->bytes);
    }
    sth_checkpoint_close(from);
    sth_checkpoint_close(made);
}

static void unpacking_gives_what_decoding_gives(void **state) {
    static const sth_dtype dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
    char in[512], slab_path[512], back[512];
    snprintf(in, sizeof in, "%s", model_write(*state));
    snprintf(slab_path, sizeof slab_path, "%s/r.safetensors", (char *)*state);
    assert_ok(model_pack(in, slab_path, STH_PACK_V2));
    for (size_t d = 0; d < 3; d++) {
        sth_pack_options options = model_options(STH_PACK_V2);
        sth_quant *slab = NULL;
        sth_checkpoint *c = NULL;
        unsigned char decoded[512], got[512];
        options.dtype = dtypes[d];
        snprintf(back, sizeof back, "%s/back%zu.safetensors", (char *)*state, d);
        assert_ok(sth_unpack(slab_path, back, &options));
        assert_ok(sth_quant_open(slab_path, &slab));
        assert_ok(sth_checkpoint_open(back, &c));
        assert_int_equal(sth_checkpoint_tensor_count(c), 4);
        assert_ok(sth_quant_decode(slab, sth_quant_find(slab, "a"), dtypes[d], decoded, 1));
        read_tensor(c, "a.weight", d ? 256 : 512, got);
        assert_memory_equal(got, decoded, d ? 256 : 512);
        read_tensor(c, "a.bias", d ? 16 : 32, got);
        assert_int_equal(sth_checkpoint_find(c, "a.bias")->dtype, dtypes[d]);
        if (dtypes[d] == STH_DTYPE_BF16) assert_memory_equal(got, model_bytes("a.bias"), 16);
        read_tensor(c, "c", 40, got);
        assert_memory_equal(got, model_bytes("c"), 40);
        sth_checkpoint_close(c);
        sth_quant_close(slab);
    }
}

static void unpacking_a_checkpoint_copies_it(void **state) {
    char in[512], index[512], back[512];
    sth_verify_result found;
    sth_pack_options options = model_options(STH_PACK_V2);
    snprintf(in, sizeof in, "%s", model_write(*state));
    snprintf(index, sizeof index, "%s/r.json", (char *)*state);
    snprintf(back, sizeof back, "%s/back.safetensors", (char *)*state);
    assert_ok(model_pack(in, index, STH_PACK_LAYER_INDEX));
    assert_ok(sth_unpack(index, back, &options));
    assert_ok(sth_verify(back, in, NULL, NULL, &found));
    assert_int_equal(found.tensors, 4);
    assert_int_equal(found.missing + found.stored_differ, 0);
    assert_int_equal(found.checksums_missing, 4); /* a plain checkpoint has none */
}

/* ---- v3 ---- */

enum { ROWS = 1024, COLUMNS_ = 1024 };

static void write_large(const char *path) {
    static const char header[] = "{\"x.0.weight\":{\"dtype\":\"BF16\",\"shape\":[1024,1024],"
                                 "\"data_offsets\":[0,2097152]},"
                                 "\"small\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[2097152,2097160]}}";
    size_t n = sizeof header - 1, total = 8 + n + 2 * ROWS * COLUMNS_ + 8;
    unsigned char *file = calloc(1, total);
    assert_non_null(file);
    file[0] = (unsigned char)n, file[1] = (unsigned char)(n >> 8);
    memcpy(file + 8, header, n);
    for (uint64_t i = 0; i < ROWS * COLUMNS_; i++) {
        uint16_t half = sthi_to_bf16((float)(int64_t)sthi_random64(3, i) * 0x1p-68f);
        memcpy(file + 8 + n + 2 * i, &half, sizeof half);
    }
    write_bytes(path, file, total);
    free(file);
}

static void v3_is_the_same_for_every_number_of_threads(void **state) {
    char in[512], one[512], two[512];
    sth_quant *slab = NULL;
    sth_verify_result found;
    sth_pack_options options = model_options(STH_PACK_V3_INT4);
    snprintf(in, sizeof in, "%s/model.safetensors", (char *)*state);
    snprintf(one, sizeof one, "%s/one", (char *)*state);
    snprintf(two, sizeof two, "%s/two", (char *)*state);
    write_large(in);
    assert_ok(sth_pack(in, one, &options));
    options.threads = 2;
    assert_ok(sth_pack(in, two, &options));
    assert_ok(sth_quant_open(one, &slab));
    const sth_quant_layer *l = sth_quant_get_layer(slab, 0);
    assert_int_equal(sth_quant_get_format(slab), STH_QUANT_V3_INT4);
    assert_true(l->out == ROWS && l->in == COLUMNS_ && l->group == 64 && l->rank == 32 && l->hadamard == 256);
    assert_string_equal(l->name, "x.0");
    assert_int_equal(sth_quant_plain_count(slab), 1);
    sth_quant_close(slab);
    static const char *const files[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                        "model.safetensors.index.json", "squareq-plan.json"};
    for (size_t i = 0; i < 4; i++) assert_true(model_same(temp_path(one, files[i]), temp_path(two, files[i])));
    assert_ok(sth_verify(one, in, &options, NULL, &found));
    assert_int_equal(found.checksums_wrong + found.checksums_missing + found.missing + found.stored_differ, 0);
    assert_true(found.worst_rel_l2 > 0.01 && found.worst_rel_l2 < 0.15);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(v2_holds_rounded_rows_and_all_else_as_it_was, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(an_index_holds_each_tensor_on_pages_of_its_own, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(unpacking_gives_what_decoding_gives, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(unpacking_a_checkpoint_copies_it, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(v3_is_the_same_for_every_number_of_threads, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
