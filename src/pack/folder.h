/* The folder OUT.partial, in which a result grows until it is whole. */
#ifndef STHI_PACK_FOLDER_H
#define STHI_PACK_FOLDER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sys/types.h>

#include "stagehand/status.h"
#include "store/file.h"

/* Who may read a result: nobody who may not read all of its source. What the umask takes away comes on top. */
typedef struct sthi_rights {
    mode_t mode; /* of a file */
    uid_t user;
    gid_t group;
} sthi_rights;

/* Of results that are made from `count` open files, at least one. */
sth_status sthi_rights_of(const sthi_file *files, uint32_t count, sthi_rights *out);

typedef struct sthi_folder {
    char *path;      /* OUT.partial */
    char *out;       /* OUT, without a slash at its end */
    int fd;
    sthi_rights rights;
    bool write_failed; /* some write was refused: what is here is worth nothing */
} sthi_folder;

/* Makes the folder, or takes over that of an earlier call, and locks it. Refused: a link, one that another process
 * works in, one of another user. */
sth_status sthi_folder_open(const char *out, const sthi_rights *rights, sthi_folder *folder);
void sthi_folder_close(sthi_folder *folder);

/* All names are plain names inside the folder; links are never followed. */

/* Opens a regular file for reading and writing, makes it where it is not there. *out_bytes: its size. */
sth_status sthi_folder_file(sthi_folder *folder, const char *name, int *out_fd, uint64_t *out_bytes);
/* Takes room on the disk for `bytes` from the start. */
sth_status sthi_folder_reserve(sthi_folder *folder, const char *name, int fd, uint64_t bytes);
sth_status sthi_folder_write(sthi_folder *folder, const char *name, int fd, uint64_t offset, const void *buffer,
                             uint64_t bytes);
sth_status sthi_folder_sync(sthi_folder *folder, const char *name, int fd);
/* A small file, whole or not at all: in the place of an older one of that name. */
sth_status sthi_folder_put(sthi_folder *folder, const char *name, const char *text, size_t bytes);
bool sthi_folder_has(const sthi_folder *folder, const char *name);
/* Removes the file if it is there. */
void sthi_folder_remove(sthi_folder *folder, const char *name);

/* Moves a file out to `path`, or the whole folder to OUT (name NULL); INVALID_ARGUMENT where something is there. */
sth_status sthi_folder_publish(sthi_folder *folder, const char *name, const char *path);
/* Syncs the folder in which OUT lies. */
sth_status sthi_folder_sync_parent(sthi_folder *folder);
/* Removes the folder if it is empty. */
void sthi_folder_end(sthi_folder *folder);
#endif
