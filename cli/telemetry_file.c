/* Reading back the JSONL file that a run wrote. Lines that are not records of steps (the mark of a full
 * file, a line torn by a crash) are passed over; one that no telemetry writes, for its length, ends the reading. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"
#include "telemetry_file.h"

enum { LINE_BYTES = 1 << 20, STEPS_MOST = 10000 };

/* O_NONBLOCK: opening a pipe must fail the check, not wait for a writer. */
static int open_file(const char *path, FILE **out) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return cli_fail(CLI_DATA, "%s: %s", path, strerror(errno));
    bool seen = fstat(fd, &st) == 0;
    if (seen && S_ISREG(st.st_mode) && (*out = fdopen(fd, "r"))) return CLI_OK;
    int error = errno;
    close(fd);
    if (seen && !S_ISREG(st.st_mode)) return cli_fail(CLI_DATA, "%s: not a regular file, as telemetry writes", path);
    return cli_fail(CLI_DATA, "%s: %s", path, strerror(error));
}

/* The next line into line[LINE_BYTES], without its end. False at the end of the file; *out_length is LINE_BYTES where
 * the line does not fit. */
static bool next_line(FILE *f, char *line, size_t *out_length) {
    size_t n = 0;
    int c = EOF;
    while (n < LINE_BYTES && (c = getc_unlocked(f)) != EOF && c != '\n') line[n++] = (char)c;
    *out_length = n;
    return n || c != EOF;
}

typedef void (*take_record)(void *context, const json_t *record);

/* Hands over each record, in the order of the file; there is one at least. */
static int each_record(const char *path, take_record take, void *context) {
    FILE *f = NULL;
    int code = open_file(path, &f);
    if (code) return code;
    static char line[LINE_BYTES];
    size_t length = 0;
    uint64_t steps = 0, number = 1;
    for (; next_line(f, line, &length) && length < LINE_BYTES; number++) {
        json_t *record = json_loadb(line, length, JSON_REJECT_DUPLICATES, NULL);
        const json_t *value = json_object_get(record, "compute_time_ms");
        if (json_is_number(value) && json_number_value(value) >= 0) take(context, record), steps++;
        json_decref(record);
    }
    int error = ferror(f) ? errno : 0;
    fclose(f);
    if (error) return cli_fail(CLI_DATA, "%s: %s", path, strerror(error));
    if (length == LINE_BYTES)
        return cli_fail(CLI_DATA, "%s: line %" PRIu64 " has more than %d bytes; give a file that telemetry wrote", path,
                        number, LINE_BYTES);
    if (!steps)
        return cli_fail(CLI_DATA, "%s: has no line with compute_time_ms; give a file that telemetry wrote",
                        path);
    return CLI_OK;
}

/* ---- the mean */

typedef struct sum {
    double ms;
    uint64_t steps;
} sum;

static void add_compute(void *context, const json_t *record) {
    sum *s = context;
    s->ms += json_number_value(json_object_get(record, "compute_time_ms"));
    s->steps++;
}

int telemetry_mean_compute(const char *path, double *out_ms) {
    sum s = {0};
    int code = each_record(path, add_compute, &s);
    if (code) return code;
    *out_ms = s.ms / (double)s.steps;
    return isfinite(*out_ms) ? CLI_OK : cli_fail(CLI_DATA, "%s: its compute times are out of range", path);
}

/* ---- the steps */

typedef struct window {
    sth_step_metrics *ring; /* [STEPS_MOST] */
    uint64_t count;
} window;

static double number_in(const json_t *record, const char *name) {
    double value = json_number_value(json_object_get(record, name));
    return isfinite(value) && value >= 0 && value < 1e15 ? value : 0;
}

static void add_step(void *context, const json_t *record) {
    window *w = context;
    sth_step_metrics *m = &w->ring[w->count++ % STEPS_MOST];
#define READ(field, unit, text) m->field = number_in(record, #field);
    STH_STEP_METRICS_LIST(READ)
#undef READ
}

int telemetry_read_steps(const char *path, sth_step_metrics **out_steps, uint32_t *out_count) {
    window w = {.ring = cli_alloc(STEPS_MOST, sizeof *w.ring)};
    int code = each_record(path, add_step, &w);
    uint32_t count = (uint32_t)(w.count < STEPS_MOST ? w.count : STEPS_MOST);
    if (!code) {
        *out_steps = cli_alloc(count, sizeof **out_steps);
        for (uint32_t i = 0; i < count; i++) (*out_steps)[i] = w.ring[(w.count - count + i) % STEPS_MOST];
        *out_count = count;
    }
    free(w.ring);
    return code;
}
