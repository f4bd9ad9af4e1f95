/* The stream of copies from the device, and the tickets of those under way.
 *
 * A copy is: record an event behind the caller's stream, make our stream wait for it, copy, record the same
 * event behind the copies. Recording again leaves the wait before alone, on every back end.
 *
 * Invariants: a ticket that is live holds its block and one reference of the download; its slot and event are
 * nobody else's until it ends. Slots stand in chunks that never move and live as long as the download, so
 * that an event may be waited for without the lock. `lost` is a live slot that no ticket leads to any more:
 * the device would not say that its copy is done, so it keeps its block until the stream has been ended.
 * Lock: `lock` guards slots, counters and `closed`; list operations only, never while the device is called.
 * Does not hold or free the memory that is copied from. */
#include "host/download.h"

#include <stdatomic.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "base/thread.h"
#include "conductor/arbiter.h"
#include "device/device.h"
#include "host/blocks.h"
#include "telemetry/devtime.h"

enum { SLOTS_EACH = 64, CHUNKS = 1024 };

typedef struct copy_slot {
    sth_event *event; /* kept from one copy to the next */
    sth_block *block;
    uint32_t index, generation; /* the latter never 0 */
    bool live, lost;
    struct copy_slot *next; /* in the list of free ones */
} copy_slot;

struct sth_download {
    sth_device *device;
    sthi_blocks *blocks;
    sth_stream stream;
    sthi_lane *lane; /* NULL without a conductor; who copies retains it under the lock */
    uint64_t chunk_bytes;
    unsigned fork_depth;
    atomic_int refs;
    sthi_mutex lock;
    bool closed; /* the stream is gone: whatever was copied is done */
    copy_slot *chunks[CHUNKS];
    uint32_t slot_count;
    copy_slot *free;
    uint64_t d2h_bytes, copies, pageable_copies, live;
};

void sthi_download_options_init(sth_download_options *options) {
    *options = (sth_download_options){
        .size = sizeof *options,
        .region_bytes = 256 << 20,
        .chunk_bytes = 32 << 20,
    };
}

/* ---- life */

static void drop(sth_download *d) {
    if (atomic_fetch_sub_explicit(&d->refs, 1, memory_order_acq_rel) != 1) return;
    STHI_INVARIANT(d->closed && !d->live);
    for (uint32_t i = 0; i < d->slot_count; i++) {
        copy_slot *s = &d->chunks[i / SLOTS_EACH][i % SLOTS_EACH];
        if (s->event) d->device->ops->event_destroy(d->device->self, s->event);
    }
    for (uint32_t i = 0; i < CHUNKS && d->chunks[i]; i++) sthi_free(d->chunks[i]);
    sthi_mutex_fini(&d->lock);
    sthi_device_release(d->device);
    sthi_free(d);
}

sth_status sthi_download_create(sth_device *device, const sth_download_options *options, sth_download **out) {
    sth_download *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_no_memory("download", "a download's record");
    sth_status rc = sthi_blocks_create(device, options->region_bytes, options->pinned_limit, &d->blocks);
    if (rc == STH_OK) rc = device->ops->stream_create(device->self, options->priority, &d->stream);
    if (rc != STH_OK) {
        sthi_blocks_close(d->blocks);
        sthi_free(d);
        return rc;
    }
    sthi_device_retain(device);
    d->device = device;
    d->chunk_bytes = options->chunk_bytes;
    d->fork_depth = sthi_fork_depth();
    atomic_init(&d->refs, 1);
    sthi_mutex_init(&d->lock);
    *out = d;
    return STH_OK;
}

static void end_slot(sth_download *d, copy_slot *s) {
    sthi_lock(&d->lock);
    STHI_INVARIANT(s->live && s->block && d->live);
    sth_block *block = s->block;
    s->block = NULL;
    s->live = s->lost = false;
    if (!++s->generation) s->generation = 1;
    s->next = d->free;
    d->free = s;
    d->live--;
    sthi_unlock(&d->lock);
    sthi_block_release(block);
    drop(d);
}

static bool in_child(const sth_download *d) { return d->fork_depth != sthi_fork_depth(); }

void sthi_download_destroy(sth_download *d) {
    if (!d || in_child(d)) return;
    (void)sthi_download_set_conductor(d, NULL);
    d->device->ops->stream_destroy(d->device->self, d->stream); /* waits for what is enqueued */
    sthi_lock(&d->lock);
    d->closed = true;
    uint32_t count = d->slot_count;
    sthi_unlock(&d->lock);
    for (uint32_t i = 0; i < count; i++) {
        copy_slot *s = &d->chunks[i / SLOTS_EACH][i % SLOTS_EACH];
        sthi_lock(&d->lock);
        bool lost = s->live && s->lost;
        sthi_unlock(&d->lock);
        if (lost) end_slot(d, s);
    }
    sthi_blocks_close(d->blocks);
    drop(d);
}

