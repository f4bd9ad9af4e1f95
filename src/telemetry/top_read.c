/* Reads the pages of this user's processes. A page is copied with pread and never mapped: its process may cut it at any
 * time. A page without its process's lock is removed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"
#include "telemetry/top.h"

enum { PAGES_MOST = 1024, TRIES = 100 };

typedef struct reading {
    sth_top_list list;
    uint32_t room, pages;
    int32_t pid; /* 0: all */
    int64_t now_ns;
    struct stat seen[STHI_TOP_FOLDERS]; /* [folders] that were read: one may have two names */
    int folders;
} reading;

/* The PID in "PID-NUMBER.page"; 0: the name is another. */
static int32_t pid_in(const char *name) {
    char *end;
    if (*name < '1' || *name > '9') return 0;
    errno = 0;
    long pid = strtol(name, &end, 10);
    if (errno || pid > INT32_MAX || *end != '-') return 0;
    size_t digits = strspn(end + 1, "0123456789abcdef");
    return digits && strcmp(end + 1 + digits, STHI_TOP_SUFFIX) == 0 ? (int32_t)pid : 0;
}

/* The file, if it is a page of this user's; -1 otherwise. */
static int open_page(int dir, const char *name) {
    struct stat st;
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() && st.st_size == STHI_TOP_PAGE_BYTES)
        return fd;
    close(fd);
    return -1;
}

static bool read_at(int fd, size_t offset, void *out, size_t bytes) {
    return pread(fd, out, bytes, (off_t)offset) == (ssize_t)bytes;
}

/* The words between two readings of the same even number. Each reading is a call of the system. */
static bool read_place(int fd, uint32_t i, sthi_top_words *out) {
    size_t at = offsetof(sthi_top_page, places) + (size_t)i * STHI_TOP_PLACE_BYTES;
    for (int attempt = 0; attempt < TRIES; attempt++) {
        uint64_t before, after;
        if (!read_at(fd, at, &before, sizeof before)) return false;
        if (!read_at(fd, at + offsetof(sthi_top_place, words), out, sizeof *out)) return false;
        if (!read_at(fd, at, &after, sizeof after)) return false;
        if (before == after && before % 2 == 0) return true;
        sched_yield();
    }
    return false;
}

static sth_status add(reading *r, const sth_top_runtime *runtime) {
    if (r->list.count == r->room) {
        uint32_t room = r->room ? 2 * r->room : 16;
        void *grown = sthi_realloc(r->list.runtimes, room, sizeof *runtime);
        if (!grown) return sthi_no_memory(NULL, "the list of runtimes");
        r->list.runtimes = grown;
        r->room = room;
    }
    r->list.runtimes[r->list.count++] = *runtime;
    return STH_OK;
}

static sth_status read_page(reading *r, int fd, int32_t pid) {
    sthi_top_header header;
    bool sound = read_at(fd, 0, &header, sizeof header) && sthi_top_header_is_sound(&header, pid);
    for (uint32_t i = 0; sound && i < STHI_TOP_PLACES; i++) {
        sthi_top_words words;
        sth_top_runtime runtime;
        bool read = read_place(fd, i, &words);
        if (read && !words.taken) continue;
        sound = read && sthi_top_take(&header, &words, r->now_ns, &runtime);
        if (!sound) break;
        runtime.pid = pid;
        runtime.place = i;
        STHI_TRY(add(r, &runtime));
    }
    r->list.passed_over += !sound;
    return STH_OK;
}

static sth_status look_at(reading *r, int dir, const char *name) {
    int32_t pid = pid_in(name);
    if (!pid || (r->pid && pid != r->pid)) return STH_OK;
    int fd = open_page(dir, name);
    if (fd < 0) return STH_OK;
    sth_status rc = STH_OK;
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) (void)unlinkat(dir, name, 0); /* its process has ended */
    else if (errno == EWOULDBLOCK) rc = read_page(r, fd, pid);
    close(fd);
    return rc;
}

static bool seen_before(reading *r, int fd) {
    struct stat *now = &r->seen[r->folders];
    if (fstat(fd, now)) return true;
    for (int i = 0; i < r->folders; i++)
        if (r->seen[i].st_dev == now->st_dev && r->seen[i].st_ino == now->st_ino) return true;
    r->folders++;
    return false;
}

static sth_status read_folder(reading *r, int fd) {
    DIR *dir = seen_before(r, fd) ? NULL : fdopendir(fd);
    if (!dir) {
        close(fd);
        return STH_OK;
    }
    sth_status rc = STH_OK;
    for (struct dirent *e; rc == STH_OK && r->pages < PAGES_MOST && (e = readdir(dir)); r->pages++)
        rc = look_at(r, fd, e->d_name);
    closedir(dir);
    return rc;
}

static int by_pid_and_place(const void *a, const void *b) {
    const sth_top_runtime *x = a, *y = b;
    if (x->pid != y->pid) return x->pid < y->pid ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

sth_status sthi_top_read_all(int32_t pid, sth_top_list *out) {
    reading r = {.pid = pid, .now_ns = sthi_now_ns()};
    char folder[STHI_TOP_PATH];
    sth_status rc = STH_OK;
    for (int i = 0; rc == STH_OK && i < STHI_TOP_FOLDERS; i++) {
        int fd = sthi_top_folder(i, folder) ? sthi_top_enter(folder, false) : -1;
        if (fd >= 0) rc = read_folder(&r, fd);
    }
    if (rc != STH_OK) {
        sthi_free(r.list.runtimes);
        return rc;
    }
    if (r.list.count) qsort(r.list.runtimes, r.list.count, sizeof *r.list.runtimes, by_pid_and_place);
    *out = r.list;
    return STH_OK;
}
