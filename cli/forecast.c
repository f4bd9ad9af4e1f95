/* Builds the planner's input: units and their order from the checkpoint, the link from an option, the
 * device or an assumption, compute time from an option or telemetry, spread over the uses by bytes. Without
 * compute time the uses take none and the link alone is predicted; what prints it says so. */
#include "forecast.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "report.h"
#include "telemetry_file.h"

#define MEASURE_BYTES ((uint64_t)64 << 20)
#define RING_UNIT ((uint64_t)2 << 20) /* what devices that map memory twice do it in */
#define RING_BUDGET (64 * RING_UNIT)  /* below it the rounding would cost more than it gains */

static void take_device(forecast *f, const char *backend, const char *name, uint32_t capabilities) {
    snprintf(f->link_device, sizeof f->link_device, "%s (%s)", name, backend);
    f->input.ring_mapped_twice = (capabilities & STH_CAP_RING) && f->input.budget >= RING_BUDGET;
    f->input.ring_granularity = f->input.ring_mapped_twice ? RING_UNIT : 512;
}

/* The device is opened also where the link is given: what it can do shapes the ring. */
static sth_status ask_device(forecast *f, const char *name) {
    sth_device *device = NULL;
    sth_device_info info;
    sth_status status = sth_device_open(name, NULL, &device);
    if (status != STH_OK) return status;
    status = sth_device_info_get(device, &info);
    if (status == STH_OK) {
        take_device(f, info.backend, info.name, info.capabilities);
        if (f->link_from == LINK_MEASURED)
            status = link_measure(device, MEASURE_BYTES, &f->input.link_bytes_per_s, &f->link_pinned);
    }
    sth_device_close(device);
    return status;
}

static int find_link(forecast *f) {
    const forecast_request *r = f->request;
    const char *name = r->device ? r->device : link_default_device();
    f->link_pinned = true;
    f->link_from = link_is_simulated(name) ? LINK_ASSUMED : LINK_MEASURED;
    if (r->link_gb_s > 0) f->link_from = LINK_GIVEN;
    if (f->link_from == LINK_GIVEN) f->input.link_bytes_per_s = r->link_gb_s * 1e9;
    if (f->link_from == LINK_ASSUMED) f->input.link_bytes_per_s = LINK_ASSUMED_BYTES_PER_S;
    sth_status status = ask_device(f, name);
    return status == STH_OK ? CLI_OK : cli_fail_status(status);
}

static int find_compute(forecast *f) {
    const forecast_request *r = f->request;
    if (r->compute_ms >= 0) {
        f->compute_from = COMPUTE_GIVEN;
        f->compute_ms = r->compute_ms;
        return CLI_OK;
    }
    if (!r->telemetry) return CLI_OK;
    f->compute_from = COMPUTE_TELEMETRY;
    return telemetry_mean_compute(r->telemetry, &f->compute_ms);
}

static uint32_t unit_of_use(const forecast *f, uint32_t use) {
    uint32_t n = f->units.count;
    return use < n ? use : 2 * n - 1 - use;
}

static bool is_packed(const unit *u) { return u->packed < u->bytes / 10 * 9; }

/* Where packed bytes cross the link they may also stay on the device. */
static sth_plan_unit plan_unit(const forecast *f, const unit *u) {
    sth_plan_unit p = {.bytes = u->bytes};
    if (!f->request->transfer || strcmp(f->request->transfer, "plain") == 0 || !is_packed(u)) return p;
    p.transfer_bytes = p.packed_bytes = u->packed;
    p.flags = strcmp(f->request->transfer, "auto") == 0 ? STH_UNIT_EITHER : STH_UNIT_EXPANDED;
    return p;
}

/* A unit that crosses packed has its packed bytes in RAM and no others. */
static void count_host_bytes(forecast *f) {
    f->host_bytes = 0;
    for (uint32_t i = 0; i < f->units.count; i++) {
        bool plain = !f->plan_units[i].transfer_bytes || (f->plan && (f->plan->resident[i] || f->plan->plain[i]));
        f->host_bytes += plain ? f->units.unit[i].bytes : f->units.unit[i].packed;
    }
}

static int make_uses(forecast *f) {
    uint32_t n = f->units.count;
    if (n > UINT32_MAX / 2) return cli_fail(CLI_DATA, "%u units are too many to plan", n);
    f->input.unit_count = n;
    f->input.use_count = f->backward ? 2 * n : n;
    f->plan_units = cli_alloc(n, sizeof *f->plan_units);
    f->uses = cli_alloc(f->input.use_count, sizeof *f->uses);
    double total = (double)f->units.bytes * (f->backward ? 2 : 1);
    for (uint32_t i = 0; i < n; i++) f->plan_units[i] = plan_unit(f, &f->units.unit[i]);
    for (uint32_t t = 0; t < f->input.use_count; t++) {
        uint32_t u = unit_of_use(f, t);
        double share = (double)f->units.unit[u].bytes / total;
        f->uses[t] = (sth_plan_use){
            .unit = u, .compute_ns = f->unit_ns ? f->unit_ns[u] : (int64_t)(f->compute_ms * 1e6 * share)};
    }
    f->input.units = f->plan_units;
    f->input.uses = f->uses;
    return CLI_OK;
}

