/* The diagnosis as one JSON object. */
#include <jansson.h>

#include "doctor.h"
#include "json_out.h"
#include "stagehand/stagehand.h"

static json_t *rates_json(const double rates[RATE_SIZES]) {
    json_t *list = json_array();
    for (int i = 0; i < RATE_SIZES; i++)
        json_out_push(list, rates[i] > 0 ? json_out_number(rates[i] / 1e9) : json_null());
    return list;
}

static json_t *sizes_json(void) {
    json_t *list = json_array();
    for (int i = 0; i < RATE_SIZES; i++) json_out_push(list, json_out_count(doctor_rate_bytes[i]));
    return list;
}

static json_t *capabilities_json(uint32_t bits) {
    json_t *list = json_array();
#define APPEND_CAPABILITY(bit, name) \
    if (bits & (bit)) json_out_push(list, json_string(name));
    CAPABILITY_LIST(APPEND_CAPABILITY)
#undef APPEND_CAPABILITY
    return list;
}

static json_t *finding_json(const finding *f) {
    json_t *o = json_object();
    json_out_set(o, "backend", json_string(f->backend));
    json_out_set(o, "available", json_boolean(f->ok));
    json_out_set(o, "error", f->error[0] ? json_out_text(f->error) : json_null());
    if (f->index < 0) return o;
    json_out_set(o, "index", json_integer(f->index));
    json_out_set(o, "name", json_out_text(f->info.name));
    json_out_set(o, "driver_version", json_integer(f->info.driver_version));
    json_out_set(o, "memory_total", json_out_count(f->info.memory_total));
    json_out_set(o, "memory_free", json_out_count(f->info.memory_free));
    json_out_set(o, "capabilities", capabilities_json(f->info.capabilities));
    json_out_set(o, "pinned", json_boolean(f->pinned));
    json_out_set(o, "copy_bytes", sizes_json());
    json_out_set(o, "pinned_gb_s", rates_json(f->pinned_rate));
    json_out_set(o, "pageable_gb_s", rates_json(f->pageable_rate));
    return o;
}

static json_t *limit_json(uint64_t limit) {
    return limit == HOST_UNLIMITED ? json_null() : json_out_count(limit);
}

static json_t *host_json(const host_facts *h) {
    json_t *o = json_object();
    json_out_set(o, "ram_total", json_out_count(h->ram_total));
    json_out_set(o, "ram_available", json_out_count(h->ram_available));
    json_out_set(o, "pin_limit", limit_json(h->pin_limit));
    json_out_set(o, "container_limit", limit_json(h->container_limit));
    json_out_set(o, "container_used", json_out_count(h->container_used));
    json_out_set(o, "wsl", json_boolean(h->wsl));
    return o;
}

static json_t *disk_json(const diagnosis *d) {
    if (!d->disk_path) return json_null();
    json_t *o = json_object();
    json_out_set(o, "path", json_out_text(d->disk_path));
    json_out_set(o, "bytes", json_out_count(d->disk.bytes));
    json_out_set(o, "gb_s", json_out_number(d->disk.bytes_per_s / 1e9));
    json_out_set(o, "cached", json_null()); /* not known */
    return o;
}

void doctor_print_json(const diagnosis *d) {
    json_t *o = json_object(), *devices = json_array(), *advice = json_array();
    for (int i = 0; i < d->finding_count; i++) json_out_push(devices, finding_json(&d->findings[i]));
    for (int i = 0; i < d->advice_count; i++) json_out_push(advice, json_out_text(d->advice[i]));
    json_out_set(o, "version", json_string(sth_version()));
    json_out_set(o, "devices", devices);
    json_out_set(o, "host", host_json(&d->host));
    json_out_set(o, "disk", disk_json(d));
    json_out_set(o, "advice", advice);
    json_out_print(o);
}
