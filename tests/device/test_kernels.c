/* The kernels' text, run on the CPU (kernels_on_cpu.cpp), gives the bits of the reference decoder: every code, scales
 * of every size, zero points, rows of any length; what files hold in 4 bits with every part that they may have; packed
 * values, and bytes that are none. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "kernels_on_cpu.h"
#include "quant/four_world.h"
#include "quant/lossless.h"
#include "quant/segment.h"
#include "support/check.h"

enum { MOST = 1 << 16 };
static uint64_t seed = 1;
static uint32_t roll(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 32);
}

/* From subnormal to close to the largest. */
static float any_scale(void) {
    return ldexpf(1 + (float)(roll() % 1000) / 1000, (int)(roll() % 250) - 135) * (roll() % 2 ? 1 : -1);
}

static void fill(const sth_segment *s, uint8_t *packed, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i++) packed[i] = (uint8_t)roll();
    uint64_t groups = (s->cols + STHI_INT4_GROUP - 1) / STHI_INT4_GROUP;
    for (uint64_t i = 0; i < s->rows * (s->encoding == STH_TRANSFER_INT4 ? groups : 1); i++) {
        float scale = any_scale(), zero = (float)(int)(roll() % 256) - 128;
        uint16_t half = sthi_to_bf16(scale);
        if (s->encoding == STH_TRANSFER_INT4) memcpy(packed + s->scales + 2 * i, &half, sizeof half);
        else memcpy(packed + s->scales + 4 * i, &scale, sizeof scale);
        if (s->zeros != STH_TRANSFER_NONE) memcpy(packed + s->zeros + 4 * i, &zero, sizeof zero);
    }
}

STHI_KNOWS_ENCODINGS(7); /* and they are compared below */

static unsigned dtype_index(sth_dtype dtype) { return dtype == STH_DTYPE_F32 ? 0 : dtype == STH_DTYPE_BF16 ? 1 : 2; }

static unsigned long long address(const void *p) { return (unsigned long long)(uintptr_t)p; }

static void launch_rows(const sth_segment *s, const uint8_t *packed, bool zeros, uint8_t *place) {
    static const char *const names[] = {"sthi_expand_int8", "sthi_expand_fp8", "sthi_expand_int4"};
    unsigned by_eight = s->cols % 8 == 0 && s->stride % 8 == 0, across = (unsigned)(by_eight ? s->cols / 8 : s->cols);
    sthi_launch l = {.codes = address(packed + s->codes), .scales = address(packed + s->scales),
                     .place = address(place), .zeros = zeros ? address(packed + s->zeros) : 0, .stride = s->stride,
                     .rows = s->rows, .dtype = dtype_index(s->dtype), .cols = (unsigned)s->cols,
                     .count = (unsigned)s->rows * across, .across = across, .by_eight = by_eight};
    kernel_on_cpu(kernel_of_name(names[s->encoding - STH_TRANSFER_INT8]), 3, 32, &l);
}

static void compare(sth_transfer encoding, sth_dtype dtype, uint64_t rows, uint64_t cols, bool zeros, bool odd) {
    static uint8_t packed[MOST] __attribute__((aligned(512)));
    static uint8_t want[MOST * 4] __attribute__((aligned(512))), got[MOST * 4] __attribute__((aligned(512)));
    sth_segment tensor = {.encoding = encoding, .dtype = dtype, .rows = rows, .cols = cols}, s;
    uint32_t count;
    uint64_t bytes;
    assert_ok(sthi_segments_layout(&tensor, 1, UINT64_MAX / 2, &s, 1, &count, &bytes));
    if (odd) s.stride = cols + cols % 3; /* as rows of files are */
    if (zeros) {
        s.zeros = bytes;
        bytes += 4 * rows;
    }
    assert_true(bytes <= MOST);
    fill(&s, packed, bytes);
    uint64_t place = sthi_segment_place_bytes(&s);
    memset(want, 0xAA, place + 64);
    memset(got, 0xAA, place + 64);
    sthi_segment_decode(&s, packed, 0, 0, place, want);
    launch_rows(&s, packed, zeros, got);
    for (uint64_t i = 0; i < place + 64; i++)
        if (want[i] != got[i])
            fail_msg("%s, dtype %d, %llu x %llu: byte %llu is %02x, not %02x", sth_transfer_name(encoding), (int)dtype,
                     (unsigned long long)rows, (unsigned long long)cols, (unsigned long long)i, got[i], want[i]);
}

