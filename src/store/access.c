/* Chooses how a file is read, by trying: opens it again for direct reads (by descriptor, so that a file that was
 * replaced by another of its name stays the one that was checked), reads one block, samples the page cache.
 *
 * Nothing here follows from the file system's name. mincore tells the truth only about files that are ours or that
 * we may write (Linux 5.2); elsewhere all pages look cached. Therefore reads that do not wait must agree, and where
 * mincore cannot be believed they alone decide. No locks: `way` is atomic, what else changes is the settling
 * thread's. */
#define _GNU_SOURCE
#include "store/access.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/fault.h"
#include "base/memory.h"
#include "store/ring.h"

#define DEFAULT_ALIGN 4096u
#define MAX_ALIGN 65536u
enum { SAMPLES = 64, SAMPLE_PAGES = 16, NOWAIT_SAMPLES = 8 };
static const double MOSTLY = 0.9;

/* statx's answer to STATX_DIOALIGN, at its place in the record: older headers do not name it. */
#define DIOALIGN_MASK 0x2000u
#define DIOALIGN_OFFSET 0x98

static bool power_of_two(uint32_t n) { return n && !(n & (n - 1)); }

/* False when the file system says that the file takes no direct reads. */
static bool find_align(const sthi_file *file, uint32_t *out) {
    union {
        struct statx named;
        unsigned char bytes[256];
    } answer;
    uint32_t said[2]; /* memory, offset */
    memset(&answer, 0, sizeof answer);
    *out = DEFAULT_ALIGN;
    if (statx(file->fd, "", AT_EMPTY_PATH, DIOALIGN_MASK, &answer.named) || !(answer.named.stx_mask & DIOALIGN_MASK))
        return true;
    memcpy(said, answer.bytes + DIOALIGN_OFFSET, sizeof said);
    if (!said[0] || !said[1]) return false;
    uint32_t most = said[0] > said[1] ? said[0] : said[1];
    if (power_of_two(most) && most <= MAX_ALIGN) *out = most < 512 ? 512 : most;
    return true;
}

static int open_direct(const sthi_file *file) {
    char again[64];
    if (sthi_fault_hit(STHI_FAULT_DIRECT)) {
        errno = EINVAL;
        return -1;
    }
    snprintf(again, sizeof again, "/proc/self/fd/%d", file->fd);
    int fd = open(again, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd >= 0 || errno != ENOENT) return fd;
    fd = open(file->path, O_RDONLY | O_CLOEXEC | O_DIRECT); /* no /proc */
    struct stat st;
    if (fd < 0 || (fstat(fd, &st) == 0 && st.st_dev == file->device && st.st_ino == file->inode)) return fd;
    close(fd);
    errno = ESTALE;
    return -1;
}

/* One block, as it will be read; *out_errno says why not. */
static bool try_direct(const sthi_access *a, int *out_errno) {
    unsigned char *room = sthi_pages_map(2 * MAX_ALIGN, 0);
    *out_errno = ENOMEM;
    if (!room) return false;
    unsigned char *to = room + (a->align - (uintptr_t)room % a->align) % a->align;
    ssize_t n = pread(a->direct_fd, to, a->align, 0);
    *out_errno = n < 0 ? errno : 0;
    sthi_pages_unmap(room, 2 * MAX_ALIGN);
    return n >= 0;
}

/* The offset of the i-th of `count` samples, on a page. */
static uint64_t sample_at(const sthi_file *file, uint64_t page, uint32_t i, uint32_t count) {
    uint64_t pages = (file->size + page - 1) / page;
    return pages * i / count * page;
}

/* Share of sampled pages that are in the cache as mincore has it; below 0 when it cannot say. */
static double share_by_mincore(const sthi_file *file) {
    struct stat st;
    bool believable = fstat(file->fd, &st) == 0 &&
                      (st.st_uid == geteuid() || faccessat(AT_FDCWD, file->path, W_OK, AT_EACCESS) == 0);
    if (!believable || !file->size) return -1;
    uint64_t page = sthi_page_size(), there = 0, seen = 0;
    unsigned char *map = mmap(NULL, file->size, PROT_READ, MAP_SHARED, file->fd, 0); /* never touched */
    if (map == MAP_FAILED) return -1;
    for (uint32_t i = 0; i < SAMPLES; i++) {
        unsigned char in_core[SAMPLE_PAGES];
        uint64_t at = sample_at(file, page, i, SAMPLES), bytes = sthi_min_u64(SAMPLE_PAGES * page, file->size - at);
        if (mincore(map + at, bytes, in_core)) continue;
        for (uint64_t k = 0; k * page < bytes; k++) there += in_core[k] & 1;
        seen += (bytes + page - 1) / page;
    }
    munmap(map, file->size);
    return seen ? (double)there / (double)seen : -1;
}

