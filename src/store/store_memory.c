/* The store whose layers are in memory: their bytes are there at once, and copied by read. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/store.h"

typedef struct memory_store {
    const sth_store_layer *layers; /* the caller's; read by layer() alone, before create returns */
    const void **data;
    uint32_t count;
} memory_store;

static uint32_t layer_count(void *self) { return ((memory_store *)self)->count; }

static sth_status layer(void *self, uint32_t i, sth_store_layer *out) {
    memory_store *m = self;
    if (!m->data[i])
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, m->layers[i].name, "layer %u has no bytes: its data is NULL",
                         i);
    *out = m->layers[i];
    return STH_OK;
}

static sth_status request(void *self, uint32_t i) { return (void)self, (void)i, STH_OK; }
static sth_status wait_for(void *self, uint32_t i) { return (void)self, (void)i, STH_OK; }
static const void *get(void *self, uint32_t i) { return ((memory_store *)self)->data[i]; }
static void release(void *self, uint32_t i) { (void)self, (void)i; }

static sth_status read_part(void *self, uint32_t i, uint64_t offset, uint64_t bytes, void *to) {
    memcpy(to, (const uint8_t *)((memory_store *)self)->data[i] + offset, bytes);
    return STH_OK;
}

static void end(void *self) {
    sthi_free(((memory_store *)self)->data);
    sthi_free(self);
}

sth_status sthi_store_memory_create(const sth_store_layer *layers, const void *const *data, uint32_t count,
                                    sth_store **out) {
    static const sth_store_ops ops = {sizeof ops, STH_STORE_VERSION, "memory", layer_count, layer, request,
                                      wait_for,   get,               release,  read_part,   end};
    memory_store *m = sthi_zalloc(1, sizeof *m);
    if (m) *m = (memory_store){.layers = layers, .data = sthi_zalloc(count, sizeof *m->data), .count = count};
    sth_status rc = m && (m->data || !count)
                        ? STH_OK
                        : sthi_no_memory("memory", "a store");
    if (rc == STH_OK && count) memcpy(m->data, data, count * sizeof *m->data);
    if (rc == STH_OK) rc = sthi_store_create(&ops, m, out);
    if (rc != STH_OK && m) end(m);
    return rc;
}
