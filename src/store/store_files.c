/* The store of files: the tensors of a checkpoint, in layers by their names. A layer's bytes are its tensors one after
 * the other, each at a multiple of 512, wherever they lie in the files. Nothing is mapped (docs/runner.md). Runtimes do
 * not come through the table: they read the files themselves (sthi_store_file_ranges), as readers.md says. */
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/natural.h"
#include "store/checkpoint.h"
#include "store/store.h"

typedef struct member {
    const sth_tensor_info *info;
    uint32_t layer;       /* as given, or as found */
    uint64_t name_length; /* of the layer's name within the tensor's */
    uint64_t offset;      /* in the layer */
    char *found;          /* the layer's name, where it was not given */
} member;

typedef struct group {
    uint32_t first, count; /* of members */
    uint64_t bytes;
    uint8_t *bytes_held;   /* between wait and release */
} group;

typedef struct files_store {
    sth_checkpoint *checkpoint;
    member *members;      /* by layer, then by name */
    uint32_t member_count;
    group *groups;
    uint32_t group_count;
    char **names;
    sth_store_tensor *said; /* what layer() shows of one */
} files_store;

static sth_status no_memory(void) {
    return sthi_no_memory("files", "the layers of a store");
}

/* ---- which tensor belongs where */

/* Up to and with the first part that is a number, else up to the last dot, else all of it. */
static uint64_t own_prefix(const char *name) {
    const char *dot = NULL;
    for (const char *part = name;;) {
        size_t n = strcspn(part, ".");
        if (n && strspn(part, "0123456789") == n && part[n]) return (uint64_t)(part + n - name);
        if (!part[n]) break;
        dot = part + n;
        part = dot + 1;
    }
    return dot && dot != name ? (uint64_t)(dot - name) : strlen(name);
}

static bool is_in(const char *tensor, const char *layer, uint64_t length) {
    return !strncmp(tensor, layer, length) && (tensor[length] == '.' || !tensor[length]);
}

static int by_name(const void *a, const void *b) {
    const member *x = a, *y = b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return sthi_compare_natural(x->info->name, y->info->name);
}

/* What follows the layer's name; the tensor's own name where nothing does. */
static const char *short_name(const member *m) {
    return m->info->name[m->name_length] ? m->info->name + m->name_length + 1 : m->info->name;
}

/* The longest name wins: "blocks.1" takes its tensors from "blocks". */
static sth_status take_named(files_store *f, const char *const *layers, uint32_t count) {
    const sth_checkpoint *c = f->checkpoint;
    for (uint64_t i = 0; i < c->tensors.count; i++) {
        const sth_tensor_info *t = &c->tensors.items[i];
        member best = {.info = NULL};
        for (uint32_t k = 0; t->bytes && k < count; k++) {
            uint64_t length = strlen(layers[k]);
            if (!is_in(t->name, layers[k], length)) continue;
            if (best.info && length == best.name_length)
                return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, layers[k],
                                 "layer '%s' is named twice: name each layer once", layers[k]);
            if (!best.info || length > best.name_length) best = (member){.info = t, .layer = k, .name_length = length};
        }
        if (best.info) f->members[f->member_count++] = best;
    }
    qsort(f->members, f->member_count, sizeof *f->members, by_name);
    return STH_OK;
}

/* Layers in natural order, and in them the tensors. */
static int by_layer(const void *a, const void *b) {
    int order = sthi_compare_natural(((const member *)a)->found, ((const member *)b)->found);
    return order ? order : by_name(a, b);
}

