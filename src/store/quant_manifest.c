/* Slabs of one safetensors file with a manifest beside it: v2, and SVDQuant's two. The manifest says which tensors
 * make a layer; every one of its claims is checked against the file. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/json.h"
#include "store/path.h"
#include "store/quant.h"
#include "store/safetensors.h"

#define KERNEL_ABI 1

typedef unsigned long long ull;

/* ---- v2 ---- */

static bool extent(const json_t *object, const char *key, size_t i, uint64_t *out) {
    const json_t *list = json_object_get(object, key);
    return json_array_size(list) == 2 && sthi_json_u64(json_array_get(list, i), out) && *out > 0;
}

static bool says(const json_t *object, const char *key, const char *wanted) {
    const char *text = json_string_value(json_object_get(object, key));
    return text && strcmp(text, wanted) == 0;
}

/* What a layer says about its kind; each must be there, and be what this format's reader can read. */
static sth_status check_kind(const sth_quant *slab, const char *name, const json_t *entry) {
    static const char *const texts[][2] = {{"quant_scheme", "per_row_symmetric"},
                                           {"dtype_qweight", "int8"},
                                           {"dtype_scale", "float32"},
                                           {"dtype_zero_point", "float32"}};
    uint64_t bits, axis;
    if (!sthi_json_u64(json_object_get(entry, "quant_bits"), &bits) ||
        !sthi_json_u64(json_object_get(entry, "quant_axis"), &axis))
        return sthi_quant_corrupt(slab, name, "quant_bits or quant_axis is missing or no number");
    bool known = bits == 8 && axis == 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) known = known && says(entry, texts[i][0], texts[i][1]);
    return known ? STH_OK
                 : sthi_fail(STH_UNSUPPORTED, "slab", 0, slab->path,
                             "%.300s: layer '%.160s': only 8 bits, per_row_symmetric, axis 0, int8 with float32 "
                             "scales and zero points are known",
                             slab->path, name);
}

static sth_status take_named(const sth_quant *slab, const json_t *entry, const char *key, const sthi_quant_want *want,
                             sth_quant_layer *layer) {
    const char *name = json_string_value(json_object_get(entry, key));
    return name ? sthi_quant_take(slab, name, want, layer)
                : sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path, "%.300s: layer '%.160s': %s is missing or no text",
                            slab->path, layer->name, key);
}

static sth_status add_v2_layer(sth_quant *slab, const json_t *entry, uint64_t at) {
    const char *name = json_string_value(json_object_get(entry, "canonical_name"));
    uint64_t packed_rows, pad;
    sth_quant_layer l = {.name = name, .encoding = STH_ENCODING_INT8_ROW};
    if (!name || !*name)
        return sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path, "%.300s: layer %llu has no canonical_name",
                         slab->path, (ull)at);
    if (!extent(entry, "orig_shape", 0, &l.out) || !extent(entry, "orig_shape", 1, &l.in) ||
        !extent(entry, "packed_shape", 0, &packed_rows) || !extent(entry, "packed_shape", 1, &l.padded_in) ||
        !sthi_json_u64(json_object_get(entry, "pad_k"), &pad))
        return sthi_quant_corrupt(slab, name, "orig_shape, packed_shape or pad_k is missing or no sizes");
    if (packed_rows != l.out || l.padded_in < l.in || (pad > 1 && l.padded_in % pad))
        return sthi_quant_corrupt(slab, name, "packed_shape is not orig_shape padded to a multiple of pad_k");
    STHI_TRY(check_kind(slab, name, entry));
    l.group = l.padded_in;
    const json_t *bias = json_object_get(entry, "bias_key");
    STHI_TRY(take_named(slab, entry, "qweight_key",
                        &(sthi_quant_want){STH_QUANT_PART_CODES, STH_DTYPE_I8, 2, {l.out, l.padded_in}}, &l));
    STHI_TRY(take_named(slab, entry, "scale_key",
                        &(sthi_quant_want){STH_QUANT_PART_SCALES, STH_DTYPE_F32, 1, {l.out}}, &l));
    STHI_TRY(take_named(slab, entry, "zero_point_key",
                        &(sthi_quant_want){STH_QUANT_PART_ZERO_POINTS, STH_DTYPE_F32, 1, {l.out}}, &l));
    if (bias && !json_is_null(bias))
        STHI_TRY(take_named(slab, entry, "bias_key",
                            &(sthi_quant_want){STH_QUANT_PART_BIAS, STH_DTYPE_F32, 1, {l.out}}, &l));
    return sthi_quant_add(slab, &l);
}

static sth_status check_totals(const sth_quant *slab, const json_t *manifest) {
    uint64_t said, bytes = 0;
    for (uint64_t i = 0; i < slab->count; i++) bytes += slab->layers[i].parts[STH_QUANT_PART_CODES]->bytes;
    const json_t *count = json_object_get(manifest, "layer_count"),
                 *total = json_object_get(manifest, "total_qweight_bytes");
    if (!sthi_json_u64(count, &said) || said != slab->count)
        return sthi_quant_corrupt(slab, NULL, "layer_count is not the number of layers");
    if (!sthi_json_u64(total, &said) || said != bytes)
        return sthi_quant_corrupt(slab, NULL, "total_qweight_bytes is not the sum over the layers");
    return STH_OK;
}

