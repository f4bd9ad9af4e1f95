/* Writing records to a file. Invariants: the file ends with a whole line after every write, also
 * after one that failed half way (it is cut back; the lock on the file makes that safe); while it is open,
 * size + pending + the truncation line <= max_bytes, so that the last line always fits. No locks of its own.
 * It does not rotate, does not sync to disk, and does not follow the file when it is renamed. */
#define _GNU_SOURCE
#include "telemetry/jsonl.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/outfile.h"

#define PENDING_BYTES 16384
#define NUMBER_BYTES 32
#define LINE_BYTES 2048 /* 22 fields of a name and a number */
#define WRITE_EVERY_NS 500000000
#define SOON_NS 1000000000 /* another that adds a line has ended by then */
#define LOOK_NS 1000000

struct sthi_jsonl {
    int fd; /* -1: ended by a failure or by the bound */
    uint64_t size, max_bytes;
    size_t pending;
    uint64_t pending_lines, lost; /* records gathered and not yet written; records that the file will never have */
    int64_t last_write_ns;
    bool already_full; /* when opened; to be reported by the first append */
    char *path;
    char buffer[PENDING_BYTES];
};

static const size_t truncated_bytes = sizeof STHI_JSONL_TRUNCATED - 1;

/* File systems without locks (some network ones) are taken as they are. */
static sth_status lock(const char *path, int fd, int64_t patience_ns) {
    int64_t until = sthi_now_ns() + patience_ns;
    do {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return STH_OK;
        if (patience_ns) sthi_sleep_ns(LOOK_NS);
    } while (sthi_now_ns() < until);
    return sthi_fail(STH_INVALID_STATE, "errno", errno, path,
                     "%s: another run is writing its telemetry there; give each its own file", path);
}

/* The last line of an earlier run may be torn (power loss): ours then starts with a line end. */
static bool ends_in_line(int fd, uint64_t size) {
    char last = 0;
    return size == 0 || (pread(fd, &last, 1, (off_t)(size - 1)) == 1 && last == '\n');
}

static sth_status open_file(sthi_jsonl *f, int64_t patience_ns) {
    static const char *const starts[] = {"{\"step\":", "{\"step_id\":", "{\"event\":", "{\"truncated\":"};
    STHI_TRY(sthi_outfile_open(f->path, "telemetry", &f->fd, &f->size));
    if (!sthi_outfile_begins(f->fd, f->size, starts, sizeof starts / sizeof *starts))
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, f->path,
                         "%s holds something else than telemetry: name a new file, or one that telemetry wrote",
                         f->path);
    STHI_TRY(lock(f->path, f->fd, patience_ns));
    struct stat now; /* another writer may have added to it before it was locked */
    if (fstat(f->fd, &now) == 0) f->size = (uint64_t)now.st_size;
    if (!ends_in_line(f->fd, f->size)) f->buffer[f->pending++] = '\n';
    f->already_full = f->size + f->pending + truncated_bytes > f->max_bytes;
    return STH_OK;
}

static void close_file(sthi_jsonl *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
    f->pending = 0;
    f->lost += f->pending_lines;
    f->pending_lines = 0;
}

static sth_status open_within(const char *path, uint64_t max_bytes, int64_t patience_ns, sthi_jsonl **out_file) {
    if (max_bytes < truncated_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, path,
                         "%s: telemetry_max_bytes is %llu; allow at least a few kilobytes", path,
                         (unsigned long long)max_bytes);
    sthi_jsonl *f = sthi_zalloc(1, sizeof *f);
    char *copy = sthi_strdup(path);
    if (!f || !copy) {
        sthi_free(f);
        sthi_free(copy);
        return sthi_no_memory(path, "telemetry in %s", path);
    }
    f->path = copy;
    f->fd = -1;
    f->max_bytes = max_bytes;
    f->last_write_ns = sthi_now_ns();
    sth_status status = open_file(f, patience_ns);
    if (status != STH_OK) {
        sthi_jsonl_close(f, false);
        return status;
    }
    *out_file = f;
    return STH_OK;
}

sth_status sthi_jsonl_open(const char *path, uint64_t max_bytes, sthi_jsonl **out_file) {
    return open_within(path, max_bytes, 0, out_file);
}

static ssize_t write_some(int fd, const char *bytes, size_t count) {
    if (sthi_fault_hit(STHI_FAULT_WRITE)) {
        errno = ENOSPC;
        return -1;
    }
    return write(fd, bytes, count);
}

/* All of it; after a failure the file is as it was before and closed. */
static sth_status write_all(sthi_jsonl *f, const char *bytes, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t n = write_some(f->fd, bytes + done, count - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            int err = n < 0 ? errno : EIO;
            bool cut = done == 0 || ftruncate(f->fd, (off_t)f->size) == 0;
            close_file(f);
            return sthi_fail(STH_IO, "errno", err, f->path, "%s: writing telemetry failed and has ended%s: %s",
                             f->path, cut ? "" : " within a line", strerror(err));
        }
        done += (size_t)n;
    }
    f->size += count;
    return STH_OK;
}

