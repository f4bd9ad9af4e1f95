/* Tensors of a losslessly packed file: read and unpacked by threads, a piece each, or described so that a device
 * expands them. The lengths of pieces were compared with the tensors when the file was opened; what is in them is
 * checked here, before it is unpacked. What streams to a device is not read by the host at all: of each piece the
 * table and the starts are checked when its segments are made, and expanding the rest reads nothing outside, whatever
 * it is. No locks. */
#include "quant/lossless_file.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/workers.h"
#include "quant/lossless.h"
#include "store/dtype.h"
#include "store/quant.h"

typedef unsigned long long ull;

static sthi_lossless_form form_of(const sth_quant_layer *l) { return sthi_lossless_form_of((int)l->tensor->dtype); }

uint64_t sthi_lossless_piece_elements(const sth_quant_layer *l, uint32_t piece) {
    uint64_t together = sthi_lossless_together(form_of(l));
    return sthi_min_u64(together, l->in - piece * together);
}

uint64_t sthi_lossless_piece_bytes(const sth_quant_layer *l, uint32_t piece) {
    return sthi_lossless_piece_elements(l, piece) * (form_of(l).bits / 8);
}

uint64_t sthi_lossless_piece_offset(const sth_quant_layer *l, uint32_t piece) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < piece; i++) sum += l->lengths[i];
    return sum;
}

static uint32_t largest(const sth_quant_layer *l) {
    uint32_t found = 0;
    for (uint32_t i = 1; i < l->pieces; i++)
        if (l->lengths[i] > l->lengths[found]) found = i;
    return found;
}

uint64_t sthi_lossless_piece_most(const sth_quant_layer *l) { return l->lengths[largest(l)]; }

/* ---- values */

static sth_status fail_at(const sth_quant *slab, const sth_quant_layer *l, uint64_t at, const char *wrong) {
    const sth_tensor_info *t = l->parts[STH_QUANT_PART_CODES];
    const char *path = slab->checkpoint->files[t->file].path;
    return sthi_fail(STH_CORRUPT_DATA, "lossless", 0, path, "%.300s: tensor '%.160s' at byte %llu: its packed piece %s",
                     path, t->name, (ull)(t->offset + at), wrong);
}

static sth_status unpack(const sth_quant *slab, const sth_quant_layer *l, uint32_t piece, uint64_t offset,
                         const uint8_t *packed, void *out) {
    uint64_t elements = sthi_lossless_piece_elements(l, piece), at = 0;
    const char *wrong = sthi_lossless_wrong(l->tensor->dtype, packed, l->lengths[piece], elements, &at);
    if (wrong) return fail_at(slab, l, offset + at, wrong);
    sthi_lossless_unpack(l->tensor->dtype, packed, l->lengths[piece], elements, 0, elements, out);
    return STH_OK;
}

sth_status sthi_lossless_piece_read(const sth_quant *slab, const sth_quant_layer *l, uint32_t piece, uint64_t offset,
                                    uint8_t *packed, void *out_values) {
    const sth_tensor_info *t = l->parts[STH_QUANT_PART_CODES];
    STHI_TRY(sthi_checkpoint_read(slab->checkpoint, t->file, t->offset + offset, l->lengths[piece], packed));
    return unpack(slab, l, piece, offset, packed, out_values);
}

typedef struct decoding {
    sthi_job job;
    const sth_quant *slab;
    const sth_quant_layer *layer;
    const uint8_t *packed;
    uint8_t *out;
} decoding;

static sth_status run_piece(sthi_job *job, uint64_t i, void *scratch) {
    const decoding *d = (const decoding *)job;
    uint32_t piece = (uint32_t)i;
    uint64_t offset = sthi_lossless_piece_offset(d->layer, piece);
    uint8_t *out = d->out + i * STHI_LOSSLESS_PIECE;
    if (d->packed) return unpack(d->slab, d->layer, piece, offset, d->packed + offset, out);
    return sthi_lossless_piece_read(d->slab, d->layer, piece, offset, scratch, out);
}

static sth_status check_dtype(const sth_quant *slab, const sth_quant_layer *l, sth_dtype dtype) {
    if (dtype == l->tensor->dtype) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, l->name,
                     "%.300s: tensor '%.160s' was packed as %s, bit for bit, and does not come back as %s; ask for "
                     "the dtype it has", slab->path, l->name, sthi_dtype_name(l->tensor->dtype),
                     sthi_dtype_name(dtype));
}

