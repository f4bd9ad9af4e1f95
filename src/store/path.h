/* Names of files: joining, what an index may name, and which file of a folder is meant. */
#ifndef STHI_STORE_PATH_H
#define STHI_STORE_PATH_H
#include <stdbool.h>

#include "stagehand/status.h"

bool sthi_path_ends_with(const char *path, const char *suffix);

/* The name beside `sibling`: its folder, then `name`. The caller frees it with sthi_free. */
sth_status sthi_path_beside(const char *sibling, const char *name, char **out);

/* True for a relative name that stays inside its folder: no leading '/', no empty, "." or ".." part. */
bool sthi_path_is_plain(const char *name);

/* True when `path` is a folder. A path that does not exist is false. */
bool sthi_path_is_folder(const char *path);

/* The file of a folder that describes the model: one of the two usual indexes, else its only .safetensors
 * file. The caller frees it with sthi_free. */
sth_status sthi_path_in_folder(const char *folder, char **out);
#endif