static void kernels_have_the_bits_of_the_reference(void **state) {
    (void)state;
    static const uint64_t cols[] = {1, 7, 8, 40, 63, 64, 65, 72, 128, 200, 512};
    static const sth_dtype dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
    for (int e = STH_TRANSFER_INT8; e <= STH_TRANSFER_INT4; e++)
        for (size_t t = 0; t < 3; t++)
            for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
                for (uint64_t rows = 1; rows <= 33; rows += 16)
                    for (int zeros = 0; zeros < (e == STH_TRANSFER_INT8 ? 2 : 1); zeros++)
                        for (int odd = 0; odd < (e == STH_TRANSFER_INT8 ? 2 : 1); odd++)
                            compare((sth_transfer)e, dtypes[t], rows, cols[c], zeros, odd);
}

/* As gpu/expand.c has it. */
static void launch_tiles(const sth_segment *s, const uint8_t *packed, unsigned grid, uint8_t *place) {
    unsigned wide = s->hadamard > 256 ? s->hadamard : 256, rows = wide < 4096 ? 4096 / wide : 1, stages = 0;
    while (s->hadamard >> (stages + 1)) stages++;
    sthi_segment_parts at = sthi_segment_find(s, packed, 0);
    sthi_launch l = {.codes = address(at.codes), .scales = address(at.scales), .up = address(at.up),
                     .down = address(at.down), .smooth = address(at.smooth), .place = address(place),
                     .stride = s->stride, .pitch = s->pitch, .rows = s->rows,
                     .root = s->hadamard ? sqrt(s->hadamard) : 1, .dtype = dtype_index(s->dtype),
                     .cols = (unsigned)s->cols, .rank = s->rank, .group = s->group, .stages = stages,
                     .exact = stages % 2 == 0, .nvfp4 = s->encoding == STH_TRANSFER_FILE_NVFP4, .factor = s->factor,
                     .across = (unsigned)(s->cols + wide - 1) / wide};
    l.count = l.across * (((unsigned)s->rows + rows - 1) / rows);
    kernel_on_cpu(kernel_of_name("sthi_expand_four_bits"), grid, 256, &l);
}

static void compare_four(int shape, int dtype, bool wild) {
    static four_world world;
    static uint8_t want[1 << 19] __attribute__((aligned(512))), got[1 << 19] __attribute__((aligned(512)));
    sth_segment s = four_shapes[shape];
    s.dtype = four_dtypes[dtype];
    four_make(&world, s, wild);
    uint64_t place = sthi_segment_place_bytes(&world.whole);
    assert_true(place + 64 <= sizeof got);
    memset(want, 0xAA, place + 64);
    memset(got, 0xAA, place + 64);
    sthi_segment_decode(&world.whole, world.packed, 0, 0, place, want);
    launch_tiles(&world.whole, world.packed, 2, got);
    for (uint64_t i = 0; i < place + 64; i++)
        if (want[i] != got[i])
            fail_msg("shape %d, dtype %d, wild %d: byte %llu is %02x, not %02x", shape, dtype, wild,
                     (unsigned long long)i, got[i], want[i]);
}

static void four_bits_have_the_bits_of_the_reference(void **state) {
    (void)state;
    const int dtypes = (int)few_under_tsan(1, 3); /* the rest differs in the last conversion */
    for (int shape = 0; shape < FOUR_SHAPES; shape++)
        for (int k = 0; k < dtypes; k++) {
            int dtype = (shape + k) % 3;
            compare_four(shape, dtype, (shape + dtype) % 2);
        }
}

