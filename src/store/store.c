/* Stores: a table of functions is checked, asked once for its layers, and these are checked and copied, so that nothing
 * that a user's code says later can contradict them. Reading is in store_held.c. */
#include "store/store.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"

enum { MOST = 1 << 14 }; /* layers, and tensors of one: names are compared each with each */

static sth_status missing(const char *entry) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, entry, "the store's table has no %s", entry);
}

static sth_status check_table(const sth_store_ops *ops) {
    if (ops->struct_size < sizeof *ops)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "struct_size",
                         "the store's table has struct_size %zu and not the %zu bytes of sth_store_ops",
                         ops->struct_size, sizeof *ops);
    if (ops->version != STH_STORE_VERSION)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "version",
                         "the store's table is of version %u; this library knows version %d", ops->version,
                         STH_STORE_VERSION);
    if (!ops->kind) return missing("kind");
    if (!ops->layer_count) return missing("layer_count");
    if (!ops->layer) return missing("layer");
    if (!ops->request) return missing("request");
    if (!ops->wait) return missing("wait");
    if (!ops->get) return missing("get");
    if (!ops->release) return missing("release");
    return STH_OK;
}

/* ---- layers */

static sth_status bad_tensor(const char *layer, const sth_store_tensor *t, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, NULL, 0, layer, "layer '%s', tensor '%s': %s", layer, t->name ? t->name : "",
                     what);
}

static sth_status check_tensor(const sth_store_layer *l, const sth_store_tensor *t) {
    uint64_t bytes = sthi_dtype_bits(t->dtype) / 8;
    if (!t->name || !*t->name) return bad_tensor(l->name, t, "it has no name");
    if (!bytes) return bad_tensor(l->name, t, "there is no such dtype");
    if (t->rank < 0 || t->rank > STH_MAX_RANK) return bad_tensor(l->name, t, "its rank is out of range");
    for (int i = 0; i < t->rank; i++)
        if (!sthi_mul_u64(bytes, t->shape[i], &bytes)) return bad_tensor(l->name, t, "its size overflows");
    if (bytes != t->bytes) return bad_tensor(l->name, t, "its bytes are not those of its shape and dtype");
    if (!sthi_range_inside(t->offset, t->bytes, l->bytes))
        return bad_tensor(l->name, t, "it does not lie inside the layer");
    return STH_OK;
}

static sth_status check_layer(const sth_store *s, uint32_t index, const sth_store_layer *l) {
    if (!l->name || !*l->name)
        return sthi_fail(STH_CORRUPT_DATA, NULL, 0, NULL, "layer %u of the store has no name", index);
    if (!l->bytes || l->bytes > UINT64_MAX / 8 || !l->tensors || !l->tensor_count || l->tensor_count > MOST)
        return sthi_fail(STH_CORRUPT_DATA, NULL, 0, l->name, "layer '%s' has no bytes, no tensors, or more than %d",
                         l->name, MOST);
    for (uint32_t i = 0; i < index; i++)
        if (!strcmp(s->layers[i].name, l->name))
            return sthi_fail(STH_CORRUPT_DATA, NULL, 0, l->name, "layers %u and %u are both called '%s'", i, index,
                             l->name);
    for (uint32_t i = 0; i < l->tensor_count; i++) {
        const sth_store_tensor *t = &l->tensors[i];
        STHI_TRY(check_tensor(l, t));
        for (uint32_t k = 0; k < i; k++) {
            const sth_store_tensor *o = &l->tensors[k];
            if (!strcmp(o->name, t->name)) return bad_tensor(l->name, t, "two tensors have this name");
            if (o->offset < t->offset + t->bytes && t->offset < o->offset + o->bytes)
                return bad_tensor(l->name, t, "it shares bytes with another");
        }
    }
    return STH_OK;
}

/* What was copied so far is in `to`, also on failure. */
static sth_status copy_layer(const sth_store_layer *l, sth_store_layer *to) {
    *to = (sth_store_layer){.name = sthi_strdup(l->name), .bytes = l->bytes};
    sth_store_tensor *tensors = sthi_zalloc(l->tensor_count, sizeof *tensors);
    to->tensors = tensors;
    bool whole = to->name && tensors;
    for (uint32_t i = 0; whole && i < l->tensor_count; i++) {
        tensors[i] = l->tensors[i];
        if (tensors[i].scale == 0) tensors[i].scale = 1;
        tensors[i].name = sthi_strdup(l->tensors[i].name);
        to->tensor_count = i + 1;
        whole = tensors[i].name != NULL;
    }
    return whole ? STH_OK : sthi_no_memory(l->name, "layer '%s'", l->name);
}

static sth_status read_layers(sth_store *s) {
    uint32_t count = s->ops.layer_count(s->self);
    if (!count || count > MOST)
        return sthi_fail(STH_CORRUPT_DATA, NULL, 0, s->kind, "the store '%s' says that it has %u layers; give 1 to %d",
                         s->kind, count, MOST);
    s->layers = sthi_zalloc(count, sizeof *s->layers);
    if (!s->layers) return sthi_no_memory(s->kind, "%u layers", count);
    for (uint32_t i = 0; i < count; i++) {
        sth_store_layer said = {0};
        STHI_TRY(s->ops.layer(s->self, i, &said));
        STHI_TRY(check_layer(s, i, &said));
        sth_status rc = copy_layer(&said, &s->layers[i]);
        s->layer_count = i + 1;
        STHI_TRY(rc);
    }
    return STH_OK;
}

/* Everything but `self`. */
static void free_store(sth_store *s) {
    for (uint32_t i = 0; i < s->layer_count; i++) {
        for (uint32_t k = 0; k < s->layers[i].tensor_count; k++)
            sthi_free((void *)(uintptr_t)s->layers[i].tensors[k].name);
        sthi_free((void *)(uintptr_t)s->layers[i].tensors);
        sthi_free((void *)(uintptr_t)s->layers[i].name);
    }
    sthi_free(s->layers);
    sthi_free(s->kind);
    sthi_cond_fini(&s->changed);
    sthi_mutex_fini(&s->lock);
    sthi_free(s);
}

sth_status sthi_store_create(const sth_store_ops *ops, void *self, sth_store **out) {
    STHI_TRY(check_table(ops));
    sth_store *s = sthi_zalloc(1, sizeof *s);
    if (!s) return sthi_no_memory(ops->kind, "a store");
    sthi_mutex_init(&s->lock);
    sthi_cond_init(&s->changed);
    s->ops = *ops;
    s->self = self;
    s->kind = sthi_strdup(ops->kind);
    sth_status rc =
        s->kind ? read_layers(s) : sthi_no_memory(NULL, "a store");
    if (rc == STH_OK) *out = s;
    else free_store(s);
    return rc;
}

void sthi_store_close(sth_store *s) {
    if (!s) return;
    sthi_store_let_go(s);
    if (s->ops.close) s->ops.close(s->self);
    free_store(s);
}
