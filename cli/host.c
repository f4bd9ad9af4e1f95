/* Reads /proc and /sys. A file that is missing or odd leaves its fact at "unknown": nothing here fails but
 * the disk measurement, which the user asked for by name. */
#define _GNU_SOURCE
#include "host.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "report.h"

#define READ_BYTES ((size_t)4 << 20)
#define NO_LIMIT_ABOVE ((uint64_t)1 << 60) /* version 1 groups write a huge number for "none" */

int64_t host_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* "MemTotal:  24576 kB" in a file of such lines; 0 where it is missing. */
static uint64_t read_kilobytes(const char *path, const char *key) {
    FILE *f = fopen(path, "re");
    char line[256];
    unsigned long long kilobytes = 0;
    size_t length = strlen(key);
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, length) == 0 && line[length] == ':' &&
            sscanf(line + length + 1, "%llu", &kilobytes) == 1)
            break;
    if (f) fclose(f);
    return (uint64_t)kilobytes * 1024;
}

static bool read_number(const char *path, uint64_t *out) {
    FILE *f = fopen(path, "re");
    unsigned long long n;
    bool ok = f && fscanf(f, "%llu", &n) == 1;
    if (f) fclose(f);
    if (ok) *out = n;
    return ok;
}

static bool file_mentions(const char *path, const char *word) {
    FILE *f = fopen(path, "re");
    char line[512];
    bool found = f && fgets(line, sizeof line, f) && strcasestr(line, word);
    if (f) fclose(f);
    return found;
}

/* ---- control groups */

typedef struct group_files {
    const char *mount, *limit, *used;
} group_files;
static const group_files version_1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                      "memory.usage_in_bytes"};
static const group_files version_2 = {"/sys/fs/cgroup", "memory.max", "memory.current"};

/* From the process's own group up to the mount: any of them can be the tightest. A path that is not there
 * (a container that sees only its own groups) counts as the nearest one above. */
static void look_upwards(const char *root, const group_files *files, const char *group, host_facts *out) {
    char folder[PATH_MAX], path[PATH_MAX + 64];
    uint64_t limit, used = 0;
    size_t base = (size_t)snprintf(folder, sizeof folder, "%s%s", root, files->mount);
    size_t length = base + (size_t)snprintf(folder + base, sizeof folder - base, "%s", group);
    if (length >= sizeof folder) return;
    for (;;) {
        snprintf(path, sizeof path, "%s/%s", folder, files->limit);
        if (read_number(path, &limit) && limit < NO_LIMIT_ABOVE && limit < out->container_limit) {
            snprintf(path, sizeof path, "%s/%s", folder, files->used);
            out->container_used = read_number(path, &used) ? used : 0;
            out->container_limit = limit;
        }
        char *slash = strrchr(folder + base, '/');
        if (!slash) return;
        *slash = 0;
    }
}

/* Lines "9:memory:/path" (version 1) and "0::/path" (version 2). */
static void look_at_groups(const char *root, host_facts *out) {
    char path[PATH_MAX], line[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        if (controllers[1] == 0)
            look_upwards(root, &version_2, group, out);
        else if (strstr(controllers + 1, "memory"))
            look_upwards(root, &version_1, group, out);
    }
    if (f) fclose(f);
}

/* The rest of the first line of a file that begins with `key`, behind blanks, tabs and a colon. */
static void read_text(const char *path, const char *key, char *out, size_t capacity) {
    FILE *f = fopen(path, "re");
    char line[256];
    size_t length = strlen(key);
    out[0] = '\0';
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, length)) continue;
        const char *rest = line + length + strspn(line + length, " \t:");
        snprintf(out, capacity, "%.*s", (int)strcspn(rest, "\n"), rest);
        break;
    }
    if (f) fclose(f);
}

static unsigned count_processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 0;
}

void host_look(const char *root, host_facts *out) {
    char path[PATH_MAX];
    struct rlimit lock;
    *out = (host_facts){.pin_limit = HOST_UNLIMITED, .container_limit = HOST_UNLIMITED};
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    out->ram_total = read_kilobytes(path, "MemTotal");
    out->ram_available = read_kilobytes(path, "MemAvailable");
    if (getrlimit(RLIMIT_MEMLOCK, &lock) == 0 && lock.rlim_cur != RLIM_INFINITY)
        out->pin_limit = lock.rlim_cur;
    snprintf(path, sizeof path, "%s/proc/version", root);
    out->wsl = file_mentions(path, "microsoft");
    snprintf(path, sizeof path, "%s/proc/cpuinfo", root);
    read_text(path, "model name", out->cpu, sizeof out->cpu);
    snprintf(path, sizeof path, "%s/sys/module/nvidia/version", root);
    read_text(path, "", out->driver, sizeof out->driver);
    out->processors = count_processors();
    look_at_groups(root, out);
}

host_use host_process_use(void) {
    return (host_use){read_kilobytes("/proc/self/status", "VmRSS"),
                      read_kilobytes("/proc/self/status", "VmHWM")};
}

/* ---- disk */

static int fail_path(const char *path) { return cli_fail(CLI_DATA, "%s: %s", path, strerror(errno)); }

/* The largest regular file of a folder, in `out`; an exit code. */
static int largest_file(const char *folder, char *out, size_t cap) {
    DIR *dir = opendir(folder);
    if (!dir) return fail_path(folder);
    off_t largest = 0;
    for (struct dirent *e; (e = readdir(dir));) {
        struct stat st;
        if (fstatat(dirfd(dir), e->d_name, &st, 0) || !S_ISREG(st.st_mode) || st.st_size <= largest)
            continue;
        if ((size_t)snprintf(out, cap, "%s/%s", folder, e->d_name) < cap) largest = st.st_size;
    }
    closedir(dir);
    return largest ? CLI_OK
                   : cli_fail(CLI_DATA, "%s: has no file that could be read to measure the disk", folder);
}

static int time_reading(const char *path, int fd, uint64_t limit, disk_rate *out) {
    char *buffer = cli_alloc(READ_BYTES, 1);
    int64_t start = host_now_ns();
    uint64_t bytes = 0;
    ssize_t n = 0;
    while (bytes < limit && (n = read(fd, buffer, READ_BYTES)) > 0) bytes += (uint64_t)n;
    int64_t ns = host_now_ns() - start;
    free(buffer);
    if (n < 0) return fail_path(path);
    if (bytes == 0) return cli_fail(CLI_DATA, "%s: is empty: the disk cannot be measured with it", path);
    *out = (disk_rate){bytes, (double)bytes * 1e9 / (double)(ns > 0 ? ns : 1)};
    return CLI_OK;
}

int host_disk_rate(const char *path, uint64_t limit, disk_rate *out) {
    char inside[PATH_MAX];
    struct stat st;
    if (stat(path, &st)) return fail_path(path);
    if (S_ISDIR(st.st_mode)) {
        int code = largest_file(path, inside, sizeof inside);
        if (code) return code;
        path = inside;
    } else if (!S_ISREG(st.st_mode)) {
        return cli_fail(CLI_DATA, "%s: is neither a file nor a folder", path);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail_path(path);
    int code = time_reading(path, fd, limit, out);
    close(fd);
    return code;
}
