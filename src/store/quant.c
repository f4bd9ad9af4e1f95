/* Finds out what kind of slab a path is, has it read, and checks what holds for all kinds: names of layers are
 * distinct, no tensor is part of two layers. Invariants once open: layers are in the order of their codes on disk, and
 * every part has the dtype and the shape that the layer's fields say. Nothing changes after open; no locks. */
#include "store/quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"
#include "store/json.h"
#include "store/path.h"

#define MANIFEST ".manifest.json"
#define MODEL ".safetensors"
typedef unsigned long long ull;

static sth_status out_of_memory(const char *path) {
    return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, path, "%.300s: out of memory while opening", path);
}

sth_status sthi_quant_corrupt(const sth_quant *slab, const char *layer, const char *what) {
    return layer ? sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path, "%.300s: layer '%.160s': %s", slab->path, layer,
                             what)
                 : sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path, "%.300s: %s", slab->path, what);
}

sth_status sthi_quant_no_slab(sth_quant *slab, const char *path, const char *why) {
    struct stat st;
    slab->no_slab = true;
    if (stat(path, &st)) return sthi_fail(STH_NOT_FOUND, "slab", 0, path, "%.300s: there is no such file", path);
    return sthi_fail(STH_UNSUPPORTED, "slab", 0, path, "%.300s: not a slab: %s", path, why);
}

/* ---- parts ---- */

static void write_shape(char *text, size_t cap, sth_dtype dtype, int rank, const uint64_t *shape) {
    int used = snprintf(text, cap, "%s [", sthi_dtype_name(dtype));
    for (int i = 0; i < rank && used > 0 && (size_t)used < cap; i++)
        used += snprintf(text + used, cap - (size_t)used, "%s%llu", i ? ", " : "", (ull)shape[i]);
    if (used > 0 && (size_t)used < cap) snprintf(text + used, cap - (size_t)used, "]");
}

static sth_status check_part(const sth_quant *slab, const sth_tensor_info *t, const sthi_quant_want *want) {
    bool same = t->dtype == want->dtype && t->rank == want->rank;
    for (int i = 0; same && i < want->rank; i++) same = t->shape[i] == want->shape[i];
    if (same) return STH_OK;
    char wanted[80], found[80];
    const char *file = slab->checkpoint->files[t->file].path;
    write_shape(wanted, sizeof wanted, want->dtype, want->rank, want->shape);
    write_shape(found, sizeof found, t->dtype, t->rank, t->shape);
    return sthi_fail(STH_CORRUPT_DATA, "slab", 0, file,
                     "%.300s: tensor '%.160s' at byte %llu is %s; as the %s of its layer it must be %s", file, t->name,
                     (ull)t->offset, found, sth_quant_part_name(want->part), wanted);
}

sth_status sthi_quant_take(const sth_quant *slab, const char *name, const sthi_quant_want *want,
                           sth_quant_layer *layer) {
    const sth_tensor_info *t = sthi_checkpoint_find(slab->checkpoint, name);
    if (!t)
        return sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path,
                         "%.300s: layer '%.160s': its tensor '%.160s' (%s) is missing", slab->path, layer->name, name,
                         sth_quant_part_name(want->part));
    STHI_TRY(check_part(slab, t, want));
    layer->parts[want->part] = t;
    return STH_OK;
}

static char *suffixed(const char *base, const char *suffix) {
    size_t size = strlen(base) + strlen(suffix) + 1;
    char *name = sthi_alloc(size);
    if (name) snprintf(name, size, "%s%s", base, suffix);
    return name;
}

sth_status sthi_quant_take_suffixed(const sth_quant *slab, const char *base, const char *suffix,
                                   const sthi_quant_want *want, sth_quant_layer *layer) {
    char *name = suffixed(base, suffix);
    if (!name) return out_of_memory(slab->path);
    sth_status status = sthi_quant_take(slab, name, want, layer);
    sthi_free(name);
    return status;
}

sth_status sthi_quant_find_suffixed(const sth_quant *slab, const char *base, const char *suffix,
                                    const sth_tensor_info **out) {
    char *name = suffixed(base, suffix);
    if (!name) return out_of_memory(slab->path);
    *out = sthi_checkpoint_find(slab->checkpoint, name);
    sthi_free(name);
    return STH_OK;
}

/* ---- layers ---- */

