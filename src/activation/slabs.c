/* Slabs of host memory. A class is a size; a request takes a free slab of the smallest class that fits, or of
 * the next larger one. With given classes there are so many slabs of each, taken when first needed; else a
 * class is made for each size that is seen, rounded up by at most an eighth, and grows as it is used. Where
 * neither helps memory is pageable and goes when it is given back.
 *
 * Invariants: a slab is in use, or in the list of its class, or, without a block, in `dying` until its last
 * copy is over. A free slab may still be read by a copy that is enqueued: its event says until when.
 * Lock: the store's. Does not copy. */
#include "activation/slabs.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "host/blocks.h"

enum { CLASSES_MAX = 96, NO_CLASS = UINT32_MAX };

typedef struct slab_class {
    uint64_t bytes;
    uint32_t taken, limit; /* limit 0: none */
    sthi_slab *free;
} slab_class;

struct sthi_slabs {
    sth_device *device;
    sthi_blocks *blocks;
    slab_class classes[CLASSES_MAX]; /* by size */
    uint32_t count;
    bool grows, closed;
    sthi_slab *dying;
    uint64_t hits, misses, fallbacks, host_bytes, pinned_bytes, used_bytes;
};

sth_status sthi_slabs_create(sth_device *device, const sth_activation_options *options, sthi_slabs **out) {
    sthi_slabs *s = sthi_zalloc(1, sizeof *s);
    if (!s) return sthi_no_memory("activation", "a pool's record");
    sth_status rc = sthi_blocks_create(device, (uint64_t)256 << 20, 0, &s->blocks);
    if (rc != STH_OK) {
        sthi_free(s);
        return rc;
    }
    s->device = device;
    s->grows = options->class_count == 0;
    for (uint32_t i = 0; i < options->class_count; i++)
        s->classes[s->count++] = (slab_class){.bytes = options->class_bytes[i], .limit = options->class_slabs[i]};
    *out = s;
    return STH_OK;
}

static void end_slab(sthi_slabs *s, sthi_slab *slab) {
    STHI_INVARIANT(slab->bytes <= s->host_bytes && s->pinned_bytes <= s->host_bytes);
    if (slab->event) s->device->ops->event_destroy(s->device->self, slab->event);
    s->host_bytes -= slab->bytes;
    if (slab->block) {
        if (sthi_block_is_pinned(slab->block)) s->pinned_bytes -= slab->bytes;
        sthi_block_release(slab->block);
    } else sthi_free(slab->memory);
    sthi_free(slab);
}

static bool idle(sthi_slabs *s, const sthi_slab *slab) {
    bool done = true;
    if (!slab->recorded) return true;
    return s->device->ops->event_query(s->device->self, slab->event, &done) == STH_OK && done;
}

static void bury(sthi_slabs *s, bool all) {
    for (sthi_slab **link = &s->dying; *link;) {
        sthi_slab *slab = *link;
        if (all || idle(s, slab)) {
            *link = slab->next;
            end_slab(s, slab);
        } else link = &slab->next;
    }
}

static void free_classes(sthi_slabs *s) {
    for (uint32_t i = 0; i < s->count; i++)
        for (sthi_slab *slab; (slab = s->classes[i].free);) {
            s->classes[i].free = slab->next;
            slab->next = s->dying; /* a copy may read it still */
            s->dying = slab;
        }
}

void sthi_slabs_destroy(sthi_slabs *s) {
    if (!s) return;
    free_classes(s);
    bury(s, true);
    sthi_blocks_close(s->blocks);
    sthi_free(s);
}

void sthi_slabs_close(sthi_slabs *s) {
    s->closed = true;
    free_classes(s);
    bury(s, false);
}

/* ---- taking */

static sth_status new_slab(sthi_slabs *s, uint64_t bytes, uint32_t class_index, sthi_slab **out) {
    sthi_slab *slab = sthi_zalloc(1, sizeof *slab);
    if (!slab) return sthi_no_memory("activation", "a slab's record");
    sth_status rc = s->device->ops->event_create(s->device->self, false, &slab->event);
    if (rc == STH_OK && class_index != NO_CLASS) {
        rc = sthi_blocks_take(s->blocks, bytes, &slab->block);
        if (rc == STH_OK) slab->memory = sthi_block_address(slab->block);
    } else if (rc == STH_OK && !(slab->memory = sthi_alloc(bytes)))
        rc = sthi_no_memory("activation", "%llu bytes of spilled activations", (unsigned long long)bytes);
    if (rc != STH_OK) {
        if (slab->event) s->device->ops->event_destroy(s->device->self, slab->event);
        sthi_free(slab);
        return rc;
    }
    slab->bytes = bytes;
    slab->class_index = class_index;
    s->host_bytes += bytes;
    if (slab->block && sthi_block_is_pinned(slab->block)) s->pinned_bytes += bytes;
    *out = slab;
    return STH_OK;
}

