/* Carries a job out: folder, room on the disk, items in their order, side files, renames.
 *
 * States: making -> (all items made, synced) -> publishing -> done. The state file tells them apart, so that a call
 * that comes after a kill goes on in the right one: while making it skips what is made, while publishing it renames
 * what is not renamed yet. What opens the result is renamed last. */
#define _GNU_SOURCE
#include "pack/run.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/thread.h"

#define SAVE_EVERY ((uint64_t)256 << 20) /* bytes written between two notes */

/* ---- items ---- */

static sth_status make_item(sthi_pack_job *job, const sthi_job_item *item) {
    job->current = item;
    for (uint32_t i = 0; i < item->count; i++) {
        job->written[i] = 0;
        XXH3_128bits_reset(job->hash[i]);
    }
    STHI_TRY(item->make(job, item));
    for (uint32_t i = 0; i < item->count; i++) {
        sthi_job_tensor *t = &job->tensors[item->first + i];
        if (job->written[i] != t->bytes)
            return sthi_fail(STH_INTERNAL, NULL, 0, t->name, "tensor '%.160s': not all bytes were made", t->name);
        XXH128_hash_t h = XXH3_128bits_digest(job->hash[i]);
        snprintf(t->checksum, sizeof t->checksum, "%016llx%016llx", (unsigned long long)h.high64,
                 (unsigned long long)h.low64);
    }
    job->done_items++;
    return job->unsaved >= SAVE_EVERY ? sthi_job_save_state(job, false) : STH_OK;
}

static sth_status make_items(sthi_pack_job *job) {
    while (job->done_items < job->item_count) {
        uint64_t before = job->done_work;
        STHI_TRY(make_item(job, &job->items[job->done_items]));
        job->done_work = before + job->items[job->done_items - 1].work;
    }
    return STH_OK;
}

/* ---- files ---- */

static sth_status open_files(sthi_pack_job *job) {
    bool lost = false;
    for (uint32_t i = 0; i < job->file_count; i++) {
        sthi_job_file *f = &job->files[i];
        uint64_t bytes = 0;
        STHI_TRY(sthi_folder_file(&job->folder, f->name, &f->fd, &bytes));
        if (bytes != f->bytes) lost = true;
    }
    while (lost && job->done_items) /* the note speaks of files that are not there */
        job->done_work -= job->items[--job->done_items].work;
    for (uint32_t i = 0; i < job->file_count; i++) {
        sthi_job_file *f = &job->files[i];
        STHI_TRY(sthi_folder_reserve(&job->folder, f->name, f->fd, f->bytes));
        if (f->header)
            STHI_TRY(sthi_folder_write(&job->folder, f->name, f->fd, 0, f->header, f->header_bytes));
    }
    return STH_OK;
}

static void close_files(sthi_pack_job *job) {
    for (uint32_t i = 0; i < job->file_count; i++) {
        if (job->files[i].fd >= 0) close(job->files[i].fd);
        job->files[i].fd = -1;
    }
}

static sth_status make_all(sthi_pack_job *job) {
    XXH3_state_t hashes[STHI_JOB_TENSORS];
    uint32_t threads = job->options.threads ? job->options.threads : (uint32_t)sthi_core_count();
    for (uint32_t i = 0; i < STHI_JOB_TENSORS; i++) job->hash[i] = &hashes[i];
    STHI_TRY(open_files(job));
    STHI_TRY(sthi_workers_create("packer", "sth-pack", threads, job->scratch_bytes, &job->workers));
    sth_status status = make_items(job);
    if (status == STH_OK && job->finish) status = job->finish(job);
    if (status == STH_OK) status = sthi_job_save_state(job, true);
    sthi_workers_destroy(job->workers);
    job->workers = NULL;
    return status;
}

/* Work is kept where the same call may come further: it was stopped, or a read or memory failed it. */
static bool worth_keeping(const sthi_pack_job *job, sth_status status) {
    return job->done_items && !job->folder.write_failed &&
           (status == STH_SHUT_DOWN || status == STH_IO || status == STH_OUT_OF_HOST_MEMORY);
}