static sth_status write_pending(sthi_jsonl *f) {
    STHI_TRY(write_all(f, f->buffer, f->pending));
    f->pending = 0;
    f->pending_lines = 0;
    f->last_write_ns = sthi_now_ns();
    return STH_OK;
}

static bool is_whole(const char *unit) {
    static const char *const whole[] = {"count", "bytes", "index", "elements", "slabs"};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        if (strcmp(unit, whole[i]) == 0) return true;
    return false;
}

/* JSON wants a point, whatever the host program's locale prints between the digits. */
static void print_number(char out[NUMBER_BYTES], double value, bool whole) {
    char text[NUMBER_BYTES];
    size_t used = 0;
    if (!isfinite(value)) {
        memcpy(out, "null", sizeof "null");
        return;
    }
    snprintf(text, sizeof text, whole && fabs(value) < 1e18 ? "%.0f" : "%.6g", value);
    for (const char *c = text; *c; c++) {
        if (strchr("+-0123456789e", *c)) out[used++] = *c;
        else if (used == 0 || out[used - 1] != '.') out[used++] = '.';
    }
    out[used] = 0;
}

#define COUNT_FIELD(field, unit, text) +sizeof #field + NUMBER_BYTES + 4
_Static_assert(0 STH_STEP_METRICS_LIST(COUNT_FIELD) < LINE_BYTES, "a record fits in a line");
#undef COUNT_FIELD

static size_t print_line(char out[LINE_BYTES], const sth_step_metrics *m) {
    char number[NUMBER_BYTES];
    size_t used = 0;
#define PRINT_FIELD(field, unit, text)                                                           \
    print_number(number, m->field, is_whole(unit));                                              \
    used += (size_t)snprintf(out + used, LINE_BYTES - used, "%s\"" #field "\":%s", used ? "," : "{", number);
    STH_STEP_METRICS_LIST(PRINT_FIELD)
#undef PRINT_FIELD
    return used + (size_t)snprintf(out + used, LINE_BYTES - used, "}\n");
}

/* No more fits: the last line says so. */
static sth_status finish(sthi_jsonl *f) {
    memcpy(f->buffer + f->pending, STHI_JSONL_TRUNCATED, truncated_bytes);
    f->pending += truncated_bytes;
    sth_status status = write_pending(f);
    close_file(f);
    return status;
}

static sth_status report_already_full(sthi_jsonl *f) {
    close_file(f);
    return sthi_fail(STH_IO, "stagehand", 0, f->path,
                     "%s: holds %llu bytes already and telemetry_max_bytes is %llu: nothing is written; move "
                     "the file away or raise the limit",
                     f->path, (unsigned long long)f->size, (unsigned long long)f->max_bytes);
}

sth_status sthi_jsonl_append(sthi_jsonl *f, const sth_step_metrics *metrics) {
    char line[LINE_BYTES];
    f->lost++; /* until it is gathered */
    if (f->fd < 0) return STH_OK;
    if (f->already_full) return report_already_full(f);
    size_t length = print_line(line, metrics);
    if (f->pending + length + truncated_bytes > PENDING_BYTES) STHI_TRY(write_pending(f));
    if (f->size + f->pending + length + truncated_bytes > f->max_bytes) return finish(f);
    memcpy(f->buffer + f->pending, line, length);
    f->pending += length;
    f->pending_lines++;
    f->lost--;
    return sthi_now_ns() - f->last_write_ns >= WRITE_EVERY_NS ? write_pending(f) : STH_OK;
}

sth_status sthi_jsonl_flush(sthi_jsonl *f) {
    return f->fd < 0 || f->already_full || !f->pending_lines ? STH_OK : write_pending(f);
}

uint64_t sthi_jsonl_lost(const sthi_jsonl *f) { return f->lost; }

static sth_status append_text(sthi_jsonl *f, const char *text, size_t length, bool *out_full) {
    *out_full = f->already_full || length > f->max_bytes - truncated_bytes - f->size - f->pending;
    if (f->already_full) return STH_OK;
    if (*out_full) return finish(f);
    STHI_TRY(write_pending(f));
    return write_all(f, text, length);
}

sth_status sthi_jsonl_append_text(const char *path, uint64_t max_bytes, const char *text, size_t length,
                                  bool *out_full) {
    sthi_jsonl *f = NULL;
    bool full = false;
    STHI_TRY(open_within(path, max_bytes, SOON_NS, &f));
    sth_status status = append_text(f, text, length, &full);
    sthi_jsonl_close(f, false);
    if (status == STH_OK) *out_full = full;
    return status;
}

void sthi_jsonl_close(sthi_jsonl *f, bool flush) {
    if (!f) return;
    if (flush && f->fd >= 0 && !f->already_full) (void)write_pending(f);
    close_file(f);
    sthi_free(f->path);
    sthi_free(f);
}