/* Where the disk counts, units spread over the order are in RAM, as far as the budget for it goes. */
static void find_disk(forecast *f, uint64_t ram_budget) {
    if (f->disk_gb_s < 0) return;
    f->input.disk_bytes_per_s = f->disk_gb_s * 1e9;
    double owed = 0, share = f->units.bytes ? (double)ram_budget / (double)f->units.bytes : 0;
    for (uint32_t i = 0; i < f->units.count; i++) {
        uint64_t bytes = f->plan_units[i].bytes;
        owed += (share < 1 ? share : 1) * (double)bytes;
        if (owed >= (double)bytes / 2 && bytes <= ram_budget - f->ram_bytes) {
            owed -= (double)bytes;
            f->ram_bytes += bytes;
        } else {
            f->plan_units[i].flags = STH_UNIT_FROM_DISK;
        }
    }
}

/* ---- a named model on a named card */

#define ASSUMED_DISK_GB_S 3.0 /* a drive behind four lanes of PCIe 3 */
#define LEAST_RAM_KEPT 4e9    /* as pinning keeps it: docs/hosts.md */

/* Weights that do not fit into RAM, beside what pinning leaves to others, are read from a disk in each step. */
static uint64_t find_ram(forecast *f) {
    const forecast_request *r = f->request;
    double ram = (double)r->ram, kept = ram / 5 > LEAST_RAM_KEPT ? ram / 5 : LEAST_RAM_KEPT;
    uint64_t room = ram > kept ? (uint64_t)(ram - kept) : 0;
    f->disk_gb_s = -1;
    if (!r->ram || room >= f->units.bytes) return 0;
    f->disk_assumed = r->disk_gb_s < 0;
    f->disk_gb_s = f->disk_assumed ? ASSUMED_DISK_GB_S : r->disk_gb_s;
    return room;
}

static int prepare_named(forecast *f) {
    const forecast_request *r = f->request;
    if (!r->budget) f->input.budget = (uint64_t)card_budget(r->card);
    model_units(r->model, r->card, &f->units, &f->unit_ns);
    for (uint32_t i = 0; i < f->units.count; i++) f->compute_ms += (double)f->unit_ns[i] / 1e6;
    f->compute_from = COMPUTE_CARD;
    f->link_from = r->link_gb_s > 0 ? LINK_GIVEN : LINK_CARD;
    f->input.link_bytes_per_s = r->link_gb_s > 0 ? r->link_gb_s * 1e9 : card_link(r->card);
    f->link_pinned = true;
    take_device(f, "cuda", r->card->title, STH_CAP_RING);
    int code = make_uses(f);
    if (code == CLI_OK) find_disk(f, find_ram(f));
    return code;
}

int forecast_prepare(const forecast_request *r, forecast *f) {
    *f = (forecast){.request = r, .backward = strcmp(r->passes, "train") == 0, .disk_gb_s = r->disk_gb_s};
    sth_plan_input_init(&f->input);
    f->input.budget = r->budget;
    if (r->card) return prepare_named(f);
    sth_status status = sth_checkpoint_open(r->path, &f->checkpoint);
    if (status != STH_OK) return cli_fail_status(status);
    int code = units_load(f->checkpoint, r->blocks, &f->units);
    if (code == CLI_OK) code = find_compute(f);
    if (code == CLI_OK) code = make_uses(f);
    if (code == CLI_OK) find_disk(f, r->ram_budget);
    if (code == CLI_OK) code = find_link(f);
    return code;
}

/* What 1 GiB more would buy. */
static int plan_more(forecast *f) {
    sth_plan *plan = NULL;
    sth_plan_input input = f->input;
    f->more_helps = f->plan->prediction.bytes_per_step > 0;
    if (!f->more_helps) return CLI_OK;
    if (__builtin_add_overflow(input.budget, FORECAST_MORE, &input.budget)) return CLI_OK;
    sth_status status = sth_plan_create(&input, &plan);
    if (status != STH_OK) return cli_fail_status(status);
    f->more = plan->prediction;
    sth_plan_destroy(plan);
    return CLI_OK;
}

static int fail_small_budget(const forecast *f) {
    const unit *largest = &f->units.unit[0];
    for (uint32_t i = 1; i < f->units.count; i++)
        if (f->units.unit[i].bytes > largest->bytes) largest = &f->units.unit[i];
    return cli_fail(
        CLI_DEVICE,
        "the budget of %s is too small: %s is the least that works for this model, whose largest "
        "unit is %s with %s",
        cli_size(f->input.budget).text, cli_size(sth_plan_smallest_budget(&f->input)).text, largest->name,
        cli_size(largest->bytes).text);
}

int forecast_plan(forecast *f) {
    sth_status status = sth_plan_create(&f->input, &f->plan);
    if (status == STH_BUDGET_TOO_SMALL) return fail_small_budget(f);
    if (status == STH_OK) count_host_bytes(f);
    return status == STH_OK ? plan_more(f) : cli_fail_status(status);
}

enum { CURVE_POINTS = 16 };

int forecast_curve(forecast *f) {
    f->curve = cli_alloc(CURVE_POINTS + 1, sizeof *f->curve);
    sth_status status = sth_plan_curve(&f->input, CURVE_POINTS, f->curve, &f->curve_count);
    return status == STH_OK ? CLI_OK : cli_fail_status(status);
}

uint64_t forecast_used_bytes(const forecast *f) { return f->units.bytes * (f->backward ? 2 : 1); }

double forecast_hit_share(const forecast *f) {
    return 1 - (double)f->plan->prediction.bytes_per_step / (double)forecast_used_bytes(f);
}

void forecast_free(forecast *f) {
    sth_plan_destroy(f->plan);
    units_free(&f->units);
    free(f->curve);
    free(f->plan_units);
    free(f->uses);
    free(f->unit_ns);
    sth_checkpoint_close(f->checkpoint);
    *f = (forecast){0};
}
