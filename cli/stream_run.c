/* The steps of a stream run. Units are read from the files; every tensor has a place at a multiple of 512
 * bytes. Nothing computes but the simulated device, and that only where a compute time was given: what is
 * measured is the streaming. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "host.h"
#include "link.h"
#include "report.h"
#include "stream.h"

#define PROGRESS_LINES 10
#define PROGRESS_EVERY_NS 100000000

/* ---- opening */

static sth_status open_device(stream_run *run) {
    const stream_request *r = run->request;
    const char *name = r->device ? r->device : link_default_device();
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    run->simulated = link_is_simulated(name);
    sim.memory_bytes = r->budget; /* anything beyond the budget is refused */
    sim.link_bytes_per_s = (uint64_t)(r->link_gb_s > 0 ? r->link_gb_s * 1e9 : LINK_ASSUMED_BYTES_PER_S);
    sth_status status = sth_device_open(name, &sim, &run->device);
    return status == STH_OK ? sth_device_info_get(run->device, &run->info) : status;
}

static sth_status add_unit(stream_run *run, const unit *u) {
    const sth_unit_desc desc = {
        .name = u->name,
        .group = u->block,
        .bytes = u->bytes,
        .checkpoint = run->checkpoint,
        .ranges = run->units.ranges + u->first_range,
        .range_count = u->range_count,
    };
    uint32_t number;
    return sth_runtime_add_unit(run->runtime, &desc, &number);
}

static sth_status make_runtime(stream_run *run) {
    sth_runtime_options options;
    sth_runtime_options_init(&options);
    options.budget = run->request->budget;
    options.ram_budget = run->request->ram_budget;
    options.telemetry_path = run->request->telemetry;
    sth_status status = sth_runtime_create(run->device, &options, &run->runtime);
    for (uint32_t i = 0; i < run->units.count && status == STH_OK; i++)
        status = add_unit(run, &run->units.unit[i]);
    return status == STH_OK ? sth_runtime_seal(run->runtime) : status;
}

int stream_open(const stream_request *request, stream_run *run) {
    int64_t start = host_now_ns();
    *run = (stream_run){.request = request};
    sth_status status = sth_checkpoint_open(request->path, &run->checkpoint);
    if (status != STH_OK) return cli_fail_status(status);
    int code = units_load(run->checkpoint, request->blocks, &run->units);
    if (code) return code;
    status = open_device(run);
    if (status == STH_OK && !run->simulated && request->compute_ms > 0)
        return cli_usage(
            "stream: --compute-ms works on the simulated device only; %s computes nothing here",
            run->info.name);
    if (status == STH_OK && !run->simulated && request->link_gb_s > 0)
        return cli_usage("stream: --link sets the simulated device's link; that of %s is measured",
                         run->info.name);
    if (status == STH_OK) status = make_runtime(run);
    run->open_ms = (double)(host_now_ns() - start) / 1e6;
    return status == STH_OK ? CLI_OK : cli_fail_status(status);
}

void stream_close(stream_run *run) {
    sth_runtime_destroy(run->runtime);
    sth_device_close(run->device);
    units_free(&run->units);
    sth_checkpoint_close(run->checkpoint);
    *run = (stream_run){0};
}

/* ---- steps */

typedef struct progress {
    bool terminal;
    int64_t shown_ns;
    uint64_t lines;
} progress;

/* One line that is written over on a terminal; elsewhere ten lines at most. */
static void show(progress *p, const stream_run *run, uint64_t step, uint32_t used) {
    uint64_t steps = run->request->steps;
    bool ended = used == run->units.count;
    if (p->terminal) {
        int64_t now = host_now_ns();
        if (now - p->shown_ns < PROGRESS_EVERY_NS && !(ended && step + 1 == steps)) return;
        p->shown_ns = now;
        fprintf(stderr, "\rstep %" PRIu64 " of %" PRIu64 ", unit %" PRIu32 " of %" PRIu32 "   ", step + 1,
                steps, used, run->units.count);
        if (ended && step + 1 == steps) putc('\n', stderr);
        return;
    }
    if (!ended || (step + 1) * PROGRESS_LINES / steps <= p->lines) return;
    p->lines = (step + 1) * PROGRESS_LINES / steps;
    fprintf(stderr, "step %" PRIu64 " of %" PRIu64 "\n", step + 1, steps);
}

