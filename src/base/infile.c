/* See infile.h. O_NONBLOCK: opening a pipe must fail the check, not wait for a writer. No locks. */
#define _GNU_SOURCE
#include "base/infile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

static sth_status fail_open(const char *path, int err) {
    sth_status status = err == ENOENT || err == ENOTDIR ? STH_NOT_FOUND : STH_IO;
    return sthi_fail(status, "errno", err, path, "%s: cannot open: %s", path, strerror(err));
}

static sth_status check(const char *path, const char *what, const struct stat *st) {
    if (S_ISREG(st->st_mode)) return STH_OK;
    return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path, "%s: not a regular file, as %s is; name a file", path,
                     what);
}

sth_status sthi_infile_open(const char *path, const char *what, FILE **out_file) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return fail_open(path, errno);
    sth_status status = fstat(fd, &st) ? fail_open(path, errno) : check(path, what, &st);
    FILE *file = status == STH_OK ? fdopen(fd, "r") : NULL;
    if (status == STH_OK && !file) status = fail_open(path, errno);
    if (file) *out_file = file;
    else close(fd);
    return status;
}

sth_status sthi_infile_check(const char *path, const char *what) {
    struct stat st;
    return stat(path, &st) ? STH_OK : check(path, what, &st);
}
