/* Finds out what a path stands for and has it opened: a safetensors file, an index of shards, a
 * layer index, or a folder that holds one of them. No locks. */
#include "base/error.h"
#include "base/memory.h"
#include "store/checkpoint.h"
#include "store/json.h"
#include "store/path.h"
#include "store/safetensors.h"

static sth_status open_safetensors(sth_checkpoint *c, const char *path) {
    int plausible = 1;
    STHI_TRY(sthi_checkpoint_add_file(c, path));
    if (!sthi_path_ends_with(path, ".safetensors"))
        STHI_TRY(sthi_safetensors_probe(&c->files[0], &plausible));
    if (!plausible)
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path,
                         "%.300s: not a safetensors file, an index (.json) or a folder; name one of these", path);
    STHI_TRY(sthi_safetensors_parse(&c->files[0], 0, &c->tensors));
    return sthi_checkpoint_index_names(c, path);
}

static sth_status open_index_tree(sth_checkpoint *c, const char *path, json_t *root) {
    json_t *weight_map = json_object_get(root, "weight_map");
    return weight_map ? sthi_shards_open(c, path, weight_map) : sthi_layers_open(c, path, root);
}

static sth_status open_index(sth_checkpoint *c, const char *path) {
    sthi_file index;
    json_t *root = NULL;
    STHI_TRY(sthi_file_open(path, &index));
    sth_status status = sthi_json_read(&index, 0, index.size, &root);
    sthi_file_close(&index);
    STHI_TRY(status);
    status = open_index_tree(c, path, root);
    json_decref(root);
    return status;
}

static sth_status open_file(sth_checkpoint *c, const char *path) {
    return sthi_path_ends_with(path, ".json") ? open_index(c, path) : open_safetensors(c, path);
}

static sth_status open_any(sth_checkpoint *c, const char *path) {
    if (!sthi_path_is_folder(path)) return open_file(c, path);
    char *inside;
    STHI_TRY(sthi_path_in_folder(path, &inside));
    sth_status status = open_file(c, inside);
    sthi_free(inside);
    return status;
}

sth_status sthi_checkpoint_open(const char *path, sth_checkpoint **out) {
    sth_checkpoint *c = sthi_zalloc(1, sizeof *c);
    if (!c) return sthi_no_memory(path, "opening %.300s", path);
    sth_status status = open_any(c, path);
    if (status != STH_OK) {
        sthi_checkpoint_close(c);
        return status;
    }
    *out = c;
    return STH_OK;
}
