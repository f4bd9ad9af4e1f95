/* A layer as a device expands it: its segments, with the ranges that their packed image is made
 * of, expand to the values that decoding gives, bit by bit. */
#include "support/check.h"

#include <string.h>

#include "base/arith.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/random.h"
#include "quant/segment.h"
#include "stagehand/quant.h"
#include "store/slabs.h"
#include "store/tempfiles.h"

enum { MOST = 24 * 256, SEGMENTS = 8, RANGES = 64, IMAGE = 1 << 16 };

static slab_files f;

typedef struct laid_out {
    sth_segment segments[SEGMENTS];
    sth_file_range ranges[RANGES];
    uint32_t segment_count, range_count;
    uint64_t end;
} laid_out;

static void lay_out(sth_quant *slab, const sth_quant_layer *l, uint64_t packed_offset, uint64_t piece, laid_out *o) {
    o->segment_count = o->range_count = 0;
    assert_ok(sth_quant_segments(slab, l, STH_DTYPE_F32, 16, packed_offset, piece, NULL, &o->segment_count, NULL,
                                 &o->range_count, &o->end));
    assert_true(o->segment_count <= SEGMENTS && o->range_count <= RANGES && o->end <= IMAGE);
    uint32_t segments = o->segment_count, ranges = o->range_count;
    assert_ok(sth_quant_segments(slab, l, STH_DTYPE_F32, 16, packed_offset, piece, o->segments, &o->segment_count,
                                 o->ranges, &o->range_count, &o->end));
    assert_int_equal(o->segment_count, segments);
    assert_int_equal(o->range_count, ranges);
}

/* The packed image of the ranges, which lie inside it and overlap nowhere. */
static void assemble(sth_quant *slab, const laid_out *o, unsigned char *image) {
    static unsigned char taken[IMAGE];
    memset(taken, 0, sizeof taken);
    memset(image, 0xee, IMAGE);
    for (uint32_t i = 0; i < o->range_count; i++) {
        const sth_file_range *r = &o->ranges[i];
        assert_true(sthi_range_inside(r->place_offset, r->bytes, o->end));
        for (uint64_t b = 0; b < r->bytes; b++) assert_false(taken[r->place_offset + b]++);
        assert_ok(sth_checkpoint_read(sth_quant_checkpoint(slab), r->file, r->file_offset, r->bytes,
                                      image + r->place_offset));
    }
}

static void largest_is_known_before(sth_quant *slab, const sth_quant_layer *l, uint64_t piece, const laid_out *o) {
    sth_segment whole;
    uint64_t most = 0, begin, end;
    for (uint32_t i = 0; i < o->segment_count; i++) {
        sthi_segment_span(&o->segments[i], &begin, &end);
        if (end - begin > most) most = end - begin;
    }
    assert_ok(sth_quant_segment(slab, l, STH_DTYPE_F32, &whole));
    assert_int_equal(sthi_segment_piece(&whole, piece), (most + 511) / 512 * 512);
}

static void compare(sth_quant *slab, const sth_quant_layer *l, uint64_t packed_offset, uint64_t piece) {
    static unsigned char image[IMAGE] __attribute__((aligned(512))), place[16 + 4 * MOST] __attribute__((aligned(16)));
    static laid_out o;
    float wanted[MOST];
    lay_out(slab, l, packed_offset, piece, &o);
    largest_is_known_before(slab, l, piece, &o);
    assert_int_equal(o.end % 512, 0);
    assemble(slab, &o, image);
    memset(place, 0, sizeof place);
    assert_ok(sth_transfer_decode(o.segments, o.segment_count, image, place));
    assert_ok(sth_quant_decode(slab, l, STH_DTYPE_F32, wanted, 1));
    assert_memory_equal(place + 16, wanted, l->out * l->in * sizeof *wanted);
}

