/* How one open file is read: around the page cache, out of it, or through it. */
#ifndef STHI_STORE_ACCESS_H
#define STHI_STORE_ACCESS_H
#include <stdatomic.h>
#include <stdbool.h>

#include "stagehand/checkpoint.h"
#include "store/file.h"

typedef struct sthi_access {
    const sthi_file *file;
    int direct_fd;           /* -1: O_DIRECT is refused */
    uint32_t align;          /* of offset, length and address of direct reads, bytes; a power of two */
    atomic_int way;          /* sth_read_way */
    sth_read_way direct_way; /* for what is not in the page cache */
    atomic_bool nowait;      /* reads that do not wait for the disk are possible */
    char why[128];           /* the choice at open */
    atomic_bool left_cache;  /* it was changed since, by sthi_access_settle */
    atomic_uint_fast64_t read_bytes;   /* asked for: counted before any of them is read */
    atomic_uint_fast64_t cached_bytes; /* of them, found in the page cache */
    uint64_t settled_bytes, settled_cached; /* as they were at the last sthi_access_settle */
} sthi_access;

/* Chooses. `file` outlives the access. Never fails: what is refused is not used, and `why` says so. */
void sthi_access_open(const sthi_file *file, sthi_access *out);
void sthi_access_close(sthi_access *access);

/* Between steps, one thread: a file of which most was not in the cache any more is read around it from now on. */
void sthi_access_settle(sthi_access *access);
void sthi_access_describe(const sthi_access *access, sth_file_way *out);

/* Whether direct reads are what the file is read with as a rule. */
static inline bool sthi_access_is_direct(const sthi_access *a) {
    int way = atomic_load_explicit(&a->way, memory_order_relaxed);
    return way == STH_READ_URING || way == STH_READ_DIRECT;
}
#endif
