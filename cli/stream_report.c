/* What a stream run came to: predicted beside measured, and what it took. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "host.h"
#include "json_out.h"
#include "report.h"
#include "stream.h"

static double ms(int64_t ns) { return (double)ns / 1e6; }

static void print_setting(const stream_run *run) {
    const units *u = &run->units;
    fputs("model     ", stdout);
    cli_put(stdout, run->request->path);
    printf("\n          %s in %" PRIu32 " units", cli_size(u->bytes).text, u->count);
    if (u->block_count) printf(" of %" PRIu32 " blocks", u->block_count);
    printf("\ndevice    %s (%s), link measured at %.1f GB/s\n", run->info.name, run->info.backend,
           run->stats.link_bytes_per_s / 1e9);
    printf("budget    %s\n", cli_size(run->request->budget).text);
    printf("steps     %" PRIu64 " in %.1f ms after %.1f ms of opening; medians of the last %" PRIu32 "\n\n",
           run->request->steps, run->steps_ms, run->open_ms, run->measured.steps);
}

static void print_pair(const char *label, double predicted, double measured, const char *measure) {
    printf("  %-16s %10.2f %10.2f %s\n", label, predicted, measured, measure);
}

/* How far off the prediction was; next to nothing predicted has no share. */
static void print_deviation(const stream_run *run) {
    double predicted = ms(run->prediction.step_ns);
    if (predicted < 0.01) return;
    printf("  %-16s %10s %+9.1f %%\n", "off by", "", 100 * (run->measured.step_ms / predicted - 1));
}

static void print_comparison(const stream_run *run) {
    const sth_prediction *p = &run->prediction;
    const stream_measured *m = &run->measured;
    printf("  %-16s %10s %10s\n", "per step", "predicted", "measured");
    print_pair("time", ms(p->step_ns), m->step_ms, "ms");
    print_deviation(run);
    print_pair("compute", ms(p->compute_ns), m->compute_ms, "ms");
    print_pair("stalls", ms(p->stall_ns), m->stall_ms, "ms");
    print_pair("copying", ms(p->link_ns), m->copy_ms, "ms");
    print_pair("bytes moved", (double)p->bytes_per_step / 1048576, m->h2d_bytes / 1048576, "MiB");
    printf("  %-16s %10s %10.1f %%\n", "hit rate", "", 100 * m->hit_rate);
    printf("  %-16s %10s %10.1f  (bytes not yet read from disk)\n", "host waits", "", m->host_waits);
    printf("\nbound by %s; %s resident, %s ring\n", cli_bound(p->bound_by),
           cli_size(p->resident_bytes).text, cli_size(p->ring_bytes).text);
}

/* Files that are read alike, for the same reason, in one line. */
static void print_ways(const stream_run *run) {
    uint32_t count = sth_runtime_file_count(run->runtime), same = 1;
    for (uint32_t i = 0; i < count; i += same) {
        sth_file_way way, next;
        same = 1;
        if (sth_runtime_file_way(run->runtime, i, &way) != STH_OK) continue;
        while (sth_runtime_file_way(run->runtime, i + same, &next) == STH_OK && next.way == way.way &&
               !strcmp(next.why, way.why))
            same++;
        printf("read      %" PRIu32 " file%s by %s: %s\n", same, same == 1 ? "" : "s", sth_read_way_name(way.way),
               way.why);
    }
    if (run->stats.disk_bytes_per_s > 0)
        printf("          %s in all, %.2f GB/s while reads were under way\n", cli_size(run->stats.file_bytes).text,
               run->stats.disk_bytes_per_s / 1e9);
}

static void print_totals(const stream_run *run) {
    const sth_runtime_stats *s = &run->stats;
    host_use ram = host_process_use();
    printf("VRAM      peak %s of %s\n", cli_size(s->device_peak).text, cli_size(s->budget).text);
    printf("RAM       %s now, peak %s, of it %s %s staging\n", cli_size(ram.now).text,
           cli_size(ram.peak).text, cli_size(s->staging_bytes).text,
           s->staging_pinned ? "pinned" : "pageable");
    if (s->ram_bytes) printf("          and %s of weights that stay there\n", cli_size(s->ram_bytes).text);
    print_ways(run);
    printf("moved     %s in %" PRIu64 " copies, %" PRIu64 " on demand, %" PRIu64 " evictions\n",
           cli_size(s->h2d_bytes).text, s->copies, s->demand_loads, s->evictions);
    if (run->verified)
        printf("verified  %" PRIu32 " units: %" PRIu32 " differ\n", run->verified, run->differing);
}

