/* Exported calls about stores: check the arguments, then hand over to store/. */
#include "api/arguments.h"
#include "store/store.h"

sth_status sth_store_create(const sth_store_ops *ops, void *self, sth_store **out_store) {
    if (!ops || !out_store) return null_argument("ops or out_store");
    return sthi_store_create(ops, self, out_store);
}

void sth_store_close(sth_store *store) { sthi_store_close(store); }

const char *sth_store_kind(const sth_store *store) { return store ? store->kind : ""; }
uint32_t sth_store_layer_count(const sth_store *store) { return store ? store->layer_count : 0; }

const sth_store_layer *sth_store_layer_at(const sth_store *store, uint32_t layer) {
    return store && layer < store->layer_count ? &store->layers[layer] : NULL;
}

sth_status sth_store_read(sth_store *store, uint32_t layer, uint64_t offset, uint64_t bytes, void *to) {
    if (!store || (bytes && !to)) return null_argument("store or to");
    return sthi_store_read(store, layer, offset, bytes, to);
}

sth_status sth_store_memory_create(const sth_store_layer *layers, const void *const *data, uint32_t count,
                                   sth_store **out_store) {
    if (!out_store || (count && (!layers || !data))) return null_argument("layers, data or out_store");
    return sthi_store_memory_create(layers, data, count, out_store);
}

sth_status sth_store_files_open(const char *path, const char *const *layers, uint32_t layer_count,
                                sth_store **out_store) {
    if (!path || !out_store || (layer_count && !layers)) return null_argument("path, layers or out_store");
    for (uint32_t i = 0; i < layer_count; i++)
        if (!layers[i]) return null_argument("a layer's name");
    return sthi_store_files_open(path, layer_count ? layers : NULL, layer_count, out_store);
}
