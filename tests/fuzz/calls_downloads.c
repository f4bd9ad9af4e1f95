/* Calls of download.h. */
#include "fuzz/calls.h"

enum { ROOM = CALLS_MEMORY / 4 };

static void make(calls *c, calls_device *d) {
    sth_download_options o;
    sth_download_options_init(&o);
    sth_download_options_init(NULL);
    o.region_bytes = calls_byte(c) % 8 ? 1 << 16 : calls_extreme(c);
    o.pinned_limit = calls_byte(c) % 4 ? 0 : calls_extreme(c);
    o.chunk_bytes = calls_byte(c) % 4 ? 1 << 13 : calls_extreme(c);
    o.priority = (int)calls_extreme(c);
    if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
    sth_devptr room;
    if (CALLS_TRY(sth_device_alloc(d->device, ROOM, &room)) != STH_OK) return;
    sth_download *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_download_create(calls_or_null(c, d->device), calls_byte(c) % 8 ? &o : NULL, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->download = made, c->source = room, c->download_on = d;
    else sth_device_free(d->device, room, ROOM);
}

static void take(calls *c, uint32_t i) {
    sth_block *made = (void *)c;
    uint64_t bytes = calls_bytes(c, 1 << 17);
    if (c->blocks[i]) return;
    sth_status rc = CALLS_TRY(sth_download_take(calls_or_null(c, c->download), bytes, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc != STH_OK) return;
    CHECK(sth_block_bytes(made) >= bytes && (uintptr_t)sth_block_address(made) % 512 == 0);
    memset(sth_block_address(made), 1, sth_block_bytes(made));
    (void)sth_block_is_pinned(made);
    c->blocks[i] = made;
}

static void copy(calls *c, uint32_t i) {
    sth_ticket ticket = 77;
    if (!c->blocks[i] || c->tickets[i]) return;
    uint64_t offset = calls_byte(c) % 2 ? 0 : calls_bytes(c, 1 << 12);
    uint64_t source = c->source + 512 * (calls_byte(c) % 8u);
    sth_status rc = CALLS_TRY(sth_download_copy(calls_or_null(c, c->download), calls_or_null(c, c->blocks[i]), offset,
                                                calls_once_in(c, 24) ? 0 : source, calls_bytes(c, ROOM / 2),
                                                calls_stream(c), calls_or_null(c, &ticket)));
    CHECK(rc == STH_OK || ticket == 77);
    if (rc == STH_OK) c->tickets[i] = ticket;
}

static void finish(calls *c, uint32_t i) {
    bool done;
    sth_ticket ticket = c->tickets[i];
    CALLS_TRY(sth_download_done(c->download, ticket, calls_or_null(c, &done)));
    if (calls_once_in(c, 4)) {
        sth_download_forget(c->download, ticket);
        c->tickets[i] = 0;
    } else if (CALLS_TRY(sth_download_wait(c->download, ticket)) == STH_OK) {
        CHECK(CALLS_TRY(sth_download_wait(c->download, ticket)) == STH_STALE);
        c->tickets[i] = 0;
    }
}

void calls_on_downloads(calls *c) {
    calls_device *d = calls_any_device(c);
    uint32_t i = calls_byte(c) % CALLS_BLOCKS;
    sth_download_stats stats;
    if (!c->download) {
        if (d) make(c, d);
        return;
    }
    switch (calls_byte(c) % 8) {
    case 0:
    case 1: take(c, i); break;
    case 2:
    case 3: copy(c, i); break;
    case 4: finish(c, i); break;
    case 5:
        sth_block_retain(c->blocks[i]);
        sth_block_release(c->blocks[i]);
        if (!c->tickets[i] || calls_byte(c) & 1) {
            sth_block_release(c->blocks[i]);
            c->blocks[i] = NULL;
        }
        break;
    case 6: CALLS_TRY(sth_download_reserve(calls_or_null(c, c->download), 512 * calls_byte(c))); break;
    default:
        CALLS_TRY(sth_download_stats_get(calls_or_null(c, c->download), calls_or_null(c, &stats)));
        CALLS_TRY(sth_download_set_conductor(calls_or_null(c, c->download), calls_or_null(c, c->conductor)));
        sth_download_forget(c->download, 0);
        CALLS_TRY(sth_download_wait(c->download, calls_extreme(c)));
    }
}

void calls_end_downloads(calls *c) {
    for (int i = 0; i < CALLS_BLOCKS; i++) {
        if (c->tickets[i]) sth_download_forget(c->download, c->tickets[i]);
        sth_block_release(c->blocks[i]);
    }
    sth_download_destroy(c->download);
    if (c->download) sth_device_free(c->download_on->device, c->source, ROOM);
}
