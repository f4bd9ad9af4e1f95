/* An index of safetensors shards. The index decides which shard holds a tensor: other copies and files
 * that it does not name are ignored. Shards are numbered in the order of their names. No locks. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/checkpoint.h"
#include "store/safetensors.h"

static int by_text(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

/* Fills names[] (room for one per entry) with the distinct shard names, sorted; they belong to the map. */
static sth_status distinct_shards(const char *path, json_t *weight_map, const char **names,
                                  size_t *out_count) {
    const char *tensor;
    json_t *shard;
    size_t n = 0, kept = 0;
    json_object_foreach (weight_map, tensor, shard) {
        names[n] = json_string_value(shard);
        if (!names[n++])
            return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                             "%.300s: tensor '%.160s': the name of its file is not text", path, tensor);
    }
    qsort(names, n, sizeof *names, by_text);
    for (size_t i = 0; i < n; i++)
        if (!kept || strcmp(names[kept - 1], names[i]) != 0) names[kept++] = names[i];
    *out_count = kept;
    return STH_OK;
}

static bool belongs(json_t *weight_map, const char *tensor, const char *shard) {
    const char *said = json_string_value(json_object_get(weight_map, tensor));
    return said && strcmp(said, shard) == 0;
}

/* Drops the tensors from `first` on that the index does not place in this shard. */
static void keep_indexed(sthi_tensors *list, uint64_t first, json_t *weight_map, const char *shard) {
    uint64_t kept = first;
    for (uint64_t i = first; i < list->count; i++) {
        if (belongs(weight_map, list->items[i].name, shard)) list->items[kept++] = list->items[i];
        else sthi_tensors_drop_name(&list->items[i]);
    }
    list->count = kept;
}

static sth_status open_shards(sth_checkpoint *c, const char *path, json_t *weight_map, const char **names,
                              size_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t first = c->tensors.count;
        STHI_TRY(sthi_checkpoint_add_named(c, path, names[i]));
        STHI_TRY(sthi_safetensors_parse(&c->files[i], i, &c->tensors));
        keep_indexed(&c->tensors, first, weight_map, names[i]);
    }
    return STH_OK;
}

static sth_status check_complete(const sth_checkpoint *c, const char *path, json_t *weight_map) {
    const char *tensor;
    json_t *shard;
    json_object_foreach (weight_map, tensor, shard) {
        if (sthi_checkpoint_find(c, tensor)) continue;
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                         "%.300s: tensor '%.160s' is not in %.160s, where the index places it", path, tensor,
                         json_string_value(shard));
    }
    return STH_OK;
}

sth_status sthi_shards_open(sth_checkpoint *c, const char *path, json_t *weight_map) {
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0)
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                         "%.300s: weight_map is not an object with at least one tensor", path);
    const char **names = sthi_zalloc(json_object_size(weight_map), sizeof *names);
    if (!names) return sthi_no_memory(path, "the index %.300s", path);
    size_t count = 0;
    sth_status status = distinct_shards(path, weight_map, names, &count);
    if (status == STH_OK) status = open_shards(c, path, weight_map, names, count);
    sthi_free(names);
    STHI_TRY(status);
    STHI_TRY(sthi_checkpoint_index_names(c, path));
    return check_complete(c, path, weight_map);
}
