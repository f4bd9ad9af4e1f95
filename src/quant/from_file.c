/* A layer of a slab as a device expands it: segments, and the ranges of the file that their packed image is made of.
 *
 *   file:    | codes, row by row |  ...  | scales |  ...  | zero points, or up | ... | down | smooth |
 *   image:   | codes of some rows | their scales | their zero points | codes of the next rows | ...
 *            | codes of some rows | their scales | their up | down | smooth | codes of the next rows | ... | down | ...
 *
 * Zero points that are all 0 and smooth factors that are all 1, as writers make them, are left where they are: q - 0 is
 * q. What is checked in decoding is checked here, when segments are counted. No state; no locks. */
#include "quant/from_file.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "quant/decoder.h"
#include "quant/four_bits.h"
#include "quant/lossless_file.h"
#include "quant/segment.h"
#include "store/quant.h"

enum { BF16_BYTES = 2 };

/* ---- which */

static sth_segment whole_eight(const sth_quant_layer *l) {
    return (sth_segment){.encoding = STH_TRANSFER_INT8, .rows = l->out, .cols = l->in, .stride = l->padded_in,
                         .smooth = STH_TRANSFER_NONE};
}

/* Sizes beyond those of the segment are cut off, not wrapped: they are found to be impossible. */
static uint32_t to_u32(uint64_t n) { return (uint32_t)sthi_min_u64(n, UINT32_MAX); }

static sth_segment whole_four(const sth_quant_layer *l) {
    bool nvfp4 = l->encoding == STH_ENCODING_NVFP4_HADAMARD;
    return (sth_segment){.encoding = nvfp4 ? STH_TRANSFER_FILE_NVFP4 : STH_TRANSFER_FILE_INT4, .rows = l->out,
                         .cols = l->in, .stride = l->in / 2, .pitch = nvfp4 ? 0 : 2 * l->out, .rank = to_u32(l->rank),
                         .group = to_u32(l->group), .hadamard = to_u32(l->hadamard), .factor = 1,
                         .zeros = STH_TRANSFER_NONE};
}

static const char *four_unfit(const sth_quant_layer *l) {
    sth_segment whole = whole_four(l);
    sthi_four_bytes bytes;
    if (l->group % STHI_FOUR_TOGETHER) return "its groups of inputs that share a scale are no multiple of 16";
    if (l->hadamard > STHI_FOUR_HADAMARD) return "it is rotated by a Hadamard matrix of more than 8192";
    if (l->out > UINT64_MAX / 4 || sthi_four_wrong(&whole, &bytes)) return "its sizes are beyond those of a kernel";
    uint64_t all = bytes.codes + bytes.scales + bytes.up + bytes.down + bytes.smooth;
    return all / l->out >= BF16_BYTES * l->in ? "its low-rank factors are as large as the weight" : NULL;
}

const char *sthi_quant_unfit(const sth_quant_layer *l) {
    bool any = l->encoding == STH_ENCODING_INT8_ROW || l->encoding == STH_ENCODING_LOSSLESS;
    return any ? NULL : four_unfit(l);
}

/* ---- numbers that are looked at */

/* Reads a part of numbers; *out is freed with sthi_free, NULL where the layer has no such part. */
static sth_status read_part(sth_quant *slab, const sth_quant_layer *l, sth_quant_part part, uint8_t **out) {
    const sth_tensor_info *t = l->parts[part];
    *out = NULL;
    if (!t) return STH_OK;
    uint8_t *bytes = sthi_alloc(t->bytes);
    if (!bytes) return sthi_no_memory(l->name, "the scales of layer '%.160s'", l->name);
    sth_status status = sthi_checkpoint_read(slab->checkpoint, t->file, t->offset, t->bytes, bytes);
    if (status == STH_OK) status = sthi_quant_check_part(slab->checkpoint, l, part, bytes);
    if (status == STH_OK) *out = bytes;
    else sthi_free(bytes);
    return status;
}

