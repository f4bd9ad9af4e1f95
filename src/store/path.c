/* Paths as text, and the one look into a folder. Links are followed: caches keep their files behind links,
 * and whoever can place a link in the model's folder can place the file itself. No locks. */
#define _GNU_SOURCE
#include "store/path.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/memory.h"

bool sthi_path_ends_with(const char *path, const char *suffix) {
    size_t n = strlen(path), m = strlen(suffix);
    return n >= m && strcmp(path + n - m, suffix) == 0;
}

static sth_status join(const char *folder, size_t folder_len, const char *name, char **out) {
    size_t size = folder_len + 1 + strlen(name) + 1;
    char *path = sthi_alloc(size);
    if (!path) return sthi_no_memory(name, "the path of %.300s", name);
    memcpy(path, folder, folder_len);
    snprintf(path + folder_len, size - folder_len, "%s%s",
             folder_len && folder[folder_len - 1] != '/' ? "/" : "", name);
    *out = path;
    return STH_OK;
}

sth_status sthi_path_beside(const char *sibling, const char *name, char **out) {
    const char *slash = strrchr(sibling, '/');
    return join(sibling, slash ? (size_t)(slash - sibling) + 1 : 0, name, out);
}

bool sthi_path_is_plain(const char *name) {
    for (const char *part = name;;) {
        size_t n = strcspn(part, "/");
        if (n == 0 || (n == 1 && part[0] == '.') || (n == 2 && part[0] == '.' && part[1] == '.'))
            return false;
        if (!part[n]) return true;
        part += n + 1;
    }
}

bool sthi_path_is_folder(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Sets *out where the folder has an entry `name`, leaves it NULL where not. */
static sth_status existing(const char *folder, const char *name, char **out) {
    char *path;
    struct stat st;
    STHI_TRY(join(folder, strlen(folder), name, &path));
    if (stat(path, &st) == 0) *out = path;
    else sthi_free(path);
    return STH_OK;
}

typedef struct listing {
    char first[NAME_MAX + 1];
    char text[400]; /* names, as far as they fit */
    uint64_t count;
} listing;

static void note_name(listing *found, const char *name) {
    if (!found->count++) snprintf(found->first, sizeof found->first, "%s", name);
    size_t used = strlen(found->text);
    if (used + strlen(name) + 8 < sizeof found->text)
        snprintf(found->text + used, sizeof found->text - used, "%s%s", used ? ", " : "", name);
    else if (!sthi_path_ends_with(found->text, "..."))
        snprintf(found->text + used, sizeof found->text - used, ", ...");
}

static sth_status list_safetensors(const char *folder, listing *found) {
    DIR *dir = opendir(folder);
    if (!dir) {
        int err = errno;
        return sthi_fail(err == ENOMEM ? STH_OUT_OF_HOST_MEMORY : STH_IO, "errno", err, folder,
                         "%.300s: cannot list the folder: %s", folder, strerror(err));
    }
    for (struct dirent *entry; (entry = readdir(dir));)
        if (entry->d_name[0] != '.' && sthi_path_ends_with(entry->d_name, ".safetensors"))
            note_name(found, entry->d_name);
    closedir(dir);
    return STH_OK;
}

static sth_status only_safetensors(const char *folder, char **out) {
    listing found = {0};
    STHI_TRY(list_safetensors(folder, &found));
    if (found.count == 0)
        return sthi_fail(
            STH_NOT_FOUND, "stagehand", 0, folder,
            "%.300s: the folder holds no index (*.safetensors.index.json) and no .safetensors file; "
            "name the folder or file of the weights", folder);
    if (found.count > 1)
        return sthi_fail(
            STH_UNSUPPORTED, "stagehand", 0, folder,
            "%.240s: the folder holds %llu .safetensors files and no index that says which belong "
            "together; name one of them: %s",
            folder, (unsigned long long)found.count, found.text);
    return join(folder, strlen(folder), found.first, out);
}

sth_status sthi_path_in_folder(const char *folder, char **out) {
    static const char *const indexes[] = {"diffusion_pytorch_model.safetensors.index.json",
                                          "model.safetensors.index.json"};
    char *path = NULL;
    for (size_t i = 0; i < sizeof indexes / sizeof *indexes && !path; i++)
        STHI_TRY(existing(folder, indexes[i], &path));
    if (!path) STHI_TRY(only_safetensors(folder, &path));
    *out = path;
    return STH_OK;
}
