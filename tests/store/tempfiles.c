/* Test support: failures here end the program, since no test can go on without its files. */
#define _GNU_SOURCE
#include "store/tempfiles.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"

static void need(int ok, const char *what) {
    if (ok) return;
    perror(what);
    exit(2);
}

int temp_setup(void **state) {
    const char *root = getenv("TMPDIR");
    char *path = NULL;
    need(asprintf(&path, "%s/stagehand-store-XXXXXX", root ? root : "/tmp") > 0, "asprintf");
    need(mkdtemp(path) != NULL, "mkdtemp");
    *state = path;
    return 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *where) {
    (void)st, (void)type, (void)where;
    return remove(path);
}

int temp_teardown(void **state) {
    int rc = nftw(*state, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    free(*state);
    return rc;
}

const char *temp_path(const char *folder, const char *name) {
    static char ring[8][512];
    static unsigned next;
    char *path = ring[next++ % 8];
    need((size_t)snprintf(path, sizeof ring[0], "%s/%s", folder, name) < sizeof ring[0], "temp_path");
    return path;
}

void write_bytes(const char *path, const void *bytes, size_t count) {
    FILE *f = fopen(path, "wb");
    need(f != NULL, path);
    need(fwrite(bytes, 1, count, f) == count, path);
    need(fclose(f) == 0, path);
}

void write_text(const char *path, const char *text) { write_bytes(path, text, strlen(text)); }

unsigned char pattern_byte(uint64_t i) { return (unsigned char)(i * 131 + (i >> 8) * 17 + 1); }

/* Rows of 256 bytes, each of which begins with another byte, are made once: sanitizers make a look at every byte
 * slow. */
static unsigned char row[256][256];
static pthread_once_t rows_once = PTHREAD_ONCE_INIT;

static void make_rows(void) {
    for (unsigned i = 0; i < sizeof row; i++) row[(unsigned char)(i / 256 * 17 + 1)][i % 256] = pattern_byte(i);
}

bool is_pattern(const void *bytes, uint64_t first, uint64_t count) {
    const unsigned char *p = bytes;
    pthread_once(&rows_once, make_rows);
    for (uint64_t i = first, end = first + count; i < end;) {
        uint64_t n = sthi_min_u64(256 - i % 256, end - i);
        if (memcmp(p, row[(unsigned char)(i / 256 * 17 + 1)] + i % 256, n)) return false;
        i += n;
        p += n;
    }
    return true;
}

void write_safetensors(const char *path, const char *header, size_t data_bytes) {
    size_t n = strlen(header), total = 8 + n + data_bytes;
    unsigned char *file = malloc(total);
    need(file != NULL, "malloc");
    for (size_t i = 0; i < 8; i++) file[i] = (unsigned char)(n >> 8 * i);
    memcpy(file + 8, header, n);
    for (size_t i = 0; i < data_bytes; i++) file[8 + n + i] = pattern_byte(i);
    write_bytes(path, file, total);
    free(file);
}

uint64_t file_bytes(const char *path) {
    struct stat st;
    need(stat(path, &st) == 0, path);
    return (uint64_t)st.st_size;
}

void cut_file(const char *path, uint64_t bytes) { need(truncate(path, (off_t)bytes) == 0, path); }

int open_descriptors(void) {
    DIR *dir = opendir("/proc/self/fd");
    need(dir != NULL, "/proc/self/fd");
    int count = 0;
    while (readdir(dir)) count++;
    closedir(dir);
    return count;
}

void drop_cache(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    need(fd >= 0 && fsync(fd) == 0, "fsync");
    need(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "posix_fadvise");
    close(fd);
}

void warm_cache(const char *path) {
    char some[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    need(fd >= 0, "open");
    while (read(fd, some, sizeof some) > 0) {}
    close(fd);
}
