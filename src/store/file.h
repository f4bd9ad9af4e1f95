/* A regular file held open for reading, which notices when its content is changed under it. */
#ifndef STHI_STORE_FILE_H
#define STHI_STORE_FILE_H
#include <stdint.h>

#include "stagehand/status.h"

typedef struct sthi_file {
    char *path;
    int fd;
    uint64_t size, device, inode; /* as they were at open */
    int64_t mtime_s, mtime_ns;
} sthi_file;

/* Opens a regular file. Folders, pipes and devices are UNSUPPORTED; a missing file is NOT_FOUND. */
sth_status sthi_file_open(const char *path, sthi_file *out);
void sthi_file_close(sthi_file *file); /* a zeroed struct is fine */

/* Fills buffer with [offset, offset + bytes). Every byte comes from the file as it was at open: a short
 * read is IO, a change since open is CHANGED_DATA. Any thread, several at once. */
sth_status sthi_file_read(const sthi_file *file, uint64_t offset, uint64_t bytes, void *buffer);

/* Parts of it, for readers that do more than one file or piece between two checks. */
sth_status sthi_file_check_unchanged(const sthi_file *file); /* CHANGED_DATA */
sth_status sthi_file_pread(const sthi_file *file, uint64_t offset, uint64_t bytes, void *buffer);
/* A read of `wanted` bytes at `offset` that ended after `got`, with an errno or (0) at the end of the file:
 * CHANGED_DATA where the file changed, else IO. */
sth_status sthi_file_fail_read(const sthi_file *file, uint64_t offset, uint64_t wanted, uint64_t got, int err);
#endif
