/* A unit that is packed, and whose master was written: its image is encoded again before it is
 * copied or read. LOSSLESS values that do not fit their segments any more make the unit plain, until
 * it is written again and fits: its pieces stay as they are, and are copied from the master. Lock
 * held. */
#include "load/repack.h"

#include "load/fingerprint.h"
#include "load/names.h"
#include "quant/segment.h"
#include "state/state.h"

/* A captured graph has the copies of one of both. */
static void set_plain(sth_runtime *rt, sthi_unit *u, bool plain) {
    if (u->encoded.plain != plain) rt->graph.edition++;
    u->encoded.plain = plain;
}

sth_status sthi_repack(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    uint64_t now = u->encoded.stale ? 0 : sthi_fingerprint_master(u);
    if (!u->master || (!u->encoded.stale && (!now || now == u->encoded.print))) return STH_OK;
    /* Copies of the packed image may be under way. */
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.stream));
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream));
    if (u->stays.at) rt->graph.edition++;
    u->stays.here = 0;
    u->encoded.stale = false;
    u->encoded.print = sthi_fingerprint_place(u, u->master, u->bytes);
    void *packed = (void *)(uintptr_t)u->host;
    uint32_t failed = 0;
    sth_status rc = sthi_segments_encode(u->segments, u->segment_count, u->master, packed, 0, NULL, &failed);
    bool too_large = rc == STH_UNSUPPORTED && u->segments[failed].encoding == STH_TRANSFER_LOSSLESS;
    if (rc == STH_OK || too_large) {
        set_plain(rt, u, too_large);
        return STH_OK;
    }
    u->encoded.stale = true;
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(why.status, why.domain, why.native, u->name,
                     "unit '%.160s', tensor '%.160s' was written and cannot be encoded again: %s", u->name,
                     sthi_tensor_name(u, u->segments[failed].place_offset), why.message);
}

sth_status sthi_fingerprint_take(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    u->writes.changed = false;
    if (u->master) STHI_TRY(sthi_repack(rt, unit));
    if (!sthi_watched(u)) return STH_OK;
    u->fingerprint = sthi_fingerprint_master(u);
    u->seen_epoch = rt->step.epoch;
    return STH_OK;
}
