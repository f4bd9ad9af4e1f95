/* stagehand plan: what streaming a checkpoint within a budget would cost, before it is run. */
#include <stdbool.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "forecast.h"
#include "report.h"

/* What is to come out. */
typedef struct plan_output {
    bool json, curve;
    const char *svg;
} plan_output;

static int check(const forecast_request *r, const plan_output *out) {
    bool curve = out->curve || out->svg;
    if (!r->budget && !curve)
        return cli_usage("plan: --budget is missing; give the bytes for weights, such as --budget 8GB");
    if (out->svg && out->json)
        return cli_usage("plan: --svg writes a picture and --json prints numbers; ask for one of them");
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

static int run(const forecast_request *request, const plan_output *out) {
    forecast f;
    bool budget = request->budget != 0;
    int code = forecast_prepare(request, &f);
    if (code == CLI_OK && budget) code = forecast_plan(&f);
    if (code == CLI_OK && (out->curve || out->svg)) code = forecast_curve(&f);
    if (code == CLI_OK && out->json) plan_print_json(&f);
    if (code == CLI_OK && !out->json) plan_print(&f);
    if (code == CLI_OK && out->svg) code = plan_write_svg(&f, out->svg);
    forecast_free(&f);
    return code;
}

int command_plan(int argc, char **argv) {
    plan_output out = {.svg = NULL};
    int code;
    forecast_request r = {.passes = "infer", .disk_gb_s = -1, .link_gb_s = -1, .compute_ms = -1};
    const arg_option options[] = {
        {"budget", ARG_SIZE, &r.budget, "SIZE", "device memory for weights, such as 3GiB; required but for a curve"},
        {"blocks", ARG_TEXT, &r.blocks, "REGEX", "only units inside modules whose name matches"},
        {"passes", ARG_TEXT, &r.passes, "KIND", "infer: forward; train: forward and backward, frozen weights"},
        {"device", ARG_TEXT, &r.device, "NAME", "cuda, cuda:1, hip, sim; without it cuda or hip where there is one"},
        {"link", ARG_REAL, &r.link_gb_s, "GB/s", "host-to-device rate, instead of measuring it"},
        {"disk", ARG_REAL, &r.disk_gb_s, "GB/s",
         "weights are read from a disk of this rate; without it they are in RAM"},
        {"ram-budget", ARG_SIZE, &r.ram_budget, "SIZE", "with --disk: host memory in which weights are kept"},
        {"compute-ms", ARG_REAL, &r.compute_ms, "MS", "compute time of one step with everything resident"},
        {"telemetry", ARG_TEXT, &r.telemetry, "FILE", "take it from the steps in this JSONL file"},
        {"curve", ARG_FLAG, &out.curve, NULL, "step time over budgets, from the smallest that works to all"},
        {"svg", ARG_TEXT, &out.svg, "FILE", "write the curve as a picture to this new file"},
        {"json", ARG_FLAG, &out.json, NULL, "print JSON"},
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
    if ((code = check(&r, &out))) return code;
    return run(&r, &out);
}
