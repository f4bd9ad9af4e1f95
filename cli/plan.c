/* stagehand plan: what streaming a checkpoint within a budget would cost, before it is run. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "forecast.h"
#include "json_out.h"
#include "report.h"

/* What is to come out. */
typedef struct plan_output {
    bool json, curve;
    const char *svg;
} plan_output;

static int check_card(const forecast_request *r, const plan_output *out) {
    if (r->blocks || r->device || r->telemetry || r->ram_budget || r->compute_ms >= 0 || strcmp(r->passes, "infer"))
        return cli_usage("plan: --card predicts a forward pass from tables; of the other options it takes --ram, "
                         "--transfer, --budget, --link, --disk, --curve, --svg and --json");
    if (!r->model && (out->curve || out->svg))
        return cli_usage("plan: a curve is of one model; name one in front of --card");
    return CLI_OK;
}

static int check(const forecast_request *r, const plan_output *out) {
    bool curve = out->curve || out->svg;
    if (!r->budget && !curve && !r->card)
        return cli_usage("plan: --budget is missing; give the bytes for weights, such as --budget 8GB");
    if (out->svg && out->json)
        return cli_usage("plan: --svg writes a picture and --json prints numbers; ask for one of them");
    if (strcmp(r->passes, "infer") && strcmp(r->passes, "train"))
        return cli_usage("plan: --passes is infer or train, not '%s'", r->passes);
    if (strcmp(r->transfer, "plain") && strcmp(r->transfer, "lossless") && strcmp(r->transfer, "auto"))
        return cli_usage("plan: --transfer is plain, lossless or auto, not '%s'", r->transfer);
    if (r->link_gb_s == 0) return cli_usage("plan: --link needs a rate above 0, in GB/s");
    if (r->disk_gb_s == 0) return cli_usage("plan: --disk needs a rate above 0, in GB/s");
    if (r->card) return check_card(r, out);
    if (r->ram) return cli_usage("plan: --ram is that of a machine with a --card; of this one give --ram-budget");
    if (r->ram_budget && r->disk_gb_s < 0)
        return cli_usage("plan: --ram-budget says what of the files is in RAM; give the rate of the rest with --disk");
    if (r->compute_ms >= 0 && r->telemetry)
        return cli_usage("plan: --compute-ms and --telemetry both give the compute time; leave one out");
    return CLI_OK;
}

static int run(const forecast_request *request, const plan_output *out) {
    forecast f;
    int code = forecast_prepare(request, &f);
    if (code == CLI_OK && f.input.budget) code = forecast_plan(&f);
    if (code == CLI_OK && (out->curve || out->svg)) code = forecast_curve(&f);
    if (code == CLI_OK && out->json) plan_print_json(&f);
    if (code == CLI_OK && !out->json) plan_print(&f);
    if (code == CLI_OK && out->svg) code = plan_write_svg(&f, out->svg);
    forecast_free(&f);
    return code;
}

/* ---- named cards and models */

static int unknown(const char *kind, const char *typed, const char *(*name_at)(int)) {
    const char *names[32];
    char list[512] = "";
    size_t n = 0, at = 0;
    for (; n < sizeof names / sizeof *names && (names[n] = name_at((int)n)); n++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", n ? ", " : "", names[n]);
    const char *near = args_suggest(typed, names, n);
    if (near) return cli_usage("plan: no %s '%s' is known; did you mean '%s'? There are %s", kind, typed, near, list);
    return cli_usage("plan: no %s '%s' is known; there are %s", kind, typed, list);
}

static const char *card_name_at(int i) { return card_at(i) ? card_at(i)->name : NULL; }
static const char *model_name_at(int i) { return model_at(i) ? model_name(model_at(i)) : NULL; }

/* Every model on one card, a line each. */
static int run_models(const forecast_request *request, bool json) {
    json_t *list = json_array();
    int code = CLI_OK;
    for (int i = 0; code == CLI_OK && model_at(i); i++) {
        forecast_request r = *request;
        forecast f;
        r.model = model_at(i);
        code = forecast_prepare(&r, &f);
        if (code == CLI_OK) code = forecast_plan(&f);
        if (code == CLI_OK && json) json_out_push(list, plan_json(&f));
        if (code == CLI_OK && !json) plan_print_line(&f, i == 0);
        forecast_free(&f);
    }
    if (code == CLI_OK && json) json_out_print(list);
    else json_decref(list);
    return code;
}

static int run_card(forecast_request *r, const plan_output *out, const char *name) {
    r->card = card_find(name);
    if (!r->card) return unknown("card", name, card_name_at);
    if (r->path && !(r->model = model_find(r->path))) return unknown("model", r->path, model_name_at);
    int code = check(r, out);
    if (code != CLI_OK) return code;
    return r->model ? run(r, out) : run_models(r, out->json);
}

int command_plan(int argc, char **argv) {
    plan_output out = {.svg = NULL};
    const char *card_name = NULL;
    int code;
    forecast_request r = {.passes = "infer", .transfer = "plain", .disk_gb_s = -1, .link_gb_s = -1, .compute_ms = -1};
    const arg_option options[] = {
        {"budget", ARG_SIZE, &r.budget, "SIZE", "device memory for weights, such as 3GiB; required but for a curve"},
        {"blocks", ARG_TEXT, &r.blocks, "REGEX", "only units inside modules whose name matches"},
        {"passes", ARG_TEXT, &r.passes, "KIND", "infer: forward; train: forward and backward, frozen weights"},
        {"device", ARG_TEXT, &r.device, "NAME", "cuda, cuda:1, hip, sim; without it cuda or hip where there is one"},
        {"link", ARG_REAL, &r.link_gb_s, "GB/s", "host-to-device rate, instead of measuring it"},
        {"disk", ARG_REAL, &r.disk_gb_s, "GB/s",
         "weights are read from a disk of this rate; without it they are in RAM"},
        {"ram-budget", ARG_SIZE, &r.ram_budget, "SIZE", "with --disk: host memory in which weights are kept"},
        {"transfer", ARG_TEXT, &r.transfer, "KIND",
         "plain; lossless: weights that stream are packed, in RAM and on the link; auto: those for which it pays"},
        {"compute-ms", ARG_REAL, &r.compute_ms, "MS", "compute time of one step with everything resident"},
        {"telemetry", ARG_TEXT, &r.telemetry, "FILE", "take it from the steps in this JSONL file"},
        {"curve", ARG_FLAG, &out.curve, NULL, "step time over budgets, from the smallest that works to all"},
        {"svg", ARG_TEXT, &out.svg, "FILE", "write the curve as a picture to this new file"},
        {"card", ARG_TEXT, &card_name, "NAME",
         "predict named models on this card, such as rtx4070, from public figures"},
        {"ram", ARG_SIZE, &r.ram, "SIZE", "with --card: memory of the machine that it is in"},
        {"json", ARG_FLAG, &out.json, NULL, "print JSON"},
    };
    const arg_spec spec = {
        .command = "plan",
        .positionals = "[PATH]",
        .help =
            "Predicts a step that streams the checkpoint at PATH through the device: time, what bounds "
            "it,\n"
            "memory, bytes moved, and what more memory would buy. Units are modules in the order of their\n"
            "names; compute time is spread over them by their bytes. With --card PATH is the name of a model, or\n"
            "left out.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .max_positionals = 1,
    };
    if (!args_parse(&spec, argc, argv, &r.path, &code)) return code;
    if (card_name) return run_card(&r, &out, card_name);
    if (!r.path) return cli_usage("plan: PATH is missing; give a model file, or a card with --card");
    if ((code = check(&r, &out))) return code;
    return run(&r, &out);
}
