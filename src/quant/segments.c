/* Many segments at once: decoded into a place, or compared with one. Threads take segments one by one; each has memory
 * of its own for the values of one, where they are compared. No locks. */
#include <stdatomic.h>
#include <string.h>

#include "base/arith.h"
#include "base/workers.h"
#include "quant/segment.h"

typedef struct whole {
    sthi_job job; /* first: run gets it */
    const sth_segment *segments;
    const uint8_t *packed;
    uint8_t *place; /* written */
    const uint8_t *compared; /* with this place, which is read alone; NULL: decode */
    atomic_bool differs;
} whole;

static sth_status work(sthi_job *job, uint64_t piece, void *scratch) {
    whole *w = (whole *)job;
    const sth_segment *s = &w->segments[piece];
    uint64_t bytes = sthi_segment_place_bytes(s);
    if (!w->compared) {
        sthi_segment_decode(s, w->packed, 0, 0, bytes, w->place + s->place_offset);
    } else if (!atomic_load(&w->differs)) {
        const uint8_t *values = w->packed + s->codes;
        if (s->encoding != STH_TRANSFER_VERBATIM) {
            sthi_segment_decode(s, w->packed, 0, 0, bytes, scratch);
            values = scratch;
        }
        if (memcmp(values, w->compared + s->place_offset, bytes) != 0) atomic_store(&w->differs, true);
    }
    return STH_OK;
}

void sthi_segments_decode(const sth_segment *s, uint32_t count, const void *packed, void *place,
                          uint32_t threads) {
    whole w = {.job = {.run = work, .pieces = count}, .segments = s, .packed = packed, .place = place};
    if (count < 2 || sthi_workers_once("expanding", "sth-expand", threads, 0, &w.job) != STH_OK)
        for (uint32_t i = 0; i < count; i++) (void)work(&w.job, i, NULL); /* without others it only takes longer */
}

sth_status sthi_segments_same(const sth_segment *s, uint32_t count, const void *packed, const void *place,
                              uint32_t threads, bool *out_same) {
    whole w = {.job = {.run = work, .pieces = count}, .segments = s, .packed = packed, .compared = place};
    uint64_t largest = 0;
    for (uint32_t i = 0; i < count; i++)
        if (s[i].encoding != STH_TRANSFER_VERBATIM)
            largest = sthi_max_u64(largest, sthi_segment_place_bytes(&s[i]));
    atomic_init(&w.differs, false);
    STHI_TRY(sthi_workers_once("expanding", "sth-expand", threads, (size_t)largest, &w.job));
    *out_same = !atomic_load(&w.differs);
    return STH_OK;
}
