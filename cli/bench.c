/* stagehand bench: rates first, then runs by the process with PyTorch, one after the other. Before each run the time
 * that is left decides; a run that takes longer than that is killed. What is not made is named with the reason. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "json_out.h"
#include "progress.h"
#include "report.h"

static int64_t wall(void *context) {
    (void)context;
    return host_now_ns();
}

/* For the end: killing the process, and the tables. */
static const double SPARE_S = 2;

static json_t *request_of(const bench_run *run, const bench_request *r, double seconds) {
    json_t *o = json_object(), *tokens = json_array();
    for (int i = 0; i < BENCH_LENGTHS; i++) json_out_push(tokens, json_out_count(run->tokens[i]));
    json_out_set(o, "system", json_out_text(bench_system_name[run->system]));
    json_out_set(o, "blocks", json_out_count(run->blocks));
    json_out_set(o, "hidden", json_out_count(run->hidden));
    json_out_set(o, "tokens", tokens);
    json_out_set(o, "budget", json_out_count(run->budget));
    json_out_set(o, "steps", json_out_count(run->steps));
    json_out_set(o, "seconds", json_out_number(seconds));
    json_out_set(o, "device", json_out_text(r->device));
    return o;
}

static void keep_why(bench_run *run, const char *why) { snprintf(run->why, sizeof run->why, "%s", why); }

/* A resident step's time is what computing takes: other runs are expected to take no less. */
static void learn(const bench_run *run, const json_t *rows, double resident_ms[BENCH_LENGTHS]) {
    if (run->system != 0) return;
    for (size_t i = 0; i < BENCH_LENGTHS; i++)
        resident_ms[i] = json_number_value(json_object_get(json_array_get(rows, i), "ms"));
}

static bench_answer one_run(const bench_request *r, bench_worker *w, bench_run *run, json_t **out_rows,
                            double resident_ms[BENCH_LENGTHS]) {
    double left = bench_seconds_left(r) - SPARE_S, wanted = bench_run_seconds(run, resident_ms);
    if (wanted > left) {
        snprintf(run->why, sizeof run->why, "it would take %.0f s, and %.0f s were left", wanted, left > 0 ? left : 0);
        return ANSWER_OK;
    }
    fprintf(stderr, "%s, weights of %s (about %.0f s)\n", bench_system_name[run->system], cli_size(run->weights).text,
            wanted);
    json_t *answer = NULL;
    int64_t deadline = r->deadline_ns - (int64_t)(SPARE_S * 1e9);
    bench_answer how = bench_worker_ask(w, request_of(run, r, left), deadline, &r->clock, &answer);
    if (how == ANSWER_LATE) keep_why(run, "the time was over before it was through");
    if (how == ANSWER_ENDED) keep_why(run, "the process ended: see its messages above");
    if (how == ANSWER_STOPPED) keep_why(run, "stopped by Ctrl-C");
    if (how != ANSWER_OK) return how;
    json_t *rows = json_object_get(answer, "rows");
    const char *why = json_string_value(json_object_get(answer, "why"));
    if (json_is_array(rows) && json_array_size(rows)) {
        *out_rows = json_incref(rows);
        learn(run, rows, resident_ms);
    } else keep_why(run, why ? why : "it gave no figures");
    json_decref(answer);
    return how;
}

static void run_all(const bench_request *r, bench_worker *w, bench_outcome *o) {
    double resident_ms[BENCH_SHARES][BENCH_LENGTHS] = {{0}};
    bench_answer how = ANSWER_OK;
    for (int i = 0; i < o->run_count; i++) {
        bench_run *run = &o->runs[i];
        if (run->why[0]) continue;
        if (how != ANSWER_OK) keep_why(run, how == ANSWER_LATE ? "the time was over" : "the process had ended");
        else how = one_run(r, w, run, &o->rows[i], resident_ms[i / BENCH_SYSTEMS]);
    }
}

