/* One result in the making: which files with which tensors, made item by item in a fixed order, with a note of how
 * far it came. */
#ifndef STHI_PACK_JOB_H
#define STHI_PACK_JOB_H
#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "base/error.h"
#include "base/workers.h"
#include "pack/folder.h"
#include "stagehand/pack.h"
#include "store/checkpoint.h"
#include "store/quant.h"

#define STHI_JOB_TENSORS 4 /* at most made by one item */
#define STHI_JOB_CHUNK ((uint64_t)8 << 20) /* bytes of the source that are in memory at once, but for whole rows */

typedef struct sthi_job_tensor {
    char *name;
    sth_dtype dtype;
    const char *spelling; /* of the dtype; lives as long as the checkpoint */
    int rank;
    uint64_t shape[STH_MAX_RANK];
    uint64_t bytes, offset; /* offset: in its file */
    uint32_t file;
    char checksum[33]; /* XXH3-128 in hexadecimal; "" until it is made */
} sthi_job_tensor;

typedef struct sthi_job_file {
    char *name;    /* in the folder */
    char *publish; /* where it goes; NULL where the whole folder is renamed */
    char *header;  /* safetensors header with its length in front: made from the tensors, where the format gives none;
                      NULL for raw bytes */
    uint64_t header_bytes, bytes;
    int fd;
} sthi_job_file;

typedef struct sthi_pack_job sthi_pack_job;

typedef struct sthi_job_item {
    sth_status (*make)(sthi_pack_job *job, const struct sthi_job_item *item);
    uint64_t first; /* of its tensors */
    uint32_t count;
    const sth_tensor_info *source, *bias; /* of the checkpoint */
    const sth_quant_layer *layer;         /* of the slab */
    uint64_t work;                        /* bytes of the source, for the progress */
    void *note;                           /* the format's; freed with the job */
} sthi_job_item;

struct sthi_pack_job {
    const char *in;
    sth_pack_options options;
    sth_quant *quant;           /* unpacking a slab; owns `checkpoint` then */
    sth_checkpoint *checkpoint; /* the source */
    sthi_job_tensor *tensors;
    uint64_t tensor_count, tensor_capacity;
    sthi_job_item *items;
    uint64_t item_count, item_capacity;
    sthi_job_file *files;
    uint32_t file_count, file_capacity;
    bool whole_folder;  /* the folder itself is the result */
    bool sides_last;    /* the other files are what opens the result: they are published behind the data */
    uint64_t alignment; /* of tensors in raw files */
    /* Writes the result's other files with sthi_job_side; called when all tensors are made. */
    sth_status (*finish)(sthi_pack_job *job);
    /* What a format notes about its items, kept across calls: an object, key to value. */
    json_t *notes;

    sthi_workers *workers;
    size_t scratch_bytes; /* for each worker */
    sthi_folder folder;
    char *sides[4]; /* names of other files, in the order in which they are published, before the data */
    char *side_paths[4];
    uint32_t side_count;
    uint64_t done_items, done_work, all_work, unsaved;
    void *hash[STHI_JOB_TENSORS]; /* of the item at work */
    uint64_t written[STHI_JOB_TENSORS];
    const sthi_job_item *current;
    char identity[33];
};

/* Opens the source; `quant`: a slab is taken apart, not read as a checkpoint; then job->quant is set if it is one. */
sth_status sthi_job_open(const char *in, const sth_pack_options *options, bool quant, sthi_pack_job *job);
void sthi_job_close(sthi_pack_job *job);

/* Adds a file that is named `name` in the folder and goes to `publish` (may be NULL). */
sth_status sthi_job_add_file(sthi_pack_job *job, const char *name, const char *publish);
/* Another file, which `finish` writes. */
sth_status sthi_job_add_side(sthi_pack_job *job, const char *name, const char *publish);
/* Adds an item; its tensors are the next ones added. */
sth_status sthi_job_add_item(sthi_pack_job *job, const sthi_job_item *item);
/* A tensor of the last item, in the last file: `base` and `suffix` are its name. */
sth_status sthi_job_add_tensor(sthi_pack_job *job, const char *base, const char *suffix, sth_dtype dtype, int rank,
                               const uint64_t *shape);
/* An item that copies a tensor as it is. */
sth_status sthi_job_add_copy(sthi_pack_job *job, const sth_tensor_info *source);

/* run.c: makes everything and publishes it as `out`. */
sth_status sthi_job_run(sthi_pack_job *job, const char *out);

/* item.c: the calls of an item in the making. */
/* The next bytes of the current item's tensor `i`. */
sth_status sthi_job_put(sthi_pack_job *job, uint32_t i, const void *bytes, uint64_t count);
/* Writes a file that sthi_job_add_side named. Takes `value` over; NULL is memory that is out. */
sth_status sthi_job_side(sthi_pack_job *job, const char *name, json_t *value, size_t flags);
/* {tensor: checksum} of all tensors; NULL when memory is out. */
json_t *sthi_job_checksums(const sthi_pack_job *job);
/* Reports progress of `work` bytes of the source; SHUT_DOWN when the caller wants to stop. */
sth_status sthi_job_progress(sthi_pack_job *job, const char *tensor, uint64_t work);
/* OUT_OF_HOST_MEMORY, naming the source. */
static inline sth_status sthi_job_out_of_memory(const sthi_pack_job *job) {
    return sthi_no_memory(job->in, "packing %.300s", job->in);
}
#endif
