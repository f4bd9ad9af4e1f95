/* `stagehand inspect`: opens a checkpoint, which checks it, and lists what it holds, by unit. Reads headers
 * only. Names come from the file and are not trusted with the terminal. */
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "json_out.h"
#include "report.h"
#include "stagehand/checkpoint.h"
#include "stagehand/util.h"
#include "units.h"

/* A tensor with the unit that it belongs to: its name without the last part. */
typedef struct row {
    const sth_tensor_info *tensor;
    char *unit;       /* "" for a name without parts */
    const char *leaf; /* the last part */
    uint64_t index;   /* place on disk */
} row;

typedef struct listing {
    sth_checkpoint *checkpoint;
    row *rows; /* by unit, then by place on disk */
    uint64_t count, unit_count;
    uint64_t bytes, holes;
    uint64_t dtype_bytes[STH_DTYPE_COUNT + 1], dtype_tensors[STH_DTYPE_COUNT + 1]; /* the last: STH_DTYPE_OTHER */
} listing;

static int by_unit(const void *left, const void *right) {
    const row *a = left, *b = right;
    int order = sth_compare_natural(a->unit, b->unit);
    return order ? order : (a->index > b->index) - (a->index < b->index);
}

static row make_row(const sth_checkpoint *checkpoint, uint64_t index) {
    const sth_tensor_info *t = sth_checkpoint_tensor(checkpoint, index);
    const char *dot = strrchr(t->name, '.');
    return (row){.tensor = t,
                 .unit = cli_copy(t->name, dot ? (size_t)(dot - t->name) : 0),
                 .leaf = dot ? dot + 1 : t->name,
                 .index = index};
}

/* One past the last row of the unit that begins at `first`. */
static uint64_t unit_end(const listing *l, uint64_t first) {
    uint64_t end = first + 1;
    while (end < l->count && strcmp(l->rows[end].unit, l->rows[first].unit) == 0) end++;
    return end;
}

static listing make_listing(sth_checkpoint *checkpoint) {
    listing l = {.checkpoint = checkpoint, .count = sth_checkpoint_tensor_count(checkpoint)};
    l.rows = cli_alloc(l.count, sizeof *l.rows);
    for (uint64_t i = 0; i < l.count; i++) {
        const sth_tensor_info *t = sth_checkpoint_tensor(checkpoint, i);
        l.rows[i] = make_row(checkpoint, i);
        l.bytes += t->bytes;
        l.dtype_bytes[t->dtype] += t->bytes;
        l.dtype_tensors[t->dtype]++;
    }
    if (l.count) qsort(l.rows, (size_t)l.count, sizeof *l.rows, by_unit);
    for (uint64_t i = 0; i < l.count; i = unit_end(&l, i)) l.unit_count++;
    for (uint32_t f = 0; f < sth_checkpoint_file_count(checkpoint); f++)
        l.holes += sth_checkpoint_hole_bytes(checkpoint, f);
    return l;
}

static void free_listing(listing *l) {
    for (uint64_t i = 0; i < l->count; i++) free(l->rows[i].unit);
    free(l->rows);
}

static uint64_t range_bytes(const listing *l, uint64_t first, uint64_t end) {
    uint64_t bytes = 0;
    for (uint64_t i = first; i < end; i++) bytes += l->rows[i].tensor->bytes;
    return bytes;
}

/* ---- for people ---- */

static const char *dtype_text(int dtype) {
    return dtype == STH_DTYPE_OTHER ? "other" : sth_dtype_name((sth_dtype)dtype);
}

static void print_tensor(const row *r) {
    const sth_tensor_info *t = r->tensor;
    char shape[STH_MAX_RANK * 22 + 8], size[24];
    size_t used = 0;
    for (int d = 0; d < t->rank; d++)
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRIu64, d ? ", " : "", t->shape[d]);
    shape[used] = 0;
    printf("  %-8s %12s  file %" PRIu32 " at %-14" PRIu64, dtype_text(t->dtype),
           sth_format_size(t->bytes, size, sizeof size), t->file, t->offset);
    cli_put(stdout, r->leaf);
    printf("  [%s]", shape);
    if (t->scale != 1) printf("  scale %g", t->scale);
    if (t->dtype == STH_DTYPE_OTHER) {
        printf("  dtype ");
        cli_put(stdout, t->spelling);
    }
    putchar('\n');
}

static void print_units(const listing *l) {
    char size[24];
    for (uint64_t i = 0, end; i < l->count; i = end) {
        end = unit_end(l, i);
        cli_put(stdout, *l->rows[i].unit ? l->rows[i].unit : "(no unit)");
        printf("  %" PRIu64 " tensor%s, %s\n", end - i, end - i == 1 ? "" : "s",
               sth_format_size(range_bytes(l, i, end), size, sizeof size));
        for (uint64_t k = i; k < end; k++) print_tensor(&l->rows[k]);
    }
}

