/* The link's rate, measured with copies of the length that the runtime issues, once there is room
 * for them. Lock held. */
#include "runtime/measure.h"

#include "device/measure.h"
#include "load/copy.h"
#include "load/pieces.h"
#include "load/read/slabs.h"
#include "load/room.h"
#include "load/together.h"
#include "state/state.h"

enum { MEASURE_MAX = 128 << 20 };

/* Rate of copies in such pieces, as the runtime will issue them. */
static sth_status measure_copies(sth_runtime *rt, const uint8_t *from, uint64_t bytes, uint64_t piece, double *out) {
    sth_devptr place = 0;
    STHI_TRY(STHI_DEV(rt, alloc, bytes, &place));
    sth_event *begin = NULL, *end = NULL;
    int64_t best = INT64_MAX;
    sth_status rc = STHI_DEV(rt, event_create, true, &begin);
    if (rc == STH_OK) rc = STHI_DEV(rt, event_create, true, &end);
    const sthi_trial_copies copies = {rt->device, place, (uint8_t *)from, bytes, piece, false};
    for (int lap = 0; rc == STH_OK && lap < 3; lap++) {
        int64_t ns = 0;
        rc = sthi_time_copies(&copies, rt->copies.stream, begin, end, &ns);
        if (rc == STH_OK && ns > 0 && ns < best) best = ns;
    }
    if (begin) STHI_DEV(rt, event_destroy, begin);
    if (end) STHI_DEV(rt, event_destroy, end);
    STHI_DEV(rt, free, place, bytes);
    if (rc == STH_OK) *out = best == INT64_MAX ? 1e12 : (double)bytes / ((double)best / 1e9);
    return rc;
}

/* Everything is staged: the rate of one slab's copy. */
static sth_status measure_staged(sth_runtime *rt, uint64_t room) {
    sth_slab slab;
    STHI_TRY(sthi_slab_wait(rt, &slab));
    const uint8_t *from = sthi_pool_slab_address(rt->slabs.pool, slab);
    sth_status rc = measure_copies(rt, from, sthi_min_u64(rt->copies.chunk, room), rt->copies.chunk, &rt->link.rate);
    (void)sthi_pool_release(rt->slabs.pool, &slab, 1);
    return rc;
}

sth_status sthi_measure_link(sth_runtime *rt) {
    if (rt->link.rate <= 0) rt->link.rate = rt->options.link_bytes_per_s;
    if (rt->link.rate > 0) return STH_OK;
    const sthi_unit *largest = NULL;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (rt->units[i].direct &&
            (!largest || sthi_source_bytes(rt, &rt->units[i]) > sthi_source_bytes(rt, largest)))
            largest = &rt->units[i];
    uint64_t room = sthi_budget_for_units(rt);
    if (!largest) return measure_staged(rt, room);
    uint64_t whole = sthi_packed_on_link(rt, largest) ? sthi_source_bytes(rt, largest)
                                                      : sthi_bytes_in_a_row(rt, (uint32_t)(largest - rt->units), room);
    uint64_t bytes = sthi_min_u64(sthi_min_u64(whole, MEASURE_MAX), room);
    uint64_t piece = sthi_packed_on_link(rt, largest) ? rt->expand.stage_bytes : sthi_run_bytes(rt);
    return measure_copies(rt, largest->host, bytes, piece, &rt->link.rate);
}