static sth_status check(sth_download *d) {
    if (in_child(d)) return sthi_fail_in_child("download", "the download");
    sthi_lock(&d->lock);
    bool closed = d->closed;
    sthi_unlock(&d->lock);
    return closed ? sthi_fail(STH_SHUT_DOWN, NULL, 0, "download",
                              "the download was shut down; make a new one") : STH_OK;
}

sth_status sthi_download_reserve(sth_download *d, uint64_t bytes) {
    STHI_TRY(check(d));
    return sthi_blocks_reserve(d->blocks, bytes);
}

sth_status sthi_download_take(sth_download *d, uint64_t bytes, sth_block **out) {
    STHI_TRY(check(d));
    return sthi_blocks_take(d->blocks, bytes, out);
}

/* ---- slots */

/* Locked. */
static bool add_chunk(sth_download *d) {
    uint32_t n = d->slot_count / SLOTS_EACH;
    STHI_INVARIANT(!d->free && d->slot_count % SLOTS_EACH == 0);
    if (n == CHUNKS) return false;
    copy_slot *chunk = sthi_zalloc(SLOTS_EACH, sizeof *chunk);
    if (!chunk) return false;
    d->chunks[n] = chunk;
    for (uint32_t i = SLOTS_EACH; i-- > 0;) {
        chunk[i].index = d->slot_count + i;
        chunk[i].generation = 1;
        chunk[i].next = d->free;
        d->free = &chunk[i];
    }
    d->slot_count += SLOTS_EACH;
    return true;
}

static void put_slot(sth_download *d, copy_slot *s) {
    sthi_lock(&d->lock);
    s->next = d->free;
    d->free = s;
    sthi_unlock(&d->lock);
}

/* A slot with an event. */
static sth_status take_slot(sth_download *d, copy_slot **out) {
    sthi_lock(&d->lock);
    copy_slot *s = d->free || add_chunk(d) ? d->free : NULL;
    if (s) d->free = s->next;
    STHI_INVARIANT(!s || (!s->live && !s->block && s->generation));
    sthi_unlock(&d->lock);
    if (!s)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, "download", "no room for one more copy under way");
    if (!s->event) {
        sth_status rc = d->device->ops->event_create(d->device->self, false, &s->event);
        if (rc != STH_OK) {
            put_slot(d, s);
            return rc;
        }
    }
    *out = s;
    return STH_OK;
}

static sth_ticket ticket_of(const copy_slot *s) { return (uint64_t)s->generation << 32 | s->index; }

static sth_status resolve(sth_download *d, sth_ticket ticket, copy_slot **out, bool *out_closed) {
    uint32_t index = (uint32_t)ticket, generation = (uint32_t)(ticket >> 32);
    sthi_lock(&d->lock);
    copy_slot *s = index < d->slot_count ? &d->chunks[index / SLOTS_EACH][index % SLOTS_EACH] : NULL;
    bool known = s && s->generation == generation && s->live && !s->lost;
    *out_closed = d->closed;
    sthi_unlock(&d->lock);
    if (!known)
        return sthi_fail(STH_STALE, NULL, 0, "download",
                         "ticket %#llx has ended, or is not of this download",
                         (unsigned long long)ticket);
    *out = s;
    return STH_OK;
}

/* ---- copies */

sth_status sthi_download_set_conductor(sth_download *d, sth_conductor *c) {
    sthi_lane *fresh = NULL;
    STHI_TRY(check(d));
    if (c) STHI_TRY(sthi_lane_open(c, d->device, d->stream, STH_DIRECTION_D2H, d, &fresh));
    sthi_lock(&d->lock);
    sthi_lane *old = d->lane;
    d->lane = fresh;
    sthi_unlock(&d->lock);
    sthi_lane_close(old);
    return STH_OK;
}