static sth_status grow(sth_quant *slab) {
    uint64_t capacity = slab->capacity ? slab->capacity * 2 : 64;
    sth_quant_layer *layers = sthi_realloc(slab->layers, (size_t)capacity, sizeof *layers);
    if (!layers) return out_of_memory(slab->path);
    slab->layers = layers;
    slab->capacity = capacity;
    return STH_OK;
}

sth_status sthi_quant_add(sth_quant *slab, const sth_quant_layer *layer) {
    if (!layer->out || !layer->in) return sthi_quant_corrupt(slab, layer->name, "it has no rows or no columns");
    if (slab->count == slab->capacity) STHI_TRY(grow(slab));
    char *name = sthi_strdup(layer->name);
    if (!name) return out_of_memory(slab->path);
    slab->layers[slab->count] = *layer;
    slab->layers[slab->count++].name = name;
    return STH_OK;
}

static int by_place(const void *left, const void *right) {
    const sth_tensor_info *a = ((const sth_quant_layer *)left)->parts[STH_QUANT_PART_CODES],
                          *b = ((const sth_quant_layer *)right)->parts[STH_QUANT_PART_CODES];
    return a < b ? -1 : a > b; /* tensors lie in one array, in the order on disk */
}

/* Marks in used[] the tensors of the layers, each at most once. */
static sth_status mark_parts(const sth_quant *slab, unsigned char *used) {
    const sth_tensor_info *tensors = slab->checkpoint->tensors.items;
    for (uint64_t i = 0; i < slab->count; i++)
        for (int p = 0; p < STH_QUANT_PART_COUNT; p++) {
            const sth_tensor_info *t = slab->layers[i].parts[p];
            if (t && used[t - tensors]++)
                return sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path,
                                 "%.300s: tensor '%.160s' is used twice, the second time by layer '%.160s'",
                                 slab->path, t->name, slab->layers[i].name);
        }
    return STH_OK;
}

static sth_status list_plain(sth_quant *slab) {
    const sthi_tensors *all = &slab->checkpoint->tensors;
    unsigned char *used = sthi_zalloc((size_t)all->count, 1);
    slab->plain = sthi_zalloc((size_t)all->count, sizeof *slab->plain);
    sth_status status = used && slab->plain ? mark_parts(slab, used) : out_of_memory(slab->path);
    for (uint64_t i = 0; status == STH_OK && i < all->count; i++)
        if (!used[i]) slab->plain[slab->plain_count++] = &all->items[i];
    sthi_free(used);
    return status;
}

/* ---- names ---- */

typedef struct named {
    const char *name;
    uint32_t at;
} named;

static int by_text(const void *left, const void *right) {
    return strcmp(((const named *)left)->name, ((const named *)right)->name);
}

static sth_status index_names(sth_quant *slab) {
    if (slab->count > UINT32_MAX) return sthi_quant_corrupt(slab, NULL, "too many layers");
    slab->by_name = sthi_zalloc((size_t)slab->count, sizeof *slab->by_name);
    named *names = sthi_zalloc((size_t)slab->count, sizeof *names);
    if (!slab->by_name || !names) {
        sthi_free(names);
        return out_of_memory(slab->path);
    }
    for (uint32_t i = 0; i < slab->count; i++) names[i] = (named){slab->layers[i].name, i};
    if (slab->count) qsort(names, (size_t)slab->count, sizeof *names, by_text);
    sth_status status = STH_OK;
    for (uint64_t i = 0; i < slab->count; i++) {
        slab->by_name[i] = names[i].at;
        if (status == STH_OK && i && strcmp(names[i].name, names[i - 1].name) == 0)
            status = sthi_quant_corrupt(slab, names[i].name, "is described twice");
    }
    sthi_free(names);
    return status;
}

