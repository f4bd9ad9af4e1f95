/* stagehand doctor: what there is to stream with, as text. */
#include "doctor.h"

#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "link.h"
#include "report.h"
#include "stagehand/stagehand.h"

#define DISK_BYTES ((uint64_t)256 << 20)

static void print_capabilities(uint32_t bits) {
    int shown = 0;
#define PRINT_CAPABILITY(bit, name) \
    if (bits & (bit)) printf("%s%s", shown++ ? ", " : "", name);
    CAPABILITY_LIST(PRINT_CAPABILITY)
#undef PRINT_CAPABILITY
    puts(shown ? "" : "none");
}

static void print_rates(const char *label, const double rates[RATE_SIZES]) {
    if (rates[0] <= 0) return;
    printf("    %-13s", label);
    for (int i = 0; i < RATE_SIZES; i++) {
        if (rates[i] > 0)
            printf(" %7.1f", rates[i] / 1e9);
        else
            printf(" %7s", "-");
    }
    puts("  GB/s");
}

static void print_link(const finding *f) {
    printf("    %-13s", "link, copies of");
    for (int i = 0; i < RATE_SIZES; i++) printf(" %3.0f MiB", (double)doctor_rate_bytes[i] / 1048576);
    puts(link_is_simulated(f->backend) ? "  (memory copies by one thread)" : "");
    print_rates("pinned", f->pinned_rate);
    print_rates("pageable", f->pageable_rate);
}

static void print_finding(const finding *f) {
    if (f->index < 0) {
        printf("  %s: not available: %s\n", f->backend, f->error);
        return;
    }
    printf("  %s:%d  %s\n", f->backend, f->index, f->info.name[0] ? f->info.name : "does not open");
    if (f->info.name[0]) {
        printf("    memory        %s, %s free\n", cli_size(f->info.memory_total).text,
               cli_size(f->info.memory_free).text);
        if (f->info.driver_version) printf("    driver        %d\n", f->info.driver_version);
        fputs("    capabilities  ", stdout);
        print_capabilities(f->info.capabilities);
        print_link(f);
    }
    if (f->error[0]) printf("    error         %s\n", f->error);
}

static void print_limit(const char *label, uint64_t limit) {
    printf("  %-16s%s\n", label, limit == HOST_UNLIMITED ? "none" : cli_size(limit).text);
}

static void print_host(const host_facts *h) {
    puts("host memory");
    printf("  RAM             %s, %s available\n", cli_size(h->ram_total).text,
           cli_size(h->ram_available).text);
    print_limit("pinning limit", h->pin_limit);
    print_limit("container limit", h->container_limit);
    if (h->container_limit != HOST_UNLIMITED)
        printf("  container uses  %s\n", cli_size(h->container_used).text);
    printf("  WSL             %s\n", h->wsl ? "yes" : "no");
}

void doctor_print(const diagnosis *d) {
    printf("Stagehand %s\ndevices\n", sth_version());
    for (int i = 0; i < d->finding_count; i++) print_finding(&d->findings[i]);
    print_host(&d->host);
    if (d->disk_path)
        printf(
            "disk\n  %s: %.2f GB/s, %s read through the page cache; whether they were cached is unknown\n",
            d->disk_path, d->disk.bytes_per_s / 1e9, cli_size(d->disk.bytes).text);
    puts(d->advice_count ? "what to do" : "nothing to do");
    for (int i = 0; i < d->advice_count; i++) printf("  - %s\n", d->advice[i]);
}

/* A device that is there and does not work is a failed check; a missing one is not. */
static int verdict(const diagnosis *d) {
    for (int i = 0; i < d->finding_count; i++)
        if (d->findings[i].index >= 0 && !d->findings[i].ok) return CLI_FAILED;
    return CLI_OK;
}

int command_doctor(int argc, char **argv) {
    static diagnosis d;
    bool json = false;
    const char *backend = NULL;
    int code;
    const arg_option options[] = {
        {"disk", ARG_TEXT, &d.disk_path, "PATH",
         "measure reading this file, or the largest file of this folder"},
        {"backend", ARG_TEXT, &backend, "PATH", "look at the devices of this shared object too"},
        {"json", ARG_FLAG, &json, NULL, "print JSON"},
    };
    const arg_spec spec = {
        .command = "doctor",
        .positionals = "",
        .help = "Shows devices and how fast they can be fed, memory and its limits, and for each thing "
                "that is\n"
                "wrong what to do.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    if (!args_parse(&spec, argc, argv, NULL, &code)) return code;
    sth_status loaded = backend ? sth_backend_load(backend, NULL) : STH_OK;
    if (loaded != STH_OK) return cli_fail_status(loaded);
    doctor_look_at_devices(&d);
    host_look("", &d.host);
    if (d.disk_path && (code = host_disk_rate(d.disk_path, DISK_BYTES, &d.disk))) return code;
    doctor_advise(&d);
    if (json)
        doctor_print_json(&d);
    else
        doctor_print(&d);
    return verdict(&d);
}
