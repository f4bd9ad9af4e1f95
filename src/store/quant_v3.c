/* v3: a folder of shards with an index, int4 or NVFP4. Which tensors make a layer is told by their names; the plan
 * must agree with them where there is one. The index's own word for the format is not believed: writers put int4's
 * there for both. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/json.h"
#include "store/path.h"
#include "store/quant.h"

#define HADAMARD 256u
#define BLOCK 16u /* inputs that share a scale in NVFP4 */
#define PLAN "squareq-plan.json"
#define PARTIAL_PLAN "squareq-plan.partial.json"

typedef unsigned long long ull;

static bool has_suffix(const char *name, const char *suffix) { return sthi_path_ends_with(name, suffix); }

static sth_status fail_codes(const sth_quant *slab, const sth_tensor_info *t, const char *what) {
    const char *file = slab->checkpoint->files[t->file].path;
    return sthi_fail(STH_CORRUPT_DATA, "slab", 0, file, "%.300s: tensor '%.160s' at byte %llu: %s", file, t->name,
                     (ull)t->offset, what);
}

/* Rank, and for int4 the group, are known from the shapes of the factors and scales. */
static sth_status infer_sizes(const sth_quant *slab, const char *base, const sth_tensor_info *codes,
                              sth_quant_layer *l) {
    const sth_tensor_info *down = NULL, *scales = NULL;
    STHI_TRY(sthi_quant_find_suffixed(slab, base, ".lora_down", &down));
    STHI_TRY(sthi_quant_find_suffixed(slab, base, ".wscales", &scales));
    bool int4 = l->encoding == STH_ENCODING_INT4_GROUP_HADAMARD;
    if (codes->rank != 2 || codes->shape[1] > UINT64_MAX / 2) return fail_codes(slab, codes, "codes need two extents");
    l->out = codes->shape[0];
    l->in = l->padded_in = 2 * codes->shape[1];
    if (!l->out || !l->in || l->in % HADAMARD)
        return fail_codes(slab, codes, "twice its second extent must be a multiple of 256");
    if (!down || down->rank != 2 || !down->shape[1])
        return fail_codes(slab, codes, "its lora_down is missing or empty");
    if (int4 && (!scales || scales->rank != 2 || !scales->shape[0] || l->in % scales->shape[0]))
        return fail_codes(slab, codes, "its wscales are missing, or are not one for each group of inputs");
    l->rank = down->shape[1];
    l->group = int4 ? l->in / scales->shape[0] : BLOCK;
    l->hadamard = HADAMARD;
    return int4 && l->group % 2 ? fail_codes(slab, codes, "its groups have an odd number of inputs") : STH_OK;
}

/* Bytes of the tiles of NVFP4's scales: 128 rows by 4 blocks of 16 inputs. */
static bool tile_bytes(const sth_quant_layer *l, uint64_t *out) {
    uint64_t rows = l->out / 128 + (l->out % 128 != 0), blocks = l->in / BLOCK, tiles;
    return sthi_mul_u64(rows, blocks / 4 + (blocks % 4 != 0), &tiles) && sthi_mul_u64(tiles, 512, out);
}

static sth_status take_int4(const sth_quant *slab, const char *base, sth_quant_layer *l) {
    STHI_TRY(sthi_quant_take_suffixed(
        slab, base, ".qweight", &(sthi_quant_want){STH_QUANT_PART_CODES, STH_DTYPE_U8, 2, {l->out, l->in / 2}}, l));
    return sthi_quant_take_suffixed(
        slab, base, ".wscales",
        &(sthi_quant_want){STH_QUANT_PART_SCALES, STH_DTYPE_BF16, 2, {l->in / l->group, l->out}}, l);
}

/* The tiles may be stored with any shape: only their number of bytes says something. */
static sth_status take_nvfp4(const sth_quant *slab, const char *base, sth_quant_layer *l) {
    uint64_t bytes = 0;
    const sth_tensor_info *tiles = NULL;
    STHI_TRY(sthi_quant_find_suffixed(slab, base, ".nvs", &tiles));
    STHI_TRY(sthi_quant_take_suffixed(
        slab, base, ".nvq", &(sthi_quant_want){STH_QUANT_PART_CODES, STH_DTYPE_U8, 2, {l->out, l->in / 2}}, l));
    if (!tiles || tiles->dtype != STH_DTYPE_U8 || !tile_bytes(l, &bytes) || tiles->bytes != bytes)
        return fail_codes(slab, tiles ? tiles : l->parts[STH_QUANT_PART_CODES],
                          "its scales (.nvs) are missing, or not U8 tiles of 128 rows by 64 inputs");
    l->parts[STH_QUANT_PART_SCALES] = tiles;
    return sthi_quant_take_suffixed(slab, base, ".nvg",
                                   &(sthi_quant_want){STH_QUANT_PART_GLOBAL_SCALE, STH_DTYPE_F32, 1, {1}}, l);
}

