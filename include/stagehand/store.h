/* stagehand/store.h - where layers come from: a table of functions that you may fill yourself.
 *
 * Life: sth_store_files_open(), sth_store_memory_create() or sth_store_create(your table) -> sth_runner_create() (or
 * sth_unit_desc.store) -> sth_store_close(), after the last runtime that reads from it.
 *
 * A store has layers, each some bytes with tensors in it. The user of a layer calls, in this order,
 *     request(layer)   begin to bring its bytes into memory
 *     wait(layer)      until they are there
 *     get(layer)       their address
 *     release(layer)   they are not needed any more
 * or, where the table has it, read(layer, offset, bytes, to), which puts a part straight where it is wanted and
 * saves a copy.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_STORE_H
#define STAGEHAND_STORE_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define STH_STORE_VERSION 1

/* Layers of one store that are requested and not released at once, at most. */
#define STH_STORE_HELD 4

/* A tensor of a layer. bytes = product of shape x size of an element. */
typedef struct sth_store_tensor {
    const char *name;      /* within the layer, such as "mlp.up.weight" */
    sth_dtype dtype;
    int rank;              /* 0 to STH_MAX_RANK; 0: one element */
    uint64_t shape[STH_MAX_RANK];
    uint64_t offset;       /* bytes from the start of the layer */
    uint64_t bytes;
    double scale;          /* a value is the stored number times this; 0 is taken as 1 */
} sth_store_tensor;

typedef struct sth_store_layer {
    const char *name;      /* such as "blocks.3"; no two layers have the same */
    uint64_t bytes;        /* of the whole layer; more than 0 */
    /* in the order in which an executor sees them; may share no byte */
    const sth_store_tensor *tensors;
    uint32_t tensor_count; /* at least 1 */
} sth_store_layer;

/* The functions of a store. Set struct_size to sizeof(sth_store_ops), version to STH_STORE_VERSION,
 * and what you do not have to NULL. `self` is what you gave to sth_store_create. A function that
 * fails says why with sth_error_set().
 *
 * Threads: layer_count and layer are called once, by sth_store_create. The others come from any
 * thread. No two calls about one layer overlap; calls about different layers may. close comes
 * last, alone. */
typedef struct sth_store_ops {
    size_t struct_size;
    uint32_t version;
    const char *kind; /* "memory", "files", ...: for messages; copied */
    uint32_t (*layer_count)(void *self);
    /* The memory that it points to must live until the next call of layer, or the end of
     * sth_store_create: it is copied. */
    sth_status (*layer)(void *self, uint32_t layer, sth_store_layer *out_layer);
    /* Begins to bring the layer. Should not block: one that does stops a thread that reads for
     * others. After a success exactly one release follows, whatever happens between; after a
     * failure none does. */
    sth_status (*request)(void *self, uint32_t layer);
    /* Once after request. Blocks until the layer is in memory. */
    sth_status (*wait)(void *self, uint32_t layer);
    /* After wait. The address of `bytes` bytes, which stay as they are until release. Never
     * NULL. */
    const void *(*get)(void *self, uint32_t layer);
    void (*release)(void *self, uint32_t layer);
    /* Optional. Bytes [offset, offset + bytes) of the layer into `to`; with it the four above
     * are not called by runtimes. Calls about one layer may overlap. Blocks until they are
     * there. */
    sth_status (*read)(void *self, uint32_t layer, uint64_t offset, uint64_t bytes, void *to);
    /* Optional. Ends `self`. */
    void (*close)(void *self);
} sth_store_ops;

typedef struct sth_store sth_store;

/* Makes a store of a table, after checking the table and every layer; from then on close is
 * called by sth_store_close. On failure `self` stays the caller's. Returns INVALID_ARGUMENT (a
 * missing entry, a wrong size or version, by name), CORRUPT_DATA (a layer or tensor that
 * contradicts itself, by name), OUT_OF_HOST_MEMORY, or what `layer` returned. Allocates: copies
 * of what the layers say. */
STH_API sth_status sth_store_create(const sth_store_ops *ops, void *self, sth_store **out_store);

/* Releases what is held, then calls the table's close. NULL is fine. Threads: one, the last
 * user. Blocks: as close. */
STH_API void sth_store_close(sth_store *store);

STH_API const char *sth_store_kind(const sth_store *store);
STH_API uint32_t sth_store_layer_count(const sth_store *store);
/* Lives as long as the store; NULL past the end. */
STH_API const sth_store_layer *sth_store_layer_at(const sth_store *store, uint32_t layer);

/* Bytes [offset, offset + bytes) of a layer into `to`, by the table's read, else by request,
 * wait, get, release. Returns INVALID_ARGUMENT for a range outside the layer, INTERNAL when get
 * gave NULL, or the store's own failure, with the layer's name before its message. Blocks: until
 * the bytes are there. */
STH_API sth_status sth_store_read(sth_store *store, uint32_t layer, uint64_t offset, uint64_t bytes,
                                  void *to);

/* Layers whose bytes are in memory: data[i] are those of layers[i]. They must stay until the
 * store is closed, and are not copied. Returns as sth_store_create. Allocates: as
 * sth_store_create. */
STH_API sth_status sth_store_memory_create(const sth_store_layer *layers, const void *const *data,
                                           uint32_t count, sth_store **out_store);

/* The tensors of a checkpoint (checkpoint.h says what `path` may be), in layers by their names.
 * layers: names of layers in the order of use; the layer "blocks.0" has the tensors "blocks.0.*",
 * called by what follows. If several names fit, the longest takes the tensor; a tensor in none of
 * them is left out. NULL: one layer for each name up to its first number ("model.layers.3" of
 * "model.layers.3.mlp.up.weight"), or up to its last dot where it has none, in natural order.
 * Within a layer tensors are in the natural order of their names, each at a multiple of 512 bytes.
 *
 * Bytes are read, never mapped (docs/runner.md says why); runtimes read them as docs/readers.md
 * says. Returns as sth_checkpoint_open; NOT_FOUND for a layer without tensors; INVALID_ARGUMENT
 * for a layer that is named twice. Blocks: for reading headers. Allocates: in proportion to the
 * headers; request, wait and get: the bytes of the layer. */
STH_API sth_status sth_store_files_open(const char *path, const char *const *layers,
                                        uint32_t layer_count, sth_store **out_store);

#ifdef __cplusplus
}
#endif
#endif