static sth_status enqueue(const sth_download *d, sthi_lane *lane, sth_event *event, uint8_t *to, sth_devptr from,
                          uint64_t bytes, sth_stream behind) {
    const sth_backend_ops *ops = d->device->ops;
    /* Memory that a framework allocated is foreign to a device that knows each of its own allocations. */
    sth_status (*copy)(sth_backend_device *, void *, sth_devptr, uint64_t, sth_stream) =
        ops->copy_d2h_foreign ? ops->copy_d2h_foreign : ops->copy_d2h;
    STHI_TRY(ops->event_record(d->device->self, event, behind));
    STHI_TRY(ops->stream_wait(d->device->self, d->stream, event));
    sthi_way way = {.piece = d->chunk_bytes, .flight = STHI_NO_FLIGHT};
    /* Due now: somebody waits for it. */
    if (lane) way = sthi_lane_begin(lane, bytes, ops->now_ns(d->device->self), d->chunk_bytes);
    sthi_devspan *span =
        sthi_devspan_begin(d->device, d->stream, STHI_TRACK_COPY_DOWN, "downloads", "download", bytes);
    sth_status rc = STH_OK;
    for (uint64_t at = 0; at < bytes && rc == STH_OK; at += way.piece)
        rc = copy(d->device->self, to + at, from + at, sthi_min_u64(way.piece, bytes - at), d->stream);
    sthi_devspan_end(span, d->stream);
    if (lane) sthi_lane_end(lane, way.flight);
    STHI_TRY(rc);
    return ops->event_record(d->device->self, event, d->stream);
}

/* After a failure something may be enqueued all the same: the block and the source are given back only when
 * it is over. */
static sth_status give_up(sth_download *d, copy_slot *s) {
    sthi_error_copy first;
    sthi_error_save(&first);
    bool over = d->device->ops->stream_synchronize(d->device->self, d->stream) == STH_OK;
    if (over) end_slot(d, s);
    else {
        sthi_lock(&d->lock);
        s->lost = true;
        sthi_unlock(&d->lock);
    }
    return sthi_error_restore(&first);
}

sth_status sthi_download_copy(sth_download *d, sth_block *block, uint64_t offset, sth_devptr source,
                              uint64_t bytes, sth_stream behind, sth_ticket *out) {
    copy_slot *s = NULL;
    STHI_TRY(check(d));
    if (!bytes || !sthi_range_inside(offset, bytes, sthi_block_bytes(block)))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "download",
                         "%llu bytes at %llu do not lie in a block of %llu bytes", (unsigned long long)bytes,
                         (unsigned long long)offset, (unsigned long long)sthi_block_bytes(block));
    STHI_TRY(take_slot(d, &s));
    bool pinned = sthi_block_is_pinned(block);
    sthi_block_retain(block);
    atomic_fetch_add_explicit(&d->refs, 1, memory_order_relaxed);
    sthi_lock(&d->lock);
    s->block = block;
    s->live = true;
    d->live++;
    sthi_lane *lane = d->lane;
    if (lane) sthi_lane_retain(lane);
    sthi_unlock(&d->lock);
    uint8_t *to = (uint8_t *)sthi_block_address(block) + offset;
    sth_status rc = enqueue(d, lane, s->event, to, source, bytes, behind);
    sthi_lane_close(lane);
    if (rc != STH_OK) return give_up(d, s);
    sthi_lock(&d->lock);
    d->d2h_bytes += bytes;
    d->copies++;
    d->pageable_copies += !pinned;
    sthi_unlock(&d->lock);
    *out = ticket_of(s);
    return STH_OK;
}

sth_status sthi_download_wait(sth_download *d, sth_ticket ticket) {
    copy_slot *s = NULL;
    bool closed;
    if (in_child(d)) return check(d);
    STHI_TRY(resolve(d, ticket, &s, &closed));
    if (!closed) STHI_TRY(d->device->ops->event_synchronize(d->device->self, s->event));
    end_slot(d, s);
    return STH_OK;
}

sth_status sthi_download_done(sth_download *d, sth_ticket ticket, bool *out) {
    copy_slot *s = NULL;
    bool closed;
    if (in_child(d)) return check(d);
    STHI_TRY(resolve(d, ticket, &s, &closed));
    if (!closed) return d->device->ops->event_query(d->device->self, s->event, out);
    *out = true;
    return STH_OK;
}

void sthi_download_forget(sth_download *d, sth_ticket ticket) {
    copy_slot *s = NULL;
    bool closed;
    if (in_child(d) || resolve(d, ticket, &s, &closed) != STH_OK) return;
    const sth_backend_ops *ops = d->device->ops;
    bool over = closed || ops->event_synchronize(d->device->self, s->event) == STH_OK ||
                ops->stream_synchronize(d->device->self, d->stream) == STH_OK;
    if (!over) {
        sthi_lock(&d->lock);
        over = d->closed; /* it was destroyed meanwhile, which waited */
        s->lost = !over;
        sthi_unlock(&d->lock);
    }
    if (over) end_slot(d, s);
}

void sthi_download_stats(sth_download *d, sth_download_stats *out) {
    *out = (sth_download_stats){0};
    if (in_child(d)) return;
    sthi_blocks_stats(d->blocks, out);
    sthi_lock(&d->lock);
    out->d2h_bytes = d->d2h_bytes;
    out->copies = d->copies;
    out->pageable_copies = d->pageable_copies;
    out->tickets = d->live;
    sthi_unlock(&d->lock);
}
