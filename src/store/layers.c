/* A layer index: raw files described by JSON entries {layer_id, name, path, offset, nbytes, optional dtype,
 * shape, scale}. The entries are a list, or the value of "layers" or "entries" in an object. Without dtype
 * a tensor is nbytes of U8. Files are numbered in the order of their first mention. No locks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/checkpoint.h"
#include "store/json.h"
#include "store/path.h"
#include "store/sparse.h"

static sth_status corrupt(const char *path, size_t entry, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "layer index", 0, path, "%.300s: entry %zu: %s", path, entry, what);
}

/* An optional field: absent and null are the same. */
static const json_t *optional(const json_t *entry, const char *key) {
    const json_t *value = json_object_get(entry, key);
    return json_is_null(value) ? NULL : value;
}

/* The entry's name, or its layer_id as text in `buf`; NULL where it has neither. */
static const char *entry_name(const json_t *entry, char *buf, size_t cap) {
    const json_t *name = optional(entry, "name"), *id = optional(entry, "layer_id");
    const json_t *chosen = name ? name : id;
    uint64_t number;
    if (!sthi_json_u64(chosen, &number) || chosen == name) return json_string_value(chosen);
    snprintf(buf, cap, "%llu", (unsigned long long)number);
    return buf;
}

static sth_status read_scale(const char *path, size_t at, const json_t *entry, double *out) {
    const json_t *scale = optional(entry, "scale");
    if (!scale) return STH_OK;
    if (!json_is_number(scale) || json_number_value(scale) == 0)
        return corrupt(path, at, "scale is not a number other than 0");
    *out = json_number_value(scale);
    return STH_OK;
}

/* Number of the file that the index calls `name`, opened at its first mention. */
static sth_status file_number(sth_checkpoint *c, const char *path, const char *name, uint32_t *out) {
    char *full;
    STHI_TRY(sthi_path_beside(path, name, &full));
    uint32_t i = c->file_count;
    while (i > 0 && strcmp(c->files[i - 1].path, full) != 0) i--;
    sthi_free(full);
    if (i == 0) {
        STHI_TRY(sthi_checkpoint_add_named(c, path, name));
        i = c->file_count;
    }
    *out = i - 1;
    return STH_OK;
}

static sth_status add_entry(sth_checkpoint *c, const char *path, size_t at, const json_t *entry) {
    char buf[32];
    if (!json_is_object(entry)) return corrupt(path, at, "it is not an object");
    sth_tensor_info t = {.name = entry_name(entry, buf, sizeof buf), .scale = 1};
    const char *file = json_string_value(json_object_get(entry, "path"));
    if (!t.name) return corrupt(path, at, "it has neither a name nor a layer_id");
    if (!file) return corrupt(path, at, "path is missing or not text");
    if (!sthi_json_u64(json_object_get(entry, "offset"), &t.offset))
        return corrupt(path, at, "offset is not an integer of at least 0");
    if (!sthi_json_u64(json_object_get(entry, "nbytes"), &t.bytes))
        return corrupt(path, at, "nbytes is not an integer of at least 0");
    STHI_TRY(read_scale(path, at, entry, &t.scale));
    const json_t *dtype = optional(entry, "dtype");
    STHI_TRY(sthi_json_type_and_shape(path, dtype, dtype ? optional(entry, "shape") : NULL, &t));
    STHI_TRY(file_number(c, path, file, &t.file));
    return sthi_tensors_add(&c->tensors, &t);
}

static int by_file(const void *left, const void *right) {
    const sth_tensor_info *a = left, *b = right;
    return a->file < b->file ? -1 : a->file > b->file;
}

static sth_status check_files(sth_checkpoint *c) {
    sthi_tensors *list = &c->tensors;
    if (list->count) qsort(list->items, (size_t)list->count, sizeof *list->items, by_file);
    uint64_t first = 0;
    for (uint32_t f = 0; f < c->file_count; f++) {
        uint64_t end = first;
        while (end < list->count && list->items[end].file == f) end++;
        sth_tensor_info *tensors = list->items + first;
        STHI_TRY(sthi_tensors_check_extents(tensors, end - first, &c->files[f], 0, &c->holes[f]));
        STHI_TRY(sthi_sparse_check(&c->files[f], tensors, end - first));
        first = end;
    }
    return STH_OK;
}

static json_t *entry_list(json_t *root) {
    if (json_is_array(root)) return root;
    json_t *layers = json_object_get(root, "layers");
    return layers ? layers : json_object_get(root, "entries");
}

sth_status sthi_layers_open(sth_checkpoint *c, const char *path, json_t *root) {
    json_t *list = entry_list(root), *entry;
    size_t at;
    if (!json_is_array(list))
        return sthi_fail(
            STH_UNSUPPORTED, "layer index", 0, path,
            "%.300s: neither an index of safetensors shards (weight_map) nor a layer index (a list "
            "of entries); name one of these",
            path);
    if (json_array_size(list) == 0)
        return sthi_fail(STH_CORRUPT_DATA, "layer index", 0, path, "%.300s: the index lists no tensor", path);
    json_array_foreach (list, at, entry) STHI_TRY(add_entry(c, path, at, entry));
    STHI_TRY(check_files(c));
    return sthi_checkpoint_index_names(c, path);
}
