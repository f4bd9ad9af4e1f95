/* Calls of device.h, backend.h, util.h and status.h. */
#include "fuzz/calls.h"

calls_device *calls_any_device(calls *c) {
    calls_device *d = &c->devices[calls_byte(c) % CALLS_DEVICES];
    return d->device ? d : c->devices[0].device ? &c->devices[0] : NULL;
}

/* In real time an hour of latency would be an hour. */
static sth_sim_options any_options(calls *c) {
    sth_sim_options o;
    sth_sim_options_init(&o);
    o.virtual_time = calls_byte(c) % 8;
    o.poison = calls_byte(c) & 1;
    o.no_expand = calls_byte(c) & 1;
    o.link_bytes_per_s = o.virtual_time ? calls_extreme(c) : UINT64_C(1) << 32;
    o.copy_latency_ns = o.virtual_time ? (int64_t)calls_extreme(c) : 0;
    if (o.virtual_time && calls_byte(c) % 4) o.link_bytes_per_s = UINT64_C(1) << 30, o.copy_latency_ns = 2000;
    o.pin_limit_bytes = calls_byte(c) % 4 ? 0 : calls_extreme(c);
    if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
    return o;
}

static void open_one(calls *c) {
    static const char *const names[] = {"sim", "sim", "sim", "sim", "cpu", "check+sim", "check+sim", "sim:0"};
    calls_device *d = &c->devices[calls_byte(c) % CALLS_DEVICES];
    if (d->device) return;
    sth_sim_options o = any_options(c);
    o.memory_bytes = calls_byte(c) % 8 ? CALLS_MEMORY : 512 * calls_byte(c);
    sth_device *made = (void *)d;
    sth_status rc = CALLS_TRY(sth_device_open(names[calls_byte(c) % 8], &o, &made));
    CHECK(rc == STH_OK || made == (void *)d);
    *d = (calls_device){.device = rc == STH_OK ? made : NULL, .memory = o.memory_bytes,
                        .virtual_time = o.virtual_time};
}

/* Devices that nothing is done with, of any size and name. */
static void open_odd(calls *c) {
    static const char *const names[] = {"sim:1", "sim:-1", "sim:99999999999999999999", "nope", "check+", "+sim",
                                        "check+nope", "sim:", ":", "", "check(x=1)+sim", "trace(file=)+sim", "sim"};
    sth_sim_options o = any_options(c);
    o.memory_bytes = calls_extreme(c);
    sth_device *made;
    const char *name = calls_byte(c) % 4 ? names[calls_byte(c) % 13] : calls_text(c);
    if (CALLS_TRY(sth_device_open(calls_or_null(c, (void *)(uintptr_t)name), calls_byte(c) & 1 ? &o : NULL,
                                  calls_or_null(c, &made))) == STH_OK)
        sth_device_close(made);
}

static void allocate(calls *c, calls_device *d) {
    uint32_t i = calls_byte(c) % CALLS_ALLOCS;
    if (d->at[i]) {
        if (calls_once_in(c, 16)) sth_device_free(d->device, d->at[i], d->bytes[i] + 512); /* not as allocated */
        sth_device_free(d->device, d->at[i], d->bytes[i]);
        d->at[i] = 0;
        return;
    }
    d->bytes[i] = calls_bytes(c, CALLS_MEMORY / 8);
    sth_devptr at = 77;
    if (CALLS_TRY(sth_device_alloc(d->device, d->bytes[i], &at)) == STH_OK) {
        CHECK(at && at % 512 == 0);
        d->at[i] = at;
    } else CHECK(at == 77);
}

static void measure(calls *c, calls_device *d) {
    static const int repeats[] = {1, 2, 3, 0, -1, INT32_MAX, INT32_MIN};
    double rate;
    CALLS_TRY(sth_device_measure_h2d(calls_or_null(c, d->device), calls_bytes(c, 1 << 16), repeats[calls_byte(c) % 7],
                                     calls_byte(c) & 1, calls_or_null(c, &rate)));
    sth_link_rates rates;
    CALLS_TRY(sth_device_measure_link(calls_or_null(c, d->device), calls_bytes(c, 1 << 16),
                                      repeats[calls_byte(c) % 7], calls_or_null(c, &rates)));
}

static void compute(calls *c, calls_device *d) {
    int64_t ns = d->virtual_time ? (int64_t)calls_extreme(c) : calls_byte(c) & 1 ? -1 : 1000;
    CALLS_TRY(sth_sim_compute(calls_or_null(c, d->device), calls_stream(c), ns));
}

