/* Rates of the link, of RAM and of the disk, each by the function that the runtime itself has for it: copies between
 * two events, the arena's write, and the reads of a runtime that streams a file. What memory is scarce for is smaller;
 * what cannot be measured says why. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "bench.h"
#include "link.h"
#include "progress.h"
#include "report.h"
#include "stagehand/arena.h"
#include "stagehand/checkpoint.h"
#include "stream.h"

const char *const bench_rate_key[RATE_COUNT] = {"link_up",  "link_down", "link_both", "link_up_pageable",
                                                "pin_rate", "ram_copy",  "disk_read"};
const char *const bench_rate_title[RATE_COUNT] = {
    "link up", "link down", "link, both at once", "link up, pageable", "pinning", "copy within RAM", "disk",
};

enum { REPEATS = 5 };
#define MIB ((uint64_t)1 << 20)
#define TRIAL (256 * MIB)     /* bytes of a copy, where there is room and a card */
#define SIM_TRIAL (32 * MIB)
#define LEAST_TRIAL (4 * MIB)
#define DISK_UNIT (16 * MIB)
#define DISK_UNITS 32         /* in the file, where room and time allow, and a card is there */
#define HEADER 8192           /* bytes of the file before the units */
#define LEAST_UNITS 8         /* fewer say nothing of the disk */

static void leave_out(bench_rates *b, bench_rate first, bench_rate last, const char *why) {
    for (int i = first; i <= (int)last; i++) {
        b->rate[i] = 0;
        snprintf(b->note[i], sizeof b->note[i], "left out: %.380s", why);
    }
}

static void note(bench_rates *b, bench_rate first, bench_rate last, const char *text) {
    for (int i = first; i <= (int)last; i++) snprintf(b->note[i], sizeof b->note[i], "%s", text);
}

/* ---- the link and pinning */

static void measure_link(sth_device *device, bench_rates *b, uint64_t bytes) {
    char text[96];
    sth_link_rates found;
    snprintf(text, sizeof text, "copies of %s%s", cli_size(bytes).text,
             b->simulated ? " by threads of the CPU: no card's link" : ", pinned");
    if (sth_device_measure_link(device, bytes, REPEATS, &found) == STH_OK) {
        b->rate[RATE_UP] = found.up;
        b->rate[RATE_DOWN] = found.down;
        b->rate[RATE_BOTH] = found.both;
        b->rate[RATE_PIN] = found.pin;
        note(b, RATE_UP, RATE_BOTH, text);
        if (b->simulated || found.pin <= 0) leave_out(b, RATE_PIN, RATE_PIN, "nothing is really pinned here");
    } else {
        leave_out(b, RATE_UP, RATE_BOTH, sth_last_error()->message);
        leave_out(b, RATE_PIN, RATE_PIN, sth_last_error()->message);
    }
    snprintf(text, sizeof text, "copies of %s", cli_size(bytes).text);
    if (sth_device_measure_h2d(device, bytes, REPEATS, false, &b->rate[RATE_PAGEABLE]) == STH_OK)
        note(b, RATE_PAGEABLE, RATE_PAGEABLE, text);
    else leave_out(b, RATE_PAGEABLE, RATE_PAGEABLE, sth_last_error()->message);
}

/* ---- RAM */

static sth_status write_twice(sth_arena *arena, uint64_t bytes, const void *from, int64_t *out_ns) {
    void *to;
    sth_status rc = sth_arena_reserve(arena, bytes, &to);
    *out_ns = INT64_MAX;
    for (int lap = 0; rc == STH_OK && lap < 3; lap++) { /* the first one also fetches the pages */
        int64_t begun = host_now_ns();
        rc = sth_arena_write(arena, to, from, bytes);
        int64_t ns = host_now_ns() - begun;
        if (lap && ns < *out_ns) *out_ns = ns;
    }
    return rc;
}

