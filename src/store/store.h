/* Stores inside the library: the checked copy of a table and of what it says, and the layers that are held. */
#ifndef STHI_STORE_STORE_H
#define STHI_STORE_STORE_H
#include "base/thread.h"
#include "stagehand/runtime.h"
#include "stagehand/store.h"

typedef enum sthi_held_state {
    STHI_HELD_FREE,
    STHI_HELD_BUSY,      /* some thread is inside request, wait or release of it */
    STHI_HELD_REQUESTED,
    STHI_HELD_READY
} sthi_held_state;

typedef struct sthi_held {
    sthi_held_state state;
    uint32_t layer, readers;
    uint64_t used;       /* when it was last wanted, counted in calls */
    const uint8_t *bytes;
} sthi_held;

struct sth_store {
    sth_store_ops ops;
    void *self;
    char *kind;
    sth_store_layer *layers; /* names and tensors are owned */
    uint32_t layer_count;
    sthi_mutex lock;         /* guards what follows; never held in a call of the table */
    sthi_cond changed;
    sthi_held held[STH_STORE_HELD];
    uint64_t calls;
};

/* store.c */
sth_status sthi_store_create(const sth_store_ops *ops, void *self, sth_store **out);
void sthi_store_close(sth_store *store);

/* store_held.c */
sth_status sthi_store_read(sth_store *store, uint32_t layer, uint64_t offset, uint64_t bytes, void *to);
/* Requests a layer that will be read soon, where that displaces nothing. Failures come back with the read. */
void sthi_store_expect(sth_store *store, uint32_t layer);
void sthi_store_let_go(sth_store *store); /* of all that is held; nobody reads any more */

/* store_memory.c */
sth_status sthi_store_memory_create(const sth_store_layer *layers, const void *const *data, uint32_t count,
                                    sth_store **out);

/* store_files.c */
sth_status sthi_store_files_open(const char *path, const char *const *layers, uint32_t count, sth_store **out);
/* The checkpoint below a store of files; NULL for any other. */
sth_checkpoint *sthi_store_checkpoint(const sth_store *store);
/* Such a store only: a range of a layer as ranges of files. Counts all, writes at most `capacity`. The range lies
 * inside the layer. */
uint32_t sthi_store_file_ranges(const sth_store *store, const sth_file_range *range, sth_file_range *out,
                                uint32_t capacity);
#endif