static sth_status take_all(files_store *f) {
    const sth_checkpoint *c = f->checkpoint;
    for (uint64_t i = 0; i < c->tensors.count; i++) {
        const sth_tensor_info *t = &c->tensors.items[i];
        if (!t->bytes) continue;
        member *m = &f->members[f->member_count++];
        *m = (member){.info = t, .name_length = own_prefix(t->name)};
        m->found = sthi_zalloc(m->name_length + 1, 1);
        if (!m->found) return no_memory();
        memcpy(m->found, t->name, m->name_length);
    }
    qsort(f->members, f->member_count, sizeof *f->members, by_layer);
    for (uint32_t i = 1; i < f->member_count; i++)
        f->members[i].layer = f->members[i - 1].layer + (strcmp(f->members[i - 1].found, f->members[i].found) != 0);
    return STH_OK;
}

static sth_status lay_out(files_store *f, uint32_t i) {
    group *g = &f->groups[i];
    for (uint32_t k = g->first; k < g->first + g->count; k++) {
        member *m = &f->members[k];
        m->offset = g->bytes;
        if (!sthi_add_u64(g->bytes, m->info->bytes, &g->bytes) || !sthi_round_up(g->bytes, STHI_ALIGN, &g->bytes))
            return sthi_fail(STH_CORRUPT_DATA, NULL, 0, m->info->name, "tensor '%s': its layer is too large",
                             m->info->name);
    }
    const member *m = &f->members[g->first];
    f->names[i] = sthi_zalloc(m->name_length + 1, 1);
    if (!f->names[i]) return no_memory();
    memcpy(f->names[i], m->info->name, m->name_length);
    return STH_OK;
}

static sth_status make_groups(files_store *f, const char *path, const char *const *layers, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < f->member_count; i++)
        found = f->members[i].layer + 1 > found ? f->members[i].layer + 1 : found;
    f->group_count = layers ? count : found;
    if (!f->group_count)
        return sthi_fail(STH_NOT_FOUND, NULL, 0, path, "%s has no tensors with bytes; name a file with weights", path);
    f->groups = sthi_zalloc(f->group_count, sizeof *f->groups);
    f->names = sthi_zalloc(f->group_count, sizeof *f->names);
    f->said = sthi_zalloc(f->member_count ? f->member_count : 1, sizeof *f->said);
    if (!f->groups || !f->names || !f->said) return no_memory();
    for (uint32_t i = 0; i < f->member_count; i++) {
        const sth_tensor_info *t = f->members[i].info;
        if (t->dtype == STH_DTYPE_OTHER)
            return sthi_fail(STH_UNSUPPORTED, NULL, 0, t->name,
                             "%.300s: tensor '%.160s' is of the dtype '%.40s', which no layer can have; convert "
                             "it",
                             f->checkpoint->files[t->file].path, t->name, t->spelling);
        group *g = &f->groups[f->members[i].layer];
        if (!g->count++) g->first = i;
    }
    for (uint32_t i = 0; i < f->group_count; i++) {
        if (!f->groups[i].count)
            return sthi_fail(STH_NOT_FOUND, NULL, 0, layers[i],
                             "layer '%s' has no tensors: none is called '%s.*' but those of other layers named; give "
                             "names that the file has",
                             layers[i], layers[i]);
        STHI_TRY(lay_out(f, i));
    }
    return STH_OK;
}

/* ---- the table */

static uint32_t layer_count(void *self) { return ((files_store *)self)->group_count; }

static sth_status layer(void *self, uint32_t i, sth_store_layer *out) {
    files_store *f = self;
    const group *g = &f->groups[i];
    for (uint32_t k = 0; k < g->count; k++) {
        const member *m = &f->members[g->first + k];
        sth_store_tensor *t = &f->said[k];
        *t = (sth_store_tensor){.name = short_name(m), .dtype = m->info->dtype, .rank = m->info->rank,
                                .offset = m->offset, .bytes = m->info->bytes, .scale = m->info->scale};
        memcpy(t->shape, m->info->shape, sizeof t->shape);
    }
    *out = (sth_store_layer){f->names[i], g->bytes, f->said, g->count};
    return STH_OK;
}

