/* Weights that several processes of a node hold are in RAM once. Each arena that shares has a
 * file in memory (memfd):
 *
 *   | head | entries: print, offset, bytes, holders | pages: what this arena was the first to hold |
 *
 * It maps its pages twice, and in place of a piece that another arena holds the same pages of
 * that arena's file:
 *   image   shared and registered with the device, which reads it
 *   view    private: tensors lie there. The kernel copies a page that is written: the write stays here
 *
 * Files are found in the descriptors of this user's processes (/proc/PID/fd) by their name, not
 * by a path: they go with the last process that has one open or mapped, however it ends. Nobody
 * is asked and nobody answers. Looking, writing and publishing happen in a turn (nodeturn.h), so
 * that of processes that come at once one writes and the others find. A process in other
 * namespaces of processes or users is none of ours. Seals fix a file's size: a page that is
 * mapped stays there.
 *
 * Invariants: an entry is complete when `count` covers it, and never changes but for `holders`.
 * That counts the arenas that use the piece, the writer's among them; who takes it to 0 gives
 * its pages back, and 0 is never left. A process that was killed leaves its count: those pages
 * then go with the file. All numbers of another's file are checked, and read once. */
#define _GNU_SOURCE
#include "host/common.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/workers.h"
#include "host/nodeturn.h"

#define NAME "stagehand-weights-1" /* another number with another layout of the file */
#define LINK "/memfd:" NAME
#define TURN "stagehand-weights"
#define TURN_NS INT64_C(120000000000)

enum { SLICE = 4 << 20, SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

typedef struct file_head {
    uint64_t most; /* entries that have room */
    uint64_t first; /* offset of the pages */
    atomic_uint_fast64_t count;
    uint64_t unused;
} file_head;

typedef struct file_entry {
    uint64_t print[2], offset, bytes;
    atomic_uint_fast64_t holders;
    uint64_t unused;
} file_entry;

/* A file with its table. */
typedef struct table {
    int fd;
    ino_t inode;
    file_head *head;
    file_entry *entries;
    uint64_t most, mapped, bytes; /* mapped: of the table; bytes: of the file */
    uint64_t next;                /* entry behind the last that was found: equal models come in equal order */
    bool used;
} table;

typedef struct piece {
    uint64_t at, bytes;  /* in image and view */
    uint64_t offset;     /* in the file */
    file_entry *entry;   /* NULL: nobody else can know it */
    int fd;
    atomic_bool gone;
} piece;

struct sthi_common {
    table own;
    table *others;
    uint32_t other_count;
    uint8_t *image, *view;
    uint64_t bytes;
    piece *pieces;
    uint32_t piece_count, most;
    int turn;
    bool begun;
};

/* ---- prints ---- */

typedef struct print_job {
    sthi_job job;
    const sth_arena_part *parts;
    uint32_t count;
    XXH128_hash_t *prints; /* of slices, in order */
} print_job;

static uint64_t slices_of(uint64_t bytes) { return bytes / SLICE + (bytes % SLICE != 0); }

static sth_status print_slice(sthi_job *job, uint64_t number, void *scratch) {
    (void)scratch;
    print_job *j = (print_job *)job;
    uint64_t slice = number;
    const sth_arena_part *part = j->parts;
    while (slice >= slices_of(part->bytes)) slice -= slices_of(part++->bytes);
    uint64_t at = slice * SLICE;
    j->prints[number] = XXH3_128bits((const uint8_t *)part->source + at, sthi_min_u64(SLICE, part->bytes - at));
    return STH_OK;
}

sth_status sthi_common_print(const sth_arena_part *parts, uint32_t count, uint64_t bytes, uint64_t out_print[2]) {
    uint64_t slices = 0;
    for (uint32_t i = 0; i < count; i++) slices += slices_of(parts[i].bytes);
    XXH128_hash_t *prints = sthi_zalloc(slices + 1, sizeof *prints);
    if (!prints) return sthi_no_memory("arena", "the print of %llu bytes of weights", (unsigned long long)bytes);
    print_job job = {.job = {.run = print_slice, .pieces = slices}, .parts = parts, .count = count, .prints = prints};
    /* A thread that cannot start is only a slower print. */
    if (slices < 2 || sthi_workers_once("arena", "print", 0, 0, &job.job) != STH_OK)
        for (uint64_t i = 0; i < slices; i++) print_slice(&job.job, i, NULL);
    XXH3_state_t all;
    XXH3_128bits_reset_withSeed(&all, bytes);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t place[2] = {parts[i].offset, parts[i].bytes};
        XXH3_128bits_update(&all, place, sizeof place);
    }
    XXH3_128bits_update(&all, prints, slices * sizeof *prints);
    XXH128_hash_t sum = XXH3_128bits_digest(&all);
    out_print[0] = sum.low64;
    out_print[1] = sum.high64;
    sthi_free(prints);
    return STH_OK;
}

