/* A runtime's place in its device's account, from create to the end of its last lease. Lock not
 * held. */
#include "runtime/share/join.h"

#include "load/charge.h"
#include "runtime/share/reserved.h"
#include "state/state.h"

sth_status sthi_residency_join(sth_runtime *rt) {
    sthi_account *a = &rt->device->account;
    if (!rt->name) return sthi_no_memory(NULL, "a runtime's name");
    sthi_account_lock(rt);
    sthi_account_join(a, &rt->share.member, rt, rt->name);
    sthi_account_unlock(rt);
    uint64_t reserved = rt->options.reserved;
    rt->options.reserved = 0;
    sth_status rc = sthi_runtime_set_reserved(rt, reserved);
    rt->share.limit = rt->options.budget; /* until the first plan */
    return rc;
}

void sthi_residency_retire(sth_runtime *rt) {
    sthi_account_lock(rt);
    rt->share.member.leaving = true;
    rt->share.member.busy = false;
    while (rt->share.member.pins) sthi_cond_wait(&rt->device->account_changed, &rt->device->account_lock);
    sthi_account_unlock_changed(rt);
}

void sthi_residency_leave(sth_runtime *rt) {
    sthi_account_lock(rt);
    sthi_account_leave(&rt->device->account, &rt->share.member);
    sthi_account_unlock_changed(rt);
}
