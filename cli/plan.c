/* stagehand plan: what streaming a checkpoint within a budget would cost, before it is run. */
#include <stdbool.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "forecast.h"
#include "report.h"

static int check(const forecast_request *r) {
    if (!r->budget)
        return cli_usage("plan: --budget is missing; give the bytes for weights, such as --budget 8GB");
    if (strcmp(r->passes, "infer") && strcmp(r->passes, "train"))
        return cli_usage("plan: --passes is infer or train, not '%s'", r->passes);
    if (r->link_gb_s == 0) return cli_usage("plan: --link needs a rate above 0, in GB/s");
    if (r->disk_gb_s == 0) return cli_usage("plan: --disk needs a rate above 0, in GB/s");
    if (r->ram_budget && r->disk_gb_s < 0)
        return cli_usage("plan: --ram-budget says what of the files is in RAM; give the rate of the rest with --disk");
    if (r->compute_ms >= 0 && r->telemetry)
        return cli_usage("plan: --compute-ms and --telemetry both give the compute time; leave one out");
    return CLI_OK;
}

static int run(const forecast_request *request, bool json) {
    forecast f;
    int code = forecast_prepare(request, &f);
    if (code == CLI_OK) code = forecast_plan(&f);
    if (code == CLI_OK && json) plan_print_json(&f);
    if (code == CLI_OK && !json) plan_print(&f);
    forecast_free(&f);
    return code;
}

int command_plan(int argc, char **argv) {
    bool json = false;
    int code;
    forecast_request r = {.passes = "infer", .disk_gb_s = -1, .link_gb_s = -1, .compute_ms = -1};
    const arg_option options[] = {
        {"budget", ARG_SIZE, &r.budget, "SIZE", "device memory for weights, such as 8GB or 3GiB; required"},
        {"blocks", ARG_TEXT, &r.blocks, "REGEX", "only units inside modules whose name matches"},
        {"passes", ARG_TEXT, &r.passes, "KIND", "infer: forward; train: forward and backward, frozen weights"},
        {"device", ARG_TEXT, &r.device, "NAME", "cuda, cuda:1, hip, sim; without it cuda or hip where there is one"},
        {"link", ARG_REAL, &r.link_gb_s, "GB/s", "host-to-device rate, instead of measuring it"},
        {"disk", ARG_REAL, &r.disk_gb_s, "GB/s",
         "weights are read from a disk of this rate; without it they are in RAM"},
        {"ram-budget", ARG_SIZE, &r.ram_budget, "SIZE", "with --disk: host memory in which weights are kept"},
        {"compute-ms", ARG_REAL, &r.compute_ms, "MS", "compute time of one step with everything resident"},
        {"telemetry", ARG_TEXT, &r.telemetry, "FILE", "take it from the steps in this JSONL file"},
        {"json", ARG_FLAG, &json, NULL, "print JSON"},
    };
    const arg_spec spec = {
        .command = "plan",
        .positionals = "PATH",
        .help =
            "Predicts a step that streams the checkpoint at PATH through the device: time, what bounds "
            "it,\n"
            "memory, bytes moved, and what more memory would buy. Units are modules in the order of their\n"
            "names; compute time is spread over them by their bytes.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_positionals = 1,
        .max_positionals = 1,
    };
    if (!args_parse(&spec, argc, argv, &r.path, &code)) return code;
    if ((code = check(&r))) return code;
    return run(&r, json);
}
