/* The reference decoder. What it computes, in this order, is the definition of every encoding:
 *
 *   int8          w = ((float)q - zero point) * s
 *   int4, NVFP4   v = q * s, or (magnitude * s) * g with the sign; then, where there is an H, v as float64 times H,
 *                 rounded to float32; then w = v + sum over r = 0, 1, ... of up[r] * down[r], the sum in float32;
 *                 then, where smooth is not 1, w / smooth; what is not a number is the one with bits 0x7fc00000
 *
 * No product and sum are contracted into one rounding: -std=c17 switches that off for GCC, the pragma for clang. Rows
 * depend on nothing but their own codes and scales, so that any number of threads gives the same bits. No locks. */
#include "quant/decoder.h"

#include <math.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "quant/hadamard.h"
#include "quant/nvfp4.h"
#include "quant/rank_row.h"
#include "store/checkpoint.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

typedef unsigned long long ull;

/* Parts may lie at any address: a file's tensors are not aligned to their elements. */
static float f32_at(const void *p, uint64_t i) {
    float x;
    memcpy(&x, (const char *)p + 4 * i, sizeof x);
    return x;
}
static float bf16_at(const void *p, uint64_t i) {
    uint16_t h;
    memcpy(&h, (const char *)p + 2 * i, sizeof h);
    return sthi_from_bf16(h);
}

/* ---- checks ---- */

static sth_status fail_value(const sth_checkpoint *c, const sth_tensor_info *t, uint64_t byte, const char *what) {
    const char *path = c->files[t->file].path;
    return sthi_fail(STH_CORRUPT_DATA, "slab", 0, path, "%.300s: tensor '%.160s': byte %llu: %s", path, t->name,
                     (ull)(t->offset + byte), what);
}

static sth_status check_finite(const sth_checkpoint *c, const sth_quant_layer *l, sth_quant_part part,
                               const void *bytes) {
    const sth_tensor_info *t = l->parts[part];
    uint64_t each = t->dtype == STH_DTYPE_F32 ? 4 : 2;
    for (uint64_t i = 0; i < t->bytes / each; i++) {
        float x = each == 4 ? f32_at(bytes, i) : bf16_at(bytes, i);
        if (!isfinite(x)) return fail_value(c, t, i * each, "a value that is not finite");
        if (part == STH_QUANT_PART_SMOOTH && x == 0) return fail_value(c, t, i * each, "a factor of 0");
    }
    return STH_OK;
}

static sth_status check_tiles(const sth_checkpoint *c, const sth_quant_layer *l, const void *bytes) {
    const unsigned char *tiles = bytes;
    const sth_tensor_info *t = l->parts[STH_QUANT_PART_SCALES];
    for (uint64_t i = 0; i < t->bytes; i++)
        if (!sthi_ue4m3_is_sure(tiles[i]))
            return fail_value(
                c, t, i,
                "a scale that no writer of this format makes, and about which readers disagree (negative, "
                "subnormal or not a number)");
    return STH_OK;
}

sth_status sthi_quant_check_part(const sth_checkpoint *c, const sth_quant_layer *l, sth_quant_part part,
                                 const void *bytes) {
    bool tiles = part == STH_QUANT_PART_SCALES && l->encoding == STH_ENCODING_NVFP4_HADAMARD;
    if (!l->parts[part]) return STH_OK;
    return tiles ? check_tiles(c, l, bytes) : check_finite(c, l, part, bytes);
}

static sth_status check_parts(const sthi_decoder *d, const sth_checkpoint *c) {
    static const sth_quant_part numbers[] = {STH_QUANT_PART_SCALES,    STH_QUANT_PART_ZERO_POINTS,
                                            STH_QUANT_PART_GLOBAL_SCALE, STH_QUANT_PART_LORA_DOWN,
                                            STH_QUANT_PART_LORA_UP,   STH_QUANT_PART_SMOOTH};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        STHI_TRY(sthi_quant_check_part(c, d->layer, numbers[i], d->parts[numbers[i]]));
    return STH_OK;
}

/* ---- life ---- */

static sth_status out_of_memory(const sth_quant_layer *l) {
    return sthi_no_memory(l->name, "decoding layer '%.160s'", l->name);
}

static sth_status widen_down(sthi_decoder *d) {
    const sth_quant_layer *l = d->layer;
    if (!l->rank) return STH_OK;
    d->down = sthi_zalloc((size_t)l->in, (size_t)l->rank * sizeof *d->down); /* smaller than twice the tensor */
    if (!d->down) return out_of_memory(l);
    for (uint64_t k = 0; k < l->in; k++)
        for (uint64_t r = 0; r < l->rank; r++)
            d->down[r * l->in + k] = bf16_at(d->parts[STH_QUANT_PART_LORA_DOWN], k * l->rank + r);
    return STH_OK;
}

static sth_status widen_smooth(sthi_decoder *d) {
    const void *smooth = d->parts[STH_QUANT_PART_SMOOTH];
    bool ones = true;
    for (uint64_t k = 0; smooth && ones && k < d->layer->in; k++) ones = bf16_at(smooth, k) == 1;
    if (!smooth || ones) return STH_OK;
    d->smooth = sthi_zalloc((size_t)d->layer->in, sizeof *d->smooth);
    if (!d->smooth) return out_of_memory(d->layer);
    for (uint64_t k = 0; k < d->layer->in; k++) d->smooth[k] = bf16_at(smooth, k);
    return STH_OK;
}

