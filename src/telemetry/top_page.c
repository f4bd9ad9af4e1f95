/* The page of this process: made for its first runtime, removed with its last one or at exit. Invariants: `page` is
 * mapped while a place is taken, and `fd` holds the lock that says so to readers; a child of fork has neither. The lock
 * guards all but the words of taken places, which their runtimes' locks guard. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/thread.h"
#include "telemetry/top.h"

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};
static sthi_top_page *page; /* NULL: none */
static int fd = -1;
static uint32_t taken;      /* bit i: place i */
static char path[STHI_TOP_PATH + 64];

_Static_assert(STHI_TOP_PLACES <= 32, "a bit for each place");

/* ---- forks ---- */

static void before_fork(void) { sthi_lock(&lock); }
static void in_parent(void) { sthi_unlock(&lock); }

/* The mapping was not inherited. The descriptor was, and would hold the parent's lock beyond its end. */
static void in_child(void) {
    if (fd >= 0) close(fd);
    fd = -1;
    page = NULL;
    taken = 0;
    sthi_unlock(&lock);
}

static void watch_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* ---- the file ---- */

static void name_program(char out[96]) {
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = file >= 0 ? read(file, out, 95) : 0;
    if (file >= 0) close(file);
    while (n > 0 && !out[n - 1]) n--;
    for (ssize_t i = 0; i < n; i++)
        if (!out[i]) out[i] = ' ';
}

/* Maps the open file. Its blocks are reserved: a store into a hole of a full disk would end the process. */
static sthi_top_page *map(int file) {
    if (sthi_fault_hit(STHI_FAULT_WRITE) || flock(file, LOCK_EX | LOCK_NB)) return NULL;
    if (posix_fallocate(file, 0, STHI_TOP_PAGE_BYTES)) return NULL;
    void *at = mmap(NULL, STHI_TOP_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) return NULL;
    if (madvise(at, STHI_TOP_PAGE_BYTES, MADV_DONTFORK)) {
        munmap(at, STHI_TOP_PAGE_BYTES);
        return NULL;
    }
    sthi_top_page *made = at;
    made->header = (sthi_top_header){.magic = STHI_TOP_MAGIC, .version = STHI_TOP_VERSION, .pid = (uint32_t)getpid(),
                                     .places = STHI_TOP_PLACES, .place_bytes = STHI_TOP_PLACE_BYTES,
                                     .figures_bytes = sizeof(sth_top_figures)};
    name_program(made->header.program);
    return made;
}

/* Under another name at first: a reader that finds a page without its lock removes it. */
static bool make_in(const char *folder) {
    char unready[64];
    const char *name = unready + 1;
    int dir = sthi_top_enter(folder, true);
    if (dir < 0) return false;
    snprintf(unready, sizeof unready, ".%d-%llx" STHI_TOP_SUFFIX, (int)getpid(), (unsigned long long)sthi_now_ns());
    int file = openat(dir, unready, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    sthi_top_page *made = file >= 0 ? map(file) : NULL;
    bool done = made && renameat(dir, unready, dir, name) == 0;
    if (done) {
        page = made;
        fd = file;
        snprintf(path, sizeof path, "%s/%s", folder, name);
    } else {
        if (made) munmap(made, STHI_TOP_PAGE_BYTES);
        if (file >= 0) unlinkat(dir, unready, 0);
        if (file >= 0) close(file);
    }
    close(dir);
    return done;
}

static bool is_wanted(void) {
    const char *value = getenv("STAGEHAND_TOP");
    return !value || strcmp(value, "0") != 0;
}

static void make(void) {
    char folder[STHI_TOP_PATH];
    if (!is_wanted()) return;
    for (int i = 0; i < STHI_TOP_FOLDERS_TO_WRITE; i++)
        if (sthi_top_folder(i, folder) && make_in(folder)) return;
}

static void remove_page(void) {
    unlink(path);
    munmap(page, STHI_TOP_PAGE_BYTES);
    close(fd);
    page = NULL;
    fd = -1;
}

/* At exit, where runtimes were not destroyed. Threads may still store: the mapping stays. */
__attribute__((destructor)) static void leave(void) {
    if (page) unlink(path);
}

/* ---- places ---- */

/* The words from the first on, as one: readers take all of it, or what was there before. */
static void store_words(sthi_top_place *place, const void *words, size_t bytes) {
    uint64_t before = atomic_load_explicit(&place->sequence, memory_order_relaxed);
    atomic_store_explicit(&place->sequence, before + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word;
        memcpy(&word, (const char *)words + 8 * i, 8);
        atomic_store_explicit(&place->words[i], word, memory_order_relaxed);
    }
    atomic_store_explicit(&place->sequence, before + 2, memory_order_release);
}

static int free_place(void) {
    int i = 0;
    while (i < STHI_TOP_PLACES && taken & UINT32_C(1) << i) i++;
    return i;
}

sthi_top_place *sthi_top_open(const char *name, const char *device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    sthi_top_place *place = NULL;
    pthread_once(&once, watch_forks);
    sthi_lock(&lock);
    if (!page) make();
    int i = page ? free_place() : STHI_TOP_PLACES;
    if (i < STHI_TOP_PLACES) {
        sthi_top_words words = {.taken = 1, .stored_ns = (uint64_t)sthi_now_ns()};
        snprintf(words.figures.name, sizeof words.figures.name, "%s", name);
        snprintf(words.figures.device, sizeof words.figures.device, "%s", device);
        taken |= UINT32_C(1) << i;
        place = &page->places[i];
        store_words(place, &words, sizeof words);
    }
    sthi_unlock(&lock);
    return place;
}

void sthi_top_store(sthi_top_place *place, const sth_top_figures *figures) {
    sthi_top_words words = {.taken = 1, .stored_ns = (uint64_t)sthi_now_ns()};
    memcpy(&words.figures, figures, offsetof(sth_top_figures, name));
    store_words(place, &words, offsetof(sthi_top_words, figures.name));
}

void sthi_top_close(sthi_top_place *place) {
    if (!place) return;
    sthi_lock(&lock);
    store_words(place, &(sthi_top_words){0}, sizeof(sthi_top_words));
    taken &= ~(UINT32_C(1) << (place - page->places));
    if (!taken) remove_page();
    sthi_unlock(&lock);
}
