/* The calls of an item in the making: its bytes go into their files, and the caller hears of
 * progress.
 * Invariant: no tensor gets more bytes than it has; its checksum covers all that were put. No
 * locks: one thread. */
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/arith.h"
#include "base/error.h"
#include "pack/job.h"
#include "store/json.h"

sth_status sthi_job_put(sthi_pack_job *job, uint32_t i, const void *bytes, uint64_t count) {
    const sthi_job_tensor *t = &job->tensors[job->current->first + i];
    sthi_job_file *f = &job->files[t->file];
    if (i >= job->current->count || !sthi_range_inside(job->written[i], count, t->bytes))
        return sthi_fail(STH_INTERNAL, NULL, 0, t->name, "tensor '%.160s': more bytes than it has", t->name);
    STHI_TRY(sthi_folder_write(&job->folder, f->name, f->fd, t->offset + job->written[i], bytes, count));
    XXH3_128bits_update(job->hash[i], bytes, (size_t)count);
    job->written[i] += count;
    job->unsaved += count;
    return STH_OK;
}

sth_status sthi_job_progress(sthi_pack_job *job, const char *tensor, uint64_t work) {
    job->done_work += work;
    if (!job->options.progress || job->options.progress(job->options.context, tensor, job->done_work, job->all_work))
        return STH_OK;
    return sthi_fail(STH_SHUT_DOWN, NULL, 0, job->folder.path ? job->folder.path : job->in,
                     "%.300s: stopped as asked; the same call goes on from here",
                     job->folder.path ? job->folder.path : job->in);
}

sth_status sthi_job_side(sthi_pack_job *job, const char *name, json_t *value, size_t flags) {
    char *text = value ? json_dumps(value, flags) : NULL;
    json_decref(value);
    if (!text) return sthi_job_out_of_memory(job);
    sth_status status = sthi_folder_put(&job->folder, name, text, strlen(text));
    sthi_json_free_text(text);
    return status;
}

json_t *sthi_job_checksums(const sthi_pack_job *job) {
    json_t *all = json_object();
    for (uint64_t i = 0; all && i < job->tensor_count; i++)
        if (json_object_set_new(all, job->tensors[i].name, json_string(job->tensors[i].checksum))) {
            json_decref(all);
            return NULL;
        }
    return all;
}