sth_status sthi_lossless_decode(const sth_quant *slab, const sth_quant_layer *l, const uint8_t *packed,
                                sth_dtype dtype, void *out, uint32_t threads) {
    STHI_TRY(check_dtype(slab, l, dtype));
    decoding d = {.job = {.run = run_piece, .pieces = l->pieces}, .slab = slab, .layer = l, .packed = packed,
                  .out = out};
    size_t scratch = packed ? 0 : (size_t)sthi_lossless_piece_most(l);
    return sthi_workers_once("decoder", "sth-decode", threads, scratch, &d.job);
}

/* ---- for a device */

static sth_segment segment_of(const sth_quant_layer *l, uint32_t piece) {
    return (sth_segment){.encoding = STH_TRANSFER_LOSSLESS, .dtype = l->tensor->dtype, .rows = 1,
                         .cols = sthi_lossless_piece_elements(l, piece), .stride = l->lengths[piece],
                         .scales = STH_TRANSFER_NONE, .zeros = STH_TRANSFER_NONE, .up = STH_TRANSFER_NONE,
                         .down = STH_TRANSFER_NONE, .smooth = STH_TRANSFER_NONE};
}

sth_status sthi_lossless_segment(const sth_quant *slab, const sth_quant_layer *l, sth_dtype dtype, sth_segment *out) {
    STHI_TRY(check_dtype(slab, l, dtype));
    *out = segment_of(l, largest(l));
    return STH_OK;
}

/* The table and the starts of every piece. */
static sth_status check_tables(const sth_quant *slab, const sth_quant_layer *l) {
    const sth_tensor_info *t = l->parts[STH_QUANT_PART_CODES];
    const sthi_lossless_form form = form_of(l);
    uint64_t most = sthi_lossless_piece_elements(l, 0), offset = 0;
    uint8_t *bytes = sthi_alloc((size_t)(sthi_lossless_fixed(form, most) -
                                         sthi_lossless_tiles(most) * sthi_lossless_record(form)));
    if (!bytes) return sthi_no_memory(l->name, "the tables of tensor '%.160s'", l->name);
    sth_status status = STH_OK;
    for (uint32_t i = 0; status == STH_OK && i < l->pieces; offset += l->lengths[i++]) {
        uint64_t elements = sthi_lossless_piece_elements(l, i), at = 0;
        uint64_t begin = sthi_lossless_tiles(elements) * sthi_lossless_record(form);
        status = sthi_checkpoint_read(slab->checkpoint, t->file, t->offset + offset + begin,
                                      sthi_lossless_fixed(form, elements) - begin, bytes);
        const char *wrong =
            status == STH_OK ? sthi_lossless_wrong_table(l->tensor->dtype, bytes, l->lengths[i], elements, &at) : NULL;
        if (wrong) status = fail_at(slab, l, offset + begin + at, wrong);
    }
    sthi_free(bytes);
    return status;
}

sth_status sthi_lossless_segments(sth_quant *slab, const sth_quant_layer *l, sth_dtype dtype, uint64_t place_offset,
                                  uint64_t packed_offset, sth_segment *segments, uint32_t *inout_segments,
                                  sth_file_range *ranges, uint32_t *inout_ranges, uint64_t *out_packed_end) {
    const sth_tensor_info *t = l->parts[STH_QUANT_PART_CODES];
    uint64_t end;
    STHI_TRY(check_dtype(slab, l, dtype));
    if (packed_offset % STHI_ALIGN || !sthi_add_u64(packed_offset, t->bytes, &end))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, l->name, "tensor '%.160s': packed_offset is no multiple of %u",
                         l->name, STHI_ALIGN);
    if (segments && (*inout_segments < l->pieces || !ranges || !*inout_ranges))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, l->name, "tensor '%.160s': no room for its %u segments",
                         l->name, l->pieces);
    if (!segments) STHI_TRY(check_tables(slab, l));
    for (uint32_t i = 0; segments && i < l->pieces; packed_offset += l->lengths[i++]) {
        segments[i] = segment_of(l, i);
        segments[i].place_offset = place_offset + (uint64_t)i * STHI_LOSSLESS_PIECE;
        segments[i].codes = packed_offset;
    }
    if (segments)
        ranges[0] = (sth_file_range){.file = t->file, .file_offset = t->offset, .bytes = t->bytes,
                                     .place_offset = end - t->bytes};
    *inout_segments = l->pieces;
    *inout_ranges = 1;
    *out_packed_end = end;
    return STH_OK;
}
