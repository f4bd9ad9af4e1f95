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
 * Processes of one node that hold the same weights may have them in common (sth_arena_create_common
 * in place of create, sth_arena_place in place of reserve and write).
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

/* An arena whose weights other processes of this user on this machine may hold, too: what several
 * hold is in memory once. Weights that only one holds are there as well. `most`: reservations, each
 * of which takes whole pages; sth_arena_place makes them. Its addresses are a private view: a write
 * there copies the page and is seen by this process alone, and not by devices (give the unit another
 * image). Devices read memory that nobody writes. Other processes find the weights from
 * sth_arena_finish on, until the last one that uses them ends, in whatever way. UNSUPPORTED where
 * this system has no such memory. */
STH_API sth_status sth_arena_create_common(sth_device *device, uint64_t capacity, uint64_t pinned,
                                           uint32_t most, sth_arena **out_arena);

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

/* A piece of a reservation: where its bytes go, from its begin on, and where they are now. */
typedef struct sth_arena_part {
    uint64_t offset;
    const void *source;
    uint64_t bytes;
} sth_arena_part;

/* The print of a reservation of `bytes` that holds these parts, in the order of their offsets:
 * XXH3-128 of all bytes and of where they lie. Threads: any. Blocks: reads them with several
 * threads, which it starts and ends. */
STH_API sth_status sth_arena_print(const sth_arena_part *parts, uint32_t count, uint64_t bytes,
                                   uint64_t out_print[2]);

/* Takes the next `bytes` of an arena that was made by create_common, and fills them: by memory of
 * another arena that holds equal bytes, or else by copies of the parts. print: as by sth_arena_print
 * of these parts; NULL: found out here. Bytes between parts are 0. The first call waits until no
 * other process of this user is between its first call and sth_arena_finish, but at most two
 * minutes; behind them the arena keeps to itself. OUT_OF_HOST_MEMORY past the capacity,
 * INVALID_STATE after finish. Threads: one at a time. Blocks. */
STH_API sth_status sth_arena_place(sth_arena *arena, uint64_t bytes, const sth_arena_part *parts,
                                   uint32_t count, const uint64_t print[2], void **out_address);

/* Nobody uses the reservation at `address` any more, of so many bytes: no tensor over it is left,
 * and no unit has it as its image. Pages of its own that this process has there are given back,
 * and those in common with the last arena that uses them. Nothing in an arena that has none in
 * common. Threads: one at a time for one reservation. */
STH_API void sth_arena_leave(sth_arena *arena, const void *address, uint64_t bytes);

/* Bytes of reservations that another arena held already. */
STH_API uint64_t sth_arena_found_bytes(const sth_arena *arena);
/* The memory that devices read for an address of the arena's: the same, but where create_common
 * made it. Not to be written. NULL: no address of the arena's. */
STH_API const void *sth_arena_image(const sth_arena *arena, const void *address);

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
