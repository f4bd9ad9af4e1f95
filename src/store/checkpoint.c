/* Opens whatever a path stands for and keeps the files open. Invariants once open: tensors are sorted by
 * file and offset, lie inside their files, share no byte within a file, and have distinct names. Nothing
 * changes after open, so any number of threads may look up and read at once; no locks. */
#include "store/checkpoint.h"

#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/json.h"
#include "store/path.h"
#include "store/safetensors.h"

static sth_status out_of_memory(const char *path) {
    return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, path, "%.300s: out of memory while opening", path);
}

static sth_status grow_files(sth_checkpoint *c, const char *path) {
    uint32_t capacity = c->file_capacity ? c->file_capacity * 2 : 4;
    sthi_file *files = sthi_realloc(c->files, capacity, sizeof *files);
    if (!files) return out_of_memory(path);
    c->files = files;
    uint64_t *holes = sthi_realloc(c->holes, capacity, sizeof *holes);
    if (!holes) return out_of_memory(path);
    c->holes = holes;
    c->file_capacity = capacity;
    return STH_OK;
}

sth_status sthi_checkpoint_add_file(sth_checkpoint *c, const char *path) {
    if (c->file_count == c->file_capacity) STHI_TRY(grow_files(c, path));
    STHI_TRY(sthi_file_open(path, &c->files[c->file_count]));
    c->holes[c->file_count++] = 0;
    return STH_OK;
}

sth_status sthi_checkpoint_add_named(sth_checkpoint *c, const char *index_path, const char *name) {
    if (!sthi_path_is_plain(name))
        return sthi_fail(STH_CORRUPT_DATA, "stagehand", 0, index_path,
                         "%.300s: names the file '%.200s', which is not a plain name inside its own folder",
                         index_path, name);
    char *path;
    STHI_TRY(sthi_path_beside(index_path, name, &path));
    sth_status status = sthi_checkpoint_add_file(c, path);
    sthi_free(path);
    return status;
}

sth_status sthi_checkpoint_index_names(sth_checkpoint *c, const char *path) {
    return sthi_names_build(&c->names, c->tensors.items, c->tensors.count, path);
}

static sth_status open_safetensors(sth_checkpoint *c, const char *path) {
    int plausible = 1;
    STHI_TRY(sthi_checkpoint_add_file(c, path));
    if (!sthi_path_ends_with(path, ".safetensors"))
        STHI_TRY(sthi_safetensors_probe(&c->files[0], &plausible));
    if (!plausible)
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path,
                         "%.300s: not a safetensors file, an index (.json) or a folder", path);
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
    if (!c) return out_of_memory(path);
    sth_status status = open_any(c, path);
    if (status != STH_OK) {
        sthi_checkpoint_close(c);
        return status;
    }
    *out = c;
    return STH_OK;
}

void sthi_checkpoint_close(sth_checkpoint *c) {
    if (!c) return;
    sthi_names_fini(&c->names);
    sthi_tensors_fini(&c->tensors);
    for (uint32_t i = 0; i < c->file_count; i++) sthi_file_close(&c->files[i]);
    sthi_free(c->files);
    sthi_free(c->holes);
    sthi_free(c);
}

const sth_tensor_info *sthi_checkpoint_find(const sth_checkpoint *c, const char *name) {
    return sthi_names_find(&c->names, c->tensors.items, name);
}

sth_status sthi_checkpoint_read(const sth_checkpoint *c, uint32_t file, uint64_t offset, uint64_t bytes,
                                void *buffer) {
    if (file >= c->file_count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "file %u of %u does not exist", file,
                         c->file_count);
    return sthi_file_read(&c->files[file], offset, bytes, buffer);
}
