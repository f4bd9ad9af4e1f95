/* state.json in the folder: which items are made, with their checksums and the formats' notes. Written after the data
 * that it speaks of is synced, so that it never says too much. A state of another identity, or one that makes no sense,
 * is as good as none. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "pack/run.h"
#include "store/json.h"
#include "store/path.h"

/* All files of the result, as they are called in the folder. */
static json_t *names(const sthi_pack_job *job) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < job->file_count; i++) json_array_append_new(list, json_string(job->files[i].name));
    for (uint32_t i = 0; i < job->side_count; i++) json_array_append_new(list, json_string(job->sides[i]));
    return list;
}

static json_t *describe(const sthi_pack_job *job, bool publishing) {
    json_t *checksums = json_array();
    uint64_t made = job->done_items < job->item_count ? job->items[job->done_items].first : job->tensor_count;
    for (uint64_t i = 0; checksums && i < made; i++)
        if (json_array_append_new(checksums, json_string(job->tensors[i].checksum))) {
            json_decref(checksums);
            return NULL;
        }
    return json_pack("{s:i, s:s, s:I, s:b, s:o, s:o, s:O}", "state_version", 1, "identity", job->identity, "items",
                     (json_int_t)job->done_items, "publishing", (int)publishing, "files", names(job), "checksums",
                     checksums, "notes", job->notes);
}

sth_status sthi_job_save_state(sthi_pack_job *job, bool publishing) {
    for (uint32_t f = 0; f < job->file_count; f++)
        if (job->files[f].fd >= 0) STHI_TRY(sthi_folder_sync(&job->folder, job->files[f].name, job->files[f].fd));
    json_t *state = describe(job, publishing);
    char *text = state ? json_dumps(state, JSON_COMPACT) : NULL;
    json_decref(state);
    if (!text) return sthi_job_out_of_memory(job);
    sth_status status = sthi_folder_put(&job->folder, STHI_JOB_STATE, text, strlen(text));
    sthi_json_free_text(text);
    job->unsaved = 0;
    return status;
}

/* True when the state is this job's and makes sense; it is taken over then. */
static bool take_over(sthi_pack_job *job, json_t *state, bool *out_publishing) {
    uint64_t items;
    const char *identity = json_string_value(json_object_get(state, "identity"));
    json_t *checksums = json_object_get(state, "checksums"), *notes = json_object_get(state, "notes");
    if (!identity || strcmp(identity, job->identity) != 0 || !json_is_object(notes) ||
        !sthi_json_u64(json_object_get(state, "items"), &items) || items > job->item_count)
        return false;
    uint64_t made = items < job->item_count ? job->items[items].first : job->tensor_count;
    bool publishing = json_is_true(json_object_get(state, "publishing"));
    if (json_array_size(checksums) != made || (publishing && items < job->item_count)) return false;
    for (uint64_t i = 0; i < made; i++) {
        const char *text = json_string_value(json_array_get(checksums, i));
        if (!text || strlen(text) != 32 || strspn(text, "0123456789abcdef") != 32) return false;
        memcpy(job->tensors[i].checksum, text, 33);
    }
    for (uint64_t i = 0; i < items; i++) job->done_work += job->items[i].work;
    job->done_items = items;
    json_object_update(job->notes, notes);
    *out_publishing = publishing;
    return true;
}

/* ---- what is in the folder ---- */

static void remove_with_new(sthi_pack_job *job, const char *name) {
    char temporary[256];
    if (!sthi_path_is_plain(name) || strchr(name, '/')) return;
    snprintf(temporary, sizeof temporary, "%.200s.new", name);
    sthi_folder_remove(&job->folder, name);
    sthi_folder_remove(&job->folder, temporary);
}

static void remove_listed(sthi_pack_job *job, const json_t *state) {
    size_t at;
    json_t *name;
    json_array_foreach (json_object_get(state, "files"), at, name)
        if (json_is_string(name)) remove_with_new(job, json_string_value(name));
    remove_with_new(job, STHI_JOB_STATE);
}

void sthi_job_clear(sthi_pack_job *job) {
    for (uint32_t i = 0; i < job->file_count; i++) remove_with_new(job, job->files[i].name);
    for (uint32_t i = 0; i < job->side_count; i++) remove_with_new(job, job->sides[i]);
    remove_with_new(job, STHI_JOB_STATE);
    sthi_folder_end(&job->folder);
}

static bool is_ours(const sthi_pack_job *job, const char *name) {
    bool ours = strncmp(name, STHI_JOB_STATE, strlen(STHI_JOB_STATE)) == 0;
    for (uint32_t i = 0; !ours && i < job->file_count; i++) ours = strcmp(name, job->files[i].name) == 0;
    for (uint32_t i = 0; !ours && i < job->side_count; i++)
        ours = strncmp(name, job->sides[i], strlen(job->sides[i])) == 0;
    return ours || strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

sth_status sthi_job_check_folder(const sthi_pack_job *job) {
    DIR *dir = opendir(job->folder.path);
    if (!dir) return sthi_fail(STH_IO, "errno", errno, job->folder.path,
                               "%.300s: cannot list it; remove the folder and call again", job->folder.path);
    sth_status status = STH_OK;
    for (struct dirent *entry; status == STH_OK && (entry = readdir(dir));)
        if (!is_ours(job, entry->d_name))
            status = sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, job->folder.path,
                               "%.300s: holds '%.160s', which is not part of this work; remove the folder",
                               job->folder.path, entry->d_name);
    closedir(dir);
    return status;
}

static sth_status read_state(sthi_pack_job *job, json_t **out) {
    sthi_file file;
    size_t size = strlen(job->folder.path) + sizeof "/" STHI_JOB_STATE;
    char *path = sthi_alloc(size);
    if (!path) return sthi_job_out_of_memory(job);
    snprintf(path, size, "%s/%s", job->folder.path, STHI_JOB_STATE);
    sth_status status = sthi_file_open(path, &file);
    sthi_free(path);
    STHI_TRY(status);
    status = sthi_json_read(&file, 0, file.size, out);
    sthi_file_close(&file);
    return status;
}

sth_status sthi_job_load_state(sthi_pack_job *job, bool *out_publishing) {
    json_t *state = NULL;
    *out_publishing = false;
    if (!sthi_folder_has(&job->folder, STHI_JOB_STATE)) return STH_OK;
    sth_status status = read_state(job, &state);
    if (status != STH_OK && status != STH_CORRUPT_DATA) return status;
    if (!state || !take_over(job, state, out_publishing)) remove_listed(job, state);
    json_decref(state);
    return STH_OK;
}