void stream_print(const stream_run *run) {
    print_setting(run);
    print_comparison(run);
    print_totals(run);
}

static json_t *measured_json(const stream_run *run) {
    const stream_measured *m = &run->measured;
    json_t *o = json_object();
    json_out_set(o, "steps", json_out_count(m->steps));
    json_out_set(o, "step_ms", json_out_number(m->step_ms));
    json_out_set(o, "compute_ms", json_out_number(m->compute_ms));
    json_out_set(o, "stall_ms", json_out_number(m->stall_ms));
    json_out_set(o, "copy_ms", json_out_number(m->copy_ms));
    json_out_set(o, "bytes_per_step", json_out_number(m->h2d_bytes));
    json_out_set(o, "link_gb_s", json_out_number(m->link_gb_s));
    json_out_set(o, "host_waits", json_out_number(m->host_waits));
    json_out_set(o, "hit_rate", json_out_number(m->hit_rate));
    return o;
}

static json_t *device_json(const stream_run *run) {
    json_t *o = json_object();
    json_out_set(o, "name", json_out_text(run->info.name));
    json_out_set(o, "backend", json_out_text(run->info.backend));
    json_out_set(o, "link_gb_s", json_out_number(run->stats.link_bytes_per_s / 1e9));
    json_out_set(o, "peak_bytes", json_out_count(run->stats.device_peak));
    return o;
}

static json_t *host_json(const stream_run *run) {
    host_use ram = host_process_use();
    json_t *o = json_object();
    json_out_set(o, "ram_bytes", json_out_count(ram.now));
    json_out_set(o, "ram_peak_bytes", json_out_count(ram.peak));
    json_out_set(o, "staging_bytes", json_out_count(run->stats.staging_bytes));
    json_out_set(o, "kept_bytes", json_out_count(run->stats.ram_bytes));
    json_out_set(o, "staging_pinned", json_boolean(run->stats.staging_pinned));
    return o;
}

static json_t *files_json(const stream_run *run) {
    json_t *list = json_array();
    sth_file_way way;
    for (uint32_t i = 0; sth_runtime_file_way(run->runtime, i, &way) == STH_OK; i++) {
        json_t *o = json_object();
        json_out_set(o, "path", json_out_text(way.path));
        json_out_set(o, "way", json_out_text(sth_read_way_name(way.way)));
        json_out_set(o, "why", json_out_text(way.why));
        json_out_set(o, "read_bytes", json_out_count(way.read_bytes));
        json_out_set(o, "cached_bytes", json_out_count(way.cached_bytes));
        json_out_push(list, o);
    }
    return list;
}

static json_t *totals_json(const stream_run *run) {
    json_t *o = json_object();
    json_out_set(o, "steps", json_out_count(run->stats.steps));
    json_out_set(o, "steps_ms", json_out_number(run->steps_ms));
    json_out_set(o, "open_ms", json_out_number(run->open_ms));
    json_out_set(o, "h2d_bytes", json_out_count(run->stats.h2d_bytes));
    json_out_set(o, "copies", json_out_count(run->stats.copies));
    json_out_set(o, "demand_loads", json_out_count(run->stats.demand_loads));
    json_out_set(o, "evictions", json_out_count(run->stats.evictions));
    json_out_set(o, "host_waits", json_out_count(run->stats.host_waits));
    return o;
}

static json_t *verified_json(const stream_run *run) {
    if (!run->request->verify) return json_null();
    json_t *o = json_object();
    json_out_set(o, "units", json_out_count(run->verified));
    json_out_set(o, "differing", json_out_count(run->differing));
    return o;
}

void stream_print_json(const stream_run *run) {
    json_t *o = json_object();
    json_out_set(o, "path", json_out_text(run->request->path));
    json_out_set(o, "bytes", json_out_count(run->units.bytes));
    json_out_set(o, "units", json_out_count(run->units.count));
    json_out_set(o, "blocks", json_out_count(run->units.block_count));
    json_out_set(o, "budget", json_out_count(run->request->budget));
    json_out_set(o, "device", device_json(run));
    json_out_set(o, "predicted", json_out_prediction(&run->prediction));
    json_out_set(o, "measured", measured_json(run));
    json_out_set(o, "host", host_json(run));
    json_out_set(o, "files", files_json(run));
    json_out_set(o, "totals", totals_json(run));
    json_out_set(o, "verified", verified_json(run));
    json_out_print(o);
}
