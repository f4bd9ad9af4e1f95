/* Host images that were written: the copy on the device is stale from then on.
 *
 * Mostly it is made anew when it is used next. Where nobody writes until then, and the place is one that the
 * plan keeps for the next step, it is made anew at once (sthi_unit_refresh): the link is idle while an
 * optimizer works, and the next forward then brings in only what has no place. Only between passes (a step
 * that is paused, or none), when no copy of a writable image is queued or under way, and only from pinned
 * memory as it is, so that the wait is one copy's. It does not decide who may write. Lock held throughout. */
#include "stream/engine.h"

static sth_status check_unit(const sth_runtime *rt, uint32_t unit) {
    if (unit < rt->unit_count) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "there is no unit %u", unit);
}

static void mark_written(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    sthi_request *r = rt->sealed ? sthi_queued(rt, unit) : NULL;
    if (r && r->slot != STHI_NO_SLOT) { /* half of it may be old bytes */
        sthi_cancel_queue(rt);
        sthi_program_skip(rt);
    } else if (r && r->staged) {
        sthi_reads_rewind(rt);
    }
    if (u->slot != STHI_NO_SLOT) rt->places.slots[u->slot].stale = true;
    if (u->master) u->repack = true;
}

sth_status sthi_unit_mark_written(sth_runtime *rt, uint32_t unit) {
    STHI_TRY(check_unit(rt, unit));
    sthi_lock(&rt->lock);
    mark_written(rt, unit);
    sthi_unlock(&rt->lock);
    return STH_OK;
}

static bool may_copy(const sth_runtime *rt) {
    bool between = !rt->step_open || rt->step_paused;
    return rt->sealed && !rt->shut && between && rt->program_on && rt->graph == STHI_GRAPH_IDLE;
}

/* Its place is the plan's for the next step, and its copy can be made without a wait for others. */
static bool stays(sth_runtime *rt, const sthi_unit *u) {
    sthi_drain_drops(rt);
    if (u->slot == STHI_NO_SLOT || !u->direct || u->segments) return false;
    const sthi_slot *s = &rt->places.slots[u->slot];
    return !sthi_slot_busy(s) && (s->resident || s->uses_left);
}

/* What fails leaves the unit stale, or not on the device: its next use makes the copy. */
static sth_status copy_now(sth_runtime *rt, uint32_t unit) {
    int32_t slot = rt->units[unit].slot;
    sth_status rc = sthi_refresh(rt, slot);
    if (rc != STH_OK) {
        rt->resident_next = 0; /* the place may be empty now */
        return rc;
    }
    if (STHI_DEV(rt, event_synchronize, rt->sync[slot].ready) == STH_OK) return STH_OK;
    return STHI_DEV(rt, stream_synchronize, rt->sync[slot].filled_by);
}

sth_status sthi_unit_refresh(sth_runtime *rt, uint32_t unit) {
    STHI_TRY(check_unit(rt, unit));
    sthi_lock(&rt->lock);
    mark_written(rt, unit);
    sth_status rc = may_copy(rt) && stays(rt, &rt->units[unit]) ? copy_now(rt, unit) : STH_OK;
    sthi_unlock(&rt->lock);
    return rc;
}
