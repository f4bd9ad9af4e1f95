/* Stages: device memory in which packed bytes arrive, and whether the device expands them at all.
 * Lock held. */
#include "load/stages.h"

#include <stdio.h>
#include <string.h>

#include "device/four_bits.h"
#include "load/charge.h"
#include "load/expand_rate.h"
#include "load/memory.h"
#include "load/pieces.h"
#include "load/room.h"
#include "quant/segment.h"
#include "state/state.h"

enum { SLACK = 3 * 4096 }; /* what direct reads need in a slab beside the bytes */

/* out_needs: what of the device. */
static sth_status largest_segment(sth_runtime *rt, uint64_t *out, uint32_t *out_needs) {
    *out = 0;
    *out_needs = STH_CAP_EXPAND;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        for (uint32_t k = 0; k < rt->units[i].segment_count; k++) {
            uint64_t begin, end;
            sthi_segment_span(&rt->units[i].segments[k], &begin, &end);
            *out = sthi_max_u64(*out, end - begin);
            if (sthi_is_four_bits((int)rt->units[i].segments[k].encoding)) *out_needs |= STH_CAP_EXPAND_FILES;
            if (rt->units[i].segments[k].encoding == STH_TRANSFER_LOSSLESS) *out_needs |= STH_CAP_EXPAND_LOSSLESS;
        }
    return sthi_round_up(*out, STHI_ALIGN, out) ? STH_OK : STH_INVALID_ARGUMENT;
}

/* Padding behind a piece stays where it is. */
static void count_pieces(const sth_runtime *rt, sthi_unit *u) {
    sthi_piece_of p;
    for (uint64_t begin = 0; begin < u->bytes; begin += p.bytes) {
        p = sthi_next_piece(rt, u, begin);
        u->wire_bytes += p.from_bytes;
    }
}

/* Whether the device's kernels are ready. */
static sth_status kernels_ready(const sth_runtime *rt, uint32_t needs) {
    const sth_backend_ops *ops = rt->device->ops;
    if ((rt->device->capabilities & needs) == needs) return ops->expand_ready(rt->device->self);
    uint32_t lacks = needs & ~rt->device->capabilities;
    const char *what = lacks & STH_CAP_EXPAND_FILES ? " for the 4 bits of files" : " for lossless transfer";
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, "expand", "%s has no kernels%s", ops->backend,
                     lacks & STH_CAP_EXPAND ? "" : what);
}

sth_status sthi_expand_open(sth_runtime *rt) {
    uint64_t bytes;
    uint32_t needs;
    STHI_TRY(largest_segment(rt, &bytes, &needs));
    if (!bytes) return STH_OK;
    if (rt->options.pool && bytes + SLACK > sthi_pool_slab_bytes(rt->options.pool)) {
        snprintf(rt->expand.error, sizeof rt->expand.error,
                 "the pool's slabs are smaller than %llu bytes, the largest segment",
                 (unsigned long long)(bytes + SLACK));
        return STH_OK;
    }
    if (kernels_ready(rt, needs) != STH_OK) { /* the host expands */
        strncpy(rt->expand.error, sthi_error_last()->message, sizeof rt->expand.error - 1);
        return STH_OK;
    }
    STHI_TRY(STHI_DEV(rt, stream_create, rt->options.copy_priority, &rt->expand.stream));
    rt->expand.count = rt->options.stages;
    for (uint32_t i = 0; i < rt->expand.count; i++) {
        STHI_TRY(STHI_DEV(rt, event_create, false, &rt->expand.stage[i].full));
        STHI_TRY(STHI_DEV(rt, event_create, false, &rt->expand.stage[i].emptied));
    }
    rt->expand.stage_bytes = bytes;
    rt->expand.on = true;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (rt->units[i].segment_count) count_pieces(rt, &rt->units[i]);
    return STH_OK;
}

sth_status sthi_stages_alloc(sth_runtime *rt) {
    if (rt->expand.stages || !rt->expand.on) return STH_OK;
    STHI_TRY(sthi_charge(rt, sthi_stages_bytes(rt)));
    sth_status rc = sthi_place_alloc(rt, sthi_stages_bytes(rt), &rt->expand.stages);
    if (rc != STH_OK) {
        sthi_uncharge(rt, sthi_stages_bytes(rt));
        rt->expand.stages = 0;
        return rc;
    }
    for (uint32_t i = 0; i < rt->expand.count; i++) rt->expand.stage[i].used = false;
    rt->extents.peak = sthi_max_u64(rt->extents.peak, sthi_held_bytes(rt));
    return STH_OK;
}

void sthi_stages_free(sth_runtime *rt) {
    if (!rt->expand.stages) return;
    const sth_stream streams[] = {rt->copies.stream, rt->copies.demand_stream, rt->expand.stream};
    for (int i = 0; i < 3; i++)
        if (streams[i]) (void)STHI_DEV(rt, stream_synchronize, streams[i]);
    sthi_place_free(rt, rt->expand.stages, sthi_stages_bytes(rt));
    sthi_uncharge(rt, sthi_stages_bytes(rt));
    rt->expand.stages = 0;
}

void sthi_expand_close(sth_runtime *rt) {
    sthi_expand_rate_close(rt);
    if (rt->expand.stream) STHI_DEV(rt, stream_destroy, rt->expand.stream);
    rt->expand.stream = 0;
    for (uint32_t i = 0; i < STHI_MOST_STAGES; i++) {
        if (rt->expand.stage[i].full) STHI_DEV(rt, event_destroy, rt->expand.stage[i].full);
        if (rt->expand.stage[i].emptied) STHI_DEV(rt, event_destroy, rt->expand.stage[i].emptied);
        rt->expand.stage[i] = (sthi_stage){0};
    }
}
