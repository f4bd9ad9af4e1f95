/* stagehand stream: really streams a checkpoint through a device, step after step, and compares what was
 * predicted with what was measured. */
#include "stream.h"

#include <inttypes.h>
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "link.h"
#include "report.h"
#include "stagehand/timeline.h"

static int check(const stream_request *r) {
    if (!r->budget)
        return cli_usage("stream: --budget is missing; give the bytes for weights, such as --budget 8GB");
    if (!r->steps || r->steps > INT32_MAX) return cli_usage("stream: --steps is a whole number from 1");
    if (r->link_gb_s == 0) return cli_usage("stream: --link needs a rate above 0, in GB/s");
    if (r->link_gb_s > 1e6) return cli_usage("stream: --link is in GB/s; %g is too much", r->link_gb_s);
    if (r->link_gb_s > 0 && r->device && !link_is_simulated(r->device))
        return cli_usage("stream: --link sets the simulated device's link; that of %s is measured",
                         r->device);
    return CLI_OK;
}

/* A recording is one of the process: it begins before anything is read, and ends when all steps have passed. */
static int trace_begin(const char *path) {
    if (!path) return CLI_OK;
    sth_timeline_options options;
    sth_timeline_options_init(&options);
    options.path = path;
    sth_status status = sth_timeline_begin(&options);
    return status == STH_OK ? CLI_OK : cli_fail_status(status);
}

static int trace_end(const stream_run *run) {
    uint64_t lost = 0;
    sth_status status = run->runtime ? sth_runtime_flush_telemetry(run->runtime) : STH_OK;
    sth_status written = sth_timeline_end(&lost);
    if (status != STH_OK || written != STH_OK) return cli_fail_status(written != STH_OK ? written : status);
    if (lost) fprintf(stderr, "stagehand: the trace lacks its first %" PRIu64 " events: trace fewer steps\n", lost);
    return CLI_OK;
}

/* What differs is reported after the table, by the exit code and on stderr. */
static int run_all(const stream_request *request, bool json) {
    stream_run run;
    int verdict = CLI_OK, code = trace_begin(request->trace);
    if (code) return code;
    code = stream_open(request, &run);
    if (code == CLI_OK) code = stream_steps(&run);
    int traced = request->trace ? trace_end(&run) : CLI_OK;
    if (code == CLI_OK) code = traced;
    if (code == CLI_OK) code = stream_measure(&run);
    if (code == CLI_OK && request->verify) verdict = stream_verify(&run);
    if (code == CLI_OK && verdict > CLI_FAILED) code = verdict;
    if (code == CLI_OK && json) stream_print_json(&run);
    if (code == CLI_OK && !json) stream_print(&run);
    stream_close(&run);
    return code ? code : verdict;
}

int command_stream(int argc, char **argv) {
    bool json = false;
    int code;
    stream_request r = {.steps = 5, .link_gb_s = -1, .compute_ms = -1};
    const arg_option options[] = {
        {"budget", ARG_SIZE, &r.budget, "SIZE", "device memory for weights, such as 8GB or 3GiB; required"},
        {"ram-budget", ARG_SIZE, &r.ram_budget, "SIZE", "host memory in which weights are kept and read once only"},
        {"steps", ARG_NUMBER, &r.steps, "N", "how often all units are used; 5 without it"},
        {"device", ARG_TEXT, &r.device, "NAME", "cuda, cuda:1, hip, sim; without it cuda or hip where there is one"},
        {"blocks", ARG_TEXT, &r.blocks, "REGEX", "only units inside modules whose name matches"},
        {"compute-ms", ARG_REAL, &r.compute_ms, "MS", "simulated device: compute time of a step"},
        {"link", ARG_REAL, &r.link_gb_s, "GB/s", "simulated device: rate of its link; 16 without it"},
        {"verify", ARG_FLAG, &r.verify, NULL, "compare every unit on the device with the file"},
        {"telemetry", ARG_TEXT, &r.telemetry, "FILE", "append one JSON line per step to this file"},
        {"trace", ARG_TEXT, &r.trace, "FILE", "write what happened when to this file, for Perfetto; .gz compresses"},
        {"json", ARG_FLAG, &json, NULL, "print JSON"},
    };
    const arg_spec spec = {
        .command = "stream",
        .positionals = "PATH",
        .help =
            "Streams the checkpoint at PATH through the device, all units in the order of their names, "
            "and\n"
            "compares what was predicted with what was measured. Bytes are read from the files each time,\n"
            "but for those that --ram-budget keeps.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_positionals = 1,
        .max_positionals = 1,
    };
    if (!args_parse(&spec, argc, argv, &r.path, &code)) return code;
    if ((code = check(&r))) return code;
    return run_all(&r, json);
}
