/* The tables of stagehand bench, to be pasted. */
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "commit.h"
#include "report.h"
#include "stagehand/stagehand.h"

static void put_card(const bench_rates *b) {
    const sth_device_info *d = &b->device;
    printf("card      ");
    if (b->simulated) printf("none: the simulated device, whose times say nothing of a card\n");
    else {
        cli_put(stdout, d->name);
        printf(" (%s:%d), %s, %s free", d->backend, d->index, cli_size(d->memory_total).text,
               cli_size(d->memory_free).text);
        if (b->host.driver[0]) printf("; driver %s", b->host.driver);
        if (d->driver_version) printf(", for CUDA %d.%d", d->driver_version / 1000, d->driver_version % 1000 / 10);
        putchar('\n');
    }
}

void bench_print_rates(const bench_rates *b) {
    printf("\nstagehand %s, commit %s\n", sth_version(), STAGEHAND_COMMIT);
    put_card(b);
    printf("host      %s, %u processors, %s of RAM, %s for this\n\n", b->host.cpu[0] ? b->host.cpu : "unknown",
           b->host.processors, cli_size(b->host.ram_total).text, cli_size(bench_ram_room(&b->host)).text);
    for (int i = 0; i < RATE_COUNT; i++) {
        if (b->rate[i] > 0) printf("%-19s %7.2f GB/s  ", bench_rate_title[i], b->rate[i] / 1e9);
        else printf("%-19s       -       ", bench_rate_title[i]);
        cli_put(stdout, b->note[i]);
        putchar('\n');
    }
    putchar('\n');
}

static void put_number(const json_t *row, const char *key, const char *form, double scale, int width) {
    const json_t *value = json_object_get(row, key);
    char text[32] = "-";
    if (json_is_number(value)) snprintf(text, sizeof text, form, json_number_value(value) * scale);
    printf(" %*s", width, text);
}

static const char *equal_text(const json_t *row) {
    const json_t *value = json_object_get(row, "equal");
    if (!json_is_boolean(value)) return "-";
    return json_is_true(value) ? "yes" : "no";
}

static void put_stack(const bench_run *run) {
    printf("%d %% of the free VRAM: weights of %s in %u blocks of width %u, bf16", run->share,
           cli_size(run->weights).text, run->blocks, run->hidden);
    if (run->shrunk) printf("; smaller than its share, %s", run->shrunk);
    printf("\n  %-24s %6s %9s %9s %9s %9s %8s %8s %6s\n", "way", "tokens", "budget GB", "ms a step", "fastest",
           "predicted", "set-up s", "VRAM GB", "equal");
}

static void put_run(const bench_run *run, json_t *rows) {
    size_t i;
    json_t *row;
    if (!rows) {
        printf("  %-24s left out: ", bench_system_name[run->system]);
        cli_put(stdout, run->why);
        putchar('\n');
        return;
    }
    json_array_foreach(rows, i, row) {
        printf("  %-24s", bench_system_name[run->system]);
        put_number(row, "tokens", "%.0f", 1, 6);
        put_number(row, "budget", "%.2f", 1e-9, 9);
        put_number(row, "ms", "%.2f", 1, 9);
        put_number(row, "min", "%.2f", 1, 9);
        put_number(row, "predicted", "%.2f", 1, 9);
        put_number(row, "setup_s", "%.1f", 1, 8);
        put_number(row, "peak", "%.2f", 1e-9, 8);
        printf(" %6s\n", equal_text(row));
    }
}

static void put_versions(const json_t *versions) {
    const char *name;
    const json_t *version;
    const char *between = "";
    json_object_foreach((json_t *)versions, name, version) {
        printf("%s%s ", between, name);
        cli_put(stdout, json_is_string(version) ? json_string_value(version) : "not installed");
        between = ", ";
    }
    putchar('\n');
}

void bench_print_runs(const bench_outcome *o) {
    if (o->python_why[0])
        printf("steps of models: left out: %s. Install PyTorch and this package into one Python, and run\n"
               "  python -m stagehand bench\n",
               o->python_why);
    if (o->versions) put_versions(o->versions);
    for (int i = 0; i < o->run_count; i++) {
        if (i % BENCH_SYSTEMS == 0) put_stack(&o->runs[i]);
        put_run(&o->runs[i], o->rows[i]);
    }
    printf("took %.0f s\n", o->seconds);
}