static void print_totals(const listing *l) {
    char size[24];
    for (uint32_t f = 0; f < sth_checkpoint_file_count(l->checkpoint); f++) {
        printf("file %" PRIu32 "  ", f);
        cli_put(stdout, sth_checkpoint_file_path(l->checkpoint, f));
        uint64_t holes = sth_checkpoint_hole_bytes(l->checkpoint, f);
        if (holes) printf("  holes: %" PRIu64 " bytes that belong to no tensor", holes);
        sth_file_way way;
        if (sth_checkpoint_file_way(l->checkpoint, f, &way) == STH_OK)
            printf("  read: %s (%s)", sth_read_way_name(way.way), way.why);
        putchar('\n');
    }
    for (int d = 0; d <= STH_DTYPE_COUNT; d++)
        if (l->dtype_tensors[d])
            printf("%-8s %" PRIu64 " tensors, %s\n", dtype_text(d), l->dtype_tensors[d],
                   sth_format_size(l->dtype_bytes[d], size, sizeof size));
    printf("total    %" PRIu64 " tensors in %" PRIu64 " units and %" PRIu32 " files, %s (%" PRIu64
           " bytes)\n",
           l->count, l->unit_count, sth_checkpoint_file_count(l->checkpoint),
           sth_format_size(l->bytes, size, sizeof size), l->bytes);
}

/* ---- for programs ---- */

static json_t *tensor_json(const row *r) {
    const sth_tensor_info *t = r->tensor;
    json_t *object = json_object(), *shape = json_array();
    for (int d = 0; d < t->rank; d++) json_out_push(shape, json_out_count(t->shape[d]));
    json_out_set(object, "name", json_out_text(t->name));
    json_out_set(object, "dtype", json_out_text(t->spelling));
    json_out_set(object, "shape", shape);
    json_out_set(object, "file", json_out_count(t->file));
    json_out_set(object, "offset", json_out_count(t->offset));
    json_out_set(object, "bytes", json_out_count(t->bytes));
    json_out_set(object, "scale", json_out_number(t->scale));
    return object;
}

static json_t *units_json(const listing *l) {
    json_t *list = json_array();
    for (uint64_t i = 0, end; i < l->count; i = end) {
        end = unit_end(l, i);
        json_t *group = json_object(), *tensors = json_array();
        for (uint64_t k = i; k < end; k++) json_out_push(tensors, tensor_json(&l->rows[k]));
        json_out_set(group, "name", json_out_text(l->rows[i].unit));
        json_out_set(group, "bytes", json_out_count(range_bytes(l, i, end)));
        json_out_set(group, "tensors", tensors);
        json_out_push(list, group);
    }
    return list;
}

static json_t *files_json(const listing *l) {
    json_t *files = json_array();
    for (uint32_t f = 0; f < sth_checkpoint_file_count(l->checkpoint); f++) {
        const char *path = sth_checkpoint_file_path(l->checkpoint, f);
        json_t *file = json_object();
        json_out_set(file, "path", json_out_text(path));
        json_out_set(file, "hole_bytes", json_out_count(sth_checkpoint_hole_bytes(l->checkpoint, f)));
        sth_file_way way;
        bool known = sth_checkpoint_file_way(l->checkpoint, f, &way) == STH_OK;
        json_out_set(file, "way", known ? json_out_text(sth_read_way_name(way.way)) : json_null());
        json_out_set(file, "why", known ? json_out_text(way.why) : json_null());
        json_out_push(files, file);
    }
    return files;
}

static json_t *totals_json(const listing *l) {
    json_t *totals = json_object(), *dtypes = json_object();
    for (int d = 0; d <= STH_DTYPE_COUNT; d++)
        if (l->dtype_tensors[d])
            json_out_set(dtypes, dtype_text(d), json_out_count(l->dtype_bytes[d]));
    json_out_set(totals, "tensors", json_out_count(l->count));
    json_out_set(totals, "units", json_out_count(l->unit_count));
    json_out_set(totals, "bytes", json_out_count(l->bytes));
    json_out_set(totals, "hole_bytes", json_out_count(l->holes));
    json_out_set(totals, "bytes_by_dtype", dtypes);
    return totals;
}

static void print_json(const listing *l) {
    json_t *root = json_object();
    json_out_set(root, "files", files_json(l));
    json_out_set(root, "units", units_json(l));
    json_out_set(root, "totals", totals_json(l));
    json_out_print(root);
}

int command_inspect(int argc, char **argv) {
    bool json = false, totals = false;
    const arg_option options[] = {
        {"json", ARG_FLAG, &json, NULL, "print JSON"},
        {"totals", ARG_FLAG, &totals, NULL, "leave out the list of tensors"},
    };
    const arg_spec spec = {
        .command = "inspect",
        .positionals = "PATH",
        .help = "Checks a model file and lists what it holds: units (modules), their tensors with dtype,\n"
                "size, place and shape, the files with the bytes that belong to no tensor and how they would be\n"
                "read now (around the page cache or out of it), and totals.\n"
                "PATH is a .safetensors file, an index (.json), or a folder that holds one. Only headers\n"
                "and one block of each file are read.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_positionals = 1,
        .max_positionals = 1,
    };
    const char *path;
    int code;
    if (!args_parse(&spec, argc, argv, &path, &code)) return code;
    if (json && totals) return cli_usage("inspect: --json prints everything; leave out --totals");
    sth_checkpoint *checkpoint;
    sth_status status = sth_checkpoint_open(path, &checkpoint);
    if (status != STH_OK) return cli_fail_status(status);
    listing l = make_listing(checkpoint);
    if (json) print_json(&l);
    else {
        if (!totals) print_units(&l);
        print_totals(&l);
    }
    free_listing(&l);
    sth_checkpoint_close(checkpoint);
    return CLI_OK;
}
