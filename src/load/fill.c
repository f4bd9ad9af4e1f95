/* A unit's bytes into its open slot: from its pinned image, or piece by piece through slabs.
 * Everything here only enqueues but for a staged unit's fill, which drops the lock while it reads:
 * meanwhile its slot is incomplete, which keeps others from the slot and from its extent. Lock
 * held. */
#include "load/fill.h"

#include "load/copy.h"
#include "load/expand.h"
#include "load/interval.h"
#include "load/pieces.h"
#include "load/read/jobs.h"
#include "load/read/read.h"
#include "load/read/slabs.h"
#include "load/slots.h"
#include "state/state.h"

sth_status sthi_piece_copy(sth_runtime *rt, int32_t slot, const sthi_piece_of *p, const uint8_t *from) {
    const sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    sth_devptr to = rt->places.extents[s->extent].base + s->offset + p->begin;
    if (sthi_packed_on_link(rt, u)) STHI_TRY(sthi_expand_piece(rt, slot, p, from));
    else STHI_TRY(sthi_copy_bytes(rt, s->unit, to, from, p->bytes, rt->sync[slot].filled_by));
    if (u->state == STH_UNIT_STATE_HOST_STAGED)
        STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_PREFETCHING, u->name));
    return STH_OK;
}

sth_status sthi_run_claim(sth_runtime *rt, int32_t slot, sthi_piece_of *p) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    STHI_TRY(sthi_claim_range(rt, slot, p->begin, p->bytes));
    if (sthi_packed_on_link(rt, u)) return STH_OK;
    uint64_t most = sthi_run_bytes(rt), end, next;
    for (; (end = p->begin + p->bytes) < u->bytes; p->bytes += next) {
        next = sthi_min_u64(rt->copies.chunk, u->bytes - end);
        if (p->bytes + next > most || !sthi_range_free(rt, slot, end, next)) break;
    }
    p->from_bytes = p->bytes;
    sthi_slot *s = &rt->places.slots[slot];
    s->claimed = sthi_max_u64(s->claimed, end); /* what is free needs no more */
    return STH_OK;
}

/* The whole unit from its pinned image. */
static sth_status copy_direct(sth_runtime *rt, int32_t slot) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    sthi_piece_of p;
    for (uint64_t begin = 0; begin < u->bytes; begin += p.bytes) {
        p = sthi_next_piece(rt, u, begin);
        STHI_TRY(sthi_run_claim(rt, slot, &p));
        STHI_TRY(sthi_piece_copy(rt, slot, &p, u->host + p.from));
    }
    return STH_OK;
}

sth_status sthi_slot_complete(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    sthi_interval_end(rt);
    STHI_TRY(STHI_DEV(rt, event_record, rt->sync[slot].ready, rt->sync[slot].filled_by));
    rt->sync[slot].copy_number = rt->graph.copy_number;
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_GPU_READY, u->name));
    s->complete = true;
    u->copies++;
    sthi_timed_step *t = rt->timing.now;
    if (t && t->copies && t->copy[t->copies - 1].unit == s->unit) t->copy[t->copies - 1].last = true;
    rt->stats.copies++;
    sthi_master_read(rt, s->unit, sthi_copies_on(rt, slot));
    return STH_OK;
}

/* Piece by piece: read into a slab with the lock dropped, copy, next. */
static sth_status copy_staged(sth_runtime *rt, int32_t slot) {
    uint32_t unit = rt->places.slots[slot].unit;
    uint64_t total = rt->units[unit].bytes;
    rt->current.host_waits++;
    sthi_piece_of p;
    for (uint64_t begin = 0; begin < total; begin += p.bytes) {
        p = sthi_next_piece(rt, &rt->units[unit], begin);
        sth_slab slab;
        STHI_TRY(sthi_slab_wait(rt, &slab));
        uint32_t shift = 0;
        sth_status rc = sthi_read_slab(rt, unit, p.from, p.from_bytes, slab, &shift);
        if (rc == STH_OK) rc = sthi_piece_copy(rt, slot, &p, sthi_slab_bytes(rt, slab, shift));
        if (rc != STH_OK) {
            (void)sthi_pool_release(rt->slabs.pool, &slab, 1);
            sthi_readers_wake(rt);
            return rc;
        }
        sthi_slab_fly(rt, slab, rt->sync[slot].filled_by);
    }
    return STH_OK;
}

sth_status sthi_slot_fill(sth_runtime *rt, int32_t slot) {
    sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    sthi_interval_end(rt);
    sth_status rc = sthi_claim_range(rt, slot, 0, u->bytes); /* all of it, before the lock is dropped */
    if (rc == STH_OK) rc = u->direct ? copy_direct(rt, slot) : copy_staged(rt, slot);
    if (rc == STH_OK) rc = sthi_slot_complete(rt, slot);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        sthi_abandon_slot(rt, slot);
        (void)sthi_error_restore(&why);
    }
    sthi_cond_broadcast(&rt->changed); /* other threads may wait for the same unit */
    return rc;
}