sth_status sthi_decoder_init(sthi_decoder *decoder, const sth_checkpoint *checkpoint, const sth_quant_layer *layer,
                             const void *const parts[STH_QUANT_PART_COUNT]) {
    sthi_decoder d = {.layer = layer};
    memcpy(d.parts, parts, sizeof d.parts);
    STHI_TRY(check_parts(&d, checkpoint));
    if (d.parts[STH_QUANT_PART_GLOBAL_SCALE]) d.global_scale = f32_at(d.parts[STH_QUANT_PART_GLOBAL_SCALE], 0);
    sth_status status = widen_down(&d);
    if (status == STH_OK) status = widen_smooth(&d);
    if (status == STH_OK) *decoder = d;
    else sthi_decoder_fini(&d);
    return status;
}

void sthi_decoder_fini(sthi_decoder *decoder) {
    sthi_free(decoder->down);
    sthi_free(decoder->smooth);
    *decoder = (sthi_decoder){0};
}

bool sthi_decoder_scratch(const sth_quant_layer *layer, size_t *out) {
    uint64_t bytes;
    bool fits = sthi_mul_u64(layer->in, sizeof(double) + sizeof(float), &bytes) && bytes <= SIZE_MAX / 2;
    if (fits) *out = (size_t)bytes;
    return fits;
}

/* ---- rows ---- */

static void int8_row(const sthi_decoder *d, uint64_t row, float *out) {
    const sth_quant_layer *l = d->layer;
    const signed char *q = (const signed char *)d->parts[STH_QUANT_PART_CODES] + row * l->padded_in;
    float s = f32_at(d->parts[STH_QUANT_PART_SCALES], row), zero = f32_at(d->parts[STH_QUANT_PART_ZERO_POINTS], row);
    for (uint64_t k = 0; k < l->in; k++) out[k] = ((float)q[k] - zero) * s;
}

static void int4_row(const sthi_decoder *d, uint64_t row, float *out) {
    const sth_quant_layer *l = d->layer;
    const unsigned char *codes = (const unsigned char *)d->parts[STH_QUANT_PART_CODES] + row * (l->in / 2);
    const void *scales = d->parts[STH_QUANT_PART_SCALES];
    for (uint64_t begin = 0, g = 0; begin < l->in; begin += l->group, g++) {
        float s = bf16_at(scales, g * l->out + row);
        for (uint64_t k = begin; k < begin + l->group; k += 2) {
            int byte = codes[k / 2];
            out[k] = (float)(((byte & 15) ^ 8) - 8) * s;
            out[k + 1] = (float)(((byte >> 4) ^ 8) - 8) * s;
        }
    }
}

static void nvfp4_row(const sthi_decoder *d, uint64_t row, float *out) {
    const sth_quant_layer *l = d->layer;
    const unsigned char *codes = (const unsigned char *)d->parts[STH_QUANT_PART_CODES] + row * (l->in / 2);
    const unsigned char *tiles = d->parts[STH_QUANT_PART_SCALES];
    for (uint64_t k = 0; k < l->in; k += 2) {
        float s = sthi_ue4m3_value(tiles[sthi_nvfp4_scale_at(row, k / 16, l->in / 16)]);
        unsigned byte = codes[k / 2];
        out[k] = sthi_e2m1_value(byte & 15) * s * d->global_scale;
        out[k + 1] = sthi_e2m1_value(byte >> 4) * s * d->global_scale;
    }
}

static void rotate(const sth_quant_layer *l, float *out, double *wide) {
    for (uint64_t k = 0; k < l->in; k++) wide[k] = out[k];
    sthi_hadamard(wide, l->in, l->hadamard);
    for (uint64_t k = 0; k < l->in; k++) out[k] = (float)wide[k];
}

static void add_low_rank(const sthi_decoder *d, uint64_t row, float *out, float *sum) {
    const sth_quant_layer *l = d->layer;
    const char *up = d->parts[STH_QUANT_PART_LORA_UP];
    sthi_rank_row(up + 2 * row * l->rank, d->down, l->rank, l->in, sum);
    for (uint64_t k = 0; k < l->in; k++) out[k] += sum[k];
}

void sthi_decoder_row(const sthi_decoder *d, uint64_t row, float *out, void *scratch) {
    const sth_quant_layer *l = d->layer;
    double *wide = scratch;
    switch (l->encoding) {
    case STH_ENCODING_INT8_ROW:
        int8_row(d, row, out);
        break;
    case STH_ENCODING_NVFP4_HADAMARD:
        nvfp4_row(d, row, out);
        break;
    default:
        int4_row(d, row, out);
    }
    if (l->hadamard) rotate(l, out, wide);
    if (l->rank) add_low_rank(d, row, out, scratch);
    for (uint64_t k = 0; d->smooth && k < l->in; k++) out[k] /= d->smooth[k];
    for (uint64_t k = 0; k < l->in; k++) out[k] = out[k] != out[k] ? sthi_of_bits(0x7fc00000u) : out[k];
}