static sth_status make(sthi_pack_job *job) {
    sth_status status = sthi_job_save_state(job, false); /* first, so that whatever is found here later can be told */
    if (status == STH_OK) status = make_all(job);
    sthi_error_copy first;
    sthi_error_save(&first);
    if (status != STH_OK && worth_keeping(job, status)) (void)sthi_job_save_state(job, false);
    close_files(job);
    if (status == STH_OK) return STH_OK;
    if (!worth_keeping(job, status)) sthi_job_clear(job);
    return sthi_error_restore(&first);
}

/* ---- the end ---- */

static sth_status publish_file(sthi_pack_job *job, const char *name, const char *path) {
    return sthi_folder_has(&job->folder, name) ? sthi_folder_publish(&job->folder, name, path) : STH_OK;
}

static sth_status publish_sides(sthi_pack_job *job) {
    for (uint32_t i = 0; i < job->side_count; i++)
        if (job->side_paths[i]) STHI_TRY(publish_file(job, job->sides[i], job->side_paths[i]));
    return STH_OK;
}

/* An earlier call that was publishing may have moved a file already; one that is nowhere cannot be made up for. */
static sth_status check_there(const sthi_pack_job *job, const char *name, const char *path) {
    struct stat st;
    if (!path || sthi_folder_has(&job->folder, name) || !lstat(path, &st)) return STH_OK;
    return sthi_fail(STH_NOT_FOUND, NULL, 0, job->folder.path,
                     "%.300s: '%.160s' was made and is gone; remove the folder and call again", job->folder.path, name);
}

static sth_status check_all_there(const sthi_pack_job *job) {
    for (uint32_t i = 0; i < job->side_count; i++) STHI_TRY(check_there(job, job->sides[i], job->side_paths[i]));
    for (uint32_t i = 0; i < job->file_count; i++)
        STHI_TRY(check_there(job, job->files[i].name, job->files[i].publish));
    return STH_OK;
}

static sth_status publish(sthi_pack_job *job) {
    STHI_TRY(check_all_there(job));
    if (!job->sides_last) STHI_TRY(publish_sides(job));
    for (uint32_t i = 0; i < job->file_count; i++)
        if (job->files[i].publish) STHI_TRY(publish_file(job, job->files[i].name, job->files[i].publish));
    if (job->sides_last) STHI_TRY(publish_sides(job));
    if (job->whole_folder) {
        STHI_TRY(sthi_folder_publish(&job->folder, NULL, job->folder.out));
        sthi_folder_remove(&job->folder, STHI_JOB_STATE); /* by descriptor: the folder has its new name by now */
        return sthi_folder_sync_parent(&job->folder);
    }
    STHI_TRY(sthi_folder_sync_parent(&job->folder));
    sthi_folder_remove(&job->folder, STHI_JOB_STATE);
    sthi_folder_end(&job->folder);
    return STH_OK;
}

static sth_status refuse_existing(const char *path) {
    struct stat st;
    if (lstat(path, &st)) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, path,
                     "%.300s: exists already; nothing is overwritten: name a new output", path);
}

static sth_status check_places(const sthi_pack_job *job) {
    if (job->whole_folder) return refuse_existing(job->folder.out);
    for (uint32_t i = 0; i < job->file_count; i++)
        if (job->files[i].publish) STHI_TRY(refuse_existing(job->files[i].publish));
    for (uint32_t i = 0; i < job->side_count; i++)
        if (job->side_paths[i]) STHI_TRY(refuse_existing(job->side_paths[i]));
    return STH_OK;
}

static sth_status run_in_folder(sthi_pack_job *job) {
    bool publishing = false;
    STHI_TRY(sthi_job_load_state(job, &publishing));
    if (!publishing) {
        STHI_TRY(check_places(job));
        STHI_TRY(sthi_job_check_folder(job));
        STHI_TRY(make(job));
    }
    return publish(job);
}

sth_status sthi_job_run(sthi_pack_job *job, const char *out) {
    STHI_TRY(sthi_job_lay_out(job));
    sthi_rights rights;
    STHI_TRY(sthi_rights_of(job->checkpoint->files, job->checkpoint->file_count, &rights));
    STHI_TRY(sthi_folder_open(out, &rights, &job->folder));
    sth_status status = run_in_folder(job);
    if (status != STH_OK) sthi_folder_end(&job->folder); /* where nothing is in it */
    sthi_folder_close(&job->folder);
    return status;
}