static sth_status open_v2(sth_quant *slab, const json_t *manifest) {
    uint64_t abi, at;
    const json_t *layers = json_object_get(manifest, "layers"), *entry;
    slab->format = STH_QUANT_V2;
    if (!sthi_json_u64(json_object_get(manifest, "kernel_abi_version"), &abi))
        return sthi_quant_corrupt(slab, NULL, "kernel_abi_version is missing or no number");
    if (abi > KERNEL_ABI)
        return sthi_fail(STH_UNSUPPORTED, "slab", 0, slab->path,
                         "%.300s: kernel_abi_version %llu is newer than %d, the one that is known", slab->path,
                         (ull)abi, KERNEL_ABI);
    if (!json_is_string(json_object_get(manifest, "model_signature")) || !json_is_array(layers))
        return sthi_quant_corrupt(slab, NULL, "model_signature or layers is missing");
    json_array_foreach (layers, at, entry) STHI_TRY(add_v2_layer(slab, entry, at));
    return check_totals(slab, manifest);
}

/* ---- SVDQuant ---- */

/* The sizes of a layer: what the hybrid's entries leave out is the same for all. */
static sth_status read_svd_sizes(const sth_quant *slab, const char *key, const json_t *entry, uint64_t group,
                                 sth_quant_layer *l) {
    const json_t *own_group = json_object_get(entry, "group");
    if (!sthi_json_u64(json_object_get(entry, "out"), &l->out) ||
        !sthi_json_u64(json_object_get(entry, "in"), &l->in) ||
        !sthi_json_u64(json_object_get(entry, "rank"), &l->rank) || (own_group && !sthi_json_u64(own_group, &group)))
        return sthi_quant_corrupt(slab, key, "in, out, rank or group is missing or no number");
    bool rows = l->encoding == STH_ENCODING_INT4_ROW_HADAMARD;
    l->padded_in = l->in;
    l->group = rows ? l->in : group;
    l->hadamard = rows ? l->in : 0;
    if (!l->out || !l->in || !l->group || l->group % 2 || l->in % l->group || !l->rank)
        return sthi_quant_corrupt(slab, key, "its sizes make no sense: in must be a multiple of group, and group even");
    if (rows && (l->in & (l->in - 1))) return sthi_quant_corrupt(slab, key, "in must be a power of two for w4a4");
    return STH_OK;
}

static sth_status take_svd_parts(const sth_quant *slab, const char *base, sth_quant_layer *l) {
    bool rows = l->encoding == STH_ENCODING_INT4_ROW_HADAMARD;
    const sthi_quant_want codes = {STH_QUANT_PART_CODES, STH_DTYPE_I8, 2, {l->out, l->in / 2}},
                         row_scales = {STH_QUANT_PART_SCALES, STH_DTYPE_BF16, 1, {l->out}},
                         group_scales = {STH_QUANT_PART_SCALES, STH_DTYPE_BF16, 2, {l->in / l->group, l->out}},
                         down = {STH_QUANT_PART_LORA_DOWN, STH_DTYPE_BF16, 2, {l->in, l->rank}},
                         up = {STH_QUANT_PART_LORA_UP, STH_DTYPE_BF16, 2, {l->out, l->rank}},
                         smooth = {STH_QUANT_PART_SMOOTH, STH_DTYPE_BF16, 1, {l->in}},
                         bias = {STH_QUANT_PART_BIAS, STH_DTYPE_BF16, 1, {l->out}};
    STHI_TRY(sthi_quant_take_suffixed(slab, base, ".qweight", &codes, l));
    STHI_TRY(
        sthi_quant_take_suffixed(slab, base, rows ? ".wscale" : ".wscales", rows ? &row_scales : &group_scales, l));
    STHI_TRY(sthi_quant_take_suffixed(slab, base, ".lora_down", &down, l));
    STHI_TRY(sthi_quant_take_suffixed(slab, base, ".lora_up", &up, l));
    if (!rows) STHI_TRY(sthi_quant_take_suffixed(slab, base, ".smooth", &smooth, l));
    const sth_tensor_info *found = NULL;
    STHI_TRY(sthi_quant_find_suffixed(slab, base, ".bias", &found));
    return found ? sthi_quant_take_suffixed(slab, base, ".bias", &bias, l) : STH_OK;
}

