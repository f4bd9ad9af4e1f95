/* Reading back the JSONL file that a run wrote. Lines that are not records of steps (the mark of a full
 * file, a line torn by a crash) are passed over. */
#define _GNU_SOURCE
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "forecast.h"
#include "report.h"

static bool read_compute(const char *line, size_t length, double *out_ms) {
    json_t *record = json_loadb(line, length, JSON_REJECT_DUPLICATES, NULL);
    const json_t *value = json_object_get(record, "compute_time_ms");
    bool ok = json_is_number(value) && json_number_value(value) >= 0;
    if (ok) *out_ms = json_number_value(value);
    json_decref(record);
    return ok;
}

int telemetry_mean_compute(const char *path, double *out_ms) {
    FILE *f = fopen(path, "re");
    if (!f) return cli_fail(CLI_DATA, "%s: %s", path, strerror(errno));
    char *line = NULL;
    size_t cap = 0;
    ssize_t length;
    double sum = 0, ms = 0;
    uint64_t steps = 0;
    while ((length = getline(&line, &cap, f)) > 0)
        if (read_compute(line, (size_t)length, &ms)) sum += ms, steps++;
    int error = ferror(f) ? errno : 0;
    free(line);
    fclose(f);
    if (error) return cli_fail(CLI_DATA, "%s: %s", path, strerror(error));
    if (!steps)
        return cli_fail(CLI_DATA, "%s: has no line with compute_time_ms; give a file that telemetry wrote",
                        path);
    *out_ms = sum / (double)steps;
    return isfinite(*out_ms) ? CLI_OK : cli_fail(CLI_DATA, "%s: its compute times are out of range", path);
}
