/* Fuzz target for telemetry files that are there already: what the library looks at before it adds to one, and what the
 * tool reads back. Input: two bytes that say how far the file may grow, then the file.
 *
 * Property: a file that is refused is left as it was; one that is taken keeps what it held, ends with a whole line,
 * stays within its bound unless it was beyond it before, and holds the new record where it is not full; the tool's mean
 * over it is a number or a refusal, and its page has finite numbers. */
#define _GNU_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../cli/report.h"
#include "../cli/telemetry_file.h"
#include "base/memory.h"
#include "fuzz/files.h"
#include "stagehand/report.h"
#include "telemetry/jsonl.h"

#define ROOM 16384

/* In the place of the tool's, which prints. */
int cli_fail(int code, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    CHECK(vsnprintf(text, sizeof text, format, args) > 0 && strstr(text, "telemetry.jsonl"));
    va_end(args);
    return code;
}

/* In the place of the tool's, which ends it. */
void *cli_alloc(uint64_t count, size_t each) {
    void *memory = calloc(count, each);
    CHECK(memory);
    return memory;
}

/* A page of what the tool reads: steps of finite numbers, whatever the file says. */
static void report(const char *path, int mean) {
    sth_report_input in;
    sth_step_metrics *steps = NULL;
    char *page = NULL;
    sth_report_input_init(&in);
    int code = telemetry_read_steps(path, &steps, &in.step_count);
    CHECK(mean != CLI_OK || code == CLI_OK);
    if (code == CLI_OK) {
        CHECK(in.step_count > 0);
        in.title = "steps.jsonl";
        in.steps = steps;
        CHECK(sth_report_write(&in, STH_REPORT_PAGE, &page) == STH_OK);
        CHECK(!strstr(page, "nan") && !strstr(page, "inf") && !strstr(page, "http"));
    }
    sth_text_free(page);
    free(steps);
}

static size_t read_back(const char *path, char *out, size_t room) {
    FILE *f = fopen(path, "rb");
    CHECK(f);
    size_t n = fread(out, 1, room, f);
    fclose(f);
    return n;
}

/* Appends one record, and says whether the file was taken. */
static bool append(const char *path, uint64_t bound) {
    static const sth_step_metrics metrics = {.step = 7, .compute_time_ms = 2.5};
    sthi_jsonl *file = NULL;
    if (sthi_jsonl_open(path, bound, &file) != STH_OK) {
        CHECK(!file && strstr(sth_last_error()->message, path));
        return false;
    }
    sth_status status = sthi_jsonl_append(file, &metrics);
    CHECK(status == STH_OK || *sth_last_error()->message);
    sthi_jsonl_close(file, true);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char after[ROOM + 1];
    if (size < 2 || size > ROOM / 2) return 0;
    const char *path = fuzz_path("telemetry.jsonl"), *before = (const char *)data + 2;
    uint64_t bound = data[0] | (uint64_t)data[1] << 8;
    size_t held = size - 2;
    long live = sthi_alloc_live();
    fuzz_write(path, before, held);
    bool taken = append(path, bound);
    size_t now = read_back(path, after, ROOM);
    CHECK(now >= held && !memcmp(after, before, held));
    if (taken) {
        CHECK(now == held || after[now - 1] == '\n');
        CHECK(now <= bound || now == held);
        if (held + 2048 < bound) CHECK(memmem(after + held, now - held, "\"step\":7,", 9));
    } else CHECK(now == held);
    double ms = -1;
    int code = telemetry_mean_compute(path, &ms);
    CHECK(code == CLI_OK ? isfinite(ms) && ms >= 0 : code == CLI_DATA);
    report(path, code);
    CHECK(sthi_alloc_live() == live);
    CHECK(fuzz_json_bytes == 0);
    return 0;
}
