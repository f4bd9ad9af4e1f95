/* The same as JSON: rates in GB/s, bytes, milliseconds. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "commit.h"
#include "json_out.h"
#include "report.h"
#include "stagehand/stagehand.h"

static json_t *device_of(const bench_rates *b) {
    json_t *o = json_object();
    json_out_set(o, "name", json_out_text(b->device.name));
    json_out_set(o, "backend", json_out_text(b->device.backend));
    json_out_set(o, "simulated", json_boolean(b->simulated));
    json_out_set(o, "memory_total", json_out_count(b->device.memory_total));
    json_out_set(o, "memory_free", json_out_count(b->device.memory_free));
    json_out_set(o, "driver", json_out_text(b->host.driver[0] ? b->host.driver : NULL));
    json_out_set(o, "driver_api", json_out_count((uint64_t)b->device.driver_version));
    return o;
}

static json_t *host_of(const bench_rates *b) {
    json_t *o = json_object();
    json_out_set(o, "cpu", json_out_text(b->host.cpu[0] ? b->host.cpu : NULL));
    json_out_set(o, "processors", json_out_count(b->host.processors));
    json_out_set(o, "ram_total", json_out_count(b->host.ram_total));
    json_out_set(o, "ram_available", json_out_count(b->host.ram_available));
    json_out_set(o, "ram_room", json_out_count(bench_ram_room(&b->host)));
    return o;
}

static json_t *rates_of(const bench_rates *b) {
    json_t *o = json_object();
    for (int i = 0; i < RATE_COUNT; i++) {
        json_t *rate = json_object();
        json_out_set(rate, "gb_s", b->rate[i] > 0 ? json_out_number(b->rate[i] / 1e9) : json_null());
        json_out_set(rate, "note", json_out_text(b->note[i]));
        json_out_set(o, bench_rate_key[i], rate);
    }
    return o;
}

static json_t *run_of(const bench_run *run, json_t *rows) {
    json_t *o = json_object();
    json_out_set(o, "share", json_out_count((uint64_t)run->share));
    json_out_set(o, "system", json_out_text(bench_system_name[run->system]));
    json_out_set(o, "blocks", json_out_count(run->blocks));
    json_out_set(o, "hidden", json_out_count(run->hidden));
    json_out_set(o, "weights", json_out_count(run->weights));
    json_out_set(o, "shrunk", json_out_text(run->shrunk));
    json_out_set(o, "left_out", json_out_text(rows ? NULL : run->why));
    json_out_set(o, "rows", rows ? json_incref(rows) : json_array());
    return o;
}

int bench_write_json(const bench_outcome *out, const char *path) {
    json_t *o = json_object(), *runs = json_array();
    json_out_set(o, "stagehand", json_out_text(sth_version()));
    json_out_set(o, "commit", json_out_text(STAGEHAND_COMMIT));
    json_out_set(o, "device", device_of(&out->rates));
    json_out_set(o, "host", host_of(&out->rates));
    json_out_set(o, "rates", rates_of(&out->rates));
    json_out_set(o, "versions", out->versions ? json_incref(out->versions) : json_null());
    json_out_set(o, "steps_left_out", json_out_text(out->python_why[0] ? out->python_why : NULL));
    for (int i = 0; i < out->run_count; i++) json_out_push(runs, run_of(&out->runs[i], out->rows[i]));
    json_out_set(o, "runs", runs);
    json_out_set(o, "seconds", json_out_number(out->seconds));
    FILE *f = fopen(path, "wxe");
    bool ok = f && json_dumpf(o, f, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) == 0 && putc('\n', f) != EOF;
    ok = f && fclose(f) == 0 && ok;
    json_decref(o);
    return ok ? CLI_OK : cli_fail(CLI_DATA, "%s: %s", path, strerror(errno));
}