static void ask(calls *c, calls_device *d) {
    sth_device_info info;
    CALLS_TRY(sth_device_info_get(calls_or_null(c, d->device), calls_or_null(c, &info)));
    (void)sth_device_now_ns(calls_or_null(c, d->device));
    (void)sth_device_count(calls_or_null(c, (void *)(uintptr_t)calls_text(c)));
    (void)sth_device_count("sim");
    (void)sth_backend_name((int)calls_extreme(c));
    sth_device_retain(d->device);
    sth_device_close(d->device);
}

static sth_status no_backend(sth_backend_device *d, sth_device_info *out) { return (void)d, (void)out, STH_INTERNAL; }

/* Tables that lack something: a whole one would stay for the life of the process. */
static void offer_backend(calls *c) {
    sth_backend_ops table = {.abi = calls_byte(c) % 4 ? STH_BACKEND_ABI : (uint32_t)calls_extreme(c),
                             .size = calls_byte(c) % 4 ? sizeof table : (size_t)calls_extreme(c),
                             .backend = calls_byte(c) % 8 ? calls_text(c) : NULL,
                             .info = calls_byte(c) & 1 ? no_backend : NULL};
    const char *name;
    CHECK(CALLS_TRY(sth_backend_register(calls_or_null(c, &table))) != STH_OK);
    static const char *const files[] = {"", "/", "nothing.so", "/nothing/at/all.so"};
    CHECK(CALLS_TRY(sth_backend_load(files[calls_byte(c) % 4], calls_or_null(c, &name))) != STH_OK);
    sth_replay_report report = {.size = calls_byte(c) % 8 ? sizeof report : (size_t)calls_extreme(c)};
    calls_device *d = calls_any_device(c);
    CALLS_TRY(sth_trace_replay(calls_or_null(c, (void *)(uintptr_t)calls_file(c)), d ? d->device : NULL,
                               calls_or_null(c, &report)));
}

static void texts(calls *c) {
    char buffer[32];
    uint64_t bytes;
    CALLS_TRY(sth_parse_size(calls_or_null(c, (void *)(uintptr_t)calls_text(c)), calls_or_null(c, &bytes)));
    CHECK(sth_format_size(calls_extreme(c), buffer, calls_byte(c) % sizeof buffer) == buffer);
    (void)sth_format_size(calls_extreme(c), NULL, calls_once_in(c, 4) ? sizeof buffer : 0);
    (void)sth_compare_natural(calls_or_null(c, (void *)(uintptr_t)calls_text(c)),
                              calls_or_null(c, (void *)(uintptr_t)calls_text(c)));
    sth_status any = (sth_status)calls_extreme(c);
    CHECK(sth_status_name(any) && sth_status_text(any) && *sth_version());
    CHECK(sth_error_set(any, calls_or_null(c, (void *)(uintptr_t)calls_text(c)), (long)calls_extreme(c),
                        calls_or_null(c, (void *)(uintptr_t)calls_text(c)),
                        calls_or_null(c, (void *)(uintptr_t)calls_text(c))) == any);
    CHECK(sth_last_error()->message && sth_last_error()->object && sth_last_error()->domain);
    int number = (int)calls_extreme(c);
    CHECK(sth_dtype_name((sth_dtype)number) && sth_read_way_name((sth_read_way)number));
    CHECK(sth_transfer_name((sth_transfer)number) && sth_pack_format_name((sth_pack_format)number));
    CHECK(sth_quant_format_name((sth_quant_format)number) && sth_encoding_name((sth_encoding)number));
    CHECK(sth_quant_part_name((sth_quant_part)number) && sth_budget_why_text((sth_budget_why)number));
    (void)sth_dtype_bits((sth_dtype)number);
    sth_sim_options_init(NULL);
    sth_device_close(NULL);
    sth_device_retain(NULL);
    sth_device_free(NULL, 1, 1);
}

void calls_on_device(calls *c) {
    calls_device *d = calls_any_device(c);
    uint8_t which = calls_byte(c) % 10;
    if (!d || which < 2) open_one(c);
    else if (which == 2) open_odd(c);
    else if (which == 3) offer_backend(c);
    else if (which == 4) texts(c);
    else if (which == 5) measure(c, d);
    else if (which == 6) compute(c, d);
    else if (which == 7) ask(c, d);
    else allocate(c, d);
}

void calls_end_devices(calls *c) {
    for (int i = 0; i < CALLS_DEVICES; i++) {
        calls_device *d = &c->devices[i];
        for (int k = 0; k < CALLS_ALLOCS; k++)
            if (d->at[k]) sth_device_free(d->device, d->at[k], d->bytes[k]);
        sth_device_close(d->device);
    }
}
