/* Exported arena calls. */
#include "api/arguments.h"
#include "host/arena.h"
#include "host/common.h"

static sth_status usable(const sth_arena *arena) {
    if (!arena) return null_argument("arena");
    if (sthi_arena_is_here(arena)) return STH_OK;
    return sthi_fail_in_child("arena", "the arena");
}

sth_status sth_arena_create(sth_device *device, uint64_t capacity, sth_arena **out_arena) {
    if (!device || !out_arena) return null_argument("device or out_arena");
    return sthi_arena_create(device, capacity, out_arena);
}
sth_status sth_arena_create_bounded(sth_device *device, uint64_t capacity, uint64_t pinned, sth_arena **out_arena) {
    if (!device || !out_arena) return null_argument("device or out_arena");
    return sthi_arena_create_bounded(device, capacity, pinned, out_arena);
}
sth_status sth_arena_create_pageable(sth_device *device, uint64_t capacity, sth_arena **out_arena) {
    if (!device || !out_arena) return null_argument("device or out_arena");
    return sthi_arena_create_pageable(device, capacity, out_arena);
}
sth_status sth_arena_create_common(sth_device *device, uint64_t capacity, uint64_t pinned, uint32_t most,
                                   sth_arena **out_arena) {
    if (!device || !out_arena) return null_argument("device or out_arena");
    return sthi_arena_create_common(device, capacity, pinned, most, out_arena);
}

void sth_arena_retain(sth_arena *arena) {
    if (arena) sthi_arena_retain(arena);
}
void sth_arena_release(sth_arena *arena) { sthi_arena_release(arena); }
void sth_arena_retain_range(sth_arena *arena, const void *address) {
    if (arena) sthi_arena_retain_range(arena, address);
}
void sth_arena_release_range(sth_arena *arena, const void *address) {
    if (arena) sthi_arena_release_range(arena, address);
}
sth_status sth_arena_reserve(sth_arena *arena, uint64_t bytes, void **out_address) {
    if (!arena || !out_address) return null_argument("arena or out_address");
    STHI_TRY(usable(arena));
    return sthi_arena_reserve(arena, bytes, out_address);
}
sth_status sth_arena_write(sth_arena *arena, void *destination, const void *source, uint64_t bytes) {
    if (!arena || !destination || (!source && bytes)) return null_argument("arena, destination or source");
    STHI_TRY(usable(arena));
    return sthi_arena_write(arena, destination, source, bytes);
}
sth_status sth_arena_print(const sth_arena_part *parts, uint32_t count, uint64_t bytes, uint64_t out_print[2]) {
    if ((!parts && count) || !out_print) return null_argument("parts or out_print");
    return sthi_common_print(parts, count, bytes, out_print);
}

sth_status sth_arena_place(sth_arena *arena, uint64_t bytes, const sth_arena_part *parts, uint32_t count,
                           const uint64_t print[2], void **out_address) {
    if (!arena || (!parts && count) || !out_address) return null_argument("arena, parts or out_address");
    STHI_TRY(usable(arena));
    return sthi_arena_place(arena, bytes, parts, count, print, out_address);
}

void sth_arena_leave(sth_arena *arena, const void *address, uint64_t bytes) {
    if (sthi_arena_is_here(arena)) sthi_arena_leave(arena, address, bytes);
}

uint64_t sth_arena_found_bytes(const sth_arena *arena) {
    return sthi_arena_is_here(arena) ? sthi_arena_found_bytes(arena) : 0;
}

const void *sth_arena_image(const sth_arena *arena, const void *address) {
    return sthi_arena_is_here(arena) ? sthi_arena_image(arena, address) : NULL;
}

sth_status sth_arena_finish(sth_arena *arena) {
    STHI_TRY(usable(arena));
    return sthi_arena_finish(arena);
}
uint64_t sth_arena_bytes(const sth_arena *arena) {
    return sthi_arena_is_here(arena) ? sthi_arena_bytes(arena) : 0;
}
uint64_t sth_arena_pinned_bytes(const sth_arena *arena) {
    return sthi_arena_is_here(arena) ? sthi_arena_pinned_bytes(arena) : 0;
}
const char *sth_arena_pin_error(const sth_arena *arena) {
    return sthi_arena_is_here(arena) ? sthi_arena_pin_error(arena) : "";
}
sth_devptr sth_arena_device_alias(const sth_arena *arena, const void *host) {
    return sthi_arena_is_here(arena) ? sthi_arena_device_alias(arena, host) : 0;
}