/* ---- a file and its table ---- */

static void *map_at(void *at, uint64_t bytes, int kind, int fd, uint64_t offset) {
    int flags = kind | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    if (sthi_fault_hit(STHI_FAULT_ALLOC)) return NULL;
    void *p = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset);
    return p == MAP_FAILED ? NULL : p;
}

static void unmap(void *p, uint64_t bytes) {
    if (p) munmap(p, bytes);
}

static void table_close(table *t) {
    unmap(t->head, t->mapped);
    if (t->fd >= 0) close(t->fd);
    *t = (table){.fd = -1};
}

/* Where the pages begin behind a table of so many entries; false where no file is so large. */
static bool first_page(uint64_t most, uint64_t *out) {
    uint64_t bytes;
    return sthi_mul_u64(most, sizeof(file_entry), &bytes) && sthi_add_u64(bytes, sizeof(file_head), &bytes) &&
           sthi_round_up(bytes, sthi_page_size(), out);
}

static bool table_map(table *t, uint64_t most, uint64_t first) {
    t->head = map_at(NULL, first, MAP_SHARED, t->fd, 0);
    if (!t->head) return false;
    t->entries = (file_entry *)(t->head + 1);
    t->most = most;
    t->mapped = first;
    return true;
}

static bool table_create(table *t, uint64_t bytes, uint32_t most) {
    uint64_t first, all;
    struct stat st;
    *t = (table){.fd = -1};
    if (sthi_fault_hit(STHI_FAULT_ALLOC) || !first_page(most, &first) || !sthi_add_u64(first, bytes, &all) ||
        all > INT64_MAX)
        return false;
    t->fd = memfd_create(NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool ok = t->fd >= 0 && !ftruncate(t->fd, (off_t)all) && !fcntl(t->fd, F_ADD_SEALS, SEALS) &&
              !fstat(t->fd, &st) && table_map(t, most, first);
    if (!ok) {
        table_close(t);
        return false;
    }
    t->inode = st.st_ino;
    t->bytes = all;
    t->head->most = most;
    t->head->first = first;
    return true;
}

/* A file that another arena made. False: it is none, or it is not whole yet. Takes over the
 * descriptor. */
static bool table_open(table *t, int fd) {
    file_head head;
    struct stat st;
    uint64_t first;
    *t = (table){.fd = fd};
    bool ok = fcntl(fd, F_GET_SEALS) == SEALS && !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size > 0 &&
              pread(fd, &head, sizeof head, 0) == sizeof head && head.most && first_page(head.most, &first) &&
              head.first == first && first <= (uint64_t)st.st_size && table_map(t, head.most, first);
    if (!ok) {
        table_close(t);
        return false;
    }
    t->inode = st.st_ino;
    t->bytes = (uint64_t)st.st_size;
    return true;
}

/* One more arena holds it, unless the last one has just let go. */
static bool hold(file_entry *e) {
    uint_fast64_t holders = atomic_load(&e->holders);
    while (holders && holders < UINT32_MAX)
        if (atomic_compare_exchange_weak(&e->holders, &holders, holders + 1)) return true;
    return false;
}

/* An entry with this print that is held now. Its offset is checked, and given as it was checked. */
static file_entry *table_find(table *t, const uint64_t print[2], uint64_t bytes, uint64_t *out_offset) {
    uint64_t count = sthi_min_u64(atomic_load(&t->head->count), t->most);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = (t->next + i) % count;
        file_entry *e = &t->entries[at];
        if (e->print[0] != print[0] || e->print[1] != print[1] || e->bytes != bytes) continue;
        uint64_t offset = *(volatile uint64_t *)&e->offset;
        bool inside = offset >= t->mapped && offset % sthi_page_size() == 0 &&
                      sthi_range_inside(offset, bytes, t->bytes);
        if (!inside || !hold(e)) continue;
        t->next = at + 1;
        *out_offset = offset;
        return e;
    }
    return NULL;
}

