/* Places: which bytes of device memory hold which unit. Pure bookkeeping over numbers; the shell moves
 * the bytes and keeps the events.
 *
 * Memory comes in extents. A slot is a range of one extent that holds (or is being filled with) one unit.
 * A slot under way claims its range from the front as its copy is issued; what is not claimed yet may
 * still belong to others. Invariant: claimed ranges of two slots never overlap. In a wrapping extent
 * (memory mapped twice in a row) a range may run past the end and go on at the beginning. */
#ifndef STHI_CORE_PLACES_H
#define STHI_CORE_PLACES_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/device.h"

enum { STHI_NO_SLOT = -1 };

typedef struct sthi_extent {
    sth_devptr base;
    uint64_t bytes;
    int32_t first_slot; /* head of the list through sthi_slot.next */
    uint32_t slots;     /* its length */
    bool wraps;         /* mapped twice */
    bool live;          /* record in use */
    bool closing;       /* no new slots: freed when the last lease in it ends */
} sthi_extent;

typedef struct sthi_slot {
    uint32_t unit;
    uint32_t extent;
    uint64_t offset, bytes, claimed;
    uint64_t generation;  /* differs for every use of this record */
    uint32_t leases;
    uint32_t uses_left;   /* planned uses still to come: prefetched, not to be taken */
    int32_t prev, next;   /* list of the extent */
    bool live;
    bool complete;        /* every byte of its copy is issued */
    bool resident;        /* at its home by plan */
    bool stale;           /* its host image changed since */
} sthi_slot;

typedef struct sthi_places {
    sthi_extent *extents;
    sthi_slot *slots;
    int32_t *free_slots;
    uint32_t extent_cap, slot_cap, free_count;
    uint32_t extent_end;   /* no record from here on was ever used */
    uint64_t generation;
} sthi_places;

sth_status sthi_places_init(sthi_places *p, uint32_t extent_cap, uint32_t slot_cap);
void sthi_places_fini(sthi_places *p);

/* -1 when all records are taken. */
int32_t sthi_places_add_extent(sthi_places *p, sth_devptr base, uint64_t bytes, bool wraps);
/* The extent must have no slots. */
void sthi_places_drop_extent(sthi_places *p, uint32_t extent);
uint64_t sthi_places_total(const sthi_places *p);

/* Opens a slot with nothing claimed; STHI_NO_SLOT when all records are taken. */
int32_t sthi_slot_open(sthi_places *p, uint32_t unit, uint32_t extent, uint64_t offset, uint64_t bytes);
void sthi_slot_close(sthi_places *p, int32_t slot);
static inline bool sthi_slot_is_open(const sthi_places *p, int32_t slot) {
    return slot >= 0 && (uint32_t)slot < p->slot_cap && p->slots[slot].live;
}

/* Next slot of `extent` after `after` (STHI_NO_SLOT to begin) whose claimed range touches
 * [offset, offset+bytes), other than `except`. */
int32_t sthi_places_touching(const sthi_places *p, uint32_t extent, uint64_t offset, uint64_t bytes,
                             int32_t except, int32_t after);

/* Whether [a, a+an) and [b, b+bn) of the extent share a byte. */
bool sthi_ranges_touch(const sthi_extent *e, uint64_t a, uint64_t an, uint64_t b, uint64_t bn);

/* Cost of taking a slot's memory: negative = not to be taken. */
typedef double (*sthi_slot_cost)(void *context, const sthi_slot *slot);
typedef struct sthi_place {
    uint32_t extent;
    uint64_t offset;
} sthi_place;
/* Cheapest place for `bytes`, never across an extent's end. False when there is none. */
bool sthi_places_choose(const sthi_places *p, uint64_t bytes, sthi_slot_cost cost, void *context,
                        sthi_place *out);
/* The same in one extent, if that is cheaper than *best: then *best and *out are set. *best: negative for none. */
void sthi_places_choose_in(const sthi_places *p, uint32_t extent, uint64_t bytes, sthi_slot_cost cost, void *context,
                           sthi_place *out, double *best);
/* True when all invariants hold; else *out_why says which is broken. */
bool sthi_places_check(const sthi_places *p, const char **out_why);
#endif
