/* Open addressing over XXH3, at most half full. Seeded per table, so that a file cannot be made to
 * collide. Immutable once built; any number of threads may look up. */
#include "store/names.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"

/* The slot that holds `name`, or the empty one where it belongs. */
static uint64_t probe(const sthi_names *names, const sth_tensor_info *tensors, const char *name,
                      uint32_t *out_tag) {
    uint64_t hash = XXH3_64bits_withSeed(name, strlen(name), names->seed);
    uint32_t tag = (uint32_t)(hash >> 32);
    uint64_t at = hash & names->mask;
    *out_tag = tag;
    for (;; at = (at + 1) & names->mask) {
        const sthi_name_slot *slot = &names->slots[at];
        if (!slot->place) return at;
        if (slot->hash == tag && strcmp(tensors[slot->place - 1].name, name) == 0) return at;
    }
}

sth_status sthi_names_build(sthi_names *names, const sth_tensor_info *tensors, uint64_t count,
                            const char *path) {
    if (count >= UINT32_MAX / 2)
        return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, path,
                         "%.300s: more than 2 thousand million tensors; split the file", path);
    uint64_t slots = 16;
    while (slots < count * 2) slots *= 2;
    names->slots = sthi_zalloc((size_t)slots, sizeof *names->slots);
    if (!names->slots) return sthi_no_memory(path, "the names of tensors in %.300s", path);
    names->mask = slots - 1;
    names->seed = (uint64_t)sthi_now_ns() ^ (uint64_t)(uintptr_t)names->slots;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t tag;
        uint64_t at = probe(names, tensors, tensors[i].name, &tag);
        if (names->slots[at].place)
            return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                             "%.300s: tensor '%.160s' is described twice", path, tensors[i].name);
        names->slots[at] = (sthi_name_slot){tag, (uint32_t)(i + 1)};
    }
    return STH_OK;
}

void sthi_names_fini(sthi_names *names) {
    sthi_free(names->slots);
    *names = (sthi_names){0};
}

const sth_tensor_info *sthi_names_find(const sthi_names *names, const sth_tensor_info *tensors,
                                       const char *name) {
    uint32_t tag;
    uint64_t at = probe(names, tensors, name, &tag);
    uint32_t place = names->slots[at].place;
    return place ? &tensors[place - 1] : NULL;
}
