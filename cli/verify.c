/* `stagehand verify`: checksums, and the error of every tensor against an original. Names come from files and are not
 * trusted with the terminal. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "json_out.h"
#include "progress.h"
#include "report.h"
#include "stagehand/pack.h"

typedef struct verification {
    progress_bar bar; /* first: progress_show is given this address */
    json_t *tensors;
} verification;

static const char *checksum_text(int checksum, const char *wrong) {
    if (checksum < 0) return "none";
    return checksum ? "right" : wrong;
}

static void take(void *context, const sth_verified *t) {
    verification *v = context;
    json_t *o = json_object();
    json_out_set(o, "name", json_out_text(t->name));
    json_out_set(o, "encoding", json_string(t->encoding));
    json_out_set(o, "checksum", json_string(checksum_text(t->checksum, "wrong")));
    json_out_set(o, "missing", json_boolean(t->missing));
    json_out_set(o, "equal", t->compared ? json_boolean(t->equal) : json_null());
    json_out_set(o, "max_abs", t->compared ? json_out_number(t->max_abs) : json_null());
    json_out_set(o, "rel_l2", t->compared ? json_out_number(t->rel_l2) : json_null());
    json_out_set(o, "cosine", t->compared ? json_out_number(t->cosine) : json_null());
    json_out_push(v->tensors, o);
}

static double number(const json_t *o, const char *key) {
    const json_t *value = json_object_get(o, key);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

static void print_tensor(const json_t *o, bool compared) {
    const char *sum = json_string_value(json_object_get(o, "checksum"));
    printf("  %-20s %-6s ", json_string_value(json_object_get(o, "encoding")),
           checksum_text(strcmp(sum, "none") == 0 ? -1 : strcmp(sum, "right") == 0, "WRONG"));
    if (json_is_true(json_object_get(o, "missing"))) printf("%-31s", "MISSING on one side");
    else if (json_is_true(json_object_get(o, "equal"))) printf("%-31s", "equal");
    else if (compared && json_is_null(json_object_get(o, "equal"))) printf("%-31s", "");
    else if (compared) printf("%9.3g %9.3g %11.8f", number(o, "max_abs"), number(o, "rel_l2"), number(o, "cosine"));
    fputs("  ", stdout);
    cli_put(stdout, json_string_value(json_object_get(o, "name")));
    putchar('\n');
}

static void print_text(const verification *v, const sth_verify_result *r, bool compared) {
    size_t i;
    json_t *o;
    printf("  %-20s %-6s %s  tensor\n", "encoding", "sum", compared ? "  max abs    rel l2      cosine" : "");
    json_array_foreach (v->tensors, i, o) print_tensor(o, compared);
    printf("%llu tensors: %llu checksums wrong, %llu without one", (unsigned long long)r->tensors,
           (unsigned long long)r->checksums_wrong, (unsigned long long)r->checksums_missing);
    if (compared)
        printf("; %llu missing, %llu stored ones differ, largest rel l2 %.3g", (unsigned long long)r->missing,
               (unsigned long long)r->stored_differ, r->worst_rel_l2);
    putchar('\n');
}

static void print_json(verification *v, const sth_verify_result *r) {
    json_t *o = json_object();
    json_out_set(o, "tensors", json_incref(v->tensors));
    json_out_set(o, "checksums_wrong", json_out_count(r->checksums_wrong));
    json_out_set(o, "checksums_missing", json_out_count(r->checksums_missing));
    json_out_set(o, "missing", json_out_count(r->missing));
    json_out_set(o, "stored_differ", json_out_count(r->stored_differ));
    json_out_set(o, "worst_rel_l2", json_out_number(r->worst_rel_l2));
    json_out_print(o);
}

int command_verify(int argc, char **argv) {
    const char *paths[2];
    bool quiet = false, json = false;
    uint64_t threads = 0;
    int code;
    sth_pack_options options;
    sth_verify_result result;
    sth_pack_options_init(&options);
    const arg_option table[] = {
        {"json", ARG_FLAG, &json, NULL, "print one JSON object"},
        {"threads", ARG_NUMBER, &threads, "N", "threads that compute (default: one for each core)"},
        {"quiet", ARG_FLAG, &quiet, NULL, "no progress"},
    };
    static const char help[] =
        "Checks every checksum of a quantised file or a checkpoint, and with ORIGINAL the error of every\n"
        "tensor. Ends with 1 when a checksum is wrong, a tensor is missing on one side, or one that is\n"
        "stored as it was differs; an error of what is quantised is told, not judged.";
    const arg_spec spec = {"verify", "PATH [ORIGINAL]", help, table, sizeof table / sizeof *table, 1, 2};
    if (!args_parse(&spec, argc, argv, paths, &code)) return code;
    verification v = {.bar = progress_begin("verified", quiet || json), .tensors = json_array()};
    options.threads = threads > UINT32_MAX ? UINT32_MAX : (uint32_t)threads;
    options.progress = progress_show;
    options.context = &v;
    sth_status status = sth_verify(paths[0], paths[1], &options, take, &result);
    progress_end(&v.bar);
    if (status == STH_OK && json) print_json(&v, &result);
    else if (status == STH_OK) print_text(&v, &result, paths[1] != NULL);
    json_decref(v.tensors);
    if (status == STH_SHUT_DOWN && progress_stopped()) return cli_fail(CLI_STOPPED, "stopped");
    if (status != STH_OK) return cli_fail_status(status);
    return result.checksums_wrong || result.missing || result.stored_differ ? CLI_FAILED : CLI_OK;
}