/* ---- other arenas ---- */

static bool same_namespace(const char *process, const char *kind) {
    char path[64];
    struct stat theirs, ours;
    snprintf(path, sizeof path, "/proc/%s/ns/%s", process, kind);
    if (stat(path, &theirs)) return false;
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    return !stat(path, &ours) && theirs.st_dev == ours.st_dev && theirs.st_ino == ours.st_ino;
}

static bool is_known(const sthi_common *c, ino_t inode) {
    bool known = inode == c->own.inode;
    for (uint32_t i = 0; i < c->other_count && !known; i++) known = inode == c->others[i].inode;
    return known;
}

static void add_other(sthi_common *c, int folder, const char *name) {
    struct stat st;
    table t, *longer;
    if (fstatat(folder, name, &st, 0) || is_known(c, st.st_ino)) return;
    int fd = openat(folder, name, O_RDWR | O_CLOEXEC);
    if (fd < 0 || !table_open(&t, fd)) return;
    longer = sthi_realloc(c->others, c->other_count + 1, sizeof *longer);
    if (longer) {
        c->others = longer;
        longer[c->other_count++] = t;
    } else {
        table_close(&t);
    }
}

static void look_into(sthi_common *c, const char *process) {
    char path[64], target[sizeof LINK + 32];
    snprintf(path, sizeof path, "/proc/%s/fd", process);
    DIR *folder = opendir(path);
    for (struct dirent *d; folder && (d = readdir(folder));) {
        ssize_t length = readlinkat(dirfd(folder), d->d_name, target, sizeof target);
        if (length >= (ssize_t)strlen(LINK) && !memcmp(target, LINK, strlen(LINK)))
            add_other(c, dirfd(folder), d->d_name);
    }
    if (folder) closedir(folder);
}

static void look_around(sthi_common *c) {
    DIR *folder = opendir("/proc");
    struct stat st;
    for (struct dirent *d; folder && (d = readdir(folder));) {
        if (!isdigit((unsigned char)d->d_name[0]) || strlen(d->d_name) > 20) continue;
        if (fstatat(dirfd(folder), d->d_name, &st, 0) || st.st_uid != geteuid()) continue;
        if (same_namespace(d->d_name, "pid") && same_namespace(d->d_name, "user")) look_into(c, d->d_name);
    }
    if (folder) closedir(folder);
}

/* ---- one arena's ---- */

sthi_common *sthi_common_create(uint64_t bytes, uint32_t most) {
    sthi_common *c = sthi_zalloc(1, sizeof *c);
    if (!c) return NULL;
    *c = (sthi_common){.own.fd = -1, .turn = -1, .bytes = bytes, .most = most};
    c->pieces = sthi_zalloc(most, sizeof *c->pieces);
    if (c->pieces && table_create(&c->own, bytes, most)) {
        c->image = map_at(NULL, bytes, MAP_SHARED, c->own.fd, c->own.mapped);
        c->view = map_at(NULL, bytes, MAP_PRIVATE, c->own.fd, c->own.mapped);
    }
    if (c->image && c->view) {
        (void)madvise(c->image, bytes, MADV_HUGEPAGE); /* advice only, and refused on many systems */
        return c;
    }
    sthi_common_destroy(c);
    return NULL;
}

