/* The one place that calls malloc and mmap for anonymous memory. Lock-free counter of live blocks. */
#define _GNU_SOURCE
#include "base/memory.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fault.h"

static atomic_long live;

static void *counted(void *p) {
    if (p) atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return p;
}

void *sthi_alloc(size_t bytes) {
    if (sthi_fault_hit(STHI_FAULT_ALLOC)) return NULL;
    return counted(malloc(bytes ? bytes : 1));
}

void *sthi_zalloc(size_t count, size_t each) {
    if (each && count > SIZE_MAX / each) return NULL;
    if (sthi_fault_hit(STHI_FAULT_ALLOC)) return NULL;
    return counted(calloc(count ? count : 1, each ? each : 1));
}

void *sthi_realloc(void *old, size_t count, size_t each) {
    if (each && count > SIZE_MAX / each) return NULL;
    if (sthi_fault_hit(STHI_FAULT_ALLOC)) return NULL;
    size_t bytes = count * each;
    void *p = realloc(old, bytes > 0 ? bytes : 1);
    return old ? p : counted(p);
}

char *sthi_strdup(const char *text) {
    size_t n = strlen(text) + 1;
    char *copy = sthi_alloc(n);
    return copy ? memcpy(copy, text, n) : NULL;
}

void sthi_free(void *p) {
    if (!p) return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(p);
}

long sthi_alloc_live(void) { return atomic_load_explicit(&live, memory_order_relaxed); }

void *sthi_pages_map(size_t bytes, int huge) {
    if (sthi_fault_hit(STHI_FAULT_ALLOC)) return NULL;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (huge) (void)madvise(p, bytes, MADV_HUGEPAGE); /* advice only: small pages also work */
    return p;
}

void sthi_pages_unmap(void *p, size_t bytes) {
    if (p) munmap(p, bytes);
}

void sthi_pages_discard(void *p, size_t bytes) { (void)madvise(p, bytes, MADV_DONTNEED); }

size_t sthi_page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* The number in the first line of the file that has the format; UINT64_MAX if none has. */
static uint64_t number_in(const char *path, const char *format) {
    unsigned long long number = 0;
    FILE *file = fopen(path, "re");
    char line[128];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) found = sscanf(line, format, &number) == 1;
    if (file) fclose(file);
    return found ? number : UINT64_MAX;
}

static atomic_uint_fast64_t assumed;

void sthi_memory_assume(uint64_t bytes) { atomic_store(&assumed, bytes); }

uint64_t sthi_memory_available(void) {
    uint64_t told = atomic_load(&assumed);
    if (told) return told;
    uint64_t kib = number_in("/proc/meminfo", "MemAvailable: %llu kB"), left = UINT64_MAX;
    uint64_t most = number_in("/sys/fs/cgroup/memory.max", "%llu");
    uint64_t taken = number_in("/sys/fs/cgroup/memory.current", "%llu");
    uint64_t cached = number_in("/sys/fs/cgroup/memory.stat", "inactive_file %llu"); /* given back when it is wanted */
    if (most != UINT64_MAX && taken != UINT64_MAX) {
        taken -= cached < taken ? cached : 0;
        left = most > taken ? most - taken : 0;
    }
    uint64_t bytes = kib <= UINT64_MAX / 1024 ? kib * 1024 : UINT64_MAX;
    return bytes < left ? bytes : left;
}

void *sthi_mirror_map(size_t bytes) {
    if (bytes > SIZE_MAX / 2 || sthi_fault_hit(STHI_FAULT_ALLOC)) return NULL;
    int fd = memfd_create("stagehand-mirror", MFD_CLOEXEC);
    if (fd < 0) return NULL;
    /* Reserve both halves first, so that the second one cannot be taken by another thread's mapping. */
    char *p = MAP_FAILED;
    if (!ftruncate(fd, (off_t)bytes))
        p = mmap(NULL, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool ok = p != MAP_FAILED;
    for (int half = 0; ok && half < 2; half++)
        ok = mmap(p + (size_t)half * bytes, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) !=
             MAP_FAILED;
    if (!ok && p != MAP_FAILED) munmap(p, 2 * bytes);
    close(fd);
    return ok ? p : NULL;
}

void sthi_mirror_unmap(void *p, size_t bytes) {
    if (p) munmap(p, 2 * bytes);
}
