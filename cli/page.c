/* stagehand report: the steps of a telemetry file as a page of HTML. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "report.h"
#include "stagehand/report.h"
#include "telemetry_file.h"

/* A new file: what is there may be something else. */
static int write_page(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    bool written = file && fputs(text, file) >= 0;
    if (file && fclose(file)) written = false;
    if (!file && fd >= 0) close(fd);
    return written ? CLI_OK : cli_fail(CLI_DATA, "%s could not be written: %s", path, strerror(errno));
}

static int run(const char *path, const char *output) {
    sth_report_input in;
    sth_step_metrics *steps = NULL;
    sth_report_input_init(&in);
    int code = telemetry_read_steps(path, &steps, &in.step_count);
    if (code) return code;
    const char *name = strrchr(path, '/');
    in.title = name && name[1] ? name + 1 : path;
    in.steps = steps;
    in.budget = (uint64_t)(steps[in.step_count - 1].vram_reserved_mb * 1048576.0);
    char *text = NULL;
    sth_status status = sth_report_write(&in, STH_REPORT_PAGE, &text);
    code = status == STH_OK ? write_page(output, text) : cli_fail_status(status);
    sth_text_free(text);
    free(steps);
    return code;
}

int command_report(int argc, char **argv) {
    const char *path, *output = NULL;
    int code;
    const arg_option options[] = {
        {"output", ARG_TEXT, &output, "FILE", "the page, a new file; also -o FILE; required"},
    };
    const arg_spec spec = {
        .command = "report",
        .positionals = "TELEMETRY",
        .help = "Makes a page of HTML of the steps in a telemetry file: one file without network. What a file does\n"
                "not say, the model's units and other budgets, runtime.report_html() has in Python.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_positionals = 1,
        .max_positionals = 1,
    };
    if (!args_parse(&spec, argc, argv, &path, &code)) return code;
    if (!output) return cli_usage("report: --output is missing; name the page, such as -o report.html");
    return run(path, output);
}