static void close_others(sthi_common *c, bool all) {
    for (uint32_t i = 0; i < c->other_count; i++)
        if (all || !c->others[i].used) table_close(&c->others[i]);
}

void sthi_common_destroy(sthi_common *c) {
    if (!c) return;
    sthi_common_end(c);
    sthi_common_drop(c, 0, UINT64_MAX);
    unmap(c->image, c->bytes);
    unmap(c->view, c->bytes);
    close_others(c, true);
    table_close(&c->own);
    sthi_free(c->others);
    sthi_free(c->pieces);
    sthi_free(c);
}

uint8_t *sthi_common_image(const sthi_common *c) { return c->image; }

uint8_t *sthi_common_view(const sthi_common *c) { return c->view; }

uint32_t sthi_common_left(const sthi_common *c) { return c->most - c->piece_count; }

void sthi_common_begin(sthi_common *c) {
    if (c->begun) return;
    c->begun = true;
    c->turn = sthi_node_turn_take(TURN, TURN_NS);
    if (c->turn >= 0) {
        look_around(c);
        return;
    }
    sthi_message *said = NULL;
    sthi_log_keep(&said, STH_LOG_WARNING,
                  "the weights of this process are its own: the turn of another process to look for common ones "
                  "has not ended in two minutes, or turns cannot be had");
    sthi_log_deliver(said);
}

void sthi_common_end(sthi_common *c) {
    sthi_node_turn_end(c->turn);
    c->turn = -1;
    close_others(c, false);
}

static sth_status map_piece(sthi_common *c, const piece *p) {
    if (map_at(c->image + p->at, p->bytes, MAP_SHARED, p->fd, p->offset) &&
        map_at(c->view + p->at, p->bytes, MAP_PRIVATE, p->fd, p->offset))
        return STH_OK;
    return sthi_fail(STH_OUT_OF_ADDRESS_SPACE, "errno", errno, "arena",
                     "%llu bytes of weights that another process holds cannot be mapped: raise vm.max_map_count, or "
                     "keep a copy for each process (host_copy=\"own\")",
                     (unsigned long long)p->bytes);
}

sth_status sthi_common_find(sthi_common *c, const uint64_t print[2], uint64_t at, uint64_t bytes, bool *out_found) {
    piece *p = &c->pieces[c->piece_count++];
    *p = (piece){.at = at, .bytes = bytes, .offset = c->own.mapped + at, .fd = c->own.fd};
    *out_found = false;
    for (uint32_t i = 0; i < c->other_count && c->turn >= 0 && !p->entry; i++) {
        table *t = &c->others[i];
        p->entry = t->head ? table_find(t, print, bytes, &p->offset) : NULL;
        if (!p->entry) continue;
        p->fd = t->fd;
        t->used = true;
        *out_found = true;
    }
    return p->entry ? map_piece(c, p) : STH_OK;
}

void sthi_common_publish(sthi_common *c, const uint64_t print[2]) {
    uint64_t number = atomic_load(&c->own.head->count);
    if (c->turn < 0 || number == c->own.most) return;
    piece *p = &c->pieces[c->piece_count - 1];
    p->entry = &c->own.entries[number];
    p->entry->print[0] = print[0];
    p->entry->print[1] = print[1];
    p->entry->offset = p->offset;
    p->entry->bytes = p->bytes;
    atomic_store(&p->entry->holders, 1);
    atomic_store(&c->own.head->count, number + 1);
}

void sthi_common_drop(sthi_common *c, uint64_t begin, uint64_t end) {
    for (uint32_t i = 0; i < c->piece_count; i++) {
        piece *p = &c->pieces[i];
        if (p->at < begin || p->at >= end || atomic_exchange(&p->gone, true)) continue;
        if (!p->entry || atomic_fetch_sub(&p->entry->holders, 1) == 1)
            (void)fallocate(p->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->offset, (off_t)p->bytes);
    }
}
