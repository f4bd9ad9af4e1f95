/* A checkpoint inside the library: its files, its tensors in the order on disk, and their names. */
#ifndef STHI_STORE_CHECKPOINT_H
#define STHI_STORE_CHECKPOINT_H
#include <jansson.h>

#include "stagehand/checkpoint.h"
#include "store/file.h"
#include "store/names.h"
#include "store/tensors.h"

struct sth_checkpoint {
    sthi_file *files;
    uint64_t *holes; /* bytes per file that no tensor covers */
    uint32_t file_count, file_capacity;
    sthi_tensors tensors;
    sthi_names names;
};

sth_status sthi_checkpoint_open(const char *path, sth_checkpoint **out); /* checkpoint_open.c */
void sthi_checkpoint_close(sth_checkpoint *checkpoint);
const sth_tensor_info *sthi_checkpoint_find(const sth_checkpoint *checkpoint, const char *name);
/* The tensor that a byte of the file belongs to; NULL for a gap. */
const char *sthi_checkpoint_tensor_at(const sth_checkpoint *checkpoint, uint32_t file, uint64_t offset);
sth_status sthi_checkpoint_read(const sth_checkpoint *checkpoint, uint32_t file, uint64_t offset,
                                uint64_t bytes, void *buffer);

/* For the readers of index files. */
sth_status sthi_checkpoint_add_file(sth_checkpoint *checkpoint, const char *path);
/* Opens the file that the index at `index_path` calls `name`; a name that leads out of its folder is
 * refused. */
sth_status sthi_checkpoint_add_named(sth_checkpoint *checkpoint, const char *index_path, const char *name);
sth_status sthi_checkpoint_index_names(sth_checkpoint *checkpoint, const char *path);

/* An index of safetensors shards: {"weight_map": {tensor: shard}}. */
sth_status sthi_shards_open(sth_checkpoint *checkpoint, const char *path, json_t *weight_map);
/* A layer index: a list of entries, or an object that holds one. */
sth_status sthi_layers_open(sth_checkpoint *checkpoint, const char *path, json_t *root);
#endif
