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
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "forecast.h"
#include "report.h"

enum { LINE_BYTES = 1 << 20 };

static bool read_compute(const char *line, size_t length, double *out_ms) {
    json_t *record = json_loadb(line, length, JSON_REJECT_DUPLICATES, NULL);
    const json_t *value = json_object_get(record, "compute_time_ms");
    bool ok = json_is_number(value) && json_number_value(value) >= 0;
    if (ok) *out_ms = json_number_value(value);
    json_decref(record);
    return ok;
}

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

int telemetry_mean_compute(const char *path, double *out_ms) {
    FILE *f = NULL;
    int code = open_file(path, &f);
    if (code) return code;
    static char line[LINE_BYTES];
    size_t length = 0;
    double sum = 0, ms = 0;
    uint64_t steps = 0, number = 1;
    for (; next_line(f, line, &length) && length < LINE_BYTES; number++)
        if (read_compute(line, length, &ms)) sum += ms, steps++;
    int error = ferror(f) ? errno : 0;
    fclose(f);
    if (error) return cli_fail(CLI_DATA, "%s: %s", path, strerror(error));
    if (length == LINE_BYTES)
        return cli_fail(CLI_DATA, "%s: line %" PRIu64 " has more than %d bytes; give a file that telemetry wrote", path,
                        number, LINE_BYTES);
    if (!steps)
        return cli_fail(CLI_DATA, "%s: has no line with compute_time_ms; give a file that telemetry wrote",
                        path);
    *out_ms = sum / (double)steps;
    return isfinite(*out_ms) ? CLI_OK : cli_fail(CLI_DATA, "%s: its compute times are out of range", path);
}
