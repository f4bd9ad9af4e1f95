/* A plan for people: what it was made from, what it costs, and a strip of what stays and what streams. */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "forecast.h"
#include "report.h"

#define STRIP_CELLS 64
#define STRIP_UNITS (4 * STRIP_CELLS) /* up to here a cell is a unit */

static double ms(int64_t ns) { return (double)ns / 1e6; }

static void print_model(const forecast *f) {
    const units *u = &f->units;
    fputs("model     ", stdout);
    if (f->request->card)
        printf("%s: %s, %s", model_name(f->request->model), model_source(f->request->model),
               model_pass(f->request->model));
    else cli_put(stdout, f->request->path);
    printf("\n          %s in %" PRIu32 " units", cli_size(u->bytes).text, u->count);
    if (u->block_count) printf(" of %" PRIu32 " blocks", u->block_count);
    printf(", the largest %s; used %s in the order of their names\n", cli_size(u->largest).text,
           f->backward ? "forward and backward" : "forward");
    if (u->left_out_tensors)
        printf("          left out: %" PRIu64
               " tensors outside the blocks, %s; they need device memory beside the "
               "budget\n",
               u->left_out_tensors, cli_size(u->left_out_bytes).text);
}

static void print_link(const forecast *f) {
    printf("link      %.1f GB/s", f->input.link_bytes_per_s / 1e9);
    if (f->link_from == LINK_GIVEN)
        puts(", as given");
    else if (f->link_from == LINK_CARD)
        printf(" PREDICTED: PCIe %d x%d, of which %.0f %%\n", f->request->card->pcie, f->request->card->lanes,
               100 * card_link_share);
    else if (f->link_from == LINK_ASSUMED)
        puts(" ASSUMED: no device was measured; give --link");
    else
        printf(", measured on %s with %s memory\n", f->link_device, f->link_pinned ? "pinned" : "pageable");
}

static void print_disk(const forecast *f) {
    if (f->disk_gb_s < 0) return;
    printf("disk      %.1f GB/s%s; %s of the weights in RAM\n", f->disk_gb_s,
           f->disk_assumed ? " ASSUMED: give --disk" : ", as given", cli_size(f->ram_bytes).text);
}

static void print_compute(const forecast *f) {
    if (f->compute_from == COMPUTE_UNKNOWN) {
        puts("compute   NOT KNOWN and taken as 0: the link alone is predicted; give --compute-ms or "
             "--telemetry");
        return;
    }
    if (f->compute_from == COMPUTE_CARD) {
        printf("compute   %.1f ms per step, PREDICTED: %.1f TFLOP/s in bf16, of which %.0f %%\n", f->compute_ms,
               f->request->card->flops / 1e12, 100 * card_flops_share);
        return;
    }
    printf("compute   %.1f ms per step, %s, spread by bytes\n", f->compute_ms,
           f->compute_from == COMPUTE_GIVEN ? "as given" : "the mean of the telemetry");
}

static void print_cost(const forecast *f) {
    const sth_prediction *p = &f->plan->prediction;
    printf("\nstep      %.1f ms, bound by %s\n", ms(p->step_ns), cli_bound(p->bound_by));
    printf("  bound   %.1f ms at least", ms(p->lower_bound_ns));
    if (p->lower_bound_ns > 0)
        printf(" (the plan is at %.3f of it)", ms(p->step_ns) / ms(p->lower_bound_ns));
    putchar('\n');
    if (f->compute_from != COMPUTE_UNKNOWN)
        printf("  stalls  %.1f ms of waiting for copies\n", ms(p->stall_ns));
    printf("  moved   %s per step, %.1f ms of copying\n", cli_size(p->bytes_per_step).text, ms(p->link_ns));
    if (p->disk_bytes_per_step)
        printf("  read    %s per step, %.1f ms of reading\n", cli_size(p->disk_bytes_per_step).text, ms(p->disk_ns));
    printf("  hits    %.1f %% of the bytes used are on the device already\n", 100 * forecast_hit_share(f));
    printf("VRAM      %s of %s: %s resident, %s ring\n", cli_size(p->resident_bytes + p->ring_bytes).text,
           cli_size(f->input.budget).text, cli_size(p->resident_bytes).text, cli_size(p->ring_bytes).text);
    bool plain = f->host_bytes == f->units.bytes;
    printf("RAM       %s when the weights are kept in RAM%s; staging only when they are read from the files\n",
           cli_size(f->host_bytes).text, plain ? "" : ", packed as weights usually are");
}

