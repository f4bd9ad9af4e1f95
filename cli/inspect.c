/* `stagehand inspect`: opens a checkpoint, which checks it, and lists what it holds, by unit. Reads headers
 * only. Names come from the file and are not trusted: what could steer a terminal is printed as \xNN. */
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
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
    const sth_checkpoint *checkpoint;
    row *rows; /* by unit, then by place on disk */
    uint64_t count, unit_count;
    uint64_t bytes, holes;
    uint64_t dtype_bytes[STH_DTYPE_COUNT], dtype_tensors[STH_DTYPE_COUNT];
} listing;

static int by_unit(const void *left, const void *right) {
    const row *a = left, *b = right;
    int order = natural_compare(a->unit, b->unit);
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

static listing make_listing(const sth_checkpoint *checkpoint) {
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

/* Control characters, and the C1 ones that UTF-8 spells c2 80 to c2 9f. */
static void put_safely(const char *text) {
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p < 0x20 || *p == 0x7f) printf("\\x%02x", *p);
        else if (*p == 0xc2 && p[1] >= 0x80 && p[1] <= 0x9f) printf("\\x%02x", *++p);
        else putchar(*p);
    }
}

static void print_tensor(const row *r) {
    const sth_tensor_info *t = r->tensor;
    char shape[STH_MAX_RANK * 22 + 8], size[24];
    size_t used = 0;
    for (int d = 0; d < t->rank; d++)
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRIu64, d ? ", " : "", t->shape[d]);
    shape[used] = 0;
    printf("  %-8s %12s  file %" PRIu32 " at %-14" PRIu64, sth_dtype_name(t->dtype),
           sth_format_size(t->bytes, size, sizeof size), t->file, t->offset);
    put_safely(r->leaf);
    printf("  [%s]", shape);
    if (t->scale != 1) printf("  scale %g", t->scale);
    putchar('\n');
}

static void print_units(const listing *l) {
    char size[24];
    for (uint64_t i = 0, end; i < l->count; i = end) {
        end = unit_end(l, i);
        put_safely(*l->rows[i].unit ? l->rows[i].unit : "(no unit)");
        printf("  %" PRIu64 " tensor%s, %s\n", end - i, end - i == 1 ? "" : "s",
               sth_format_size(range_bytes(l, i, end), size, sizeof size));
        for (uint64_t k = i; k < end; k++) print_tensor(&l->rows[k]);
    }
}

static void print_totals(const listing *l) {
    char size[24];
    for (uint32_t f = 0; f < sth_checkpoint_file_count(l->checkpoint); f++) {
        printf("file %" PRIu32 "  ", f);
        put_safely(sth_checkpoint_file_path(l->checkpoint, f));
        uint64_t holes = sth_checkpoint_hole_bytes(l->checkpoint, f);
        if (holes) printf("  holes: %" PRIu64 " bytes that belong to no tensor", holes);
        putchar('\n');
    }
    for (int d = 0; d < STH_DTYPE_COUNT; d++)
        if (l->dtype_tensors[d])
            printf("%-8s %" PRIu64 " tensors, %s\n", sth_dtype_name((sth_dtype)d), l->dtype_tensors[d],
                   sth_format_size(l->dtype_bytes[d], size, sizeof size));
    printf("total    %" PRIu64 " tensors in %" PRIu64 " units and %" PRIu32 " files, %s (%" PRIu64
           " bytes)\n",
           l->count, l->unit_count, sth_checkpoint_file_count(l->checkpoint),
           sth_format_size(l->bytes, size, sizeof size), l->bytes);
}

/* ---- for programs ---- */

static json_t *need(json_t *value) {
    if (!value) exit(cli_fail(CLI_DEVICE, "out of memory"));
    return value;
}

static void put(json_t *object, const char *key, json_t *value) {
    if (json_object_set_new(object, key, need(value))) exit(cli_fail(CLI_DEVICE, "out of memory"));
}

static void push(json_t *array, json_t *value) {
    if (json_array_append_new(array, need(value))) exit(cli_fail(CLI_DEVICE, "out of memory"));
}

static json_t *number(uint64_t n) { return json_integer((json_int_t)n); }

static json_t *tensor_json(const row *r) {
    const sth_tensor_info *t = r->tensor;
    json_t *object = need(json_object()), *shape = need(json_array());
    for (int d = 0; d < t->rank; d++) push(shape, number(t->shape[d]));
    put(object, "name", json_string(t->name));
    put(object, "dtype", json_string(sth_dtype_name(t->dtype)));
    put(object, "shape", shape);
    put(object, "file", number(t->file));
    put(object, "offset", number(t->offset));
    put(object, "bytes", number(t->bytes));
    put(object, "scale", json_real(t->scale));
    return object;
}

static json_t *units_json(const listing *l) {
    json_t *list = need(json_array());
    for (uint64_t i = 0, end; i < l->count; i = end) {
        end = unit_end(l, i);
        json_t *group = need(json_object()), *tensors = need(json_array());
        for (uint64_t k = i; k < end; k++) push(tensors, tensor_json(&l->rows[k]));
        put(group, "name", json_string(l->rows[i].unit));
        put(group, "bytes", number(range_bytes(l, i, end)));
        put(group, "tensors", tensors);
        push(list, group);
    }
    return list;
}

static json_t *files_json(const listing *l) {
    json_t *files = need(json_array());
    for (uint32_t f = 0; f < sth_checkpoint_file_count(l->checkpoint); f++) {
        const char *path = sth_checkpoint_file_path(l->checkpoint, f);
        json_t *file = need(json_object()), *text = json_string(path);
        /* JSON knows no text that is not UTF-8, paths do. */
        put(file, "path", text ? text : json_null());
        put(file, "hole_bytes", number(sth_checkpoint_hole_bytes(l->checkpoint, f)));
        push(files, file);
    }
    return files;
}

static json_t *totals_json(const listing *l) {
    json_t *totals = need(json_object()), *dtypes = need(json_object());
    for (int d = 0; d < STH_DTYPE_COUNT; d++)
        if (l->dtype_tensors[d]) put(dtypes, sth_dtype_name((sth_dtype)d), number(l->dtype_bytes[d]));
    put(totals, "tensors", number(l->count));
    put(totals, "units", number(l->unit_count));
    put(totals, "bytes", number(l->bytes));
    put(totals, "hole_bytes", number(l->holes));
    put(totals, "bytes_by_dtype", dtypes);
    return totals;
}

static void print_json(const listing *l) {
    json_t *root = need(json_object());
    put(root, "files", files_json(l));
    put(root, "units", units_json(l));
    put(root, "totals", totals_json(l));
    json_dumpf(root, stdout, JSON_INDENT(1)); /* a failed write is seen when stdout is flushed */
    putchar('\n');
    json_decref(root);
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
        .help = "Checks a model file and lists what it holds: units (modules), their tensors with dtype, "
                "size, place\n"
                "and shape, the files with the bytes that belong to no tensor, and totals. PATH is a "
                ".safetensors\n"
                "file, an index (.json), or a folder that holds one. Only headers are read.",
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
