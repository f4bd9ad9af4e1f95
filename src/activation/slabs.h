/* Host memory for spilled bytes: slabs by class, each with the event of the last copy that used it. */
#ifndef STHI_ACTIVATION_SLABS_H
#define STHI_ACTIVATION_SLABS_H
#include "device/device.h"
#include "stagehand/activation.h"
#include "stagehand/download.h"

typedef struct sthi_slab {
    struct sthi_slab *next;
    sth_block *block; /* NULL: `memory` is not the pool's */
    uint8_t *memory;
    uint64_t bytes;
    uint32_t class_index;
    sth_event *event; /* behind the last copy out of or into the slab */
    bool recorded;
} sthi_slab;

typedef struct sthi_slabs sthi_slabs;

sth_status sthi_slabs_create(sth_device *device, const sth_activation_options *options, sthi_slabs **out);
/* The copies are over. NULL is fine. */
void sthi_slabs_destroy(sthi_slabs *s);
/* Memory may be in use by a copy that was enqueued before: the next one waits for `event` where `recorded`. */
sth_status sthi_slabs_take(sthi_slabs *s, uint64_t bytes, sthi_slab **out);
void sthi_slabs_give(sthi_slabs *s, sthi_slab *slab);
/* Free slabs go, and those that come back: nothing will be taken any more. */
void sthi_slabs_close(sthi_slabs *s);
void sthi_slabs_set_pinned_limit(sthi_slabs *s, uint64_t bytes); /* 0: none */
void sthi_slabs_stats(const sthi_slabs *s, sth_activation_stats *out);
#endif
