/* Which tensors become layers. Embeddings are left out: they are read by rows, not multiplied. No locks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/natural.h"
#include "pack/formats.h"
#include "pack/rows.h"
#include "store/path.h"

static int by_name(const void *left, const void *right) {
    return sthi_compare_natural(((const sthi_choice *)left)->tensor->name, ((const sthi_choice *)right)->tensor->name);
}

sth_status sthi_skip_init(const char *pattern, sthi_skip *out) {
    char why[160];
    *out = (sthi_skip){.any = pattern != NULL};
    int error = pattern ? regcomp(&out->names, pattern, REG_EXTENDED | REG_NOSUB) : 0;
    if (!error) return STH_OK;
    regerror(error, &out->names, why, sizeof why);
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, error, pattern,
                     "skip must be a regular expression, and '%.160s' is none: %s", pattern,
                     why);
}

bool sthi_skip_has(const sthi_skip *skip, const char *name) {
    return skip->any && !regexec(&skip->names, name, 0, NULL, 0);
}

void sthi_skip_fini(sthi_skip *skip) {
    if (skip->any) regfree(&skip->names);
}

static bool eligible(const sth_tensor_info *t, uint64_t least, uint64_t unit) {
    return t->rank == 2 && sthi_rows_is_float(t->dtype) && sthi_path_ends_with(t->name, ".weight") &&
           t->shape[0] >= least && t->shape[1] >= least && t->shape[1] % unit == 0 && !strstr(t->name, "embed");
}

static sth_status choose(const sthi_pack_job *job, const sth_tensor_info *t, const sthi_skip *skip, uint64_t least,
                         uint64_t unit, sthi_choice *out) {
    if (t->scale != 1)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in,
                         "%.300s: tensor '%.160s' has a scale of its own in the layer index, which no other format can "
                         "hold; pack the file without that index",
                         job->in, t->name);
    *out = (sthi_choice){.tensor = t};
    if (!eligible(t, least, unit) || sthi_skip_has(skip, t->name)) return STH_OK;
    out->quantise = true;
    out->base = sthi_strdup(t->name);
    if (!out->base) return sthi_job_out_of_memory(job);
    out->base[strlen(out->base) - strlen(".weight")] = '\0';
    return STH_OK;
}

sth_status sthi_choose(const sthi_pack_job *job, uint64_t least, uint64_t unit, sthi_choices *out) {
    const sthi_tensors *all = &job->checkpoint->tensors;
    sthi_skip skip;
    STHI_TRY(sthi_skip_init(job->options.skip, &skip));
    sthi_choices c = {.items = sthi_zalloc((size_t)all->count, sizeof *c.items)};
    sth_status status = c.items ? STH_OK : sthi_job_out_of_memory(job);
    while (status == STH_OK && c.count < all->count) {
        status = choose(job, &all->items[c.count], &skip, least, unit, &c.items[c.count]);
        c.count++;
    }
    sthi_skip_fini(&skip);
    if (c.count && status == STH_OK) qsort(c.items, (size_t)c.count, sizeof *c.items, by_name);
    if (status == STH_OK) *out = c;
    else sthi_choices_fini(&c);
    return status;
}

sth_status sthi_order(const sthi_pack_job *job, sthi_choices *out) {
    const sthi_tensors *all = &job->checkpoint->tensors;
    sthi_choices c = {.items = sthi_zalloc((size_t)all->count, sizeof *c.items), .count = all->count};
    if (!c.items) return sthi_job_out_of_memory(job);
    for (uint64_t i = 0; i < c.count; i++) c.items[i].tensor = &all->items[i];
    if (c.count) qsort(c.items, (size_t)c.count, sizeof *c.items, by_name);
    *out = c;
    return STH_OK;
}

void sthi_choices_fini(sthi_choices *c) {
    for (uint64_t i = 0; i < c->count; i++) sthi_free(c->items[i].base);
    sthi_free(c->items);
    *c = (sthi_choices){0};
}

sth_status sthi_pack_name(const char *out, const char *suffix, const char *new_suffix, char **out_name) {
    if (!sthi_path_ends_with(out, suffix) || strlen(sthi_pack_leaf(out)) == strlen(suffix))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, out, "%.300s: the name of the result must end in %s", out,
                         suffix);
    size_t keep = strlen(out) - strlen(suffix), size = keep + strlen(new_suffix) + 1;
    char *name = sthi_alloc(size);
    if (!name) return sthi_no_memory(out, "a name beside %.300s", out);
    snprintf(name, size, "%.*s%s", (int)keep, out, new_suffix);
    *out_name = name;
    return STH_OK;
}

const char *sthi_pack_leaf(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
