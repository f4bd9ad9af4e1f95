/* A download that reserved its space and was interrupted leaves a file of the right size which reads as
 * zeros. Such ranges are holes, and the file system knows them. Zeros can be holes on purpose too, when a
 * tool made the file sparse, so that small holes are let pass; and file systems that turn zeros into holes by
 * themselves (compression), or ask a server, are not asked. Costs one system call for a file without holes.
 */
#define _GNU_SOURCE
#include "store/sparse.h"

#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <linux/magic.h>

#include "base/arith.h"
#include "base/error.h"

#define SUSPICIOUS_BYTES ((uint64_t)1 << 20)
#define BLOCK 4096u          /* unit of holes on the file systems below, as a rule */
#define XFS_MAGIC 0x58465342 /* not in linux/magic.h */

typedef unsigned long long ull;

bool sthi_sparse_is_telling(const sthi_file *file) {
    struct statfs fs;
    if (fstatfs(file->fd, &fs)) return false;
    switch ((unsigned long)fs.f_type) {
    case EXT4_SUPER_MAGIC:
    case XFS_MAGIC:
    case BTRFS_SUPER_MAGIC:
    case F2FS_SUPER_MAGIC:
    case TMPFS_MAGIC:
    case OVERLAYFS_SUPER_MAGIC:
        return true;
    default:
        return false;
    }
}

static bool may_have_holes(const sthi_file *file) {
    struct stat st;
    return fstat(file->fd, &st) == 0 && (uint64_t)st.st_blocks * 512 < file->size &&
           sthi_sparse_is_telling(file);
}

/* First byte at or behind `at` that is data (or a hole), at most `end`. Moves the descriptor's position,
 * which nothing else uses. */
static uint64_t seek(const sthi_file *file, uint64_t at, int whence, uint64_t end) {
    off_t found = lseek(file->fd, (off_t)at, whence);
    return found < 0 ? end : sthi_min_u64((uint64_t)found, end); /* there is none behind `at` */
}

/* The part of a tensor that shares no block with its neighbours or the header, which may be written although
 * the tensor is not; the whole tensor where there is no such part. */
typedef struct span {
    uint64_t begin, end;
} span;

static span own_blocks(const sth_tensor_info *t) {
    uint64_t end = t->offset + t->bytes, first = t->offset + (BLOCK - t->offset % BLOCK) % BLOCK;
    span inner = {first, end - end % BLOCK};
    return inner.begin < inner.end ? inner : (span){t->offset, end};
}

/* Bytes of the span that lie in holes; *out_first is the first of them. */
static uint64_t hole_bytes(const sthi_file *file, span s, uint64_t *out_first) {
    uint64_t bytes = 0;
    for (uint64_t at = s.begin; at < s.end;) {
        uint64_t data = seek(file, at, SEEK_DATA, s.end);
        if (data > at && !bytes) *out_first = at;
        bytes += data - at;
        at = data < s.end ? seek(file, data, SEEK_HOLE, s.end) : s.end;
    }
    return bytes;
}

sth_status sthi_sparse_check(const sthi_file *file, const sth_tensor_info *tensors, uint64_t count) {
    if (!may_have_holes(file)) return STH_OK;
    for (uint64_t i = 0; i < count; i++) {
        const sth_tensor_info *t = &tensors[i];
        span s = own_blocks(t);
        uint64_t first = 0, missing = hole_bytes(file, s, &first);
        if (!missing || (missing < s.end - s.begin && missing < SUSPICIOUS_BYTES)) continue;
        return sthi_fail(
            STH_CORRUPT_DATA, "safetensors", 0, file->path,
            "%.300s: tensor '%.160s': %llu of its %llu bytes were never written (the file has a hole at "
            "byte %llu); an interrupted download? If they are zeros on purpose, copy the file with "
            "cp --sparse=never",
            file->path, t->name, (ull)missing, (ull)t->bytes, (ull)first);
    }
    return STH_OK;
}