static sth_status compute(const stream_run *run, const unit *u) {
    if (!run->simulated || run->request->compute_ms <= 0) return STH_OK;
    double share = (double)u->bytes / (double)run->units.bytes;
    return sth_sim_compute(run->device, 0, (int64_t)(run->request->compute_ms * 1e6 * share));
}

static sth_status use_unit(stream_run *run, uint32_t i) {
    sth_lease lease;
    sth_status status = sth_unit_acquire(run->runtime, i, 0, &lease);
    if (status != STH_OK) return status;
    status = compute(run, &run->units.unit[i]);
    sth_lease_release(run->runtime, &lease);
    return status;
}

static sth_status one_step(stream_run *run, progress *p, uint64_t step) {
    sth_status status = sth_step_begin(run->runtime);
    for (uint32_t i = 0; i < run->units.count && status == STH_OK; i++) {
        status = use_unit(run, i);
        if (status == STH_OK) show(p, run, step, i + 1);
    }
    return status == STH_OK ? sth_step_end(run->runtime) : status;
}

int stream_steps(stream_run *run) {
    progress p = {.terminal = isatty(STDERR_FILENO)};
    int64_t start = host_now_ns();
    sth_status status = STH_OK;
    for (uint64_t s = 0; s < run->request->steps && status == STH_OK; s++) status = one_step(run, &p, s);
    if (status == STH_OK) status = sth_runtime_synchronize(run->runtime);
    run->steps_ms = (double)(host_now_ns() - start) / 1e6;
    return status == STH_OK ? CLI_OK : cli_fail_status(status);
}

int stream_verify(stream_run *run) {
    for (uint32_t i = 0; i < run->units.count; i++) {
        bool equal = false;
        sth_status status = sth_unit_verify(run->runtime, i, &equal, NULL);
        if (status != STH_OK) return cli_fail_status(status);
        run->verified++;
        if (equal) continue;
        run->differing++;
        cli_fail(CLI_FAILED, "%s: the bytes on the device differ from the file's", run->units.unit[i].name);
    }
    return run->differing ? CLI_FAILED : CLI_OK;
}

/* ---- measuring */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *values, uint32_t count) {
    qsort(values, count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* The newest `count` records; fewer where the window holds fewer. */
static uint32_t take_records(sth_runtime *runtime, sth_step_metrics *out, uint32_t count) {
    uint32_t n = 0;
    while (n < count && sth_runtime_step_metrics(runtime, n, &out[n]) == STH_OK) n++;
    return n;
}

static double hit_rate_of(const sth_step_metrics *m, uint32_t count) {
    double hits = 0, uses = 0;
    for (uint32_t i = 0; i < count; i++) {
        hits += m[i].prefetch_hits;
        uses += m[i].prefetch_hits + m[i].prefetch_misses;
    }
    return uses > 0 ? hits / uses : 1;
}

static stream_measured summary_of(const sth_step_metrics *m, uint32_t count) {
    stream_measured out = {.steps = count, .hit_rate = hit_rate_of(m, count)};
    double *values = cli_alloc(count, sizeof *values);
#define MEDIAN(target, field)                                    \
    for (uint32_t i = 0; i < count; i++) values[i] = m[i].field; \
    out.target = median_of(values, count);
    MEDIAN(step_ms, step_time_ms)
    MEDIAN(copy_ms, copy_time_ms)
    MEDIAN(compute_ms, compute_time_ms)
    MEDIAN(stall_ms, stall_time_ms)
    MEDIAN(h2d_bytes, h2d_bytes)
    MEDIAN(link_gb_s, link_gb_s)
    MEDIAN(host_waits, host_waits)
#undef MEDIAN
    free(values);
    return out;
}

int stream_measure(stream_run *run) {
    uint64_t steps = run->request->steps, learning = steps > 2 ? 2 : steps - 1;
    uint32_t wanted = steps - learning < 100 ? (uint32_t)(steps - learning) : 100;
    sth_step_metrics *m = cli_alloc(wanted, sizeof *m);
    uint32_t count = take_records(run->runtime, m, wanted);
    if (count) run->measured = summary_of(m, count);
    free(m);
    sth_status status = sth_runtime_stats_get(run->runtime, &run->stats);
    if (status == STH_OK) status = sth_runtime_prediction(run->runtime, &run->prediction);
    return status == STH_OK ? CLI_OK : cli_fail_status(status);
}