static void segments_expand_to_what_decoding_gives(void **state) {
    static const uint64_t pieces[] = {1, 100, 1 << 20};
    int layers = 0;
    for (int format = 0; format < STH_QUANT_LOSSLESS; format++) { /* that is pack/lossless */
        sth_quant *slab = NULL;
        slab_make(&f, (sth_quant_format)format);
        assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
        for (uint64_t i = 0; i < sth_quant_layer_count(slab); i++) {
            const sth_quant_layer *l = sth_quant_get_layer(slab, i);
            if (sth_quant_unfit(l)) continue;
            layers++;
            for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) compare(slab, l, p * 512, pieces[p]);
        }
        sth_quant_close(slab);
        assert_int_equal(temp_teardown(state), 0);
        assert_int_equal(temp_setup(state), 0);
    }
    assert_true(layers >= 6);
}

static void the_largest_piece_of_an_encoding_is_known_before(void **state) {
    static sth_segment all[4096];
    (void)state;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        sth_segment whole = {.encoding = (sth_transfer)(seed % 4), .dtype = STH_DTYPE_BF16,
                             .rows = 1 + sthi_random64(seed, 0) % 300, .cols = 1 + sthi_random64(seed, 1) % 3000};
        if (whole.encoding == STH_TRANSFER_VERBATIM) whole.cols *= whole.rows, whole.rows = 1;
        uint64_t piece = 512 + sthi_random64(seed, 2) % 20000, packed, most = 0;
        uint32_t count;
        assert_ok(sth_transfer_layout(&whole, 1, piece, all, 4096, &count, &packed));
        for (uint32_t i = 0; i < count; i++) {
            uint64_t bytes = (i + 1 < count ? all[i + 1].codes : packed) - all[i].codes;
            if (bytes > most) most = bytes;
        }
        assert_int_equal(sthi_segment_piece(&whole, piece), most);
    }
}

/* Two rows of 40 bytes go together, so that each segment begins at a multiple of 16 in the
 * place. */
static void a_piece_holds_as_few_rows_as_can_be(void **state) {
    sth_quant *slab = NULL;
    static laid_out o;
    slab_make(&f, STH_QUANT_V2);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    lay_out(slab, sth_quant_find(slab, "a"), 0, 1, &o);
    assert_int_equal(o.segment_count, 2);
    assert_int_equal(o.segments[0].rows + o.segments[1].rows, 3);
    assert_int_equal(o.segments[1].place_offset, 16 + o.segments[0].rows * 10 * 4);
    assert_true(o.segments[1].codes > o.segments[0].zeros && o.segments[1].zeros < o.end);
    lay_out(slab, sth_quant_find(slab, "a"), 0, 1 << 20, &o);
    assert_int_equal(o.segment_count, 1);
    assert_int_equal(o.range_count, 3); /* codes, scales, zero points */
    sth_quant_close(slab);
}

/* Zero points of 0 stay where they are. */
static void parts_that_change_nothing_do_not_cross(void **state) {
    sth_quant *slab = NULL;
    static laid_out o;
    slab_make(&f, STH_QUANT_V2);
    memset(slab_bytes(&f, "a.zero_point"), 0, 12);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    lay_out(slab, sth_quant_find(slab, "a"), 0, 1 << 20, &o);
    assert_int_equal(o.range_count, 2);
    assert_true(o.segments[0].zeros == STH_TRANSFER_NONE);
    compare(slab, sth_quant_find(slab, "a"), 0, 1 << 20);
    sth_quant_close(slab);
}

static void layers_that_no_kernel_expands_say_why(void **state) {
    sth_quant *slab = NULL;
    uint32_t segments = 0, ranges = 0;
    uint64_t end;
    slab_make(&f, STH_QUANT_SVDQUANT);
    slab_edit(&f, "\"group\":16", "\"group\":8");
    slab_edit(&f, "\"shape\":[2,24],\"data_offsets\":[384,480]", "\"shape\":[4,24],\"data_offsets\":[384,576]");
    slab_edit(&f, "\"shape\":[32,5],\"data_offsets\":[480,800]", "\"shape\":[32,4],\"data_offsets\":[576,832]");
    slab_edit(&f, "\"shape\":[24,5],\"data_offsets\":[800,1040]}",
              "\"shape\":[24,4],\"data_offsets\":[832,1024]},"
              "\"rest\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[1024,1040]}");
    slab_edit(&f, "\"rank\":5", "\"rank\":4");
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    const sth_quant_layer *l = sth_quant_get_layer(slab, 0);
    assert_int_equal(l->group, 8);
    assert_non_null(strstr(sth_quant_unfit(l), "no multiple of 16"));
    assert_status(sth_quant_segments(slab, l, STH_DTYPE_F32, 0, 0, 4096, NULL, &segments, NULL, &ranges, &end),
                  STH_UNSUPPORTED);
    sth_quant_close(slab);
}

