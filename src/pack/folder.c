/* Files inside OUT.partial, by descriptor of the folder, so that no link that appears meanwhile leads elsewhere.
 * Publishing never replaces: renameat2 with RENAME_NOREPLACE, or a hard link where the file system has no such thing.
 * Two processes keep apart by a lock on the folder, which goes with its descriptor. */
#define _GNU_SOURCE
#include "pack/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"

#define CALL_BYTES ((uint64_t)1 << 30) /* one system call moves at most 2 GiB less a page */

static sth_status fail_errno(const char *path, const char *name, int err, const char *verb) {
    sth_status status = err == ENOENT || err == ENOTDIR ? STH_NOT_FOUND : STH_IO;
    return sthi_fail(status, "errno", err, path, "%.300s%s%.200s: cannot %s: %s", path, name ? "/" : "",
                     name ? name : "", verb, strerror(err));
}

static sth_status fail_write(sthi_folder *f, const char *name, int err, const char *verb) {
    f->write_failed = true;
    return fail_errno(f->path, name, err, verb);
}

/* ---- who may read ---- */

sth_status sthi_rights_of(const sthi_file *files, uint32_t count, sthi_rights *out) {
    sthi_rights r = {.mode = 0666};
    for (uint32_t i = 0; i < count; i++) {
        struct stat st;
        if (fstat(files[i].fd, &st)) return fail_errno(files[i].path, NULL, errno, "examine");
        if (i && st.st_gid != r.group) r.mode &= ~(mode_t)060 | (r.mode & 06) << 3; /* no group can read them all */
        r.mode &= st.st_mode;
        r.user = st.st_uid;
        r.group = st.st_gid;
    }
    r.mode |= 0600;
    *out = r;
    return STH_OK;
}

/* A new file is of the process's user and group. Where it cannot be given the source's, members of the group may do no
 * more than everybody. */
static sth_status settle_rights(sthi_folder *f, const char *name, int fd) {
    struct stat st;
    if (fstat(fd, &st)) return fail_errno(f->path, name, errno, "examine");
    if (geteuid() == 0 && st.st_uid != f->rights.user && fchown(fd, f->rights.user, (gid_t)-1))
        return fail_errno(f->path, name, errno, "give to the owner of the source");
    if (st.st_gid == f->rights.group || !fchown(fd, (uid_t)-1, f->rights.group)) return STH_OK;
    mode_t less = st.st_mode & (~(mode_t)060 | (st.st_mode & 06) << 3);
    return less == st.st_mode || !fchmod(fd, less & 07777) ? STH_OK
                                                          : fail_errno(f->path, name, errno, "restrict access to");
}

static mode_t of_folder(mode_t mode) { return 0700 | (mode & 066) | (mode & 044) >> 2; }

/* ---- life ---- */

static sth_status name_folder(const char *out, sthi_folder *f) {
    size_t length = strlen(out);
    f->out = sthi_strdup(out);
    f->path = sthi_alloc(length + sizeof ".partial");
    if (!f->out || !f->path) return sthi_no_memory(out, "the path of %.300s", out);
    while (length > 1 && f->out[length - 1] == '/') f->out[--length] = '\0';
    snprintf(f->path, length + sizeof ".partial", "%s.partial", f->out);
    return STH_OK;
}

static sth_status open_folder(sthi_folder *f) {
    struct stat st;
    if (mkdir(f->path, of_folder(f->rights.mode)) && errno != EEXIST)
        return fail_errno(f->path, NULL, errno, "make the folder");
    f->fd = open(f->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (f->fd < 0) {
        int err = errno;
        return fail_errno(f->path, NULL, err,
                          err == ENOTDIR || err == ELOOP ? "work in it (a file or a link)" : "open");
    }
    if (flock(f->fd, LOCK_EX | LOCK_NB))
        return sthi_fail(STH_INVALID_STATE, "errno", errno, f->path,
                         "%.300s: another process is at work in it; wait until that ends",
                         f->path);
    if (fstat(f->fd, &st)) return fail_errno(f->path, NULL, errno, "examine");
    if (st.st_uid != geteuid())
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, f->path, "%.300s: belongs to another user; remove it",
                         f->path);
    return STH_OK;
}

sth_status sthi_folder_open(const char *out, const sthi_rights *rights, sthi_folder *folder) {
    sthi_folder f = {.fd = -1, .rights = *rights};
    sth_status status = name_folder(out, &f);
    if (status == STH_OK) status = open_folder(&f);
    if (status == STH_OK) *folder = f;
    else sthi_folder_close(&f);
    return status;
}

void sthi_folder_close(sthi_folder *folder) {
    if (folder->fd >= 0) close(folder->fd);
    sthi_free(folder->path);
    sthi_free(folder->out);
    *folder = (sthi_folder){.fd = -1};
}

void sthi_folder_end(sthi_folder *folder) {
    sthi_error_copy first;
    sthi_error_save(&first);
    (void)rmdir(folder->path);
    sthi_error_restore(&first);
}

/* ---- files ---- */

sth_status sthi_folder_file(sthi_folder *f, const char *name, int *out_fd, uint64_t *out_bytes) {
    struct stat st;
    int fd = openat(f->fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, f->rights.mode);
    if (fd < 0) return fail_errno(f->path, name, errno, "open for writing");
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_nlink != 1) {
        close(fd);
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, f->path, "%.300s/%.200s: not a file of its own; remove it",
                         f->path, name);
    }
    sth_status status = settle_rights(f, name, fd);
    if (status != STH_OK) {
        close(fd);
        return status;
    }
    *out_fd = fd;
    *out_bytes = (uint64_t)st.st_size;
    return STH_OK;
}