static sth_status add_svd_layer(sth_quant *slab, const char *key, const json_t *entry, uint64_t group) {
    const char *kind = json_string_value(json_object_get(entry, "kind"));
    bool hybrid = slab->format == STH_QUANT_SVDQUANT_HYBRID, rows = hybrid && kind && strcmp(kind, "w4a4") == 0;
    if (hybrid && !rows && (!kind || strcmp(kind, "w4a16") != 0))
        return sthi_quant_corrupt(slab, key, "its kind is neither w4a4 nor w4a16");
    char *base = sthi_strdup(key);
    if (!base) return sthi_no_memory(slab->path, "a name in %.300s", slab->path);
    if (sthi_path_ends_with(base, ".weight")) base[strlen(base) - strlen(".weight")] = '\0';
    sth_quant_layer l = {.name = base,
                        .encoding = rows ? STH_ENCODING_INT4_ROW_HADAMARD : STH_ENCODING_INT4_GROUP};
    sth_status status = read_svd_sizes(slab, key, entry, group, &l);
    if (status == STH_OK) status = take_svd_parts(slab, base, &l);
    if (status == STH_OK) status = sthi_quant_add(slab, &l);
    sthi_free(base);
    return status;
}

static sth_status check_passthrough(const sth_quant *slab, const json_t *list) {
    size_t at;
    const json_t *key;
    if (!json_is_array(list)) return sthi_quant_corrupt(slab, NULL, "passthrough is missing or no list");
    json_array_foreach (list, at, key) {
        const char *name = json_string_value(key);
        if (!name || !sthi_checkpoint_find(slab->checkpoint, name))
            return sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path,
                             "%.300s: passthrough tensor '%.160s' is not in %.160s", slab->path, name ? name : "?",
                             slab->checkpoint->files[0].path);
    }
    return STH_OK;
}

static sth_status open_svdquant(sth_quant *slab, const json_t *manifest) {
    bool hybrid = says(manifest, "method", "svdquant_w4a4_hybrid");
    json_t *layers = json_object_get(manifest, hybrid ? "layers" : "quantized"), *entry;
    const json_t *hadamard = json_object_get(manifest, "hadamard"), *bits = json_object_get(manifest, "quant_bits");
    const char *key;
    uint64_t group;
    slab->format = hybrid ? STH_QUANT_SVDQUANT_HYBRID : STH_QUANT_SVDQUANT;
    if (!json_is_object(layers) || !sthi_json_u64(json_object_get(manifest, "group"), &group))
        return sthi_quant_corrupt(slab, NULL, "the list of layers or the group is missing");
    if (hybrid && (!hadamard || !says(manifest, "hadamard", "sylvester")))
        return sthi_fail(STH_UNSUPPORTED, "slab", 0, slab->path, "%.300s: only the Sylvester Hadamard matrix is known",
                         slab->path);
    if (bits && json_integer_value(bits) != 4)
        return sthi_fail(STH_UNSUPPORTED, "slab", 0, slab->path, "%.300s: only quant_bits of 4 are known", slab->path);
    json_object_foreach (layers, key, entry) STHI_TRY(add_svd_layer(slab, key, entry, group));
    return check_passthrough(slab, json_object_get(manifest, "passthrough"));
}

/* ---- either ---- */

/* Which reader a manifest is for. */
static sth_status read_layers(sth_quant *slab, const json_t *manifest) {
    const char *version = json_string_value(json_object_get(manifest, "quant_version")),
               *method = json_string_value(json_object_get(manifest, "method"));
    if (version && strcmp(version, "squareq_bp8_v2") == 0) return open_v2(slab, manifest);
    if (method && (strcmp(method, "svdquant_int4") == 0 || strcmp(method, "svdquant_w4a4_hybrid") == 0))
        return open_svdquant(slab, manifest);
    return sthi_fail(STH_UNSUPPORTED, "slab", 0, slab->path,
                     "%.300s: quant_version '%.60s', method '%.60s': no manifest that is known", slab->path,
                     version ? version : "", method ? method : "");
}

sth_status sthi_quant_open_manifest(sth_quant *slab, const char *model_path, const char *manifest_path) {
    sthi_file file;
    char *path = sthi_strdup(manifest_path);
    if (!path) return sthi_no_memory(manifest_path, "a name in %.300s", manifest_path);
    sthi_free(slab->path);
    slab->path = path;
    STHI_TRY(sthi_file_open(manifest_path, &file));
    sth_status status = sthi_json_read(&file, 0, file.size, &slab->description);
    sthi_file_close(&file);
    STHI_TRY(status);
    if (!json_is_object(slab->description)) return sthi_quant_corrupt(slab, NULL, "the manifest is not a JSON object");
    STHI_TRY(sthi_checkpoint_open(model_path, &slab->checkpoint));
    return read_layers(slab, slab->description);
}

sth_status sthi_quant_open_embedded(sth_quant *slab, const char *model_path, bool *out_found) {
    sthi_file file;
    *out_found = false;
    static const char *const keys[] = {STHI_LOSSLESS_KEY, "svdquant_manifest"};
    int key = 0;
    STHI_TRY(sthi_file_open(model_path, &file));
    sth_status status = sthi_safetensors_metadata(&file, keys, 2, &slab->description, &key);
    sthi_file_close(&file);
    STHI_TRY(status);
    *out_found = slab->description != NULL;
    if (!*out_found) return STH_OK;
    STHI_TRY(sthi_checkpoint_open(model_path, &slab->checkpoint));
    return key == 0 ? sthi_quant_open_lossless(slab) : read_layers(slab, slab->description);
}