static sth_status check_numbers(sth_quant *slab, const sth_quant_layer *l) {
    static const sth_quant_part parts[] = {STH_QUANT_PART_SCALES, STH_QUANT_PART_LORA_UP, STH_QUANT_PART_LORA_DOWN};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint8_t *bytes;
        STHI_TRY(read_part(slab, l, parts[i], &bytes));
        sthi_free(bytes);
    }
    return STH_OK;
}

/* Whether a part has a number that is another one than `usual`. */
static sth_status differs(sth_quant *slab, const sth_quant_layer *l, sth_quant_part part, float usual, bool *out) {
    uint8_t *bytes;
    *out = false;
    STHI_TRY(read_part(slab, l, part, &bytes));
    for (uint64_t at = 0; bytes && !*out && at < l->parts[part]->bytes;) {
        float x;
        uint16_t h;
        if (l->parts[part]->dtype == STH_DTYPE_F32) {
            memcpy(&x, bytes + at, sizeof x);
            at += sizeof x;
        } else {
            memcpy(&h, bytes + at, sizeof h);
            x = sthi_from_bf16(h);
            at += sizeof h;
        }
        *out = x != usual;
    }
    sthi_free(bytes);
    return STH_OK;
}

static sth_status read_factor(sth_quant *slab, const sth_quant_layer *l, float *out) {
    uint8_t *bytes;
    STHI_TRY(read_part(slab, l, STH_QUANT_PART_GLOBAL_SCALE, &bytes));
    if (bytes) memcpy(out, bytes, sizeof *out);
    sthi_free(bytes);
    return STH_OK;
}

/* The layer as one segment, with the parts that it needs. */
static sth_status describe(sth_quant *slab, const sth_quant_layer *l, sth_segment *out) {
    bool zeros, smooth;
    STHI_TRY(differs(slab, l, STH_QUANT_PART_ZERO_POINTS, 0, &zeros));
    STHI_TRY(differs(slab, l, STH_QUANT_PART_SMOOTH, 1, &smooth));
    *out = l->encoding == STH_ENCODING_INT8_ROW ? whole_eight(l) : whole_four(l);
    out->zeros = zeros ? 0 : STH_TRANSFER_NONE;
    out->smooth = smooth ? 0 : STH_TRANSFER_NONE;
    return read_factor(slab, l, &out->factor);
}

/* ---- ranges */

typedef struct ranges {
    const sth_quant_layer *layer;
    sth_file_range *out; /* NULL: they are counted */
    uint64_t count, room;
} ranges;

/* `bytes` of a part from byte `from` on. */
static void add(ranges *r, sth_quant_part part, uint64_t from, uint64_t bytes, uint64_t to) {
    const sth_tensor_info *t = r->layer->parts[part];
    if (r->out && r->count < r->room)
        r->out[r->count] = (sth_file_range){.file = t->file, .file_offset = t->offset + from, .bytes = bytes,
                                            .place_offset = to};
    r->count++;
}

static void add_scales(ranges *r, const sth_segment *s, uint64_t row) {
    const sth_quant_layer *l = r->layer;
    uint64_t groups = l->in / l->group;
    if (s->encoding == STH_TRANSFER_INT8) {
        add(r, STH_QUANT_PART_SCALES, 4 * row, 4 * s->rows, s->scales);
    } else if (s->encoding == STH_TRANSFER_FILE_NVFP4) {
        add(r, STH_QUANT_PART_SCALES, sthi_tiles_bytes(row, l->in), sthi_tiles_bytes(s->rows, l->in), s->scales);
    } else if (s->rows == l->out) {
        add(r, STH_QUANT_PART_SCALES, 0, groups * s->pitch, s->scales);
    } else {
        for (uint64_t g = 0; g < groups; g++)
            add(r, STH_QUANT_PART_SCALES, 2 * (g * l->out + row), 2 * s->rows, s->scales + g * s->pitch);
    }
}

