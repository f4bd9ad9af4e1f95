/* Finds out what kind of slab a path is, has it read, and checks what holds for all kinds: names
 * of layers are distinct, no tensor is part of two layers. No locks. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/path.h"
#include "store/quant.h"

#define MANIFEST ".manifest.json"
#define MODEL ".safetensors"

/* ---- what holds for all kinds ---- */

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

/* What describes a losslessly packed file is no tensor of the model. */
static void mark_own(const sth_quant *slab, unsigned char *used) {
    const sthi_originals *o = &slab->originals;
    const sth_tensor_info *tensors = slab->checkpoint->tensors.items, *own[] = {o->index, o->sums, o->sizes};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (own[i]) used[own[i] - tensors] = 1;
    for (uint32_t i = 0; i < o->count; i++) used[o->items[i].header - tensors] = 1;
}

static sth_status list_plain(sth_quant *slab) {
    const sthi_tensors *all = &slab->checkpoint->tensors;
    unsigned char *used = sthi_zalloc((size_t)all->count, 1);
    slab->plain = sthi_zalloc((size_t)all->count, sizeof *slab->plain);
    sth_status status = used && slab->plain
                            ? mark_parts(slab, used)
                            : sthi_no_memory(slab->path, "the layers of %.300s", slab->path);
    if (status == STH_OK) mark_own(slab, used);
    for (uint64_t i = 0; status == STH_OK && i < all->count; i++)
        if (!used[i]) slab->plain[slab->plain_count++] = &all->items[i];
    sthi_free(used);
    return status;
}

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
        return sthi_no_memory(slab->path, "the layers of %.300s", slab->path);
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

static sth_status check_whole(sth_quant *slab) {
    if (slab->count) qsort(slab->layers, (size_t)slab->count, sizeof *slab->layers, by_place);
    STHI_TRY(index_names(slab));
    return list_plain(slab);
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
    if (!other) return sthi_no_memory(path, "opening %.300s", path);
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

static sth_status open_slab(const char *path, sth_quant **out, bool *out_no_slab) {
    sth_quant *slab = sthi_zalloc(1, sizeof *slab);
    if (slab) slab->path = sthi_strdup(path);
    sth_status status = slab && slab->path ? open_any(slab, path) : sthi_no_memory(path, "opening %.300s", path);
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
