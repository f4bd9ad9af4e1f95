/* The state's file: made new (never one that is there), readable by its owner alone, and without a name from
 * the start, so that it goes with the process however that ends, and no other process finds a stale one.
 * Positioned reads and writes only: a mapping would turn a full disk into SIGBUS. Knows nothing of
 * what the bytes mean. No locks. */
#define _GNU_SOURCE
#include "optim/statefile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"

#define ATTEMPTS 1000
#define REGION_UNIT 4096
#define CALL_BYTES ((uint64_t)1 << 30) /* one system call moves at most 2 GiB less a page */

static sth_status fail_errno(const char *path, int err, const char *what) {
    sth_status status = err == ENOENT || err == ENOTDIR ? STH_NOT_FOUND : STH_IO;
    return sthi_fail(status, "errno", err, path, "%s: cannot %s: %s", path, what, strerror(err));
}

static int create_new(const char *path) {
    return open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
}

/* A name of our own in `folder`; others may hold the first ones tried. */
static int create_inside(const char *folder, char *path, size_t capacity) {
    int fd = -1;
    for (int i = 0; fd < 0 && i < ATTEMPTS; i++) {
        int length = snprintf(path, capacity, "%s/stagehand-adamw-%ld-%d", folder, (long)getpid(), i);
        if (length < 0 || (size_t)length >= capacity) {
            errno = ENAMETOOLONG;
            return -1;
        }
        fd = create_new(path);
        if (fd < 0 && errno != EEXIST) return -1;
    }
    return fd;
}

sth_status sthi_statefile_open(const char *path, sthi_statefile *out) {
    char made[4096];
    struct stat st;
    bool folder = !stat(path, &st) && S_ISDIR(st.st_mode);
    const char *name = folder ? made : path;
    int fd = folder ? create_inside(path, made, sizeof made) : create_new(path);
    if (fd < 0 && errno == EEXIST)
        return sthi_fail(
            STH_INVALID_ARGUMENT, "errno", EEXIST, path,
            "%s: exists already; give a folder as state_path, or the name of a file that does not exist", path);
    if (fd < 0) return fail_errno(path, errno, "make a file for the optimizer's state");
    if (unlink(name)) {
        int err = errno;
        close(fd);
        return fail_errno(name, err, "take the name of the optimizer's file away");
    }
    char *copy = sthi_strdup(path);
    if (!copy) {
        close(fd);
        return sthi_no_memory(path, "the path of %s", path);
    }
    *out = (sthi_statefile){.fd = fd, .path = copy};
    return STH_OK;
}

void sthi_statefile_close(sthi_statefile *file) {
    if (!file->path) return;
    close(file->fd);
    sthi_free(file->path);
    *file = (sthi_statefile){.fd = -1};
}

/* Asked first: crossing the limit sends a signal that ends the process. */
static bool within_limit(uint64_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

static int allocate(int fd, uint64_t offset, uint64_t bytes) {
    if (sthi_fault_hit(STHI_FAULT_WRITE)) return ENOSPC;
    int err;
    do err = posix_fallocate(fd, (off_t)offset, (off_t)bytes);
    while (err == EINTR);
    return err;
}

sth_status sthi_statefile_grow(sthi_statefile *file, uint64_t bytes, uint64_t *out_offset) {
    uint64_t rounded, end;
    char want[24];
    if (!sthi_round_up(bytes, REGION_UNIT, &rounded) || !sthi_add_u64(file->bytes, rounded, &end) ||
        end > INT64_MAX)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, file->path,
                         "%s: a state of %llu bytes is too large; keep it in memory",
                         file->path, (unsigned long long)bytes);
    sthi_format_size(end, want, sizeof want);
    if (!within_limit(end))
        return sthi_fail(STH_IO, "errno", EFBIG, file->path,
                         "%s: the optimizer's state takes %s, more than this process may write to one file "
                         "(RLIMIT_FSIZE, ulimit -f); raise that limit",
                         file->path, want);
    int err = rounded ? allocate(file->fd, file->bytes, rounded) : 0;
    if (err)
        return sthi_fail(
            STH_IO, "errno", err, file->path,
            "%s: no room for %s of the optimizer's state: %s; free some, or give another state_path",
            file->path, want, strerror(err));
    *out_offset = file->bytes;
    file->bytes = end;
    return STH_OK;
}

sth_status sthi_statefile_read(const sthi_statefile *file, uint64_t offset, void *buffer, uint64_t bytes) {
    char *to = buffer;
    while (bytes) {
        ssize_t got = -1;
        errno = EIO;
        if (!sthi_fault_hit(STHI_FAULT_READ))
            got = pread(file->fd, to, sthi_min_u64(bytes, CALL_BYTES), (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail_errno(file->path, errno, "read the optimizer's state");
        if (!got)
            return sthi_fail(STH_IO, NULL, 0, file->path,
                             "%s: the optimizer's file ends early, at byte %llu; load weights and state again",
                             file->path, (unsigned long long)offset);
        to += got;
        offset += (uint64_t)got;
        bytes -= (uint64_t)got;
    }
    return STH_OK;
}

sth_status sthi_statefile_write(const sthi_statefile *file, uint64_t offset, const void *buffer,
                                uint64_t bytes) {
    const char *from = buffer;
    while (bytes) {
        ssize_t put = -1;
        errno = ENOSPC;
        if (!sthi_fault_hit(STHI_FAULT_WRITE))
            put = pwrite(file->fd, from, sthi_min_u64(bytes, CALL_BYTES), (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return fail_errno(file->path, errno, "write the optimizer's state");
        from += put;
        offset += (uint64_t)put;
        bytes -= (uint64_t)put;
    }
    return STH_OK;
}
