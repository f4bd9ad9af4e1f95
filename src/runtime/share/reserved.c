/* Bytes of the budget that the caller fills itself, and that places shrink for. Each call changes
 * the runtime's record in the account with what it has asked others for, or not at all. Lock not
 * held. */
#include "runtime/share/reserved.h"

#include "load/charge.h"
#include "load/room.h"
#include "runtime/budget.h"
#include "runtime/drops.h"
#include "runtime/geometry.h"
#include "runtime/share/ask.h"
#include "runtime/share/give.h"
#include "state/state.h"

static sth_status check_reserved(sth_runtime *rt, uint64_t bytes) {
    if (rt->shut) return sthi_shut_down(rt);
    if (sthi_stepping(rt))
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is inside a step: `reserved` changes "
                         "between steps", rt->name);
    uint64_t budget = rt->options.budget, least = rt->sealed ? sthi_least_to_plan(rt) - rt->options.reserved : 1;
    if (bytes >= budget || least > budget - bytes)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "a budget of %llu bytes is too small for %llu that the caller fills and units of %llu: "
                         "at least %llu are needed",
                         (unsigned long long)budget, (unsigned long long)bytes, (unsigned long long)least,
                         (unsigned long long)(bytes + least));
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
    if (much && rt->sealed && !rt->share.parked) (void)sthi_make_do(rt, much);
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

void sthi_runtime_soften(sth_runtime *rt, uint64_t bytes) {
    sthi_lock(&rt->lock);
    rt->share.soft = bytes;
    sthi_unlock(&rt->lock);
}

uint64_t sthi_runtime_reserved(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    uint64_t bytes = rt->options.reserved;
    sthi_unlock(&rt->lock);
    return bytes;
}

bool sthi_yield_soft(sth_runtime *rt, uint64_t bytes) {
    uint64_t soft = sthi_min_u64(rt->share.soft, rt->options.reserved);
    rt->share.soft = 0;
    if (!soft) return false;
    give_reserved(rt, rt->options.reserved - soft);
    (void)sthi_rearrange(rt, bytes); /* without room there is none: the caller looks again */
    return true;
}