/* The same by reads that fail where they would have to wait; *out_works is false when there are no such reads. */
static double share_by_reading(const sthi_file *file, bool *out_works) {
    uint64_t page = sthi_page_size(), there = 0;
    char to[512];
    *out_works = true;
    /* So that what is not there is not read ahead. */
    (void)posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
    for (uint32_t i = 0; i < NOWAIT_SAMPLES && *out_works; i++) {
        struct iovec v = {to, sizeof to};
        uint64_t at = sample_at(file, page, 2 * i + 1, 2 * NOWAIT_SAMPLES);
        ssize_t n = preadv2(file->fd, &v, 1, (off_t)at, RWF_NOWAIT);
        there += n > 0;
        *out_works = n >= 0 || errno == EAGAIN;
    }
    (void)posix_fadvise(file->fd, 0, 0, POSIX_FADV_NORMAL);
    return *out_works ? (double)there / NOWAIT_SAMPLES : 0;
}

static bool is_cached(sthi_access *a, double *out_share) {
    double by_mincore = share_by_mincore(a->file);
    *out_share = by_mincore;
    if (by_mincore >= 0 && by_mincore < MOSTLY) return false;
    bool works;
    double by_reading = share_by_reading(a->file, &works);
    atomic_store(&a->nowait, works);
    if (by_mincore < 0) *out_share = by_reading;
    return works ? by_reading >= MOSTLY : by_mincore >= MOSTLY;
}

static void choose_direct_way(sthi_access *a) {
    int err;
    sthi_ring *ring = sthi_ring_open(1, &err);
    a->direct_way = ring ? STH_READ_URING : STH_READ_DIRECT;
    if (!ring) snprintf(a->why, sizeof a->why, "io_uring is refused: %s", strerror(err));
    sthi_ring_close(ring);
}

/* Opens the direct descriptor; false with `why` when the file cannot be read with it. */
static bool prepare_direct(sthi_access *a) {
    int err = 0;
    bool takes = find_align(a->file, &a->align);
    if (takes) a->direct_fd = open_direct(a->file);
    if (takes && a->direct_fd < 0) err = errno;
    if (a->direct_fd >= 0 && try_direct(a, &err)) return true;
    if (a->direct_fd >= 0) close(a->direct_fd);
    a->direct_fd = -1;
    snprintf(a->why, sizeof a->why, "O_DIRECT is refused: %s",
             takes ? strerror(err) : "the file system has none for this file");
    return false;
}

void sthi_access_open(const sthi_file *file, sthi_access *a) {
    double share;
    *a = (sthi_access){.file = file, .direct_fd = -1, .align = DEFAULT_ALIGN};
    atomic_init(&a->left_cache, false);
    atomic_init(&a->nowait, false);
    atomic_init(&a->read_bytes, 0);
    atomic_init(&a->cached_bytes, 0);
    a->direct_way = STH_READ_BUFFERED;
    if (prepare_direct(a)) choose_direct_way(a);
    atomic_init(&a->way, a->direct_way);
    bool cached = is_cached(a, &share);
    char percent[48] = "";
    if (share >= 0) snprintf(percent, sizeof percent, "%.0f %% of it is in the page cache", share * 100);
    if (cached) {
        atomic_store(&a->way, STH_READ_CACHED);
        snprintf(a->why, sizeof a->why, "%s", percent);
    } else if (!a->why[0]) {
        snprintf(a->why, sizeof a->why, "%s", percent[0] ? percent : "it is not in the page cache");
    }
}

void sthi_access_close(sthi_access *a) {
    if (a->direct_fd >= 0) close(a->direct_fd);
    a->direct_fd = -1;
}

void sthi_access_settle(sthi_access *a) {
    uint64_t cached = atomic_load(&a->cached_bytes);
    uint64_t bytes = atomic_load(&a->read_bytes); /* after `cached`, which is part of it */
    uint64_t lately = bytes - a->settled_bytes, there = cached - a->settled_cached;
    a->settled_bytes = bytes;
    a->settled_cached = cached;
    if (atomic_load(&a->way) != STH_READ_CACHED || a->direct_fd < 0 || !lately || there >= lately / 2) return;
    atomic_store(&a->left_cache, true);
    atomic_store(&a->way, a->direct_way);
}

void sthi_access_describe(const sthi_access *a, sth_file_way *out) {
    *out = (sth_file_way){.way = (sth_read_way)atomic_load(&a->way), .path = a->file->path,
                          .align = a->direct_fd >= 0 ? a->align : 1,
                          .cached_bytes = atomic_load(&a->cached_bytes)};
    out->read_bytes = atomic_load(&a->read_bytes); /* after `cached_bytes`, which are part of them */
    snprintf(out->why, sizeof out->why, "%s", atomic_load(&a->left_cache) ? "it has left the page cache" : a->why);
}
