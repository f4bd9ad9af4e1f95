/* Decoding a layer of every encoding from its file, against the encoding's definition written
 * out one number at a time. The numbers have few digits, so that sums in float64 are exact in
 * any order. */
#include "support/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/half.h"
#include "base/memory.h"
#include "stagehand/quant.h"
#include "store/slabs.h"
#include "store/tempfiles.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

enum { MOST = 24 * 256 };

static slab_files f;

static sth_quant *open_new(const char *folder, sth_quant_format format) {
    sth_quant *slab = NULL;
    slab_make(&f, format);
    assert_ok(sth_quant_open(slab_write(&f, folder), &slab));
    return slab;
}

/* ---- the definitions ---- */

static int nibble(const unsigned char *codes, uint64_t row, uint64_t in, uint64_t k) {
    int byte = codes[row * (in / 2) + k / 2], code = k % 2 ? byte >> 4 : byte & 15;
    return code;
}

static float int8_value(uint64_t row, uint64_t k, const char *codes, const char *scales, const char *zeros) {
    float q = (float)(signed char)slab_bytes(&f, codes)[row * 64 + k];
    return (q - slab_f32(&f, zeros, row)) * slab_f32(&f, scales, row);
}

static float int4_value(uint64_t row, uint64_t k, const sth_quant_layer *l, const char *codes, const char *scales) {
    int code = nibble(slab_bytes(&f, codes), row, l->in, k);
    return (float)(code >= 8 ? code - 16 : code) * slab_bf16(&f, scales, k / l->group * l->out + row);
}

/* Magnitudes of e2m1, and 2^(e-7) (1 + m/8) of e4m3; the scales lie in tiles of 128 rows by 4
 * blocks. */
static float nvfp4_value(uint64_t row, uint64_t k, const sth_quant_layer *l) {
    static const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    int code = nibble(slab_bytes(&f, "a.nvq"), row, l->in, k);
    uint64_t block = k / 16, tile = block / 4; /* 24 rows: all in the first row of tiles, 16 bytes for each */
    unsigned s = slab_bytes(&f, "a.nvs")[tile * 512 + row * 16 + block % 4];
    float scale = ldexpf(1 + (float)(s & 7) / 8, (int)(s >> 3) - 7), v = magnitudes[code & 7] * scale;
    return (code & 8 ? -v : v) * slab_f32(&f, "a.nvg", 0);
}

static void rotate(float *row, uint64_t in, uint64_t block) {
    float copy[256];
    memcpy(copy, row, in * sizeof *row);
    for (uint64_t k = 0; k < in; k++) {
        double sum = 0;
        for (uint64_t j = 0; j < block; j++)
            sum += (__builtin_popcountll(j & k % block) % 2 ? -1.0 : 1.0) * (double)copy[k / block * block + j];
        row[k] = (float)(sum / sqrt((double)block));
    }
}

static float low_rank(const sth_quant_layer *l, const char *layer, uint64_t row, uint64_t k) {
    char up[24], down[24];
    float sum = 0;
    snprintf(up, sizeof up, "%s.lora_up", layer);
    snprintf(down, sizeof down, "%s.lora_down", layer);
    for (uint64_t r = 0; r < l->rank; r++)
        sum += slab_bf16(&f, up, row * l->rank + r) * slab_bf16(&f, down, k * l->rank + r);
    return sum;
}

static void define(const sth_quant_layer *l, float *out) {
    bool b = l->name[0] == 'b';
    for (uint64_t row = 0; row < l->out; row++) {
        float *to = out + row * l->in;
        for (uint64_t k = 0; k < l->in; k++) {
            switch (l->encoding) {
            case STH_ENCODING_INT8_ROW:
                to[k] = b ? int8_value(row, k, "b.qweight", "b.scale", "b.zero_point")
                          : int8_value(row, k, "a.qweight", "a.scale", "a.zero_point");
                break;
            case STH_ENCODING_NVFP4_HADAMARD: to[k] = nvfp4_value(row, k, l); break;
            case STH_ENCODING_INT4_ROW_HADAMARD: to[k] = int4_value(row, k, l, "b.qweight", "b.wscale"); break;
            default: to[k] = int4_value(row, k, l, "a.qweight", "a.wscales");
            }
        }
        if (l->hadamard) rotate(to, l->in, l->hadamard);
        for (uint64_t k = 0; l->rank && k < l->in; k++) to[k] += low_rank(l, l->name, row, k);
        for (uint64_t k = 0; l->parts[STH_QUANT_PART_SMOOTH] && k < l->in; k++) to[k] /= slab_bf16(&f, "a.smooth", k);
    }
}

/* ---- tests ---- */

