/* Lookup of tensors by name. */
#ifndef STHI_STORE_NAMES_H
#define STHI_STORE_NAMES_H
#include <stdint.h>

#include "stagehand/checkpoint.h"

typedef struct sthi_name_slot {
    uint32_t hash;  /* upper half of the name's hash, compared before the name */
    uint32_t place; /* index of the tensor + 1; 0 is an empty slot */
} sthi_name_slot;

typedef struct sthi_names {
    sthi_name_slot *slots;
    uint64_t mask; /* number of slots - 1 */
    uint64_t seed;
} sthi_names;

/* Builds the table over tensors[0..count). A name that occurs twice is CORRUPT_DATA; `path` is named. */
sth_status sthi_names_build(sthi_names *names, const sth_tensor_info *tensors, uint64_t count,
                            const char *path);
void sthi_names_fini(sthi_names *names);
/* The tensor with this name, or NULL. */
const sth_tensor_info *sthi_names_find(const sthi_names *names, const sth_tensor_info *tensors,
                                       const char *name);
#endif
