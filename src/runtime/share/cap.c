/* What all runtimes of a device may take together: the cap, and budgets that are found. Lock: the
 * account's. */
#include "runtime/share/cap.h"

#include "state/state.h"

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