/* Bytes of [from, to) of all units that are resident. */
static uint64_t resident_between(const forecast *f, uint64_t from, uint64_t to) {
    uint64_t at = 0, sum = 0;
    for (uint32_t i = 0; i < f->units.count; at += f->units.unit[i++].bytes) {
        uint64_t end = at + f->units.unit[i].bytes;
        if (!f->plan->resident[i] || end <= from || at >= to) continue;
        sum += (end < to ? end : to) - (at > from ? at : from);
    }
    return sum;
}

static char byte_cell(const forecast *f, int cell) {
    double each = (double)f->units.bytes / STRIP_UNITS;
    uint64_t from = (uint64_t)(each * cell), to = (uint64_t)(each * (cell + 1));
    double share = to > from ? (double)resident_between(f, from, to) / (double)(to - from) : 0;
    if (share > 0.95) return '#';
    return share < 0.05 ? '.' : '+';
}

static char unit_cell(const forecast *f, int cell) { return f->plan->resident[cell] ? '#' : '.'; }

static void print_strip(const forecast *f) {
    bool by_unit = f->units.count <= STRIP_UNITS;
    int cells = by_unit ? (int)f->units.count : STRIP_UNITS;
    puts(by_unit ? "\nunits in order: # stays, . streams"
                 : "\nbytes in order: # stays, . streams, + some of each");
    for (int i = 0; i < cells; i++) {
        if (i % STRIP_CELLS == 0) fputs("  ", stdout);
        putchar(by_unit ? unit_cell(f, i) : byte_cell(f, i));
        if (i % STRIP_CELLS == STRIP_CELLS - 1 || i == cells - 1) putchar('\n');
    }
}

static void print_more(const forecast *f) {
    if (!f->more_helps) {
        puts("\nEverything fits: more budget would change nothing.");
        return;
    }
    double now = ms(f->plan->prediction.step_ns), then = ms(f->more.step_ns);
    printf("\n1 GiB more (%s): %.1f ms per step, %.1f ms less; %s moved, %s less\n",
           cli_size(f->input.budget + FORECAST_MORE).text, then, now - then,
           cli_size(f->more.bytes_per_step).text,
           cli_size(f->plan->prediction.bytes_per_step - f->more.bytes_per_step).text);
}

static void print_curve(const forecast *f) {
    char *text = NULL;
    if (sth_curve_write(f->curve, f->curve_count, f->input.budget, STH_CURVE_TEXT, &text) != STH_OK) return;
    putchar('\n');
    fputs(text, stdout);
    sth_text_free(text);
}

int plan_write_svg(const forecast *f, const char *path) {
    char *text = NULL;
    sth_status status = sth_curve_write(f->curve, f->curve_count, f->input.budget, STH_CURVE_SVG, &text);
    if (status != STH_OK) return cli_fail_status(status);
    FILE *file = fopen(path, "wx");
    bool written = file && fputs(text, file) >= 0;
    if (file && fclose(file)) written = false;
    sth_text_free(text);
    if (written) return CLI_OK;
    return cli_fail(CLI_DATA, "%s could not be written: %s", path, strerror(errno));
}

void plan_print(const forecast *f) {
    if (f->request->card) printf("card      %s, PREDICTED from public figures\n", f->request->card->title);
    print_model(f);
    if (f->plan) printf("budget    %s\n", cli_size(f->input.budget).text);
    print_link(f);
    print_disk(f);
    print_compute(f);
    if (f->plan) {
        print_cost(f);
        print_strip(f);
        print_more(f);
    }
    if (f->curve) print_curve(f);
}

void plan_print_line(const forecast *f, bool heading) {
    const card *c = f->request->card;
    const sth_prediction *p = &f->plan->prediction;
    if (heading) {
        printf("%s, PREDICTED from public figures: link %.1f GB/s, %.1f TFLOP/s in bf16 of which %.0f %%; budget %s\n",
               c->title, f->input.link_bytes_per_s / 1e9, c->flops / 1e12, 100 * card_flops_share,
               cli_size(f->input.budget).text);
        printf("  %-12s %10s %13s %13s  %-11s %s\n", "model", "weights", "compute, ms", "step, ms", "bound by",
               "of");
    }
    printf("  %-12s %10s %13.1f %13.1f  %-11s %s%s\n", model_name(f->request->model), cli_size(f->units.bytes).text,
           f->compute_ms, ms(p->step_ns), p->bytes_per_step ? cli_bound(p->bound_by) : "compute",
           model_pass(f->request->model), p->disk_bytes_per_step ? "; read from the disk in part" : "");
}