static sth_status add_layer(sth_quant *slab, const sth_tensor_info *codes, const char *base, sth_encoding encoding) {
    bool int4 = encoding == STH_ENCODING_INT4_GROUP_HADAMARD;
    sth_quant_layer l = {.name = base, .encoding = encoding};
    STHI_TRY(infer_sizes(slab, base, codes, &l));
    STHI_TRY(int4 ? take_int4(slab, base, &l) : take_nvfp4(slab, base, &l));
    STHI_TRY(sthi_quant_take_suffixed(
        slab, base, ".lora_down", &(sthi_quant_want){STH_QUANT_PART_LORA_DOWN, STH_DTYPE_BF16, 2, {l.in, l.rank}}, &l));
    STHI_TRY(sthi_quant_take_suffixed(
        slab, base, ".lora_up", &(sthi_quant_want){STH_QUANT_PART_LORA_UP, STH_DTYPE_BF16, 2, {l.out, l.rank}}, &l));
    return sthi_quant_add(slab, &l);
}

static sth_status add_if_codes(sth_quant *slab, const sth_tensor_info *t) {
    bool int4 = has_suffix(t->name, ".qweight"), nvfp4 = has_suffix(t->name, ".nvq");
    if (!int4 && !nvfp4) return STH_OK;
    char *base = sthi_strdup(t->name);
    if (!base) return sthi_no_memory(slab->path, "a layer's name in %.300s", slab->path);
    base[strlen(base) - strlen(int4 ? ".qweight" : ".nvq")] = '\0';
    sth_status status =
        add_layer(slab, t, base, int4 ? STH_ENCODING_INT4_GROUP_HADAMARD : STH_ENCODING_NVFP4_HADAMARD);
    sthi_free(base);
    return status;
}

/* ---- the plan ---- */

static bool plan_agrees(const json_t *said, const sth_quant_layer *l) {
    uint64_t out, in, rank;
    const char *format = json_string_value(json_object_get(said, "format"));
    bool nvfp4 = l->encoding == STH_ENCODING_NVFP4_HADAMARD;
    return sthi_json_u64(json_object_get(said, "out"), &out) && sthi_json_u64(json_object_get(said, "in"), &in) &&
           sthi_json_u64(json_object_get(said, "rank"), &rank) && out == l->out && in == l->in && rank == l->rank &&
           (!format || (strstr(format, "nvfp4") != NULL) == nvfp4);
}

static sth_status check_plan(const sth_quant *slab, const json_t *plan) {
    const json_t *layers = json_object_get(plan, "layers");
    uint64_t version;
    if (!sthi_json_u64(json_object_get(plan, "plan_version"), &version) || !json_is_object(layers))
        return sthi_quant_corrupt(slab, NULL, PLAN " has no plan_version or no layers");
    if (version != 1)
        return sthi_fail(STH_UNSUPPORTED, "slab", 0, slab->path, "%.300s: plan_version %llu of " PLAN " is not known",
                         slab->path, (ull)version);
    if (json_object_size(layers) != slab->count)
        return sthi_quant_corrupt(slab, NULL, PLAN " has another number of layers than the shards");
    for (uint64_t i = 0; i < slab->count; i++) {
        const sth_quant_layer *l = &slab->layers[i];
        size_t size = strlen(l->name) + sizeof ".weight";
        char *key = sthi_alloc(size);
        if (!key) return sthi_no_memory(slab->path, "a layer's name in %.300s", slab->path);
        snprintf(key, size, "%s.weight", l->name);
        const json_t *said = json_object_get(layers, key);
        sthi_free(key);
        if (!said || !plan_agrees(said, l))
            return sthi_quant_corrupt(slab, l->name, PLAN " does not list it, or with another size, rank or format");
    }
    return STH_OK;
}

static bool is_there(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

static sth_status read_plan(sth_quant *slab, const char *path) {
    sthi_file file;
    STHI_TRY(sthi_file_open(path, &file));
    sth_status status = sthi_json_read(&file, 0, file.size, &slab->description);
    sthi_file_close(&file);
    STHI_TRY(status);
    return check_plan(slab, slab->description);
}

/* A folder without a plan is read all the same, unless its build never came to its end. */
static sth_status use_plan(sth_quant *slab, const char *inside) {
    char *plan = NULL, *partial = NULL;
    STHI_TRY(sthi_path_beside(inside, PLAN, &plan));
    sth_status status = sthi_path_beside(inside, PARTIAL_PLAN, &partial);
    if (status == STH_OK && is_there(plan)) status = read_plan(slab, plan);
    else if (status == STH_OK && is_there(partial))
        status = sthi_quant_corrupt(slab, NULL, "there is a " PARTIAL_PLAN " but no plan: it was not built to its end");
    sthi_free(plan);
    sthi_free(partial);
    return status;
}

sth_status sthi_quant_open_v3(sth_quant *slab, const char *index) {
    STHI_TRY(sthi_checkpoint_open(index, &slab->checkpoint));
    const sthi_tensors *tensors = &slab->checkpoint->tensors;
    for (uint64_t i = 0; i < tensors->count; i++) STHI_TRY(add_if_codes(slab, &tensors->items[i]));
    if (!slab->count)
        return sthi_quant_no_slab(slab, slab->path, "no tensor is named *.qweight or *.nvq");
    slab->format = slab->layers[0].encoding == STH_ENCODING_NVFP4_HADAMARD ? STH_QUANT_V3_NVFP4 : STH_QUANT_V3_INT4;
    return use_plan(slab, index);
}
