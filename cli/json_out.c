/* Numbers, paths and predictions as JSON. */
#include "json_out.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

static void end_for_memory(void) { exit(cli_fail(CLI_DEVICE, "no host memory")); }

void json_out_set(json_t *object, const char *key, json_t *value) {
    if (json_object_set_new(object, key, value)) end_for_memory();
}

void json_out_push(json_t *array, json_t *value) {
    if (json_array_append_new(array, value)) end_for_memory();
}

json_t *json_out_count(uint64_t value) { return json_integer((json_int_t)value); }

json_t *json_out_number(double value) { return isfinite(value) ? json_real(value) : json_null(); }

/* Names of files may be any bytes. */
json_t *json_out_text(const char *text) {
    json_t *value = text ? json_string(text) : json_null();
    if (value) return value;
    char *plain = cli_copy(text, strlen(text));
    for (char *c = plain; *c; c++)
        if ((unsigned char)*c >= 128) *c = '?';
    value = json_string(plain);
    free(plain);
    return value;
}

static const char *bound_name(sth_bound bound) {
    if (bound == STH_BOUND_DISK) return "disk";
    if (bound == STH_BOUND_COMPUTE) return "compute";
    return bound == STH_BOUND_LINK ? "link" : "ring";
}

json_t *json_out_prediction(const sth_prediction *p) {
    json_t *o = json_object();
    json_out_set(o, "step_ms", json_out_number((double)p->step_ns / 1e6));
    json_out_set(o, "compute_ms", json_out_number((double)p->compute_ns / 1e6));
    json_out_set(o, "link_ms", json_out_number((double)p->link_ns / 1e6));
    json_out_set(o, "disk_ms", json_out_number((double)p->disk_ns / 1e6));
    json_out_set(o, "stall_ms", json_out_number((double)p->stall_ns / 1e6));
    json_out_set(o, "lower_bound_ms", json_out_number((double)p->lower_bound_ns / 1e6));
    json_out_set(o, "bytes_per_step", json_out_count(p->bytes_per_step));
    json_out_set(o, "disk_bytes_per_step", json_out_count(p->disk_bytes_per_step));
    json_out_set(o, "resident_bytes", json_out_count(p->resident_bytes));
    json_out_set(o, "ring_bytes", json_out_count(p->ring_bytes));
    json_out_set(o, "streamed_bytes", json_out_count(p->streamed_bytes));
    json_out_set(o, "total_bytes", json_out_count(p->total_bytes));
    json_out_set(o, "bound_by", json_string(bound_name(p->bound_by)));
    return o;
}

/* A failed write is seen when stdout is flushed. */
void json_out_print(json_t *object) {
    json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(object);
}
