/* A layer of a slab as a device expands it: segments, and the ranges of the file that their packed image is made of.
 *
 *   file:    | codes, row by row |  ...  | scales |  ...  | zero points |
 *   image:   | codes of some rows | their scales | their zero points | codes of the next rows | ...
 *
 * Zero points that are all 0, as writers make them, are left where they are: q - 0 is q. No state; no locks. */
#include "quant/from_file.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "quant/decoder.h"
#include "quant/segment.h"
#include "store/quant.h"

enum { VECTOR = 16 };

const char *sthi_quant_unfit(const sth_quant_layer *l) {
    if (l->hadamard) return "it is stored rotated by a Hadamard matrix, which the host undoes";
    if (l->rank) return "it is stored with low-rank factors, which the host multiplies";
    if (l->encoding != STH_ENCODING_INT8_ROW) return "its scales are stored by group of inputs, not by row";
    if (l->padded_in % VECTOR) return "the rows of its codes are no multiple of 16 bytes";
    return NULL;
}

/* Reads a part of numbers by row; *out is freed with sthi_free. */
static sth_status read_part(sth_quant *slab, const sth_quant_layer *l, sth_quant_part part, uint8_t **out) {
    const sth_tensor_info *t = l->parts[part];
    uint8_t *bytes = sthi_alloc(t->bytes);
    if (!bytes) return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, l->name, "layer '%.160s': no memory for its scales", l->name);
    sth_status status = sthi_checkpoint_read(slab->checkpoint, t->file, t->offset, t->bytes, bytes);
    if (status == STH_OK) status = sthi_quant_check_finite(slab->checkpoint, l, part, bytes);
    if (status == STH_OK) *out = bytes;
    else sthi_free(bytes);
    return status;
}

/* Checks the numbers of all rows. */
static sth_status look_at_numbers(sth_quant *slab, const sth_quant_layer *l, bool *out_zeros) {
    uint8_t *bytes = NULL;
    STHI_TRY(read_part(slab, l, STH_QUANT_PART_SCALES, &bytes));
    sthi_free(bytes);
    *out_zeros = false;
    STHI_TRY(read_part(slab, l, STH_QUANT_PART_ZERO_POINTS, &bytes));
    for (uint64_t row = 0; row < l->out && !*out_zeros; row++) {
        float zero;
        memcpy(&zero, bytes + 4 * row, sizeof zero);
        *out_zeros = zero != 0;
    }
    sthi_free(bytes);
    return STH_OK;
}

static sth_file_range range_of(const sth_tensor_info *t, uint64_t row, uint64_t rows, uint64_t row_bytes,
                               uint64_t packed_offset) {
    return (sth_file_range){.file = t->file, .file_offset = t->offset + row * row_bytes, .bytes = rows * row_bytes,
                            .place_offset = packed_offset};
}

static void add_ranges(const sth_quant_layer *l, const sth_segment *s, uint32_t count, sth_file_range *out) {
    uint64_t row = 0;
    for (uint32_t i = 0; i < count; row += s[i++].rows) {
        *out++ = range_of(l->parts[STH_QUANT_PART_CODES], row, s[i].rows, l->padded_in, s[i].codes);
        *out++ = range_of(l->parts[STH_QUANT_PART_SCALES], row, s[i].rows, 4, s[i].scales);
        if (s[i].zeros != STH_TRANSFER_NONE)
            *out++ = range_of(l->parts[STH_QUANT_PART_ZERO_POINTS], row, s[i].rows, 4, s[i].zeros);
    }
}

sth_status sthi_quant_segments(sth_quant *slab, const sth_quant_layer *l, sth_dtype dtype, uint64_t place_offset,
                               uint64_t packed_offset, uint64_t piece_bytes, sth_segment *segments,
                               uint32_t *inout_segments, sth_file_range *ranges, uint32_t *inout_ranges,
                               uint64_t *out_packed_end) {
    const char *unfit = sthi_quant_unfit(l);
    if (unfit)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, l->name, "%.300s: layer '%.160s' cannot be expanded on a device: %s",
                         slab->path, l->name, unfit);
    sth_segment whole = {.encoding = STH_TRANSFER_INT8, .dtype = dtype, .place_offset = place_offset, .rows = l->out,
                         .cols = l->in, .stride = l->padded_in};
    bool zeros;
    uint32_t count;
    STHI_TRY(look_at_numbers(slab, l, &zeros));
    STHI_TRY(sthi_segments_of_rows(&whole, zeros, piece_bytes, packed_offset, segments, *inout_segments, &count,
                                   out_packed_end));
    uint32_t each = zeros ? 3 : 2;
    if (count > UINT32_MAX / 3 || (segments && (!ranges || *inout_ranges < each * count)))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, l->name, "layer '%.160s': no room for its %u segments' ranges",
                         l->name, count);
    if (segments) add_ranges(l, segments, count, ranges);
    *inout_segments = count;
    *inout_ranges = each * count;
    return STH_OK;
}