/* Asked first: crossing the limit sends a signal that ends the process. */
static bool within_limit(uint64_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

sth_status sthi_folder_reserve(sthi_folder *f, const char *name, int fd, uint64_t bytes) {
    char size[24];
    sthi_format_size(bytes, size, sizeof size);
    if (bytes > INT64_MAX || !within_limit(bytes)) {
        f->write_failed = true;
        return sthi_fail(STH_IO, "errno", EFBIG, f->path,
                         "%.300s/%.200s: would have %s, more than this process may write to one file (ulimit -f); "
                         "raise that limit", f->path, name, size);
    }
    int err = sthi_fault_hit(STHI_FAULT_WRITE) ? ENOSPC : 0;
    while (!err && bytes && (err = posix_fallocate(fd, 0, (off_t)bytes)) == EINTR) err = 0;
    if (!err && ftruncate(fd, (off_t)bytes)) err = errno;
    if (!err) return STH_OK;
    f->write_failed = true;
    return sthi_fail(STH_IO, "errno", err, f->path, "%.300s/%.200s: no room for %s: %s; free some", f->path, name, size,
                     strerror(err));
}

sth_status sthi_folder_write(sthi_folder *f, const char *name, int fd, uint64_t offset, const void *buffer,
                             uint64_t bytes) {
    const char *from = buffer;
    while (bytes) {
        ssize_t put = -1;
        errno = ENOSPC;
        if (!sthi_fault_hit(STHI_FAULT_WRITE)) put = pwrite(fd, from, sthi_min_u64(bytes, CALL_BYTES), (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return fail_write(f, name, errno, "write");
        from += put;
        offset += (uint64_t)put;
        bytes -= (uint64_t)put;
    }
    return STH_OK;
}

sth_status sthi_folder_sync(sthi_folder *f, const char *name, int fd) {
    if (sthi_fault_hit(STHI_FAULT_WRITE)) return fail_write(f, name, EIO, "sync");
    return fsync(fd) ? fail_write(f, name, errno, "sync") : STH_OK;
}

sth_status sthi_folder_put(sthi_folder *f, const char *name, const char *text, size_t bytes) {
    char temporary[256];
    int length = snprintf(temporary, sizeof temporary, "%s.new", name);
    if (length < 0 || (size_t)length >= sizeof temporary) return fail_errno(f->path, name, ENAMETOOLONG, "write");
    sthi_folder_remove(f, temporary);
    int fd = openat(f->fd, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                    f->rights.mode);
    if (fd < 0) return fail_write(f, temporary, errno, "make");
    sth_status status = settle_rights(f, temporary, fd);
    if (status == STH_OK) status = sthi_folder_write(f, temporary, fd, 0, text, bytes);
    if (status == STH_OK) status = sthi_folder_sync(f, temporary, fd);
    if (close(fd) && status == STH_OK) status = fail_write(f, temporary, errno, "close");
    if (status == STH_OK && renameat(f->fd, temporary, f->fd, name)) status = fail_write(f, name, errno, "rename");
    return status;
}

bool sthi_folder_has(const sthi_folder *f, const char *name) {
    struct stat st;
    return fstatat(f->fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

void sthi_folder_remove(sthi_folder *f, const char *name) { (void)unlinkat(f->fd, name, 0); }

/* ---- publishing ---- */

static int move(int from_fd, const char *from, const char *to, bool file) {
    if (!renameat2(from_fd, from, AT_FDCWD, to, RENAME_NOREPLACE)) return 0;
    if (errno != EINVAL && errno != ENOSYS) return errno;
    if (file) return linkat(from_fd, from, AT_FDCWD, to, 0) || unlinkat(from_fd, from, 0) ? errno : 0;
    if (mkdir(to, 0777)) return errno; /* a folder replaces an empty one, which is the one made here */
    return renameat(from_fd, from, AT_FDCWD, to) ? errno : 0;
}

sth_status sthi_folder_publish(sthi_folder *f, const char *name, const char *path) {
    if (sthi_fault_hit(STHI_FAULT_WRITE)) return fail_errno(path, NULL, EIO, "rename to it");
    if (!name) STHI_TRY(settle_rights(f, NULL, f->fd));
    int err = name ? move(f->fd, name, path, true) : move(AT_FDCWD, f->path, f->out, false);
    if (!err) return STH_OK;
    if (err == EEXIST)
        return sthi_fail(STH_INVALID_ARGUMENT, "errno", err, path,
                         "%.300s: exists already; nothing is overwritten: name a new output",
                         path);
    return fail_errno(path, NULL, err, "rename to it");
}

sth_status sthi_folder_sync_parent(sthi_folder *f) {
    char *parent = sthi_strdup(f->out);
    if (!parent) return sthi_no_memory(f->out, "the path of %.300s", f->out);
    char *slash = strrchr(parent, '/');
    if (slash) slash[slash == parent] = '\0';
    int fd = open(slash ? parent : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int err = fd < 0 || fsync(fd) ? errno : 0;
    if (fd >= 0) close(fd);
    sthi_free(parent);
    return err ? fail_errno(f->out, NULL, err, "sync its folder") : STH_OK;
}
