/* Exported functions of stagehand/quant.h: checks arguments, then calls src/store and src/quant. */
#include "stagehand/quant.h"

#include "base/error.h"
#include "quant/decoder.h"
#include "quant/from_file.h"
#include "store/quant.h"

const char *sth_quant_format_name(sth_quant_format format) { return sthi_quant_format_name(format); }

const char *sth_encoding_name(sth_encoding encoding) { return sthi_encoding_name(encoding); }

const char *sth_quant_part_name(sth_quant_part part) { return sthi_quant_part_name(part); }

static sth_status check_path(const char *path, sth_quant **out_slab) {
    if (path && *path && out_slab) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                     "opening a slab needs a path that is not empty and an address for the result");
}

sth_status sth_quant_open(const char *path, sth_quant **out_slab) {
    STHI_TRY(check_path(path, out_slab));
    return sthi_quant_open(path, out_slab);
}

sth_status sth_quant_open_if_slab(const char *path, sth_quant **out_slab) {
    STHI_TRY(check_path(path, out_slab));
    return sthi_quant_open_if_slab(path, out_slab);
}

void sth_quant_close(sth_quant *slab) { sthi_quant_close(slab); }

sth_quant_format sth_quant_get_format(const sth_quant *slab) { return slab ? slab->format : STH_QUANT_FORMAT_COUNT; }

uint64_t sth_quant_layer_count(const sth_quant *slab) { return slab ? slab->count : 0; }

const sth_quant_layer *sth_quant_get_layer(const sth_quant *slab, uint64_t i) {
    return slab && i < slab->count ? &slab->layers[i] : NULL;
}

const sth_quant_layer *sth_quant_find(const sth_quant *slab, const char *name) {
    return slab && name ? sthi_quant_find(slab, name) : NULL;
}

uint64_t sth_quant_plain_count(const sth_quant *slab) { return slab ? slab->plain_count : 0; }

const sth_tensor_info *sth_quant_plain(const sth_quant *slab, uint64_t i) {
    return slab && i < slab->plain_count ? slab->plain[i] : NULL;
}

sth_checkpoint *sth_quant_checkpoint(sth_quant *slab) { return slab ? slab->checkpoint : NULL; }

static sth_status check(const sth_quant *slab, const sth_quant_layer *layer, const void *out) {
    if (slab && layer && out && sthi_quant_has(slab, layer)) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                     "a layer needs a slab that it is of, and memory for the result");
}

sth_status sth_quant_decode(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, void *out,
                           uint32_t threads) {
    STHI_TRY(check(slab, layer, out));
    return sthi_quant_decode(slab, layer, dtype, out, threads);
}

sth_status sth_quant_decode_parts(const sth_quant *slab, const sth_quant_layer *layer,
                                 const void *const parts[STH_QUANT_PART_COUNT], sth_dtype dtype, void *out,
                                 uint32_t threads) {
    STHI_TRY(check(slab, layer, out));
    for (int p = 0; p < STH_QUANT_PART_COUNT; p++)
        if (!parts || (layer->parts[p] && p != STH_QUANT_PART_BIAS && !parts[p]))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, layer->name, "layer '%.160s': its %s are not given",
                             layer->name, sthi_quant_part_name((sth_quant_part)p));
    return sthi_quant_decode_parts(slab, layer, parts, dtype, out, threads);
}

const char *sth_quant_unfit(const sth_quant_layer *layer) {
    return layer ? sthi_quant_unfit(layer) : "there is no such layer";
}

sth_status sth_quant_segment(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, sth_segment *out_segment) {
    STHI_TRY(check(slab, layer, out_segment));
    return sthi_quant_segment(slab, layer, dtype, out_segment);
}

sth_status sth_quant_segments(sth_quant *slab, const sth_quant_layer *layer, sth_dtype dtype, uint64_t place_offset,
                              uint64_t packed_offset, uint64_t piece_bytes, sth_segment *segments,
                              uint32_t *inout_segments, sth_file_range *ranges, uint32_t *inout_ranges,
                              uint64_t *out_packed_end) {
    STHI_TRY(check(slab, layer, out_packed_end));
    if (!inout_segments || !inout_ranges || packed_offset % 512)
        return sthi_fail(
            STH_INVALID_ARGUMENT, NULL, 0, layer->name,
            "the segments of a layer need addresses for their counts, and an offset that is a multiple of 512");
    return sthi_quant_segments(slab, layer, dtype, place_offset, packed_offset, piece_bytes, segments, inout_segments,
                               ranges, inout_ranges, out_packed_end);
}
