/* The share of file-backed units that stays in host memory (options.ram_budget). Chosen once, at seal, from what the
 * first plan does not keep on the device, spread evenly over the order; filled by the first reads of the units, which
 * happen anyhow; pinned in the background. A unit whose image is full is read from there, and copied from there as soon
 * as that memory is pinned. A failure to get memory keeps fewer units and is no error.
 *
 * An image's chunks: EMPTY -> FILLING (claimed by the reader that has just read it) -> FULL. Lock: rt->lock for the
 * states; not held while a chunk is copied, which nobody else writes then and nobody reads before all are FULL. */
#include <string.h>

#include "base/memory.h"
#include "stream/engine.h"

enum { EMPTY, FILLING, FULL };

static uint64_t chunks_of(const sth_runtime *rt, const sthi_unit *u) { return (u->bytes + rt->chunk - 1) / rt->chunk; }

/* Residents come last: they are on the device, but another plan may stream them. */
static bool may_keep(const sthi_unit *u, bool residents) {
    return (u->checkpoint || u->store) && !u->kept && !u->segments && u->resident == residents;
}

static bool keep(sth_runtime *rt, sthi_unit *u) {
    void *image = NULL;
    uint8_t *chunks = sthi_zalloc(chunks_of(rt, u), 1);
    if (!chunks || sthi_arena_reserve(rt->kept_arena, u->bytes, &image) != STH_OK) {
        sthi_free(chunks);
        return false;
    }
    u->kept = image;
    u->kept_chunks = chunks;
    u->kept_left = chunks_of(rt, u);
    rt->stats.ram_bytes += u->bytes;
    return true;
}

/* By error diffusion, a unit each time its share of the budget has come together. */
static void spread(sth_runtime *rt, uint64_t budget, double share) {
    double owed = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!may_keep(u, false)) continue;
        owed += share * (double)u->bytes;
        if (owed < (double)u->bytes / 2 || u->bytes > budget - rt->stats.ram_bytes || !keep(rt, u)) continue;
        owed -= (double)u->bytes;
    }
}

/* Whatever still fits. */
static void fill(sth_runtime *rt, uint64_t budget, bool residents) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (may_keep(u, residents) && u->bytes <= budget - rt->stats.ram_bytes) (void)keep(rt, u);
    }
}

void sthi_keep_choose(sth_runtime *rt) {
    uint64_t budget = rt->options.ram_budget, total = 0, streamed = 0;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        if (rt->units[i].checkpoint || rt->units[i].store) total += rt->units[i].bytes;
        if (may_keep(&rt->units[i], false)) streamed += rt->units[i].bytes;
    }
    if (!budget || !total) return;
    if (sthi_arena_create(rt->device, sthi_min_u64(budget, total), &rt->kept_arena) != STH_OK) return;
    spread(rt, budget, budget < streamed ? (double)budget / (double)streamed : 1);
    fill(rt, budget, false);
    fill(rt, budget, true);
    sthi_arena_pin_rest(rt->kept_arena);
}

/* The image is what the unit comes from now; without staging once it is pinned. */
static void promote(sth_runtime *rt, sthi_unit *u) {
    u->host = u->kept;
    u->host_bytes = u->bytes;
    u->in_ram = true;
    u->direct = sthi_arena_is_pinned(rt->kept_arena, u->kept, u->bytes);
}

void sthi_keep_chunk(sth_runtime *rt, sthi_unit *u, uint64_t begin, uint64_t bytes, const uint8_t *from) {
    uint8_t *state = u->kept && !u->in_ram ? &u->kept_chunks[begin / rt->chunk] : NULL;
    if (!state || *state != EMPTY || begin % rt->chunk) return;
    *state = FILLING;
    sthi_unlock(&rt->lock);
    memcpy(u->kept + begin, from, bytes);
    sthi_lock(&rt->lock);
    *state = FULL;
    if (!--u->kept_left) promote(rt, u);
}

void sthi_keep_settle(sth_runtime *rt) {
    for (uint32_t i = 0; rt->kept_arena && i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        /* Only this: readers look at the rest of it without the lock. */
        if (u->in_ram && !u->direct) u->direct = sthi_arena_is_pinned(rt->kept_arena, u->kept, u->bytes);
    }
}

void sthi_keep_close(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!u->kept) continue;
        sthi_free(u->kept_chunks);
        u->kept_chunks = NULL;
        u->kept = NULL;
        u->host = NULL;
        u->in_ram = u->direct = false;
    }
    sthi_arena_release(rt->kept_arena);
    rt->kept_arena = NULL;
}