static void measure_ram(sth_device *device, bench_rates *b, uint64_t bytes) {
    sth_arena *arena = NULL;
    int64_t ns = 0;
    void *from = cli_alloc(bytes, 1);
    memset(from, 1, bytes);
    sth_status rc = sth_arena_create_pageable(device, bytes, &arena);
    if (rc == STH_OK) rc = write_twice(arena, bytes, from, &ns);
    if (rc == STH_OK) {
        b->rate[RATE_COPY] = (double)bytes * 1e9 / (double)(ns > 0 ? ns : 1);
        note(b, RATE_COPY, RATE_COPY, "by as many threads as weights are taken over with; bytes copied a second");
    } else leave_out(b, RATE_COPY, RATE_COPY, sth_last_error()->message);
    sth_arena_release(arena);
    free(from);
}

/* ---- the disk: a file of this process's own, which is gone when it has been read */

typedef struct trial_file {
    char folder[PATH_MAX], path[PATH_MAX + 32];
    uint32_t count; /* of units */
} trial_file;

static void remove_file(const trial_file *t) {
    (void)unlink(t->path);
    (void)rmdir(t->folder);
}

/* As many units as room and time allow, of bytes in which no file system finds a pattern. */
static bool write_units(int fd, const bench_request *r, trial_file *t, uint32_t most, double seconds) {
    uint64_t *words = cli_alloc(DISK_UNIT, 1), state = 1;
    int64_t end = r->clock.now(r->clock.context) + (int64_t)(seconds * 1e9);
    bool ok = true;
    for (t->count = 0; ok && t->count < most; t->count++) {
        if (r->clock.now(r->clock.context) > end || progress_stopped()) break;
        for (size_t i = 0; i < DISK_UNIT / sizeof *words; i++)
            words[i] = state = state * 6364136223846793005u + 1442695040888963407u;
        off_t at = (off_t)(HEADER + t->count * DISK_UNIT);
        ok = pwrite(fd, words, DISK_UNIT, at) == (ssize_t)DISK_UNIT && fdatasync(fd) == 0;
    }
    free(words);
    return ok;
}

/* A tensor for each unit, filled up with blanks. */
static bool write_header(int fd, const trial_file *t) {
    char header[HEADER];
    size_t n = 8;
    memset(header, ' ', sizeof header);
    for (int i = 0; i < 8; i++) header[i] = (char)((sizeof header - 8) >> (8 * i));
    for (uint32_t i = 0; i < t->count; i++)
        n += (size_t)snprintf(header + n, sizeof header - n,
                              "%c\"u%u.w\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                              i ? ',' : '{', i, (unsigned long long)DISK_UNIT, (unsigned long long)(i * DISK_UNIT),
                              (unsigned long long)((i + 1) * DISK_UNIT));
    header[n++] = '}';
    header[n] = ' '; /* in place of the text's end */
    return pwrite(fd, header, sizeof header, 0) == (ssize_t)sizeof header && fdatasync(fd) == 0;
}

static bool fill_file(int fd, const bench_request *r, trial_file *t, uint32_t most, double seconds) {
    struct statvfs fs;
    if (fstatvfs(fd, &fs)) return false;
    uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize / 10 / DISK_UNIT;
    if (room < LEAST_UNITS) {
        errno = ENOSPC;
        return false;
    }
    return write_units(fd, r, t, room < most ? (uint32_t)room : most, seconds) && write_header(fd, t);
}

static sth_status read_units(stream_run *run, const bench_request *r, double seconds) {
    int64_t end = r->clock.now(r->clock.context) + (int64_t)(seconds * 1e9);
    sth_status rc = sth_step_begin(run->runtime);
    for (uint32_t i = 0; rc == STH_OK && i < run->units.count; i++) {
        sth_lease lease;
        rc = sth_unit_acquire(run->runtime, i, 0, &lease);
        if (rc == STH_OK) sth_lease_release(run->runtime, &lease);
        if (r->clock.now(r->clock.context) > end || progress_stopped()) break;
    }
    return rc == STH_OK ? sth_step_end(run->runtime) : rc;
}

