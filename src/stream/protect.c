/* Who stays on the device: keeping, reservations, guests, the bytes that the caller fills itself, and the cap.
 *
 * Each call changes the runtime's record in the device's account first, so that what it has stays, then brings it
 * to the device where it is not (residency.c), and takes the record back when that fails. */
#include "stream/engine.h"

/* ---- protection */

/* Protects first, so that what it has stays, then brings it here. Undoes the protection when that fails. */
sth_status sthi_runtime_keep_begin(sth_runtime *rt) {
    sthi_account_lock(rt);
    rt->member.keeps++;
    sthi_account_unlock(rt);
    sth_status rc = sthi_arrive(rt);
    if (rc != STH_OK) sthi_runtime_keep_end(rt);
    return rc;
}

void sthi_runtime_keep_end(sth_runtime *rt) {
    sthi_account_lock(rt);
    if (rt->member.keeps) rt->member.keeps--;
    sthi_account_unlock_changed(rt);
}

static void set_priority(sth_runtime *rt, sth_resident_priority priority) {
    sthi_account_lock(rt);
    rt->member.priority = priority;
    sthi_account_unlock_changed(rt);
}

sth_status sthi_runtime_reserve(sth_runtime *rt, sth_resident_priority priority) {
    sthi_account_lock(rt);
    sth_resident_priority before = rt->member.priority;
    sthi_account_unlock(rt);
    set_priority(rt, priority);
    sth_status rc = priority == STH_PRIORITY_NONE ? STH_OK : sthi_arrive(rt);
    if (rc != STH_OK) set_priority(rt, before);
    return rc;
}

void sthi_runtime_release(sth_runtime *rt) { set_priority(rt, STH_PRIORITY_NONE); }

sth_status sthi_runtime_guest_begin(sth_runtime *rt) {
    sthi_account_lock(rt);
    rt->member.guests++;
    sthi_account_unlock(rt);
    sth_status rc = sthi_arrive(rt);
    if (rc != STH_OK) {
        sthi_account_lock(rt);
        if (rt->member.guests) rt->member.guests--;
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
    sth_status rc = rt->step_open ? sthi_step_end_locked(rt) : STH_OK;
    if (rt->sealed && !rt->parked) sthi_park(rt);
    *out_left = sthi_held_bytes(rt);
    return rc;
}

sth_status sthi_runtime_guest_end(sth_runtime *rt, uint64_t *out_left) {
    uint64_t left = 0;
    sthi_account_lock(rt);
    if (rt->member.guests) rt->member.guests--;
    bool goes = sthi_account_shield(&rt->member) == STHI_SHIELD_NONE;
    sthi_account_unlock_changed(rt);
    sthi_lock(&rt->lock);
    while (rt->arriving && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    sth_status rc = goes ? leave_device(rt, &left) : STH_OK;
    sthi_unlock(&rt->lock);
    if (out_left) *out_left = left;
    return rc;
}

/* ---- `reserved`, the cap */

static sth_status check_reserved(sth_runtime *rt, uint64_t bytes, uint64_t budget) {
    if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    if (sthi_stepping(rt))
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is inside a step: `reserved` changes "
                         "between steps", rt->name);
    uint64_t least = rt->sealed ? sthi_smallest_budget(rt) - rt->options.reserved : 1;
    if (bytes >= budget || least > budget - bytes)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "a budget of %llu bytes is too small for %llu that the caller fills and units of %llu",
                         (unsigned long long)budget, (unsigned long long)bytes, (unsigned long long)least);
    return STH_OK;
}

/* Only a runtime without places may change it by much: others plan anew at the end of their step. Lock held. */
static void put_reserved(sth_runtime *rt, uint64_t bytes) {
    uint64_t old = rt->options.reserved;
    sthi_account_lock(rt);
    sthi_account *a = &rt->device->account;
    if (bytes > old) (void)sthi_account_take(a, &rt->member, bytes - old);
    else if (old > bytes) sthi_account_give(a, &rt->member, old - bytes);
    rt->member.fixed = bytes;
    sthi_account_unlock_changed(rt);
    rt->options.reserved = bytes;
    sthi_set_watermarks(rt);
    if (rt->sealed && !rt->parked) rt->replan = true;
}

sth_status sthi_runtime_set_reserved(sth_runtime *rt, uint64_t bytes) {
    return sthi_runtime_set_reserved_within(rt, bytes, 0);
}

sth_status sthi_runtime_set_reserved_within(sth_runtime *rt, uint64_t bytes, uint64_t budget) {
    sthi_lock(&rt->lock);
    if (!budget) budget = rt->options.budget;
    sth_status rc = check_reserved(rt, bytes, budget);
    uint64_t old = rt->options.reserved, least = 0;
    if (rc == STH_OK && bytes > old) {
        least = sthi_held_bytes(rt) + bytes;
        if (rt->sealed && rt->parked) /* it comes, and asks others once */
            least = sthi_max_u64(least, sthi_smallest_budget(rt) - old + bytes);
    }
    sthi_unlock(&rt->lock);
    if (rc != STH_OK) return rc;
    STHI_TRY(sthi_request_room(rt, least, least));
    sthi_lock(&rt->lock);
    rt->options.budget = budget;
    put_reserved(rt, bytes);
    sthi_settle(rt);
    sthi_unlock(&rt->lock);
    return STH_OK;
}

sth_status sthi_residency_set_cap(sth_device *device, uint64_t bytes) {
    uint64_t cap = bytes ? bytes : device->default_cap;
    sthi_lock(&device->account_lock);
    uint64_t charge = device->account.charge;
    if (cap >= charge) device->account.cap = cap;
    sthi_cond_broadcast(&device->account_changed);
    sthi_unlock(&device->account_lock);
    if (cap >= charge) return STH_OK;
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "cap",
                     "a cap of %llu bytes is below the %llu that the models on the device occupy now",
                     (unsigned long long)cap, (unsigned long long)charge);
}

void sthi_residency_get(sth_device *device, sth_residency_info *out) {
    sthi_lock(&device->account_lock);
    sthi_account_info(&device->account, out);
    sthi_unlock(&device->account_lock);
}

/* ---- a budget that is found */

void sthi_residency_find_budget(sth_device *device, const sth_memory_reading *reading, sth_budget_verdict *out) {
    sthi_lock(&device->account_lock);
    sthi_account *a = &device->account;
    uint64_t fixed = sthi_account_fixed(a);
    sthi_finder_observe(&device->finder, reading, a->inside + fixed, a->inside_peak + fixed, a->outside, out);
    a->inside_peak = a->inside;
    sthi_finder_share(&device->finder, reading, out);
    /* What is occupied above the cap goes when whoever has it plans for less. */
    if (!reading->limit) a->cap = sthi_max_u64(sthi_min_u64(out->cap, device->default_cap), a->charge);
    sthi_cond_broadcast(&device->account_changed);
    sthi_unlock(&device->account_lock);
}

void sthi_residency_forget(sth_device *device) {
    sthi_lock(&device->account_lock);
    device->finder = (sthi_finder){0};
    sthi_unlock(&device->account_lock);
}
