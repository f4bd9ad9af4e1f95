/* Bytes of a store's layers by request, wait, get and release.
 *
 * A layer is held from its request to its release, and serves any number of readers meanwhile; runtimes read it chunk
 * by chunk. It is let go of when its last byte was read and nobody reads it any more, or when another layer needs its
 * record (a load was given up half way). Invariants: calls about one layer never overlap, for its record is BUSY while
 * one is under way; every request that succeeded is followed by one release.
 * Lock: the store's; never held in a call of the table or while bytes are copied. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "store/store.h"

static sthi_held *find(sth_store *s, uint32_t layer) {
    for (int i = 0; i < STH_STORE_HELD; i++)
        if (s->held[i].state != STHI_HELD_FREE && s->held[i].layer == layer) return &s->held[i];
    return NULL;
}

static sthi_held *find_free(sth_store *s) {
    for (int i = 0; i < STH_STORE_HELD; i++)
        if (s->held[i].state == STHI_HELD_FREE) return &s->held[i];
    return NULL;
}

/* The one that nobody reads and that was wanted longest ago. */
static sthi_held *find_idle(sth_store *s) {
    sthi_held *best = NULL;
    for (int i = 0; i < STH_STORE_HELD; i++) {
        sthi_held *h = &s->held[i];
        if (h->state <= STHI_HELD_BUSY || h->readers) continue;
        if (!best || h->used < best->used) best = h;
    }
    return best;
}

static void become(sth_store *s, sthi_held *h, sthi_held_state state) {
    h->state = state;
    sthi_cond_broadcast(&s->changed);
}

/* Lock held; let go while the table is called. Nobody reads it. */
static void release(sth_store *s, sthi_held *h) {
    h->state = STHI_HELD_BUSY;
    sthi_unlock(&s->lock);
    s->ops.release(s->self, h->layer);
    sthi_lock(&s->lock);
    become(s, h, STHI_HELD_FREE);
}

/* The record is free; another layer's request may fail. The same as to the lock. */
static sth_status request(sth_store *s, sthi_held *h, uint32_t layer) {
    *h = (sthi_held){.state = STHI_HELD_BUSY, .layer = layer, .used = ++s->calls};
    sthi_unlock(&s->lock);
    sth_status rc = s->ops.request(s->self, layer);
    sthi_lock(&s->lock);
    become(s, h, rc == STH_OK ? STHI_HELD_REQUESTED : STHI_HELD_FREE);
    return rc;
}

static sth_status fetch(sth_store *s, sthi_held *h) {
    h->state = STHI_HELD_BUSY;
    sthi_unlock(&s->lock);
    sth_status rc = s->ops.wait(s->self, h->layer);
    const void *bytes = rc == STH_OK ? s->ops.get(s->self, h->layer) : NULL;
    if (rc == STH_OK && !bytes)
        rc = sthi_fail(STH_INTERNAL, NULL, 0, s->kind, "the store '%s' gave no address for a layer that it has brought",
                       s->kind);
    sthi_error_copy why;
    if (rc != STH_OK) sthi_error_save(&why);
    if (rc != STH_OK) s->ops.release(s->self, h->layer);
    sthi_lock(&s->lock);
    h->bytes = bytes;
    become(s, h, rc == STH_OK ? STHI_HELD_READY : STHI_HELD_FREE);
    return rc == STH_OK ? STH_OK : sthi_error_restore(&why);
}

/* Until the layer is READY; its record then counts one reader more. */
static sth_status hold(sth_store *s, uint32_t layer, sthi_held **out) {
    for (;;) {
        sthi_held *h = find(s, layer), *other;
        if (h && h->state == STHI_HELD_READY) {
            h->readers++;
            h->used = ++s->calls;
            *out = h;
            return STH_OK;
        }
        if (h && h->state == STHI_HELD_REQUESTED) STHI_TRY(fetch(s, h));
        else if (!h && (other = find_free(s))) STHI_TRY(request(s, other, layer));
        else if (!h && (other = find_idle(s))) release(s, other);
        else sthi_cond_wait(&s->changed, &s->lock);
    }
}

static uint64_t end_of_tensors(const sth_store_layer *l) {
    uint64_t end = 0;
    for (uint32_t i = 0; i < l->tensor_count; i++) end = sthi_max_u64(end, l->tensors[i].offset + l->tensors[i].bytes);
    return end;
}

static sth_status read_held(sth_store *s, uint32_t layer, uint64_t offset, uint64_t bytes, void *to) {
    sthi_held *h;
    sthi_lock(&s->lock);
    sth_status rc = hold(s, layer, &h);
    sthi_unlock(&s->lock);
    if (rc != STH_OK) return rc;
    memcpy(to, h->bytes + offset, bytes);
    sthi_lock(&s->lock);
    if (offset + bytes >= end_of_tensors(&s->layers[layer]))
        h->used = 0; /* all was read: it goes with its last reader */
    if (!--h->readers && !h->used) release(s, h);
    else sthi_cond_broadcast(&s->changed);
    sthi_unlock(&s->lock);
    return STH_OK;
}

sth_status sthi_store_read(sth_store *s, uint32_t layer, uint64_t offset, uint64_t bytes, void *to) {
    if (layer >= s->layer_count || !sthi_range_inside(offset, bytes, s->layers[layer].bytes))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, s->kind,
                         "bytes %llu to %llu of layer %u are not in the store '%s'", (unsigned long long)offset,
                         (unsigned long long)(offset + bytes), layer, s->kind);
    if (!bytes) return STH_OK;
    /* A table that fails without a word must not be described by an older failure. */
    (void)sthi_fail(STH_OK, NULL, 0, NULL, "the store gives no reason");
    sth_status rc =
        s->ops.read ? s->ops.read(s->self, layer, offset, bytes, to) : read_held(s, layer, offset, bytes, to);
    if (rc == STH_OK) return STH_OK;
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(rc, why.domain, why.native, why.object, "layer '%s': %s", s->layers[layer].name, why.message);
}

void sthi_store_expect(sth_store *s, uint32_t layer) {
    if (s->ops.read) return;
    sthi_error_copy before;
    sthi_error_save(&before);
    sthi_lock(&s->lock);
    sthi_held *h = find(s, layer) ? NULL : find_free(s);
    if (h && request(s, h, layer) != STH_OK) (void)sthi_error_restore(&before);
    sthi_unlock(&s->lock);
}

void sthi_store_let_go(sth_store *s) {
    sthi_lock(&s->lock);
    for (int i = 0; i < STH_STORE_HELD; i++)
        if (s->held[i].state != STHI_HELD_FREE) release(s, &s->held[i]);
    sthi_unlock(&s->lock);
}