static void start_and_run(const bench_request *r, bench_outcome *o, char *python) {
    bench_worker w;
    json_t *hello = NULL;
    fputs("starting PyTorch\n", stderr);
    char *const argv[] = {python, "-W", "ignore", "-m", "stagehand.bench", NULL};
    if (!bench_worker_start(&w, argv)) snprintf(o->python_why, sizeof o->python_why, "%.150s does not start", python);
    else if (bench_worker_ask(&w, NULL, r->deadline_ns - (int64_t)(SPARE_S * 1e9), &r->clock, &hello) != ANSWER_OK)
        snprintf(o->python_why, sizeof o->python_why, "PyTorch did not start in time: see the messages above");
    if (!o->python_why[0]) {
        bench_facts facts = {.vram_free = o->rates.device.memory_free,
                             .ram_room = bench_ram_room(&o->rates.host),
                             .simulated = o->rates.simulated,
                             .seconds = bench_seconds_left(r) - SPARE_S};
        memcpy(facts.rate, o->rates.rate, sizeof facts.rate);
        o->versions = hello;
        o->run_count = BENCH_RUNS;
        bench_plan(&facts, o->runs);
        run_all(r, &w, o);
    }
    bench_worker_end(&w);
}

static void run_steps(const bench_request *r, bench_outcome *o) {
    char python[4096];
    const char *why;
    if (r->rates_only) return;
    if (bench_find_python(python, sizeof python, &why)) start_and_run(r, o, python);
    else snprintf(o->python_why, sizeof o->python_why, "%s", why);
}

static int run(bench_request *r) {
    static bench_outcome o;
    (void)progress_begin("", true); /* Ctrl-C ends what runs, and the tables are still printed */
    int code = bench_measure_rates(r, &o.rates);
    if (code != CLI_OK && code != CLI_STOPPED) return code;
    bench_print_rates(&o.rates);
    fflush(stdout);
    if (code == CLI_OK) run_steps(r, &o);
    o.seconds = (double)(r->clock.now(r->clock.context) - r->begun_ns) / 1e9;
    bench_print_runs(&o);
    if (r->json && code == CLI_OK) code = bench_write_json(&o, r->json);
    for (int i = 0; i < BENCH_RUNS; i++) json_decref(o.rows[i]);
    json_decref(o.versions);
    return progress_stopped() ? CLI_STOPPED : code;
}

static int check(const bench_request *r) {
    if (r->seconds < 5 || r->seconds > 3600) return cli_usage("bench: --seconds is a whole number from 5 to 3600");
    if (r->json && access(r->json, F_OK) == 0)
        return cli_fail(CLI_DATA, "%s is there already; nothing is overwritten: give another name", r->json);
    return CLI_OK;
}

int command_bench(int argc, char **argv) {
    bench_request r = {.disk = ".", .seconds = 120, .clock = {.now = wall}};
    int code;
    const arg_option options[] = {
        {"device", ARG_TEXT, &r.device, "NAME", "cuda, cuda:1, hip, sim; without it cuda or hip where there is one"},
        {"disk", ARG_TEXT, &r.disk, "FOLDER", "where a file of 512 MiB is written, read and removed; . without it"},
        {"seconds", ARG_NUMBER, &r.seconds, "N", "it ends within this time; 120 without it"},
        {"rates", ARG_FLAG, &r.rates_only, NULL, "measure link, RAM and disk alone, without PyTorch"},
        {"json", ARG_TEXT, &r.json, "FILE", "write everything to this new file too"},
    };
    const arg_spec spec = {
        .command = "bench",
        .positionals = "",
        .help = "Measures link, RAM and disk of this machine, then steps of a stack of transformer blocks of 30 and\n"
                "60 % of the free VRAM: resident, streamed, and by diffusers and accelerate where they are installed.\n"
                "Downloads nothing and sends nothing. Takes two minutes at most.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    if (!args_parse(&spec, argc, argv, NULL, &code)) return code;
    if ((code = check(&r))) return code;
    r.begun_ns = r.clock.now(r.clock.context);
    r.deadline_ns = r.begun_ns + (int64_t)r.seconds * 1000000000;
    return run(&r);
}
