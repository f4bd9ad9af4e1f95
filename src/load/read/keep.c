/* The share of file-backed units that stays in host memory (options.ram_budget). Chosen once, at seal, from what the
 * first plan does not keep on the device, spread evenly over the order; filled by the first reads of the units, which
 * happen anyhow; pinned in the background. A unit whose image is full is read from there, and copied from there as soon
 * as that memory is pinned. A failure to get memory keeps fewer units and is no error.
 *
 * An image's chunks: EMPTY -> FILLING (claimed by the reader that has just read it) -> FULL. Lock: rt->lock for the
 * states; not held while a chunk is copied, which nobody else writes then and nobody reads before all are FULL. */
#include "load/read/keep.h"

#include <string.h>

#include "base/invariant.h"
#include "base/memory.h"
#include "load/pieces.h"
#include "quant/segment.h"
#include "state/state.h"

enum { EMPTY, FILLING, FULL };

/* Of the image: what the unit's file holds, packed or not. */
static uint64_t image_bytes(const sthi_unit *u) { return u->segments ? u->packed_bytes : u->bytes; }

/* A packed unit is read in pieces of whole segments: a state for each segment, of which the first of a piece is
 * used. */
static uint64_t states_of(const sth_runtime *rt, const sthi_unit *u) {
    return u->segments ? u->segment_count : (u->bytes + rt->copies.chunk - 1) / rt->copies.chunk;
}

static uint64_t chunks_of(const sth_runtime *rt, const sthi_unit *u) {
    if (!u->segments) return states_of(rt, u);
    sthi_piece_of p;
    uint64_t count = 0;
    for (uint64_t begin = 0; begin < u->bytes; begin += p.bytes) {
        p = sthi_next_piece(rt, u, begin);
        count += p.segments > 0;
    }
    return count;
}

/* Residents come last: they are on the device, but another plan may stream them. What the host expands is not read
 * piece by piece. */
static bool may_keep(const sth_runtime *rt, const sthi_unit *u, bool residents) {
    return (u->checkpoint || u->store) && !u->kept.image && (!u->segments || rt->expand.on) && u->resident == residents;
}

static bool keep(sth_runtime *rt, sthi_unit *u) {
    void *image = NULL;
    STHI_INVARIANT(image_bytes(u) <= rt->options.ram_budget - rt->stats.ram_bytes);
    uint8_t *chunks = sthi_zalloc(states_of(rt, u), 1);
    if (!chunks || sthi_arena_reserve(rt->sources.kept_arena, image_bytes(u), &image) != STH_OK) {
        sthi_free(chunks);
        return false;
    }
    u->kept.image = image;
    u->kept.chunks = chunks;
    u->kept.left = chunks_of(rt, u);
    rt->stats.ram_bytes += image_bytes(u);
    return true;
}

/* By error diffusion, a unit each time its share of the budget has come together. */
static void spread(sth_runtime *rt, uint64_t budget, double share) {
    double owed = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!may_keep(rt, u, false)) continue;
        uint64_t bytes = image_bytes(u);
        owed += share * (double)bytes;
        if (owed < (double)bytes / 2 || bytes > budget - rt->stats.ram_bytes || !keep(rt, u)) continue;
        owed -= (double)bytes;
    }
}

/* Whatever still fits. */
static void fill(sth_runtime *rt, uint64_t budget, bool residents) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (may_keep(rt, u, residents) && image_bytes(u) <= budget - rt->stats.ram_bytes) (void)keep(rt, u);
    }
}

void sthi_keep_choose(sth_runtime *rt) {
    uint64_t budget = rt->options.ram_budget, total = 0, streamed = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        uint64_t bytes;
        if ((u->checkpoint || u->store) && sthi_round_up(image_bytes(u), STHI_ALIGN, &bytes)) total += bytes;
        if (may_keep(rt, u, false)) streamed += image_bytes(u);
    }
    if (!budget || !total) return;
    if (sthi_arena_create(rt->device, sthi_min_u64(budget, total), &rt->sources.kept_arena) != STH_OK) return;
    spread(rt, budget, budget < streamed ? (double)budget / (double)streamed : 1);
    fill(rt, budget, false);
    fill(rt, budget, true);
    sthi_arena_pin_rest(rt->sources.kept_arena);
}

/* The image is what the unit comes from now; without staging once it is pinned. */
static void promote(sth_runtime *rt, sthi_unit *u) {
    u->host = u->kept.image;
    u->host_bytes = image_bytes(u);
    u->in_ram = true;
    u->direct = sthi_arena_is_pinned(rt->sources.kept_arena, u->kept.image, image_bytes(u));
}

/* The state of the chunk that begins at `begin` of the image; NULL where none does. */
static uint8_t *state_at(const sth_runtime *rt, const sthi_unit *u, uint64_t begin) {
    if (!u->segments) return begin % rt->copies.chunk ? NULL : &u->kept.chunks[begin / rt->copies.chunk];
    uint32_t low = 0, high = u->segment_count;
    while (low < high) {
        uint64_t from, end;
        uint32_t middle = low + (high - low) / 2;
        sthi_segment_span(&u->segments[middle], &from, &end);
        if (from == begin) return &u->kept.chunks[middle];
        if (from < begin) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

void sthi_keep_chunk(sth_runtime *rt, sthi_unit *u, uint64_t begin, uint64_t bytes, const uint8_t *from) {
    uint8_t *state = u->kept.image && !u->in_ram && bytes ? state_at(rt, u, begin) : NULL;
    if (!state || *state != EMPTY) return;
    STHI_INVARIANT(u->kept.left && begin + bytes <= image_bytes(u));
    *state = FILLING;
    sthi_unlock(&rt->lock);
    memcpy(u->kept.image + begin, from, bytes);
    sthi_lock(&rt->lock);
    *state = FULL;
    if (!--u->kept.left) promote(rt, u);
}

void sthi_keep_settle(sth_runtime *rt) {
    for (uint32_t i = 0; rt->sources.kept_arena && i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        /* Only this: readers look at the rest of it without the lock. */
        if (!u->in_ram || u->direct) continue;
        u->direct = sthi_arena_is_pinned(rt->sources.kept_arena, u->kept.image, image_bytes(u));
    }
}

void sthi_keep_close(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!u->kept.image) continue;
        sthi_free(u->kept.chunks);
        u->kept.chunks = NULL;
        u->kept.image = NULL;
        u->host = NULL;
        u->in_ram = u->direct = false;
    }
    sthi_arena_release(rt->sources.kept_arena);
    rt->sources.kept_arena = NULL;
}