static void numbers_that_are_none_are_refused_when_segments_are_counted(void **state) {
    sth_quant *slab = NULL;
    uint32_t segments = 0, ranges = 0, infinity = 0x7f800000;
    uint64_t end;
    slab_make(&f, STH_QUANT_V2);
    memcpy(slab_bytes(&f, "a.zero_point") + 8, &infinity, sizeof infinity);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    assert_status(sth_quant_segments(slab, sth_quant_find(slab, "a"), STH_DTYPE_F32, 0, 0, 4096, NULL, &segments, NULL,
                                     &ranges, &end),
                  STH_CORRUPT_DATA);
    assert_non_null(strstr(sth_last_error()->message, "a.zero_point"));
    sth_quant_close(slab);
}

static void too_little_room_is_the_callers_mistake(void **state) {
    sth_quant *slab = NULL;
    static laid_out o;
    slab_make(&f, STH_QUANT_V2);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    const sth_quant_layer *l = sth_quant_find(slab, "a");
    lay_out(slab, l, 0, 1, &o);
    uint32_t segments = o.segment_count, ranges = o.range_count - 1;
    assert_status(sth_quant_segments(slab, l, STH_DTYPE_F32, 16, 0, 1, o.segments, &segments, o.ranges, &ranges,
                                     &o.end),
                  STH_INVALID_ARGUMENT);
    segments = o.segment_count - 1, ranges = o.range_count;
    assert_status(sth_quant_segments(slab, l, STH_DTYPE_F32, 16, 0, 1, o.segments, &segments, o.ranges, &ranges,
                                     &o.end),
                  STH_INVALID_ARGUMENT);
    sth_quant_close(slab);
}

static void every_allocation_and_read_may_fail(void **state) {
    sth_quant *slab = NULL;
    slab_make(&f, STH_QUANT_V3_NVFP4);
    assert_ok(sth_quant_open(slab_write(&f, *state), &slab));
    const sth_quant_layer *l = sth_quant_get_layer(slab, 0);
    static const sthi_fault_kind kinds[] = {STHI_FAULT_ALLOC, STHI_FAULT_READ};
    for (size_t k = 0; k < 2; k++)
        for (uint64_t n = 1, hit = 1; hit; n++) {
            long live = sthi_alloc_live();
            uint32_t segments = 0, ranges = 0;
            uint64_t end;
            sthi_fault_arm(kinds[k], n, false);
            sth_status status =
                sth_quant_segments(slab, l, STH_DTYPE_F32, 0, 0, 4096, NULL, &segments, NULL, &ranges, &end);
            hit = sthi_fault_seen(kinds[k]) >= n;
            sthi_fault_disarm_all();
            assert_status(status, !hit ? STH_OK : k ? STH_IO : STH_OUT_OF_HOST_MEMORY);
            assert_int_equal(sthi_alloc_live(), live);
            assert_true(hit || n > 3);
        }
    sth_quant_close(slab);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(segments_expand_to_what_decoding_gives, temp_setup, temp_teardown),
        cmocka_unit_test(the_largest_piece_of_an_encoding_is_known_before),
        cmocka_unit_test_setup_teardown(a_piece_holds_as_few_rows_as_can_be, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(parts_that_change_nothing_do_not_cross, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(layers_that_no_kernel_expands_say_why, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(numbers_that_are_none_are_refused_when_segments_are_counted, temp_setup,
                                        temp_teardown),
        cmocka_unit_test_setup_teardown(too_little_room_is_the_callers_mistake, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(every_allocation_and_read_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
