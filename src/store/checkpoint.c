/* A checkpoint's files, tensors and names. Invariants once open: tensors are sorted by file and
 * offset, lie inside their files, share no byte within a file, and have distinct names. Nothing
 * changes after open, so any number of threads may look up and read at once; no locks. */
#include "store/checkpoint.h"

#include "base/error.h"
#include "base/memory.h"
#include "store/path.h"

static sth_status grow_files(sth_checkpoint *c, const char *path) {
    uint32_t capacity = c->file_capacity ? c->file_capacity * 2 : 4;
    sthi_file *files = sthi_realloc(c->files, capacity, sizeof *files);
    if (!files) return sthi_no_memory(path, "the files of %.300s", path);
    c->files = files;
    uint64_t *holes = sthi_realloc(c->holes, capacity, sizeof *holes);
    if (!holes) return sthi_no_memory(path, "the files of %.300s", path);
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

const char *sthi_checkpoint_tensor_at(const sth_checkpoint *checkpoint, uint32_t file, uint64_t offset) {
    for (uint64_t i = 0; i < checkpoint->tensors.count; i++) {
        const sth_tensor_info *t = &checkpoint->tensors.items[i];
        if (t->file == file && offset >= t->offset && offset - t->offset < t->bytes) return t->name;
    }
    return NULL;
}

sth_status sthi_checkpoint_read(const sth_checkpoint *c, uint32_t file, uint64_t offset, uint64_t bytes,
                                void *buffer) {
    if (file >= c->file_count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "file %u of %u does not exist", file,
                         c->file_count);
    return sthi_file_read(&c->files[file], offset, bytes, buffer);
}
