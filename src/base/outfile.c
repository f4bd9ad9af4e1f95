/* See outfile.h. O_RDWR: opening a pipe for writing alone would wait for a reader, and the head is looked at. What is
 * checked is the open file, so that nobody can exchange it in between. No locks. */
#define _GNU_SOURCE
#include "base/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

static sth_status fail_open(const char *path, const char *what, int err) {
    if (err == ELOOP)
        return sthi_fail(STH_UNSUPPORTED, "errno", err, path,
                         "%s: %s is not written through a symbolic link; name the file itself", path, what);
    sth_status status = err == ENOENT || err == ENOTDIR ? STH_NOT_FOUND : STH_IO;
    return sthi_fail(status, "errno", err, path, "%s: cannot open for %s: %s", path, what, strerror(err));
}

static sth_status examine(int fd, const char *path, const char *what, uint64_t *out_bytes) {
    struct stat st;
    if (fstat(fd, &st)) return fail_open(path, what, errno);
    if (!S_ISREG(st.st_mode))
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path,
                         "%s: %s is written to regular files only; name a new file", path, what);
    if (st.st_nlink > 1)
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path,
                         "%s has another name, where %s would be written too; name a new file", path, what);
    *out_bytes = (uint64_t)st.st_size;
    return STH_OK;
}

sth_status sthi_outfile_open(const char *path, const char *what, int *out_fd, uint64_t *out_bytes) {
    int fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY, 0600);
    if (fd < 0) return fail_open(path, what, errno);
    sth_status status = examine(fd, path, what, out_bytes);
    if (status == STH_OK) *out_fd = fd;
    else close(fd);
    return status;
}

bool sthi_outfile_begins(int fd, uint64_t bytes, const char *const *texts, int count) {
    char head[32] = {0};
    if (!bytes) return true;
    if (pread(fd, head, sizeof head - 1, 0) < 0) return false;
    for (int i = 0; i < count; i++)
        if (strncmp(head, texts[i], strlen(texts[i])) == 0) return true;
    return false;
}