static void compare(sth_quant *slab, const sth_quant_layer *l) {
    float wanted[MOST], got[MOST];
    uint16_t half[MOST];
    define(l, wanted);
    for (uint32_t threads = 0; threads <= 3; threads++) {
        memset(got, 0xaa, sizeof got);
        assert_ok(sth_quant_decode(slab, l, STH_DTYPE_F32, got, threads));
        for (uint64_t i = 0; i < l->out * l->in; i++)
            if (memcmp(&got[i], &wanted[i], sizeof *got))
                fail_msg("%s of %s, row %d, column %d: %a, not %a", l->name, sth_encoding_name(l->encoding),
                         (int)(i / l->in), (int)(i % l->in), (double)got[i], (double)wanted[i]);
    }
    for (int bf16 = 0; bf16 < 2; bf16++) {
        assert_ok(sth_quant_decode(slab, l, bf16 ? STH_DTYPE_BF16 : STH_DTYPE_F16, half, 1));
        for (uint64_t i = 0; i < l->out * l->in; i++)
            assert_int_equal(half[i], bf16 ? sthi_to_bf16(wanted[i]) : sthi_to_f16(wanted[i]));
    }
}

static void every_format_decodes_as_its_definition_says(void **state) {
    int seen[STH_ENCODING_COUNT] = {0};
    for (int format = 0; format < STH_QUANT_LOSSLESS; format++) { /* that is pack/lossless */
        sth_quant *slab = open_new(*state, (sth_quant_format)format);
        for (uint64_t i = 0; i < sth_quant_layer_count(slab); i++) {
            const sth_quant_layer *l = sth_quant_get_layer(slab, i);
            seen[l->encoding]++;
            compare(slab, l);
        }
        sth_quant_close(slab);
        assert_int_equal(temp_teardown(state), 0);
        assert_int_equal(temp_setup(state), 0);
    }
    for (int e = 0; e < STH_ENCODING_LOSSLESS; e++) assert_true(seen[e] > 0);
}

/* A smooth of ones, as writers make it, is as good as none. */
static void factors_of_one_change_nothing(void **state) {
    sth_quant *slab = NULL;
    float got[MOST], wanted[MOST];
    uint16_t one = sthi_to_bf16(1);
    slab_make(&f, STH_QUANT_SVDQUANT);
    for (int k = 0; k < 32; k++) memcpy(slab_bytes(&f, "a.smooth") + 2 * k, &one, sizeof one);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    const sth_quant_layer *l = sth_quant_get_layer(slab, 0);
    define(l, wanted);
    assert_ok(sth_quant_decode(slab, l, STH_DTYPE_F32, got, 1));
    assert_memory_equal(got, wanted, l->out * l->in * sizeof *got);
    sth_quant_close(slab);
}

static void what_is_no_number_has_the_bits_of_the_one_nan(void **state) {
    sth_quant *slab = NULL;
    float got[MOST], largest = 0x1.fp127f, minus = -0x1.fp127f;
    slab_make(&f, STH_QUANT_V2); /* (q - z) s: an infinity less nothing; then 0 times it */
    memcpy(slab_bytes(&f, "b.zero_point"), &minus, sizeof minus);
    memcpy(slab_bytes(&f, "b.scale"), &largest, sizeof largest);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    assert_ok(sth_quant_decode(slab, sth_quant_find(slab, "b"), STH_DTYPE_F32, got, 1));
    for (int k = 0; k < 64; k++) assert_true(isinf(got[k]) && got[k] > 0);
    sth_quant_close(slab);
    slab_make(&f, STH_QUANT_SVDQUANT); /* infinities of both signs from the factors */
    uint16_t big = sthi_to_bf16(0x1p127f), negative = sthi_to_bf16(-0x1p127f);
    memcpy(slab_bytes(&f, "a.lora_up"), &big, sizeof big);
    memcpy(slab_bytes(&f, "a.lora_up") + 2, &big, sizeof big);
    memcpy(slab_bytes(&f, "a.lora_down"), &big, sizeof big);
    memcpy(slab_bytes(&f, "a.lora_down") + 2, &negative, sizeof negative);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    assert_ok(sth_quant_decode(slab, sth_quant_get_layer(slab, 0), STH_DTYPE_F32, got, 1));
    uint32_t bits;
    memcpy(&bits, got, sizeof bits);
    assert_int_equal(bits, 0x7fc00000);
    sth_quant_close(slab);
}

/* ---- hostile numbers ---- */

typedef struct bad_number {
    sth_quant_format format;
    const char *part;
    uint64_t at; /* byte of the part */
    uint32_t value;
    size_t bytes;
    const char *says;
} bad_number;