static void add_segment(ranges *r, const sth_segment *s, uint64_t row) {
    add(r, STH_QUANT_PART_CODES, row * s->stride, s->rows * s->stride, s->codes);
    add_scales(r, s, row);
    if (s->zeros != STH_TRANSFER_NONE) add(r, STH_QUANT_PART_ZERO_POINTS, 4 * row, 4 * s->rows, s->zeros);
    if (!sthi_is_four_bits((int)s->encoding)) return;
    if (s->rank) {
        add(r, STH_QUANT_PART_LORA_UP, 2 * s->rank * row, 2 * s->rank * s->rows, s->up);
        add(r, STH_QUANT_PART_LORA_DOWN, 0, 2 * s->rank * s->cols, s->down);
    }
    if (s->smooth != STH_TRANSFER_NONE) add(r, STH_QUANT_PART_SMOOTH, 0, 2 * s->cols, s->smooth);
}

/* ---- the whole */

static sth_status lay_out(const sth_segment *whole, uint64_t packed_offset, uint64_t piece_bytes, sth_segment *segments,
                          uint32_t *inout_count, uint64_t *out_end, ranges *r) {
    sth_segment *all = segments;
    uint32_t count;
    STHI_TRY(sthi_segments_of_rows(whole, piece_bytes, packed_offset, segments, *inout_count, &count, out_end));
    if (!all && !(all = sthi_zalloc(count, sizeof *all)))
        return sthi_no_memory(r->layer->name, "the %u segments of layer '%.160s'", count, r->layer->name);
    sth_status rc =
        segments ? STH_OK : sthi_segments_of_rows(whole, piece_bytes, packed_offset, all, count, &count, out_end);
    uint64_t row = 0;
    for (uint32_t i = 0; rc == STH_OK && i < count; row += all[i++].rows) add_segment(r, &all[i], row);
    if (!segments) sthi_free(all);
    *inout_count = count;
    return rc;
}

static sth_status check_fit(const sth_quant *slab, const sth_quant_layer *l) {
    const char *unfit = sthi_quant_unfit(l);
    if (!unfit) return STH_OK;
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, l->name, "%.300s: layer '%.160s' cannot be expanded on a device: %s",
                     slab->path, l->name, unfit);
}

sth_status sthi_quant_segment(sth_quant *slab, const sth_quant_layer *l, sth_dtype dtype, sth_segment *out) {
    if (l->encoding == STH_ENCODING_LOSSLESS) return sthi_lossless_segment(slab, l, dtype, out);
    STHI_TRY(check_fit(slab, l));
    STHI_TRY(describe(slab, l, out));
    out->dtype = dtype;
    return STH_OK;
}

sth_status sthi_quant_segments(sth_quant *slab, const sth_quant_layer *l, sth_dtype dtype, uint64_t place_offset,
                               uint64_t packed_offset, uint64_t piece_bytes, sth_segment *segments,
                               uint32_t *inout_segments, sth_file_range *out_ranges, uint32_t *inout_ranges,
                               uint64_t *out_packed_end) {
    sth_segment whole;
    uint32_t count = *inout_segments;
    if (l->encoding == STH_ENCODING_LOSSLESS)
        return sthi_lossless_segments(slab, l, dtype, place_offset, packed_offset, segments, inout_segments, out_ranges,
                                      inout_ranges, out_packed_end);
    STHI_TRY(check_fit(slab, l));
    if (!segments) STHI_TRY(check_numbers(slab, l));
    STHI_TRY(describe(slab, l, &whole));
    whole.dtype = dtype;
    whole.place_offset = place_offset;
    ranges r = {.layer = l, .out = segments ? out_ranges : NULL, .room = *inout_ranges};
    STHI_TRY(lay_out(&whole, packed_offset, piece_bytes, segments, &count, out_packed_end, &r));
    if (r.count > UINT32_MAX || (segments && (!out_ranges || r.count > r.room)))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, l->name, "layer '%.160s': no room for its %u segments' ranges",
                         l->name, count);
    *inout_segments = count;
    *inout_ranges = (uint32_t)r.count;
    return STH_OK;
}
