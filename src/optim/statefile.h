/* A file without a name for the optimiser's state, grown and preallocated by regions. */
#ifndef STHI_OPTIM_STATEFILE_H
#define STHI_OPTIM_STATEFILE_H
#include <stdint.h>

#include "stagehand/status.h"

typedef struct sthi_statefile {
    int fd; /* -1: none */
    char *path;
    uint64_t bytes; /* given out; guarded by the caller */
} sthi_statefile;

/* `path`: a folder, or the name of a file that does not exist. Blocks. Allocates. */
sth_status sthi_statefile_open(const char *path, sthi_statefile *out);
void sthi_statefile_close(sthi_statefile *file);
/* The next `bytes`, which read as zeros and have their room on the disk. One thread at a time. */
sth_status sthi_statefile_grow(sthi_statefile *file, uint64_t bytes, uint64_t *out_offset);
/* Threads: any, on ranges of their own. */
sth_status sthi_statefile_read(const sthi_statefile *file, uint64_t offset, void *buffer, uint64_t bytes);
sth_status sthi_statefile_write(const sthi_statefile *file, uint64_t offset, const void *buffer,
                                uint64_t bytes);
#endif
