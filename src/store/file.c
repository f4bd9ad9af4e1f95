/* Opening and reading files. pread only: a mapping would turn a truncated file into SIGBUS and a hole
 * past the end into zeros. The file's identity (size, time of change, inode) is compared before and
 * after each read, on the open descriptor: a file that was replaced by another of the same name still
 * gives its old bytes, one that was written in place is refused. No locks; the struct is read only after
 * open. Does not follow the path again, and does not lock the file against writers. */
#define _GNU_SOURCE
#include "store/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"

#define READ_CHUNK ((uint64_t)1 << 30) /* one system call moves at most 2 GiB less a page */
#define TICK_NS 1000000
#define MAX_TICKS 20

static sth_status fail_errno(const char *path, int err, const char *verb) {
    sth_status status = err == ENOENT || err == ENOTDIR ? STH_NOT_FOUND : STH_IO;
    return sthi_fail(status, "errno", err, path, "%s: cannot %s: %s", path, verb, strerror(err));
}

/* The kernel stamps files with a clock of a few milliseconds. A file that was written within the current
 * tick could be rewritten without its time changing: wait until the tick is over. */
static void let_tick_pass(const struct stat *st) {
    for (int i = 0; i < MAX_TICKS; i++) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME_COARSE, &now);
        if (now.tv_sec != st->st_mtim.tv_sec || now.tv_nsec > st->st_mtim.tv_nsec) return;
        sthi_sleep_ns(TICK_NS);
    }
}

static void note_identity(sthi_file *file, const struct stat *st) {
    file->size = (uint64_t)st->st_size;
    file->device = (uint64_t)st->st_dev;
    file->inode = (uint64_t)st->st_ino;
    file->mtime_s = (int64_t)st->st_mtim.tv_sec;
    file->mtime_ns = (int64_t)st->st_mtim.tv_nsec;
}

static sth_status stat_regular(const char *path, int fd, struct stat *out) {
    if (fstat(fd, out)) return fail_errno(path, errno, "examine");
    if (!S_ISREG(out->st_mode))
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path, "%s: not a regular file; name a file", path);
    return STH_OK;
}

static sth_status identify(const char *path, int fd, sthi_file *out) {
    struct stat st;
    STHI_TRY(stat_regular(path, fd, &st));
    let_tick_pass(&st);
    STHI_TRY(stat_regular(path, fd, &st));
    note_identity(out, &st);
    return STH_OK;
}

sth_status sthi_file_open(const char *path, sthi_file *out) {
    /* O_NONBLOCK: opening a pipe must fail the check below, not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return fail_errno(path, errno, "open");
    sthi_file file = {.fd = fd};
    sth_status status = identify(path, fd, &file);
    if (status == STH_OK) {
        file.path = sthi_strdup(path);
        if (!file.path)
            status =
                sthi_no_memory(path, "opening %s", path);
    }
    if (status != STH_OK) {
        close(fd);
        return status;
    }
    *out = file;
    return STH_OK;
}

void sthi_file_close(sthi_file *file) {
    if (!file || !file->path) return;
    close(file->fd);
    sthi_free(file->path);
    *file = (sthi_file){.fd = -1};
}

sth_status sthi_file_check_unchanged(const sthi_file *file) {
    struct stat st;
    if (fstat(file->fd, &st)) return fail_errno(file->path, errno, "examine");
    sthi_file now = {0};
    note_identity(&now, &st);
    if (now.size != file->size)
        return sthi_fail(STH_CHANGED_DATA, "stagehand", 0, file->path,
                         "%s: changed while it was open: it had %llu bytes and now has %llu; open it again",
                         file->path, (unsigned long long)file->size, (unsigned long long)now.size);
    if (now.mtime_s != file->mtime_s || now.mtime_ns != file->mtime_ns || now.inode != file->inode ||
        now.device != file->device)
        return sthi_fail(STH_CHANGED_DATA, "stagehand", 0, file->path,
                         "%s: changed while it was open (it was written to); open it again", file->path);
    return STH_OK;
}

sth_status sthi_file_fail_read(const sthi_file *file, uint64_t offset, uint64_t wanted, uint64_t got, int err) {
    STHI_TRY(sthi_file_check_unchanged(file));
    if (err)
        return sthi_fail(STH_IO, "errno", err, file->path,
                         "%s: reading %llu bytes at byte %llu failed after %llu: %s", file->path,
                         (unsigned long long)wanted, (unsigned long long)offset, (unsigned long long)got,
                         strerror(err));
    return sthi_fail(STH_IO, "stagehand", 0, file->path,
                     "%s: short read at byte %llu: wanted %llu bytes, got %llu; open it again when it is whole",
                     file->path,
                     (unsigned long long)offset, (unsigned long long)wanted, (unsigned long long)got);
}

static ssize_t pread_retry(int fd, void *buffer, size_t bytes, off_t offset) {
    if (sthi_fault_hit(STHI_FAULT_READ)) {
        errno = EIO;
        return -1;
    }
    ssize_t n;
    do n = pread(fd, buffer, bytes, offset);
    while (n < 0 && errno == EINTR);
    return n > 1 && sthi_fault_hit(STHI_FAULT_SHORT_READ) ? n / 2 : n;
}

sth_status sthi_file_pread(const sthi_file *file, uint64_t offset, uint64_t bytes, void *buffer) {
    uint64_t done = 0;
    while (done < bytes) {
        size_t part = (size_t)sthi_min_u64(bytes - done, READ_CHUNK);
        ssize_t n = pread_retry(file->fd, (char *)buffer + done, part, (off_t)(offset + done));
        if (n <= 0) return sthi_file_fail_read(file, offset, bytes, done, n < 0 ? errno : 0);
        done += (uint64_t)n;
    }
    return STH_OK;
}

sth_status sthi_file_read(const sthi_file *file, uint64_t offset, uint64_t bytes, void *buffer) {
    if (!sthi_range_inside(offset, bytes, file->size))
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, file->path,
                         "%s: %llu bytes at byte %llu reach past the end of the file (%llu bytes)",
                         file->path, (unsigned long long)bytes, (unsigned long long)offset,
                         (unsigned long long)file->size);
    STHI_TRY(sthi_file_check_unchanged(file));
    STHI_TRY(sthi_file_pread(file, offset, bytes, buffer));
    return sthi_file_check_unchanged(file);
}
