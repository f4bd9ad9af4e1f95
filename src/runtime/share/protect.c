/* Who stays on the device: keeping, reservations, guests. Each call changes the runtime's record in
 * the device's account first, so that what it has stays, then brings it to the device where it is
 * not (arrive.c), and takes the record back when that fails. */
#include "runtime/share/protect.h"

#include "load/charge.h"
#include "load/room.h"
#include "runtime/drops.h"
#include "runtime/share/arrive.h"
#include "runtime/share/give.h"
#include "runtime/step.h"
#include "state/state.h"

sth_status sthi_runtime_keep_begin(sth_runtime *rt) {
    sthi_account_lock(rt);
    rt->share.member.keeps++;
    sthi_account_unlock(rt);
    sth_status rc = sthi_arrive(rt);
    if (rc != STH_OK) sthi_runtime_keep_end(rt);
    return rc;
}

void sthi_runtime_keep_end(sth_runtime *rt) {
    sthi_account_lock(rt);
    if (rt->share.member.keeps) rt->share.member.keeps--;
    sthi_account_unlock_changed(rt);
}

static void set_priority(sth_runtime *rt, sth_resident_priority priority) {
    sthi_account_lock(rt);
    rt->share.member.priority = priority;
    sthi_account_unlock_changed(rt);
}

sth_status sthi_runtime_reserve(sth_runtime *rt, sth_resident_priority priority) {
    sthi_account_lock(rt);
    sth_resident_priority before = rt->share.member.priority;
    sthi_account_unlock(rt);
    set_priority(rt, priority);
    sth_status rc = priority == STH_PRIORITY_NONE ? STH_OK : sthi_arrive(rt);
    if (rc != STH_OK) set_priority(rt, before);
    return rc;
}

void sthi_runtime_release(sth_runtime *rt) { set_priority(rt, STH_PRIORITY_NONE); }

sth_status sthi_runtime_guest_begin(sth_runtime *rt) {
    sthi_account_lock(rt);
    rt->share.member.guests++;
    sthi_account_unlock(rt);
    sth_status rc = sthi_arrive(rt);
    if (rc != STH_OK) {
        sthi_account_lock(rt);
        if (rt->share.member.guests) rt->share.member.guests--;
        sthi_account_unlock_changed(rt);
    }
    return rc;
}

static sth_status leave_device(sth_runtime *rt, uint64_t *out_left) {
    sthi_drain_drops(rt);
    if (rt->shut) return STH_OK;
    if (sthi_stepping(rt) || rt->callers)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is in use: a guest leaves between steps",
                         rt->name);
    sth_status rc = rt->step.open ? sthi_step_end_locked(rt) : STH_OK;
    if (rt->sealed && (!rt->share.parked || rt->share.lent)) sthi_park(rt);
    *out_left = sthi_held_bytes(rt);
    return rc;
}

sth_status sthi_runtime_guest_end(sth_runtime *rt, uint64_t *out_left) {
    uint64_t left = 0;
    sthi_account_lock(rt);
    if (rt->share.member.guests) rt->share.member.guests--;
    bool goes = sthi_account_shield(&rt->share.member) == STHI_SHIELD_NONE;
    sthi_account_unlock_changed(rt);
    sthi_lock(&rt->lock);
    while (rt->share.arriving && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    sth_status rc = goes ? leave_device(rt, &left) : STH_OK;
    sthi_unlock(&rt->lock);
    if (out_left) *out_left = left;
    return rc;
}