const sth_quant_layer *sthi_quant_find(const sth_quant *slab, const char *name) {
    uint64_t low = 0, high = slab->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        const sth_quant_layer *layer = &slab->layers[slab->by_name[middle]];
        int order = strcmp(name, layer->name);
        if (order == 0) return layer;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

bool sthi_quant_has(const sth_quant *slab, const sth_quant_layer *layer) {
    uintptr_t at = (uintptr_t)layer, first = (uintptr_t)slab->layers;
    return at >= first && (at - first) / sizeof *layer < slab->count && (at - first) % sizeof *layer == 0;
}

/* ---- what a path stands for ---- */

static bool is_there(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

/* Sets *out to `path` with `new_suffix` in the place of `suffix`, with which it ends. */
static sth_status exchange(const char *path, const char *suffix, const char *new_suffix, char **out) {
    size_t keep = strlen(path) - strlen(suffix), size = keep + strlen(new_suffix) + 1;
    char *other = sthi_alloc(size);
    if (!other) return out_of_memory(path);
    snprintf(other, size, "%.*s%s", (int)keep, path, new_suffix);
    *out = other;
    return STH_OK;
}

/* `path` is a safetensors file; without a manifest it may be the only shard of a v3 folder. */
static sth_status open_model(sth_quant *slab, const char *path, bool in_folder) {
    char *manifest = NULL;
    STHI_TRY(exchange(path, MODEL, MANIFEST, &manifest));
    sth_status status = STH_OK;
    bool done = is_there(manifest);
    if (done) status = sthi_quant_open_manifest(slab, path, manifest);
    else if (is_there(path)) status = sthi_quant_open_embedded(slab, path, &done);
    sthi_free(manifest);
    if (done || status != STH_OK) return status;
    return in_folder ? sthi_quant_open_v3(slab, path)
                     : sthi_quant_no_slab(slab, path, "there is no .manifest.json beside it, nor one in its header");
}

static sth_status open_folder(sth_quant *slab, const char *folder) {
    char *inside = NULL;
    STHI_TRY(sthi_path_in_folder(folder, &inside));
    sth_status status =
        sthi_path_ends_with(inside, MODEL) ? open_model(slab, inside, true) : sthi_quant_open_v3(slab, inside);
    sthi_free(inside);
    return status;
}

static sth_status open_manifest(sth_quant *slab, const char *path) {
    char *model = NULL;
    STHI_TRY(exchange(path, MANIFEST, MODEL, &model));
    sth_status status = sthi_quant_open_manifest(slab, model, path);
    sthi_free(model);
    return status;
}

static sth_status open_any(sth_quant *slab, const char *path) {
    if (sthi_path_is_folder(path)) return open_folder(slab, path);
    if (sthi_path_ends_with(path, MODEL)) return open_model(slab, path, false);
    if (sthi_path_ends_with(path, MANIFEST)) return open_manifest(slab, path);
    if (sthi_path_ends_with(path, ".fpk") || sthi_path_ends_with(path, ".slab")) return sthi_quant_open_v1(slab, path);
    return sthi_quant_no_slab(slab, path,
                              "those are .fpk and .slab files, .safetensors files with a .manifest.json, and folders "
                              "with shards");
}

static sth_status check_whole(sth_quant *slab) {
    if (slab->count) qsort(slab->layers, (size_t)slab->count, sizeof *slab->layers, by_place);
    STHI_TRY(index_names(slab));
    return list_plain(slab);
}

static sth_status open_slab(const char *path, sth_quant **out, bool *out_no_slab) {
    sth_quant *slab = sthi_zalloc(1, sizeof *slab);
    if (slab) slab->path = sthi_strdup(path);
    sth_status status = slab && slab->path ? open_any(slab, path) : out_of_memory(path);
    if (status == STH_OK) status = check_whole(slab);
    *out_no_slab = slab && slab->no_slab;
    if (status == STH_OK) *out = slab;
    else sthi_quant_close(slab);
    return status;
}

sth_status sthi_quant_open(const char *path, sth_quant **out) {
    bool no_slab;
    return open_slab(path, out, &no_slab);
}

sth_status sthi_quant_open_if_slab(const char *path, sth_quant **out) {
    bool no_slab;
    sth_quant *slab = NULL;
    sth_status status = open_slab(path, &slab, &no_slab);
    if (no_slab) status = STH_OK;
    if (status == STH_OK) *out = slab;
    return status;
}

void sthi_quant_close(sth_quant *slab) {
    if (!slab) return;
    for (uint64_t i = 0; i < slab->count; i++) sthi_free((void *)(uintptr_t)slab->layers[i].name);
    sthi_free(slab->layers);
    sthi_free(slab->by_name);
    sthi_free(slab->plain);
    sthi_zip_fini(&slab->zip);
    json_decref(slab->description);
    sthi_checkpoint_close(slab->checkpoint);
    sthi_free(slab->path);
    sthi_free(slab);
}
