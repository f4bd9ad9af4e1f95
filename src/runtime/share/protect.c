/* Who stays on the device: keeping, reservations, guests, the bytes that the caller fills itself, and the cap.
 *
 * Each call changes the runtime's record in the device's account first, so that what it has stays, then brings it
 * to the device where it is not (residency.c), and takes the record back when that fails. */
#include "runtime/share/protect.h"

#include "load/charge.h"
#include "load/room.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/share/arrive.h"
#include "runtime/step.h"
#include "state/state.h"

/* ---- protection */

/* Protects first, so that what it has stays, then brings it here. Undoes the protection when that fails. */
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
    if (rt->sealed && !rt->share.parked) sthi_park(rt);
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

/* ---- `reserved`, the cap */

static sth_status check_reserved(sth_runtime *rt, uint64_t bytes) {
    if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    if (sthi_stepping(rt))
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is inside a step: `reserved` changes "
                         "between steps", rt->name);
    uint64_t budget = rt->options.budget, least = rt->sealed ? sthi_least_to_plan(rt) - rt->options.reserved : 1;
    if (bytes >= budget || least > budget - bytes)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "a budget of %llu bytes is too small for %llu that the caller fills and units of %llu",
                         (unsigned long long)budget, (unsigned long long)bytes, (unsigned long long)least);
    return STH_OK;
}

/* Lock held. Places stay as they are: they are planned anew at the end of a step. */
static void put_reserved(sth_runtime *rt, uint64_t bytes) {
    uint64_t places = rt->share.limit > rt->options.reserved ? rt->share.limit - rt->options.reserved : 0;
    rt->options.reserved = bytes;
    rt->share.limit = places + bytes;
    if (rt->sealed && !rt->share.parked) rt->planned.again = true;
}

static void give_reserved(sth_runtime *rt, uint64_t bytes) {
    sthi_account_lock(rt);
    sthi_account_give(&rt->device->account, &rt->share.member, rt->options.reserved - bytes);
    rt->share.member.fixed = bytes;
    sthi_account_unlock_changed(rt);
    put_reserved(rt, bytes);
}

/* Room for the runtime with `bytes` reserved: `want` with its places as they are, `least` where those can change. A
 * parked one comes next, and asks others once for both. Lock held. */
static void room_with(sth_runtime *rt, uint64_t bytes, uint64_t *out_least, uint64_t *out_want) {
    *out_least = *out_want = sthi_held_bytes(rt) + bytes;
    if (!rt->sealed) return;
    uint64_t smallest = sthi_least_to_plan(rt) - rt->options.reserved + bytes;
    if (rt->share.parked) {
        *out_least = *out_want = sthi_max_u64(*out_want, smallest);
    } else if (sthi_idle(rt, 0)) {
        *out_want = sthi_min_u64(*out_want, rt->options.budget);
        *out_least = sthi_min_u64(*out_want, smallest);
    }
}

/* Bytes by which places have to shrink for `more` reserved ones: above the budget, or above what the account has. */
static uint64_t too_much(sth_runtime *rt, uint64_t more) {
    sthi_account_lock(rt);
    uint64_t can = rt->share.member.claim + sthi_account_free(&rt->device->account);
    sthi_account_unlock(rt);
    uint64_t after = sthi_held_bytes(rt) + rt->options.reserved + more;
    uint64_t over = after > rt->options.budget ? after - rt->options.budget : 0;
    return sthi_max_u64(over, more > can ? more - can : 0);
}

/* Places stay as they are while somebody uses them: then both have to fit the budget. Lock held. */
static sth_status check_places(sth_runtime *rt, uint64_t bytes) {
    uint64_t held = sthi_held_bytes(rt), budget = rt->options.budget;
    bool stay = bytes > rt->options.reserved && rt->sealed && !rt->share.parked && !sthi_idle(rt, 0);
    if (!stay || (held <= budget && bytes <= budget - held)) return STH_OK;
    return sthi_fail(
        STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
        "a budget of %llu bytes is too small for %llu that the caller fills and places of %llu, which stay as "
        "they are while '%s' is in use: tensors over %llu bytes of its weights are held. Let them go first",
        (unsigned long long)budget, (unsigned long long)bytes, (unsigned long long)held, rt->name,
        (unsigned long long)rt->leases.bytes);
}

/* From what is held for the runtime. False: it has changed meanwhile, or places that do not give way took it. Lock
 * held. */
static bool take_reserved(sth_runtime *rt, uint64_t bytes) {
    if (rt->shut || sthi_stepping(rt) || bytes < rt->options.reserved || check_places(rt, bytes) != STH_OK)
        return false;
    uint64_t more = bytes - rt->options.reserved, much = too_much(rt, more);
    if (much && rt->sealed && !rt->share.parked) (void)sthi_give_way(rt, much);
    sthi_account_lock(rt);
    bool taken = sthi_account_take(&rt->device->account, &rt->share.member, more);
    if (taken) rt->share.member.fixed = bytes;
    sthi_account_unlock(rt);
    if (taken) put_reserved(rt, bytes);
    return taken;
}

/* As `check_places`; other threads get a moment to let go. Lock held; dropped meanwhile. */
static sth_status wait_for_places(sth_runtime *rt, uint64_t bytes, int64_t *until) {
    for (;;) {
        sthi_drain_drops(rt);
        sth_status rc = check_places(rt, bytes);
        if (rc == STH_OK || rt->shut || !sthi_wait_inside(rt, until)) return rc;
    }
}

/* Lock held. What there is to ask for, or with fewer bytes nothing more. */
static sth_status prepare_reserved(sth_runtime *rt, uint64_t bytes, int64_t *until, uint64_t *out_least,
                                   uint64_t *out_want, bool *out_grows) {
    STHI_TRY(check_reserved(rt, bytes));
    STHI_TRY(wait_for_places(rt, bytes, until));
    STHI_TRY(check_reserved(rt, bytes)); /* somebody may have begun a step */
    *out_grows = bytes > rt->options.reserved;
    if (*out_grows) room_with(rt, bytes, out_least, out_want);
    else give_reserved(rt, bytes);
    return STH_OK;
}

sth_status sthi_runtime_set_reserved(sth_runtime *rt, uint64_t bytes) {
    for (int64_t until = 0;;) {
        uint64_t least = 0, want = 0;
        bool grows = false;
        sthi_lock(&rt->lock);
        sth_status rc = prepare_reserved(rt, bytes, &until, &least, &want, &grows);
        sthi_unlock(&rt->lock);
        if (rc != STH_OK || !grows) return rc;
        STHI_TRY(sthi_request_room(rt, least, want));
        sthi_lock(&rt->lock);
        bool taken = take_reserved(rt, bytes);
        sthi_settle(rt);
        sthi_unlock(&rt->lock);
        if (taken) return STH_OK;
    }
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
