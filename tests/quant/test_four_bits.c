/* Segments of a file's 4 bits decode to the bits of the decoder by whole rows: every kind of layer, of all sizes of
 * numbers, in pieces of any length, laid out as one segment or as many. What cannot be is refused. */
#include "support/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "four_world.h"
#include "quant/decoder.h"
#include "quant/segment.h"

static four_world world;

/* What decoder.c makes of the layer. */
static void decode_layer(const four_world *w, sth_dtype dtype, void *out) {
    const sth_segment *s = &w->whole;
    bool nvfp4 = s->encoding == STH_TRANSFER_FILE_NVFP4;
    sth_quant_layer l = {.name = "l", .out = s->rows, .in = s->cols, .padded_in = s->cols, .group = s->group,
                         .rank = s->rank, .hadamard = s->hadamard,
                         .encoding = nvfp4 ? STH_ENCODING_NVFP4_HADAMARD : STH_ENCODING_INT4_GROUP};
    const void *parts[STH_QUANT_PART_COUNT] = {0};
    sthi_segment_parts at = sthi_segment_find(s, w->packed, 0);
    sthi_decoder d;
    parts[STH_QUANT_PART_CODES] = at.codes;
    parts[STH_QUANT_PART_SCALES] = at.scales;
    if (nvfp4) parts[STH_QUANT_PART_GLOBAL_SCALE] = &s->factor;
    parts[STH_QUANT_PART_LORA_UP] = at.up;
    parts[STH_QUANT_PART_LORA_DOWN] = at.down;
    parts[STH_QUANT_PART_SMOOTH] = at.smooth;
    assert_ok(sthi_decoder_init(&d, NULL, &l, parts)); /* no part is looked at: the layer names none */
    assert_ok(sthi_decoder_rows(&d, 0, l.out, dtype, out, 1));
    sthi_decoder_fini(&d);
}

static uint64_t count_nans(const float *x, uint64_t n) {
    uint64_t nans = 0;
    for (uint64_t i = 0; i < n; i++) nans += isnan(x[i]);
    return nans;
}

static void segments_have_the_bits_of_the_decoder(void **state) {
    (void)state;
    uint64_t nans = 0;
    for (int i = 0; i < FOUR_SHAPES; i++)
        for (int wild = 0; wild < 2; wild++)
            for (int t = 0; t < 3; t++) {
                sth_segment shape = four_shapes[i];
                shape.dtype = four_dtypes[t];
                four_make(&world, shape, wild);
                uint64_t bytes = sthi_segment_place_bytes(&world.whole);
                char *want = sthi_alloc(bytes), *got = sthi_alloc(bytes);
                decode_layer(&world, shape.dtype, want);
                sthi_segment_decode(&world.whole, world.packed, 0, 0, bytes, got);
                if (memcmp(want, got, bytes)) fail_msg("shape %d, dtype %d, wild %d", i, t, wild);
                if (t == 0) nans += count_nans((const float *)got, bytes / 4);
                sthi_free(want);
                sthi_free(got);
            }
    assert_true(nans > 100); /* or that was not tried */
}

static void any_part_of_a_segment_is_that_part(void **state) {
    (void)state;
    for (int i = 0; i < FOUR_SHAPES; i++) {
        sth_segment shape = four_shapes[i];
        shape.dtype = i % 2 ? STH_DTYPE_BF16 : STH_DTYPE_F32;
        four_make(&world, shape, false);
        uint64_t each = i % 2 ? 2 : 4, bytes = sthi_segment_place_bytes(&world.whole);
        char *want = sthi_alloc(bytes), *got = sthi_zalloc(bytes + 8, 1);
        sthi_segment_decode(&world.whole, world.packed, 0, 0, bytes, want);
        for (int n = 0; n < 12; n++) {
            uint64_t begin = four_roll() % (bytes / each + 1) * each,
                     end = begin + four_roll() % (bytes / each + 1) * each;
            if (end > bytes) end = bytes;
            memset(got, 0x55, bytes + 8);
            sthi_segment_decode(&world.whole, world.packed, 0, begin, end, got);
            assert_memory_equal(got, want + begin, end - begin);
            for (int k = 0; k < 8; k++) assert_int_equal(got[end - begin + (uint64_t)k], 0x55);
        }
        sthi_free(want);
        sthi_free(got);
    }
}

/* Copies what a segment of some rows needs from the image of the whole. */
static void copy_rows(const four_world *w, const sth_segment *s, uint64_t row, uint8_t *image) {
    const sth_segment *all = &w->whole;
    memcpy(image + s->codes, w->packed + all->codes + row * all->stride, s->rows * s->stride);
    if (s->encoding == STH_TRANSFER_FILE_NVFP4)
        memcpy(image + s->scales, w->packed + all->scales + sthi_tiles_bytes(row, s->cols),
               sthi_tiles_bytes(s->rows, s->cols));
    for (uint64_t g = 0; s->encoding == STH_TRANSFER_FILE_INT4 && g < s->cols / s->group; g++)
        memcpy(image + s->scales + g * s->pitch, w->packed + all->scales + g * all->pitch + 2 * row, 2 * s->rows);
    memcpy(image + s->up, w->packed + all->up + 2 * row * s->rank, 2 * s->rows * s->rank);
    memcpy(image + s->down, w->packed + all->down, 2 * s->cols * s->rank);
}