static sth_status read_part(void *self, uint32_t i, uint64_t offset, uint64_t bytes, void *to) {
    files_store *f = self;
    const group *g = &f->groups[i];
    memset(to, 0, bytes); /* between tensors */
    for (uint32_t k = g->first; k < g->first + g->count; k++) {
        const member *m = &f->members[k];
        uint64_t from = sthi_max_u64(m->offset, offset), end = sthi_min_u64(m->offset + m->info->bytes, offset + bytes);
        if (from >= end) continue;
        STHI_TRY(sthi_checkpoint_read(f->checkpoint, m->info->file, m->info->offset + (from - m->offset), end - from,
                                      (uint8_t *)to + (from - offset)));
    }
    return STH_OK;
}

static sth_status request(void *self, uint32_t i) {
    group *g = &((files_store *)self)->groups[i];
    g->bytes_held = sthi_alloc(g->bytes);
    return g->bytes_held ? STH_OK : no_memory();
}

static sth_status wait_for(void *self, uint32_t i) {
    const group *g = &((files_store *)self)->groups[i];
    return read_part(self, i, 0, g->bytes, g->bytes_held);
}

static const void *get(void *self, uint32_t i) { return ((files_store *)self)->groups[i].bytes_held; }

static void release(void *self, uint32_t i) {
    group *g = &((files_store *)self)->groups[i];
    sthi_free(g->bytes_held);
    g->bytes_held = NULL;
}

static void end(void *self) {
    files_store *f = self;
    for (uint32_t i = 0; f->names && i < f->group_count; i++) sthi_free(f->names[i]);
    for (uint32_t i = 0; f->members && i < f->member_count; i++) sthi_free(f->members[i].found);
    sthi_free(f->names);
    sthi_free(f->groups);
    sthi_free(f->members);
    sthi_free(f->said);
    sthi_checkpoint_close(f->checkpoint);
    sthi_free(f);
}

static const sth_store_ops table = {sizeof table, STH_STORE_VERSION, "files", layer_count, layer, request,
                                    wait_for,     get,               release, read_part,   end};

static sth_status open_store(files_store *f, const char *path, const char *const *layers, uint32_t count) {
    STHI_TRY(sthi_checkpoint_open(path, &f->checkpoint));
    uint64_t tensors = f->checkpoint->tensors.count;
    f->members = tensors < UINT32_MAX / 2 ? sthi_zalloc(tensors + 1, sizeof *f->members) : NULL;
    if (!f->members) return no_memory();
    STHI_TRY(layers ? take_named(f, layers, count) : take_all(f));
    return make_groups(f, path, layers, count);
}

sth_status sthi_store_files_open(const char *path, const char *const *layers, uint32_t count, sth_store **out) {
    files_store *f = sthi_zalloc(1, sizeof *f);
    if (!f) return no_memory();
    sth_status rc = open_store(f, path, layers, count);
    if (rc == STH_OK) rc = sthi_store_create(&table, f, out);
    if (rc != STH_OK) end(f);
    return rc;
}

sth_checkpoint *sthi_store_checkpoint(const sth_store *s) {
    return s->ops.read == read_part ? ((files_store *)s->self)->checkpoint : NULL;
}

uint32_t sthi_store_file_ranges(const sth_store *s, const sth_file_range *r, sth_file_range *out, uint32_t capacity) {
    const files_store *f = s->self;
    const group *g = &f->groups[r->file];
    uint32_t count = 0;
    for (uint32_t k = g->first; k < g->first + g->count; k++) {
        const member *m = &f->members[k];
        uint64_t from = sthi_max_u64(m->offset, r->file_offset);
        uint64_t stop = sthi_min_u64(m->offset + m->info->bytes, r->file_offset + r->bytes);
        if (from >= stop) continue;
        if (count < capacity)
            out[count] = (sth_file_range){.file = m->info->file, .file_offset = m->info->offset + (from - m->offset),
                                          .bytes = stop - from,
                                          .place_offset = r->place_offset + (from - r->file_offset)};
        count++;
    }
    return count;
}