/* As gpu/expand.c has it. From memory of exactly so many bytes, for the sanitizer. */
static void compare_lossless(sth_dtype dtype, uint64_t cols, int hostile) {
    uint64_t each = dtype == STH_DTYPE_F32 ? 4 : 2, bytes, place = cols * each;
    uint8_t *values = malloc(place), *want = malloc(place + 64), *got = malloc(place + 64);
    assert_true(values && want && got);
    for (uint64_t i = 0; i < place; i++) values[i] = (uint8_t)(roll() & (i % each == each - 1 ? 0x83 : 0xff));
    bytes = sthi_lossless_bytes((int)dtype, cols, cols);
    uint8_t *packed = aligned_alloc(512, (bytes + 511) / 512 * 512), *at = packed;
    assert_true(packed && sthi_lossless_pack(dtype, values, cols, packed, bytes));
    for (uint64_t i = 0; hostile && i < bytes; i++)
        if (hostile == 2 || roll() % 3 == 0) packed[i] = (uint8_t)(hostile == 2 ? 0xff : roll());
    memset(want, 0xAA, place + 64);
    memset(got, 0xAA, place + 64);
    sthi_lossless_unpack(dtype, packed, bytes, cols, 0, cols, want);
    if (!hostile) assert_memory_equal(want, values, place);
    sthi_launch l = {.codes = address(at), .place = address(got), .stride = bytes, .rows = 1, .cols = (unsigned)cols,
                     .escapes = bytes - sthi_lossless_fixed(sthi_lossless_form_of((int)dtype), cols),
                     .dtype = dtype_index(dtype), .count = (unsigned)sthi_lossless_tiles(cols)};
    kernel_on_cpu(kernel_of_name("sthi_expand_lossless"), 3, 64, &l);
    for (uint64_t i = 0; i < place + 64; i++)
        if (want[i] != got[i])
            fail_msg("dtype %d, %llu values, hostile %d: byte %llu is %02x, not %02x", (int)dtype,
                     (unsigned long long)cols, hostile, (unsigned long long)i, got[i], want[i]);
    free(values), free(want), free(got), free(packed);
}

static void packed_values_have_the_bits_of_the_reference(void **state) {
    (void)state;
    static const uint64_t cols[] = {1, 3, 4, 127, 128, 131, 1023, 1024, 1025, 4099, 20000};
    static const sth_dtype dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
    for (size_t t = 0; t < 3; t++)
        for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
            for (int hostile = 0; hostile < 3; hostile++) compare_lossless(dtypes[t], cols[c], hostile);
}

static void the_texts_float16_is_that_of_the_library(void **state) {
    (void)state;
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += few_under_tsan(9973, 251)) { /* every exponent */
        float x = sthi_of_bits((uint32_t)bits);
        if (half_on_cpu(x) != sthi_to_f16(x)) fail_msg("%08x: %04x", (unsigned)bits, half_on_cpu(x));
    }
    for (uint32_t h = 0; h < 0x7c00; h++) /* and what lies halfway between two, and beside it */
        for (int beside = -1; beside <= 1; beside++) {
            uint32_t low = sthi_bits_of(sthi_from_f16((uint16_t)h)),
                     high = sthi_bits_of(sthi_from_f16((uint16_t)(h + 1)));
            float x = sthi_of_bits(h < 0x400 ? sthi_bits_of(((float)h + 0.5f) * 0x1p-24f) + (uint32_t)beside
                                             : low + (high - low) / 2 + (uint32_t)beside);
            if (half_on_cpu(x) != sthi_to_f16(x)) fail_msg("near %04x: %04x", h, half_on_cpu(x));
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(kernels_have_the_bits_of_the_reference),
                                       cmocka_unit_test(four_bits_have_the_bits_of_the_reference),
                                       cmocka_unit_test(packed_values_have_the_bits_of_the_reference),
                                       cmocka_unit_test(the_texts_float16_is_that_of_the_library)};
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