/* The class of exactly this size, made where there is room for one more; else NO_CLASS. */
static uint32_t class_for(sthi_slabs *s, uint64_t bytes) {
    uint32_t at = 0;
    while (at < s->count && s->classes[at].bytes < bytes) at++;
    STHI_INVARIANT(at + 1 >= s->count || s->classes[at].bytes < s->classes[at + 1].bytes);
    if (at < s->count && s->classes[at].bytes == bytes) return at;
    if (s->count == CLASSES_MAX) return NO_CLASS;
    memmove(&s->classes[at + 1], &s->classes[at], (s->count - at) * sizeof s->classes[0]);
    s->classes[at] = (slab_class){.bytes = bytes};
    s->count++;
    return at;
}

static uint64_t rounded(uint64_t bytes) {
    uint64_t step = STHI_ALIGN, out;
    while (step * 16 < bytes) step *= 2;
    return sthi_round_up(bytes, step, &out) ? out : bytes;
}

static sthi_slab *take_free(sthi_slabs *s, uint64_t bytes) {
    for (uint32_t i = 0; i < s->count; i++) {
        slab_class *c = &s->classes[i];
        if (c->bytes < bytes) continue;
        if (s->grows && c->bytes / 2 > rounded(bytes)) return NULL; /* a class of its own wastes less */
        if (!c->free) continue;
        sthi_slab *slab = c->free;
        c->free = slab->next;
        return slab;
    }
    return NULL;
}

/* A slab within the counts that were given: the first use of it. */
static sth_status take_given(sthi_slabs *s, uint64_t bytes, sthi_slab **out) {
    for (uint32_t i = 0; i < s->count; i++) {
        slab_class *c = &s->classes[i];
        if (c->bytes < bytes || c->taken >= c->limit) continue;
        STHI_TRY(new_slab(s, c->bytes, i, out));
        c->taken++;
        return STH_OK;
    }
    return STH_OK;
}

static sth_status take_new(sthi_slabs *s, uint64_t bytes, sthi_slab **out) {
    uint64_t size = rounded(bytes);
    uint32_t index = s->grows ? class_for(s, size) : NO_CLASS;
    s->misses++;
    if (index != NO_CLASS) {
        STHI_TRY(new_slab(s, size, index, out));
        s->fallbacks += !sthi_block_is_pinned((*out)->block);
        return STH_OK;
    }
    s->fallbacks++;
    return new_slab(s, bytes, NO_CLASS, out);
}

sth_status sthi_slabs_take(sthi_slabs *s, uint64_t bytes, sthi_slab **out) {
    bury(s, false);
    sthi_slab *slab = take_free(s, bytes);
    if (!slab && !s->grows) STHI_TRY(take_given(s, bytes, &slab));
    if (slab) s->hits++;
    else STHI_TRY(take_new(s, bytes, &slab));
    slab->next = NULL;
    s->used_bytes += slab->bytes;
    *out = slab;
    return STH_OK;
}

void sthi_slabs_give(sthi_slabs *s, sthi_slab *slab) {
    STHI_INVARIANT(slab->bytes <= s->used_bytes && s->used_bytes <= s->host_bytes);
    bool pooled = slab->block && !s->closed;
    /* Classes may have moved since; those of given sizes have not. */
    uint32_t index = pooled && s->grows ? class_for(s, slab->bytes) : slab->class_index;
    sthi_slab **list = pooled && index != NO_CLASS ? &s->classes[index].free : &s->dying;
    s->used_bytes -= slab->bytes;
    slab->next = *list;
    *list = slab;
    if (list == &s->dying) bury(s, false);
}

void sthi_slabs_set_pinned_limit(sthi_slabs *s, uint64_t bytes) { sthi_blocks_set_pinned_limit(s->blocks, bytes); }

void sthi_slabs_stats(const sthi_slabs *s, sth_activation_stats *out) {
    out->pool_hits = s->hits;
    out->pool_misses = s->misses;
    out->fallbacks = s->fallbacks;
    out->host_bytes = s->host_bytes;
    out->pinned_bytes = s->pinned_bytes;
    out->slab_bytes = s->used_bytes;
}
