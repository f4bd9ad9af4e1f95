/* One read: bytes of a unit's source into a slab, each kind of source in its way, and the rate that
 * all reads bring together. Lock held; dropped while reading. */
#include "load/read/read.h"

#include "base/invariant.h"
#include "load/read/from_store.h"
#include "load/read/keep.h"
#include "load/read/source.h"
#include "load/repack.h"
#include "state/state.h"
#include "store/store.h"
#include "telemetry/timeline.h"

enum { RATE_CHUNKS = 4 /* fewer say little about a rate */ };

/* Reads under way count as one: the rate is what they bring together. */
static void count_reads(sth_runtime *rt, int change) {
    int64_t now = rt->device->ops->now_ns(rt->device->self);
    if (rt->reads.under_way) rt->reads.ns += now - rt->reads.since;
    rt->reads.since = now;
    rt->reads.under_way = (uint32_t)((int)rt->reads.under_way + change);
}

/* What a recording calls such a read. */
static sthi_track track_of(const sth_runtime *rt, const sthi_unit *u, bool from_store) {
    if (from_store) return STHI_TRACK_READ;
    return u->segments && !rt->expand.on ? STHI_TRACK_DECODE : STHI_TRACK_STAGE;
}

sth_status sthi_read_slab(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, sth_slab slab,
                          uint32_t *out_shift) {
    sthi_unit *u = &rt->units[unit];
    uint32_t master = u->flags & STH_UNIT_WRITABLE ? 1 : 0;
    bool whole = !u->in_ram && (!u->segments || rt->expand.on); /* as it is at its source */
    bool from_file = u->checkpoint && whole, from_store = u->store && whole;
    sth_store *store = NULL; /* which is told what will be read after this */
    uint32_t next = 0;
    STHI_INVARIANT(bytes <= sthi_pool_slab_bytes(rt->slabs.pool));
    if (u->master) STHI_TRY(sthi_repack(rt, unit));
    sthi_fetcher *fetcher = from_file ? sthi_fetcher_take(rt) : NULL;
    if (from_file && !fetcher) return sthi_no_memory(u->name, "reading unit '%s'", u->name);
    rt->reads.masters += master;
    rt->reads.images++;
    count_reads(rt, 1);
    if (from_store) (void)sthi_store_next(rt, unit, &store, &next);
    sthi_unlock(&rt->lock);
    sthi_track track = track_of(rt, u, from_file || from_store);
    sthi_mark begun = sthi_timeline_mark(sthi_track_text(track), u->name);
    uint8_t *to = sthi_pool_slab_address(rt->slabs.pool, slab);
    if (store) sthi_store_expect(store, next);
    *out_shift = 0;
    sth_status rc = from_store ? sthi_store_chunk(u, begin, bytes, to)
                               : sthi_read_source(rt, unit, fetcher, begin, bytes, to, out_shift);
    sthi_timeline_since(begun, track, rt->name, u->name, bytes);
    sthi_lock(&rt->lock);
    count_reads(rt, -1);
    if (rc == STH_OK && (from_file || from_store)) sthi_keep_chunk(rt, u, begin, bytes, to + *out_shift);
    if (fetcher) sthi_fetcher_give(rt, fetcher);
    rt->reads.bytes += rc == STH_OK ? bytes : 0;
    rt->reads.masters -= master;
    rt->reads.images--;
    if (!rt->reads.images || (master && !rt->reads.masters)) sthi_cond_broadcast(&rt->changed);
    return rc;
}

void sthi_read_rate_settle(sth_runtime *rt) {
    count_reads(rt, 0);
    if (rt->reads.ns > 0 && rt->reads.bytes >= RATE_CHUNKS * rt->copies.chunk) {
        double seen = (double)rt->reads.bytes / ((double)rt->reads.ns / 1e9);
        /* Where nobody waited, reading was not what set the pace. */
        if (seen > rt->reads.rate) rt->reads.rate = seen;
        else if (rt->current.host_waits > 0) rt->reads.rate = (rt->reads.rate + seen) / 2;
    }
    rt->reads.bytes = 0;
    rt->reads.ns = 0;
}
