/* The layer index: one raw file with every tensor on its own pages, in natural order of the names, and a list that says
 * where each is. Modules get numbers in that order, as layer_id. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "pack/formats.h"

#define PAGE 4096u

static size_t module_length(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

static bool same_module(const char *a, const char *b) {
    size_t n = module_length(a);
    return n == module_length(b) && memcmp(a, b, n) == 0;
}

static json_t *describe(const sthi_pack_job *job, uint64_t i, json_int_t id) {
    const sthi_job_tensor *t = &job->tensors[i];
    json_t *shape = json_array();
    for (int d = 0; d < t->rank; d++) json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
    json_t *entry = json_pack("{s:I, s:s, s:s, s:I, s:I, s:s, s:o, s:s}", "layer_id", id, "name", t->name, "path",
                              job->files[0].name, "offset", (json_int_t)t->offset, "nbytes", (json_int_t)t->bytes,
                              "dtype", t->spelling, "shape", shape, "xxh3_128", t->checksum);
    double scale = job->items[i].source->scale;
    if (entry && scale != 1) json_object_set_new(entry, "scale", json_real(scale));
    return entry;
}

static sth_status finish(sthi_pack_job *job) {
    json_t *list = json_array();
    json_int_t id = 0;
    for (uint64_t i = 0; list && i < job->tensor_count; i++) {
        if (i && !same_module(job->tensors[i].name, job->tensors[i - 1].name)) id++;
        json_t *entry = describe(job, i, id);
        if (entry && !json_array_append_new(list, entry)) continue;
        json_decref(list);
        list = NULL;
    }
    json_t *root = list ? json_pack("{s:o}", "layers", list) : NULL;
    return sthi_job_side(job, job->sides[0], root, JSON_INDENT(1));
}

sth_status sthi_pack_index(sthi_pack_job *job, const char *out) {
    char *data = NULL;
    sthi_choices all = {0};
    STHI_TRY(sthi_pack_name(out, ".json", ".bin", &data));
    sth_status status = sthi_job_add_file(job, sthi_pack_leaf(data), data);
    sthi_free(data);
    STHI_TRY(status);
    STHI_TRY(sthi_job_add_side(job, sthi_pack_leaf(out), out));
    job->alignment = PAGE;
    job->sides_last = true;
    job->finish = finish;
    STHI_TRY(sthi_order(job, &all));
    for (uint64_t i = 0; status == STH_OK && i < all.count; i++) status = sthi_job_add_copy(job, all.items[i].tensor);
    sthi_choices_fini(&all);
    return status;
}
