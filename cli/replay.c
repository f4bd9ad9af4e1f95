/* stagehand replay: makes the calls of a device's trace again. */
#include <inttypes.h>
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "report.h"
#include "stagehand/stagehand.h"

int command_replay(int argc, char **argv) {
    const char *path, *name = "sim";
    int code;
    const arg_option options[] = {
        {"device", ARG_TEXT, &name, "NAME", "where to make them; decorators may stand before it (default: sim)"},
    };
    const arg_spec spec = {"replay", "TRACE",
                           "Makes the calls of a trace, which a device named trace(file=TRACE)+... wrote, once more.\n"
                           "Ends with 1 when a call has another status than it had then, or cannot be made.",
                           options, sizeof options / sizeof *options, 1, 1};
    if (!args_parse(&spec, argc, argv, &path, &code)) return code;
    sth_device *device = NULL;
    sth_replay_report r = {.size = sizeof r};
    sth_status status = sth_device_open(name, NULL, &device);
    if (status == STH_OK) status = sth_trace_replay(path, device, &r);
    code = status == STH_OK ? CLI_OK : cli_fail_status(status);
    sth_device_close(device);
    if (status != STH_OK) return code;
    printf("%" PRIu64 " calls, %" PRIu64 " with another status, %" PRIu64 " skipped\n", r.calls, r.different,
           r.skipped);
    if (r.first_different[0]) printf("the first: %s\n", r.first_different);
    return r.different || r.skipped ? CLI_FAILED : CLI_OK;
}
