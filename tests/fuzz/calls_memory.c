/* Calls of arena.h and pool.h. */
#include "fuzz/calls.h"

static void make_arena(calls *c, calls_arena *a, calls_device *d) {
    uint64_t capacity = calls_bytes(c, CALLS_MEMORY);
    sth_arena *made = (void *)a;
    sth_device *on = calls_or_null(c, d->device);
    sth_status rc;
    switch (calls_byte(c) % 3) {
    case 0: rc = CALLS_TRY(sth_arena_create_bounded(on, capacity, calls_extreme(c), &made)); break;
    case 1: rc = CALLS_TRY(sth_arena_create_pageable(on, capacity, &made)); break;
    default: rc = CALLS_TRY(sth_arena_create(on, capacity, &made));
    }
    CHECK(rc == STH_OK || made == (void *)a);
    *a = (calls_arena){.arena = rc == STH_OK ? made : NULL};
}

static void on_arena(calls *c, calls_arena *a) {
    void *at = a;
    uint64_t bytes = calls_bytes(c, 1 << 17);
    switch (calls_byte(c) % 8) {
    case 0:
        if (a->count && !calls_once_in(c, 8)) {
            uint32_t i = calls_byte(c) % a->count;
            bytes = bytes <= a->bytes[i] ? bytes : a->bytes[i];
            CALLS_TRY(sth_arena_write(calls_or_null(c, a->arena), calls_or_null(c, a->at[i]), calls_images, bytes));
        } else if (a->count) { /* past the end, or before the beginning */
            CHECK(CALLS_TRY(sth_arena_write(a->arena, (uint8_t *)a->at[0] - 4096, calls_images, 1)) != STH_OK);
            CHECK(CALLS_TRY(sth_arena_write(a->arena, a->at[0], calls_images, UINT64_MAX)) != STH_OK);
        }
        break;
    case 1: CALLS_TRY(sth_arena_finish(calls_or_null(c, a->arena))); break;
    case 2:
        (void)sth_arena_bytes(calls_or_null(c, a->arena));
        (void)sth_arena_pinned_bytes(calls_or_null(c, a->arena));
        CHECK(sth_arena_pin_error(calls_or_null(c, a->arena)));
        CHECK(sth_arena_found_bytes(a->arena) == 0); /* none of them is in common */
        CHECK(sth_arena_place(a->arena, 1, NULL, 1, NULL, &at) != STH_OK && at == (void *)a);
        CHECK(sth_arena_place(a->arena, bytes, NULL, 0, NULL, &at) != STH_OK && at == (void *)a);
        if (a->count) CHECK(sth_arena_image(a->arena, a->at[0]) == a->at[0]);
        sth_arena_leave(a->arena, a->count ? a->at[0] : NULL, bytes);
        (void)sth_arena_device_alias(calls_or_null(c, a->arena), a->count ? a->at[0] : calls_memory);
        break;
    case 3:
        sth_arena_retain(a->arena);
        sth_arena_retain(NULL);
        sth_arena_release(a->arena);
        break;
    default:
        if (a->count == CALLS_PIECES) break;
        if (CALLS_TRY(sth_arena_reserve(calls_or_null(c, a->arena), bytes, calls_or_null(c, &at))) == STH_OK) {
            CHECK((uintptr_t)at % 512 == 0);
            a->at[a->count] = at;
            a->bytes[a->count++] = bytes;
        } else CHECK(at == (void *)a);
    }
}

static void waits(void *arg, uint32_t wanted, uint32_t free) { (void)arg, (void)wanted, (void)free; }

static void make_pool(calls *c) {
    calls_device *d = calls_any_device(c);
    uint64_t slab = calls_bytes(c, 1 << 15), total = slab * (calls_byte(c) % 9u);
    if (calls_once_in(c, 8)) total = calls_bytes(c, 1 << 17);
    uint64_t align = calls_byte(c) % 4 ? 512 : calls_byte(c) % 2 ? 4096 : calls_extreme(c);
    sth_pool *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_pool_create(d ? d->device : NULL, total, slab, align, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    c->pool = rc == STH_OK ? made : NULL;
    c->slab_count = 0;
}

/* Waits only where it is served at once: there is no other thread that would give slabs back. */
static void take_slabs(calls *c) {
    sth_pool_stats stats;
    uint32_t room = CALLS_SLABS - c->slab_count, got = 0;
    if (CALLS_TRY(sth_pool_stats_get(c->pool, &stats)) != STH_OK) return;
    uint64_t bytes = calls_bytes(c, 1 << 16);
    uint32_t wanted = sth_pool_slabs_for(c->pool, bytes);
    bool now = wanted <= stats.free || wanted > stats.total;
    sth_status rc = now && calls_byte(c) & 1
                        ? CALLS_TRY(sth_pool_acquire(c->pool, bytes, c->slabs + c->slab_count, room, &got))
                        : CALLS_TRY(sth_pool_try_acquire(c->pool, bytes, c->slabs + c->slab_count, room, &got));
    CHECK(rc == STH_OK || !got);
    for (uint32_t i = 0; i < got; i++) {
        uint8_t *at = sth_pool_slab_address(c->pool, c->slabs[c->slab_count + i]);
        CHECK(at);
        at[0] = at[sth_pool_slab_bytes(c->pool) - 1] = 1;
    }
    c->slab_count += got;
}

static void on_pool(calls *c) {
    switch (calls_byte(c) % 8) {
    case 0: (void)sth_pool_slab_address(calls_or_null(c, c->pool), calls_extreme(c)); break;
    case 1: {
        sth_slab wrong[2] = {calls_extreme(c), c->slab_count ? c->slabs[0] : 0};
        CHECK(CALLS_TRY(sth_pool_release(calls_or_null(c, c->pool), wrong, 2)) != STH_OK);
        CALLS_TRY(sth_pool_release(c->pool, NULL, calls_byte(c) & 1));
        break;
    }
    case 2: if (calls_once_in(c, 4)) sth_pool_shutdown(calls_or_null(c, c->pool)); break;
    case 3:
        sth_pool_set_wait_handler(calls_or_null(c, c->pool), calls_byte(c) & 1 ? waits : NULL, NULL);
        (void)sth_pool_is_pinned(calls_or_null(c, c->pool));
        CHECK(sth_pool_warning(calls_or_null(c, c->pool)));
        (void)sth_pool_slabs_for(calls_or_null(c, c->pool), calls_extreme(c));
        (void)sth_pool_slab_bytes(calls_or_null(c, c->pool));
        break;
    case 4:
        if (!c->slab_count) break;
        CHECK(CALLS_TRY(sth_pool_release(c->pool, c->slabs, c->slab_count)) == STH_OK);
        CHECK(CALLS_TRY(sth_pool_release(c->pool, c->slabs, c->slab_count)) == STH_STALE);
        c->slab_count = 0;
        break;
    default: if (!c->pool_lent) take_slabs(c);
    }
}

void calls_on_memory(calls *c) {
    calls_device *d = calls_any_device(c);
    calls_arena *a = &c->arenas[calls_byte(c) % CALLS_ARENAS];
    if (calls_byte(c) % 3 == 0) {
        if (c->pool) on_pool(c);
        else make_pool(c);
    } else if (a->arena) on_arena(c, a);
    else if (d) make_arena(c, a, d);
}

void calls_end_memory(calls *c) {
    for (int i = 0; i < CALLS_ARENAS; i++) sth_arena_release(c->arenas[i].arena);
    sth_pool_destroy(c->pool);
}