static void rows_are_laid_out_with_what_they_share(void **state) {
    (void)state;
    for (int kind = STH_TRANSFER_FILE_INT4; kind <= STH_TRANSFER_FILE_NVFP4; kind++)
        for (uint64_t piece = 512; piece < 1 << 20; piece *= 4) {
            enum { ROWS = 900, COLS = 256, MOST = 8 };
            sth_segment shape = {.encoding = (sth_transfer)kind, .dtype = STH_DTYPE_BF16, .rows = ROWS, .cols = COLS,
                                 .group = kind == STH_TRANSFER_FILE_INT4 ? 64 : 16, .rank = 16, .hadamard = 256,
                                 .smooth = STH_TRANSFER_NONE}, segments[MOST];
            uint32_t count;
            uint64_t end, row = 0, before = 512;
            four_make(&world, shape, false);
            sth_segment whole = world.whole;
            whole.place_offset = 1024;
            assert_ok(sthi_segments_of_rows(&whole, piece, before, segments, MOST, &count, &end));
            assert_ok(sthi_segments_check(segments, count, 1024 + 2 * ROWS * COLS, end, "x"));
            assert_true(piece < 1 << 18 ? count > 1 : count == 1);
            uint8_t *image = sthi_zalloc(end, 1), *want = sthi_alloc(2 * ROWS * COLS),
                    *got = sthi_alloc(2 * ROWS * COLS);
            for (uint32_t i = 0; i < count; row += segments[i++].rows) {
                uint64_t from, stop, shared = 2 * COLS * 16;
                sthi_segment_span(&segments[i], &from, &stop);
                assert_true(from >= before && stop <= end);
                if (i + 1 < count) assert_true(stop - from >= 4 * shared && stop - from <= piece + 65536);
                before = stop;
                copy_rows(&world, &segments[i], row, image);
                sthi_segment_decode(&segments[i], image, 0, 0, sthi_segment_place_bytes(&segments[i]),
                                    got + segments[i].place_offset - 1024);
            }
            assert_int_equal(row, ROWS);
            sthi_segment_decode(&world.whole, world.packed, 0, 0, 2 * ROWS * COLS, want);
            assert_memory_equal(want, got, 2 * ROWS * COLS);
            sthi_free(image);
            sthi_free(want);
            sthi_free(got);
        }
}

#define REFUSED(...)                                                                                   \
    do {                                                                                               \
        sth_segment s = world.whole;                                                                   \
        __VA_ARGS__;                                                                                   \
        if (sthi_segments_check(&s, 1, place, world.bytes, "x") != STH_INVALID_ARGUMENT)               \
            fail_msg("is taken: %s", #__VA_ARGS__);                                                    \
    } while (0)

static void impossible_segments_are_refused(void **state) {
    (void)state;
    sth_segment shape = four_shapes[0];
    shape.dtype = STH_DTYPE_BF16;
    shape.smooth = 0;
    four_make(&world, shape, false);
    uint64_t place = sthi_segment_place_bytes(&world.whole);
    assert_ok(sthi_segments_check(&world.whole, 1, place, world.bytes, "x"));
    REFUSED(s.group = 0);
    REFUSED(s.group = 8);
    REFUSED(s.group = 48); /* 256 is none of it */
    REFUSED(s.hadamard = 8);
    REFUSED(s.hadamard = 96);
    REFUSED(s.hadamard = 512); /* more than a row */
    REFUSED(s.hadamard = 1u << 31);
    REFUSED(s.rank = 65536);
    REFUSED(s.rank = 2000); /* more than the image holds */
    REFUSED(s.stride = 120);
    REFUSED(s.stride = 132);
    REFUSED(s.stride = UINT64_MAX / 33 * 2 & ~UINT64_C(7));
    REFUSED(s.pitch = 64);
    REFUSED(s.pitch = 67);
    REFUSED(s.pitch = UINT64_MAX - 1);
    REFUSED(s.pitch = (UINT64_C(1) << 62) + 66); /* times 3 + 66: wraps */
    REFUSED(s.factor = INFINITY);
    REFUSED(s.factor = NAN);
    REFUSED(s.zeros = 0);
    REFUSED(s.scales = STH_TRANSFER_NONE);
    REFUSED(s.up = STH_TRANSFER_NONE);
    REFUSED(s.down = world.bytes - 512);
    REFUSED(s.smooth = world.bytes);
    REFUSED(s.up += 2);
    REFUSED(s.rows = UINT64_C(1) << 60);
    REFUSED(s.cols = UINT64_C(1) << 32);
    REFUSED(s.cols = 0);
    REFUSED(s.encoding = STH_TRANSFER_FILE_NVFP4);
    REFUSED(s.place_offset = 8);
    uint32_t count;
    uint64_t bytes;
    assert_status(sthi_segments_layout(&world.whole, 1, 1 << 20, NULL, 0, &count, &bytes), STH_INVALID_ARGUMENT);
    assert_status(sthi_segments_encode(&world.whole, 1, world.packed, world.packed, 1, NULL, NULL), STH_UNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(segments_have_the_bits_of_the_decoder), cmocka_unit_test(any_part_of_a_segment_is_that_part),
        cmocka_unit_test(rows_are_laid_out_with_what_they_share), cmocka_unit_test(impossible_segments_are_refused)};
    return cmocka_run_group_tests_name("four bits", tests, NULL, NULL);
}
