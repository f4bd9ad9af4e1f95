/* From what was found to what to do: one line for each thing that is wrong. Pure: reads the diagnosis only.
 */
#include <stdarg.h>
#include <stdio.h>

#include "doctor.h"
#include "link.h"
#include "report.h"

#define SLOW_LINK 6e9   /* bytes/s: below a PCIe 3 x8 slot */
#define SLOW_DISK 500e6 /* bytes/s: a hard disk, a network share or SATA */
#define GIB ((uint64_t)1 << 30)

static void advise(diagnosis *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void advise(diagnosis *d, const char *format, ...) {
    va_list args;
    if (d->advice_count == MAX_FINDINGS) return;
    va_start(args, format);
    vsnprintf(d->advice[d->advice_count++], sizeof *d->advice, format, args);
    va_end(args);
}

static void about_pinning(diagnosis *d, const finding *f) {
    if (d->host.wsl)
        advise(d,
               "%s:%d cannot pin memory: WSL allows about half of its memory; raise memory= in .wslconfig",
               f->backend, f->index);
    else if (d->host.pin_limit != HOST_UNLIMITED)
        advise(
            d,
            "%s:%d cannot pin memory: raise the limit (ulimit -l unlimited, or --ulimit memlock=-1 for a "
            "container)",
            f->backend, f->index);
    else
        advise(d, "%s:%d cannot pin memory, so copies are slow: %s", f->backend, f->index, f->error);
}

static void about_device(diagnosis *d, const finding *f) {
    if (!f->ok) {
        advise(d, "%s:%d is there but does not work: %.400s", f->backend, f->index, f->error);
        return;
    }
    if (!f->pinned)
        about_pinning(d, f);
    else if (f->pinned_rate[RATE_SIZES - 1] < SLOW_LINK)
        advise(d,
               "%s:%d takes only %.1f GB/s: see that the card sits in a full-width slot and that the link "
               "is not "
               "in a power-saving state",
               f->backend, f->index, f->pinned_rate[RATE_SIZES - 1] / 1e9);
    if (f->info.memory_free < f->info.memory_total / 2)
        advise(d, "%s:%d has %s of %s free: other programs hold the rest; close them or lower the budget",
               f->backend, f->index, cli_size(f->info.memory_free).text,
               cli_size(f->info.memory_total).text);
    if (f->info.capabilities & STH_CAP_UNIFIED_MEMORY)
        advise(d, "%s:%d shares its memory with the host: streaming weights gains nothing there",
               f->backend, f->index);
}

static void about_devices(diagnosis *d) {
    int real = 0;
    for (int i = 0; i < d->finding_count; i++) {
        const finding *f = &d->findings[i];
        if (link_is_simulated(f->backend) || f->info.capabilities & STH_CAP_HOST_IS_DEVICE) continue;
        if (f->index < 0) continue;
        real++;
        about_device(d, f);
    }
    if (real) return;
    for (int i = 0; i < d->finding_count; i++)
        if (d->findings[i].index < 0)
            advise(d, "no %s device: %.400s. Without one only the simulated device (sim) can be used",
                   d->findings[i].backend, d->findings[i].error);
}

static void about_host(diagnosis *d) {
    const host_facts *h = &d->host;
    if (h->container_limit != HOST_UNLIMITED && h->container_limit < h->ram_total)
        advise(
            d,
            "the container may use %s of the machine's %s: weights kept in RAM must fit in that; raise it "
            "(docker run --memory) or stream from files",
            cli_size(h->container_limit).text, cli_size(h->ram_total).text);
    if (h->ram_total && h->ram_available < 2 * GIB)
        advise(d, "only %s of RAM are available: close other programs, or stream from files",
               cli_size(h->ram_available).text);
}

void doctor_advise(diagnosis *d) {
    about_devices(d);
    about_host(d);
    if (d->disk_path && d->disk.bytes_per_s < SLOW_DISK)
        advise(d, "%s is read at %.0f MB/s: keep model files on an NVMe disk", d->disk_path,
               d->disk.bytes_per_s / 1e6);
}
