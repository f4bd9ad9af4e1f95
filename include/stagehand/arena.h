/* stagehand/arena.h - host memory for weights: one exact region, touched by several threads, registered
 * with the device in windows while it is being filled.
 *
 * Life: sth_arena_create(capacity) -> sth_arena_reserve + sth_arena_write (each unit, in order)
 *       -> sth_arena_finish -> ... -> sth_arena_release.
 *
 *   window 0 (registered as one piece)        window 1
 *   | unit 0 | unit 1 | unit 2      |pad to page| unit 3 | ...
 *   every unit starts at a multiple of 512 bytes and lies in one window, so that one copy can move it.
 *
 * Above the pinning limit the arena stays pageable (see sth_arena_pinned_bytes), and the runtime
 * stages its copies through a small pinned ring: slower, never wrong, never an error.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. In a forked child calls return
 * INVALID_STATE, and what ends something does nothing. */
#ifndef STAGEHAND_ARENA_H
#define STAGEHAND_ARENA_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_arena sth_arena;

/* `capacity`: bytes for all reservations, each rounded up to 512; padding is added on top.
 * Memory is reserved, not touched. Keeps the device alive. Allocates: address space, and host
 * memory for records. */
STH_API sth_status sth_arena_create(sth_device *device, uint64_t capacity, sth_arena **out_arena);

/* The same, and of its pages at most `pinned` bytes are registered: reservations that do not fit
 * into that stay pageable, and later ones that are small enough still fit. */
STH_API sth_status sth_arena_create_bounded(sth_device *device, uint64_t capacity, uint64_t pinned,
                                            sth_arena **out_arena);

/* The same, and none of it is ever registered: for bytes that are not copied from where they
 * are. */
STH_API sth_status sth_arena_create_pageable(sth_device *device, uint64_t capacity,
                                             sth_arena **out_arena);

/* Counted ownership: create returns one reference, and only who has one may retain. Memory that
 * no range holds goes with the last one.
 * Threads: any. Blocks: the last release waits for registration under way. NULL is fine. */
STH_API void sth_arena_retain(sth_arena *arena);
STH_API void sth_arena_release(sth_arena *arena);

/* Counted use of a reservation: `address` lies in it. Behind the arena's last release the memory
 * of a window is given back to the system with its last range, and a range that is left keeps its
 * window, pinned as it was. retain_range needs a reference of the arena, release_range needs none.
 * Threads: any. Blocks: release_range may unpin a window. NULL is fine. */
STH_API void sth_arena_retain_range(sth_arena *arena, const void *address);
STH_API void sth_arena_release_range(sth_arena *arena, const void *address);

/* Takes the next `bytes`; *out_address is 512-byte aligned host memory. OUT_OF_HOST_MEMORY past
 * capacity, INVALID_STATE after finish. Threads: one at a time. */
STH_API sth_status sth_arena_reserve(sth_arena *arena, uint64_t bytes, void **out_address);

/* Copies into reserved memory with several threads, which it starts and ends. Threads: one at a
 * time. Blocks: until copied. */
STH_API sth_status sth_arena_write(sth_arena *arena, void *destination, const void *source,
                                   uint64_t bytes);

/* No more reservations: the rest is registered too. Blocks: until all registration has ended.
 * Returns OK also when memory stayed pageable; sth_arena_pin_error says why. Threads: one at a
 * time. */
STH_API sth_status sth_arena_finish(sth_arena *arena);

/* Threads: any, but not while another thread reserves. */
STH_API uint64_t sth_arena_bytes(const sth_arena *arena);        /* reserved so far */
STH_API uint64_t sth_arena_pinned_bytes(const sth_arena *arena); /* registered so far */
STH_API const char *sth_arena_pin_error(const sth_arena *arena); /* "" where nothing failed */
/* Device address by which kernels read `host` in place; 0 where they cannot.
 * Threads: any, after sth_arena_finish. */
STH_API sth_devptr sth_arena_device_alias(const sth_arena *arena, const void *host);

#ifdef __cplusplus
}
#endif
#endif
