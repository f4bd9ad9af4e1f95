/* A slab: its layers and their parts, as the readers of the formats add them and as others find
 * them.
 *
 * Invariants once open: layers are in the order of their codes on disk, and every part has the
 * dtype and the shape that the layer's fields say. Nothing changes after open; no locks. */
#include "store/quant.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"

typedef unsigned long long ull;

sth_status sthi_quant_corrupt(const sth_quant *slab, const char *layer, const char *what) {
    return layer ? sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path, "%.300s: layer '%.160s': %s", slab->path, layer,
                             what)
                 : sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path, "%.300s: %s", slab->path, what);
}

sth_status sthi_quant_no_slab(sth_quant *slab, const char *path, const char *why) {
    struct stat st;
    slab->no_slab = true;
    if (stat(path, &st))
        return sthi_fail(STH_NOT_FOUND, "slab", 0, path, "%.300s: there is no such file; look at the path", path);
    return sthi_fail(STH_UNSUPPORTED, "slab", 0, path, "%.300s: not a slab: %s", path, why);
}

/* ---- parts ---- */

static void write_shape(char *text, size_t cap, const char *dtype, int rank, const uint64_t *shape) {
    int used = snprintf(text, cap, "%.32s [", dtype);
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
    write_shape(wanted, sizeof wanted, sthi_dtype_name(want->dtype), want->rank, want->shape);
    write_shape(found, sizeof found, t->spelling, t->rank, t->shape);
    return sthi_fail(STH_CORRUPT_DATA, "slab", 0, file,
                     "%.300s: tensor '%.160s' at byte %llu is %s; as the %s of its layer it must be %s", file, t->name,
                     (ull)t->offset, found, sthi_quant_part_name(want->part), wanted);
}

sth_status sthi_quant_take(const sth_quant *slab, const char *name, const sthi_quant_want *want,
                           sth_quant_layer *layer) {
    const sth_tensor_info *t = sthi_checkpoint_find(slab->checkpoint, name);
    if (!t)
        return sthi_fail(STH_CORRUPT_DATA, "slab", 0, slab->path,
                         "%.300s: layer '%.160s': its tensor '%.160s' (%s) is missing", slab->path, layer->name, name,
                         sthi_quant_part_name(want->part));
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
    if (!name) return sthi_no_memory(slab->path, "the layers of %.300s", slab->path);
    sth_status status = sthi_quant_take(slab, name, want, layer);
    sthi_free(name);
    return status;
}

sth_status sthi_quant_find_suffixed(const sth_quant *slab, const char *base, const char *suffix,
                                    const sth_tensor_info **out) {
    char *name = suffixed(base, suffix);
    if (!name) return sthi_no_memory(slab->path, "the layers of %.300s", slab->path);
    *out = sthi_checkpoint_find(slab->checkpoint, name);
    sthi_free(name);
    return STH_OK;
}

/* ---- layers ---- */

static sth_status grow(sth_quant *slab) {
    uint64_t capacity = slab->capacity ? slab->capacity * 2 : 64;
    sth_quant_layer *layers = sthi_realloc(slab->layers, (size_t)capacity, sizeof *layers);
    if (!layers) return sthi_no_memory(slab->path, "the layers of %.300s", slab->path);
    slab->layers = layers;
    slab->capacity = capacity;
    return STH_OK;
}

sth_status sthi_quant_add(sth_quant *slab, const sth_quant_layer *layer) {
    if (!layer->out || !layer->in) return sthi_quant_corrupt(slab, layer->name, "it has no rows or no columns");
    if (slab->count == slab->capacity) STHI_TRY(grow(slab));
    char *name = sthi_strdup(layer->name);
    if (!name) return sthi_no_memory(slab->path, "the layers of %.300s", slab->path);
    slab->layers[slab->count] = *layer;
    slab->layers[slab->count++].name = name;
    return STH_OK;
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

static void end_originals(sthi_originals *o) {
    for (uint32_t i = 0; i < o->count; i++) sthi_tensors_fini(&o->items[i].tensors);
    sthi_free(o->items);
    sthi_free(o->lengths);
}

void sthi_quant_close(sth_quant *slab) {
    if (!slab) return;
    for (uint64_t i = 0; i < slab->count; i++) sthi_free((void *)(uintptr_t)slab->layers[i].name);
    sthi_free(slab->layers);
    sthi_free(slab->by_name);
    sthi_free(slab->plain);
    sthi_zip_fini(&slab->zip);
    json_decref(slab->description);
    end_originals(&slab->originals);
    sthi_checkpoint_close(slab->checkpoint);
    sthi_free(slab->path);
    sthi_free(slab);
}
