/* Exported functions of stagehand/checkpoint.h: checks arguments, then calls src/store. */
#include "stagehand/checkpoint.h"

#include "base/error.h"
#include "store/access.h"
#include "store/candidates.h"
#include "store/checkpoint.h"
#include "store/dtype.h"

const char *sth_dtype_name(sth_dtype dtype) { return sthi_dtype_name(dtype); }

uint32_t sth_dtype_bits(sth_dtype dtype) { return sthi_dtype_bits(dtype); }

sth_status sth_checkpoint_open(const char *path, sth_checkpoint **out_checkpoint) {
    if (!path || !*path || !out_checkpoint)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_checkpoint_open needs a path that is not empty and an address for the result");
    return sthi_checkpoint_open(path, out_checkpoint);
}

void sth_checkpoint_close(sth_checkpoint *checkpoint) { sthi_checkpoint_close(checkpoint); }

uint64_t sth_checkpoint_tensor_count(const sth_checkpoint *checkpoint) {
    return checkpoint ? checkpoint->tensors.count : 0;
}

const sth_tensor_info *sth_checkpoint_tensor(const sth_checkpoint *checkpoint, uint64_t i) {
    return checkpoint && i < checkpoint->tensors.count ? &checkpoint->tensors.items[i] : NULL;
}

const sth_tensor_info *sth_checkpoint_find(const sth_checkpoint *checkpoint, const char *name) {
    return checkpoint && name ? sthi_checkpoint_find(checkpoint, name) : NULL;
}

uint32_t sth_checkpoint_file_count(const sth_checkpoint *checkpoint) {
    return checkpoint ? checkpoint->file_count : 0;
}

const char *sth_checkpoint_file_path(const sth_checkpoint *checkpoint, uint32_t file) {
    return checkpoint && file < checkpoint->file_count ? checkpoint->files[file].path : NULL;
}

int sth_checkpoint_file_descriptor(const sth_checkpoint *checkpoint, uint32_t file) {
    return checkpoint && file < checkpoint->file_count ? checkpoint->files[file].fd : -1;
}

uint64_t sth_checkpoint_hole_bytes(const sth_checkpoint *checkpoint, uint32_t file) {
    return checkpoint && file < checkpoint->file_count ? checkpoint->holes[file] : 0;
}

sth_status sth_checkpoint_read(sth_checkpoint *checkpoint, uint32_t file, uint64_t offset, uint64_t bytes,
                               void *buffer) {
    if (!checkpoint || (!buffer && bytes))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_checkpoint_read needs a checkpoint and a buffer");
    return sthi_checkpoint_read(checkpoint, file, offset, bytes, buffer);
}

sth_status sth_checkpoint_names(const char *name, sth_name_visit *visit, void *context) {
    if (!name || !visit)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_checkpoint_names needs a name and a function");
    return sthi_checkpoint_names(name, visit, context);
}

const char *sth_read_way_name(sth_read_way way) {
    static const char *const names[] = {
#define STHI_WAY_NAME(name, text) text,
        STH_READ_WAY_LIST(STHI_WAY_NAME)
#undef STHI_WAY_NAME
    };
    return (unsigned)way < STH_READ_WAY_COUNT ? names[way] : "?";
}

sth_status sth_checkpoint_file_way(sth_checkpoint *checkpoint, uint32_t file, sth_file_way *out_way) {
    if (!checkpoint || !out_way || file >= checkpoint->file_count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_checkpoint_file_way needs a checkpoint, one of its files and an address for the result");
    sthi_access access;
    sthi_access_open(&checkpoint->files[file], &access);
    sthi_access_describe(&access, out_way);
    sthi_access_close(&access);
    return STH_OK;
}