static void read_file(const bench_request *r, trial_file *t, const char *device, bench_rates *b, double seconds) {
    const stream_request request = {.path = t->path,
                                    .device = device,
                                    .budget = 4 * DISK_UNIT,
                                    .steps = 1,
                                    .link_gb_s = link_is_simulated(device) ? 1e6 : -1,
                                    .compute_ms = -1};
    stream_run run;
    int code = stream_open(&request, &run);
    sth_file_way way = {0};
    bool known = code == CLI_OK && sth_checkpoint_file_way(run.checkpoint, 0, &way) == STH_OK;
    char by[64] = "";
    if (known) snprintf(by, sizeof by, ", by %s", sth_read_way_name(way.way));
    remove_file(t);
    sth_status rc = code == CLI_OK ? read_units(&run, r, seconds) : STH_IO;
    if (rc == STH_OK) rc = sth_runtime_stats_get(run.runtime, &run.stats);
    if (rc == STH_OK && run.stats.disk_bytes_per_s > 0) {
        b->rate[RATE_DISK] = run.stats.disk_bytes_per_s;
        snprintf(b->note[RATE_DISK], sizeof b->note[RATE_DISK], "a file of %s in %s%s",
                 cli_size(t->count * DISK_UNIT).text, r->disk, by);
    } else leave_out(b, RATE_DISK, RATE_DISK, rc == STH_OK ? "too little was read in time" : sth_last_error()->message);
    stream_close(&run);
}

static void measure_disk(const bench_request *r, const char *device, bench_rates *b, double seconds) {
    trial_file t = {.count = 0};
    char text[380];
    snprintf(t.folder, sizeof t.folder, "%s/.stagehand-bench-XXXXXX", r->disk);
    if (!mkdtemp(t.folder)) {
        snprintf(text, sizeof text, "%.200s: %.80s; name another folder with --disk", r->disk, strerror(errno));
        leave_out(b, RATE_DISK, RATE_DISK, text);
        return;
    }
    snprintf(t.path, sizeof t.path, "%s/file.safetensors", t.folder);
    int fd = open(t.path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && fill_file(fd, r, &t, b->simulated ? LEAST_UNITS : DISK_UNITS, seconds / 3);
    snprintf(text, sizeof text, "%.200s: %.80s; name another folder with --disk", r->disk, strerror(errno));
    if (ok) (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (fd >= 0) close(fd);
    if (ok && t.count >= LEAST_UNITS) {
        read_file(r, &t, device, b, seconds / 3);
        return;
    }
    remove_file(&t);
    leave_out(b, RATE_DISK, RATE_DISK, ok ? "the disk is too slow to write a file in the time" : text);
}

/* ---- all */

static void say(const char *what) { fprintf(stderr, "measuring %s\n", what); }

static void measure_on(sth_device *device, const bench_request *r, bench_rates *b) {
    uint64_t room = bench_ram_room(&b->host) / 8, vram = b->device.memory_free / 8;
    uint64_t bytes = room < vram ? room : vram;
    uint64_t most = b->simulated ? SIM_TRIAL : TRIAL;
    bytes = (bytes < most ? bytes : most) / MIB * MIB;
    if (bytes < LEAST_TRIAL) {
        leave_out(b, RATE_UP, RATE_COPY, "RAM or VRAM is scarce");
        return;
    }
    say("the link");
    measure_link(device, b, bytes);
    if (bench_seconds_left(r) <= 0 || progress_stopped()) {
        leave_out(b, RATE_COPY, RATE_COPY, "the time was over");
        return;
    }
    say("RAM");
    measure_ram(device, b, bytes);
}

int bench_measure_rates(const bench_request *r, bench_rates *out) {
    const char *name = r->device ? r->device : link_default_device();
    sth_device *device = NULL;
    *out = (bench_rates){.simulated = link_is_simulated(name)};
    host_look("", &out->host);
    sth_status rc = sth_device_open(name, NULL, &device);
    if (rc == STH_OK) rc = sth_device_info_get(device, &out->device);
    if (rc != STH_OK) {
        sth_device_close(device);
        return cli_fail_status(rc);
    }
    measure_on(device, r, out);
    sth_device_close(device);
    double left = bench_seconds_left(r);
    if (left <= 0 || progress_stopped()) leave_out(out, RATE_DISK, RATE_DISK, "the time was over");
    else if (bench_ram_room(&out->host) < 256 * MIB) leave_out(out, RATE_DISK, RATE_DISK, "RAM is scarce");
    else {
        say("the disk");
        measure_disk(r, name, out, left / 4 < 24 ? left / 4 : 24);
    }
    return progress_stopped() ? CLI_STOPPED : CLI_OK;
}
