/* Host arena: what the runtime needs to know beyond the public calls. */
#ifndef STHI_HOST_ARENA_H
#define STHI_HOST_ARENA_H
#include <stdbool.h>

#include "stagehand/arena.h"

sth_status sthi_arena_create(sth_device *device, uint64_t capacity, sth_arena **out);
sth_status sthi_arena_create_bounded(sth_device *device, uint64_t capacity, uint64_t pinned, sth_arena **out);
sth_status sthi_arena_create_pageable(sth_device *device, uint64_t capacity, sth_arena **out);
sth_status sthi_arena_create_common(sth_device *device, uint64_t capacity, uint64_t pinned, uint32_t most,
                                    sth_arena **out);
void sthi_arena_retain(sth_arena *arena);
void sthi_arena_release(sth_arena *arena);
void sthi_arena_retain_range(sth_arena *arena, const void *address);
void sthi_arena_release_range(sth_arena *arena, const void *address);
/* Not NULL, and not that of the process from which this one was forked: its lock may be held there for good. */
bool sthi_arena_is_here(const sth_arena *arena);
sth_status sthi_arena_reserve(sth_arena *arena, uint64_t bytes, void **out);
sth_status sthi_arena_write(sth_arena *arena, void *dst, const void *src, uint64_t bytes);
sth_status sthi_arena_place(sth_arena *arena, uint64_t bytes, const sth_arena_part *parts, uint32_t count,
                            const uint64_t print[2], void **out);
sth_status sthi_arena_finish(sth_arena *arena);
void sthi_arena_leave(sth_arena *arena, const void *address, uint64_t bytes);
/* The memory that devices read for an address of the arena's: the same, but where processes share it. NULL: no address
 * of the arena's. */
const void *sthi_arena_image(const sth_arena *arena, const void *address);
uint64_t sthi_arena_found_bytes(const sth_arena *arena);
uint64_t sthi_arena_bytes(const sth_arena *arena);
uint64_t sthi_arena_pinned_bytes(const sth_arena *arena);
const char *sthi_arena_pin_error(const sth_arena *arena);
sth_devptr sthi_arena_device_alias(const sth_arena *arena, const void *host);
/* No more reservations in the present window: it is pinned in the background, as the full ones are. */
void sthi_arena_pin_rest(sth_arena *arena);
/* True when [host, host+bytes) lies in one registered window. */
bool sthi_arena_is_pinned(const sth_arena *arena, const void *host, uint64_t bytes);
#endif