static void numbers_that_are_none_are_refused_by_byte(void **state) {
    static const bad_number cases[] = {
        {STH_QUANT_V1, "a.scale", 4, 0x7f800000, 4, "not finite"},
        {STH_QUANT_V2, "a.scale", 8, 0x7fc00001, 4, "not finite"},
        {STH_QUANT_V2, "a.zero_point", 0, 0xff800000, 4, "not finite"},
        {STH_QUANT_SVDQUANT, "a.wscales", 10, 0x7f80, 2, "not finite"},
        {STH_QUANT_SVDQUANT, "a.lora_down", 318, 0xff80, 2, "not finite"},
        {STH_QUANT_SVDQUANT, "a.lora_up", 28, 0x7fff, 2, "not finite"},
        {STH_QUANT_SVDQUANT, "a.smooth", 62, 0x7f80, 2, "not finite"},
        {STH_QUANT_SVDQUANT, "a.smooth", 4, 0x8000, 2, "a factor of 0"},
        {STH_QUANT_V3_INT4, "a.wscales", 0, 0xffc0, 2, "not finite"},
        {STH_QUANT_V3_NVFP4, "a.nvs", 2047, 0x7f, 1, "no writer of this format makes"},
        {STH_QUANT_V3_NVFP4, "a.nvs", 0, 0x88, 1, "no writer of this format makes"},
        {STH_QUANT_V3_NVFP4, "a.nvs", 5, 0x01, 1, "no writer of this format makes"},
        {STH_QUANT_V3_NVFP4, "a.nvg", 0, 0x7f800000, 4, "not finite"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bad_number *c = &cases[i];
        sth_quant *slab = NULL;
        float out[MOST];
        char byte[32];
        slab_make(&f, c->format);
        memcpy(slab_bytes(&f, c->part) + c->at, &c->value, c->bytes);
        assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
        const sth_tensor_info *t = sth_checkpoint_find(sth_quant_checkpoint(slab), c->part);
        long live = sthi_alloc_live();
        assert_status(sth_quant_decode(slab, sth_quant_find(slab, "a"), STH_DTYPE_F32, out, 1), STH_CORRUPT_DATA);
        snprintf(byte, sizeof byte, "byte %llu:", (unsigned long long)(t->offset + c->at));
        const char *said = sth_last_error()->message;
        if (!strstr(said, c->part) || !strstr(said, byte) || !strstr(said, c->says)) fail_msg("%s (%s)", said, byte);
        assert_int_equal(sthi_alloc_live(), live);
        sth_quant_close(slab);
        assert_int_equal(temp_teardown(state), 0);
        assert_int_equal(temp_setup(state), 0);
    }
}

static void other_dtypes_and_foreign_layers_are_the_callers_mistake(void **state) {
    sth_quant *slab = open_new(*state, STH_QUANT_V2), *other = NULL;
    float out[MOST];
    const sth_quant_layer *a = sth_quant_find(slab, "a");
    assert_ok(sth_quant_open(temp_path(*state, "m.safetensors"), &other));
    assert_status(sth_quant_decode(slab, a, STH_DTYPE_F64, out, 1), STH_INVALID_ARGUMENT);
    assert_status(sth_quant_decode(slab, a, STH_DTYPE_F32, out, 257), STH_INVALID_ARGUMENT);
    assert_status(sth_quant_decode(other, a, STH_DTYPE_F32, out, 1), STH_INVALID_ARGUMENT);
    assert_status(sth_quant_decode(slab, NULL, STH_DTYPE_F32, out, 1), STH_INVALID_ARGUMENT);
    sth_quant_close(other);
    sth_quant_close(slab);
}

/* ---- failures ---- */

static void fail_each(sth_quant *slab, sthi_fault_kind kind, sth_status expected) {
    const sth_quant_layer *l = sth_quant_get_layer(slab, 0);
    float wanted[MOST], got[MOST];
    define(l, wanted);
    for (uint64_t n = 1, hit = 1; hit; n++) {
        long live = sthi_alloc_live();
        memset(got, 0, sizeof got);
        sthi_fault_arm(kind, n, false);
        sth_status status = sth_quant_decode(slab, l, STH_DTYPE_F32, got, 2);
        hit = sthi_fault_seen(kind) >= n;
        sthi_fault_disarm_all();
        if (hit) assert_status(status, expected);
        else assert_ok(status);
        if (!hit) assert_memory_equal(got, wanted, l->out * l->in * sizeof *got);
        assert_int_equal(sthi_alloc_live(), live);
        assert_true(hit || n > 1);
    }
}

static void every_allocation_read_and_thread_may_fail(void **state) {
    sth_quant *slab = open_new(*state, STH_QUANT_SVDQUANT);
    fail_each(slab, STHI_FAULT_ALLOC, STH_OUT_OF_HOST_MEMORY);
    fail_each(slab, STHI_FAULT_READ, STH_IO);
    fail_each(slab, STHI_FAULT_THREAD, STH_OUT_OF_HOST_MEMORY);
    sth_quant_close(slab);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_format_decodes_as_its_definition_says, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(factors_of_one_change_nothing, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(what_is_no_number_has_the_bits_of_the_one_nan, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(numbers_that_are_none_are_refused_by_byte, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(other_dtypes_and_foreign_layers_are_the_callers_mistake, temp_setup,
                                        temp_teardown),
        cmocka_unit_test_setup_teardown(every_allocation_read_and_thread_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
