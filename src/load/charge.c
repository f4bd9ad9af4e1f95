/* What a runtime holds of its device, in the device's account (core/account.h). A change of plan
 * runs inside a hold: bytes freed on the way stay claimed, so that no third runtime takes them
 * before the new plan is laid out. Lock: the account's, a leaf. */
#include "load/charge.h"

#include "base/invariant.h"
#include "state/state.h"

uint64_t sthi_this_thread(void) {
    static _Thread_local char here;
    return (uint64_t)(uintptr_t)&here;
}

uint64_t sthi_hold(sth_runtime *rt, uint64_t want) {
    sthi_account_lock(rt);
    rt->share.limit = sthi_account_hold(&rt->device->account, &rt->share.member, want);
    STHI_INVARIANT(rt->share.limit <= want && rt->share.limit <= rt->share.member.charge);
    sthi_account_unlock(rt);
    return rt->share.limit;
}

void sthi_settle(sth_runtime *rt) {
    sthi_account_lock(rt);
    sthi_account_settle(&rt->device->account, &rt->share.member);
    sthi_account_unlock_changed(rt);
}

uint64_t sthi_account_most(sth_runtime *rt) {
    sthi_account_lock(rt);
    uint64_t most = rt->device->account.soft ? rt->device->default_cap : rt->device->account.cap;
    sthi_account_unlock(rt);
    return most;
}

sth_status sthi_charge(sth_runtime *rt, uint64_t bytes) {
    STHI_INVARIANT(bytes && bytes <= STHI_BYTES_MOST);
    sthi_account_lock(rt);
    bool taken = sthi_account_take(&rt->device->account, &rt->share.member, bytes);
    uint64_t left = sthi_account_free(&rt->device->account), cap = rt->device->account.cap;
    sthi_account_unlock(rt);
    return taken ? STH_OK
                 : sthi_fail(STH_OUT_OF_DEVICE_MEMORY, NULL, 0, rt->name,
                             "'%s' asks for %llu bytes of the device, but of the cap of %llu bytes that its models "
                             "share %llu are free; give the others smaller budgets, or raise the cap", rt->name,
                             (unsigned long long)bytes, (unsigned long long)cap,
                             (unsigned long long)left);
}

void sthi_uncharge(sth_runtime *rt, uint64_t bytes) {
    sthi_account_lock(rt);
    sthi_account_give(&rt->device->account, &rt->share.member, bytes);
    sthi_account_unlock_changed(rt);
}

void sthi_note_begin(sth_runtime *rt) {
    sthi_account_lock(rt);
    bool before = sthi_account_stays(&rt->share.member);
    sthi_account_ran(&rt->device->account, &rt->share.member);
    if (!before && sthi_account_stays(&rt->share.member)) rt->share.settled = false; /* its next step asks again */
    sthi_account_unlock(rt);
}

void sthi_note_step(sth_runtime *rt, bool busy) {
    STHI_INVARIANT(!busy || rt->step.open);
    sthi_account_lock(rt);
    rt->share.member.busy = busy;
    rt->share.member.thread = sthi_this_thread();
    if (busy || rt->step.open) sthi_account_used(&rt->device->account, &rt->share.member);
    sthi_account_unlock_changed(rt);
}
