/* What all runtimes of a device may take together: the cap, and budgets that are found. Lock: the
 * account's; where a runtime is asked what it needs, its own. */
#include "runtime/share/cap.h"

#include "base/arith.h"
#include "base/memory.h"
#include "core/finder.h"
#include "load/room.h"
#include "runtime/budget.h"
#include "state/state.h"

sth_status sthi_residency_set_cap(sth_device *device, uint64_t bytes) {
    uint64_t cap = bytes ? bytes : device->default_cap;
    sthi_lock(&device->account_lock);
    uint64_t charge = device->account.charge;
    if (cap >= charge) {
        device->account.cap = cap;
        device->account.soft = false;
    }
    sthi_cond_broadcast(&device->account_changed);
    sthi_unlock(&device->account_lock);
    if (cap >= charge) return STH_OK;
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "cap",
                     "a cap of %llu bytes is below the %llu that the models on the device occupy now; give more, or "
                     "end a model first",
                     (unsigned long long)cap, (unsigned long long)charge);
}

void sthi_residency_get(sth_device *device, sth_residency_info *out) {
    sthi_lock(&device->account_lock);
    sthi_account_info(&device->account, out);
    sthi_unlock(&device->account_lock);
}

/* The finder of a phase. That of all where memory is out: it knows the most. */
static sthi_finder *finder_of(sth_device *device, uint64_t number) {
    if (!number) return &device->finder;
    for (sthi_phase *p = device->phases; p; p = p->next)
        if (p->number == number) return &p->finder;
    sthi_phase *made = sthi_zalloc(1, sizeof *made);
    if (!made) return &device->finder;
    *made = (sthi_phase){.next = device->phases, .number = number};
    device->phases = made;
    return &made->finder;
}

/* Another model ran until now: the peak is of its steps. */
static void end_turn(sth_device *device, sthi_finder *mine, sth_memory_reading *r) {
    const sthi_account *a = &device->account;
    uint64_t fixed = sthi_account_fixed(a);
    sth_memory_reading last = *r;
    sth_budget_verdict ignored;
    last.growth = 0;
    last.least = 0;
    sthi_finder_observe(device->ran, &last, a->inside + fixed, a->inside_peak + fixed, a->outside, &ignored);
    sthi_finder_follow(mine, device->ran);
    r->framework_peak = r->framework_allocated;
}

void sthi_residency_find_budget(sth_device *device, const sth_memory_reading *given, sth_budget_verdict *out) {
    sth_memory_reading copy = *given, *reading = &copy;
    sthi_lock(&device->account_lock);
    sthi_account *a = &device->account;
    uint64_t fixed = sthi_account_fixed(a);
    sthi_finder *mine = finder_of(device, reading->phase);
    bool turn = reading->phase && device->ran && device->ran != mine;
    if (turn) end_turn(device, mine, reading);
    sthi_finder_observe(mine, reading, a->inside + fixed, a->inside_peak + fixed, a->outside, out);
    a->inside_peak = a->inside;
    sthi_finder_share(mine, reading, out);
    if (reading->phase && reading->runs) device->ran = mine;
    if (turn) out->reset_peak = true;
    /* What is occupied above the cap goes when whoever has it plans for less. */
    if (!reading->limit) {
        a->cap = sthi_max_u64(sthi_min_u64(out->cap, device->default_cap), a->charge);
        a->soft = reading->phase > 0;
    }
    sthi_cond_broadcast(&device->account_changed);
    sthi_unlock(&device->account_lock);
}

/* Without what its caller can give up. */
static uint64_t least_of(const sth_runtime *rt, uint64_t spare) {
    uint64_t least = sthi_smallest_budget(rt);
    return least - sthi_min_u64(least, spare);
}

void sthi_runtime_find_budget(sth_runtime *rt, const sth_memory_reading *reading, uint64_t spare,
                              sth_budget_verdict *out) {
    sthi_residency_find_budget(rt->device, reading, out);
    sthi_lock(&rt->lock);
    /* The smallest budget takes a look at all uses: it is asked for only where it may count. */
    uint64_t least = out->budget < reading->budget ? sthi_max_u64(least_of(rt, spare), reading->least) : 0;
    sthi_finder_settle(reading, least, rt->leases.bytes > 0, out);
    sthi_unlock(&rt->lock);
}

bool sthi_residency_above_ceiling(sth_device *device, const sth_memory_reading *reading) {
    sthi_lock(&device->account_lock);
    bool above = sthi_finder_above_ceiling(finder_of(device, reading->phase), reading, device->account.charge);
    sthi_unlock(&device->account_lock);
    return above;
}

uint64_t sthi_runtime_budget_without(sth_runtime *rt, uint64_t bytes, uint64_t spare, uint64_t *out_freed) {
    sthi_lock(&rt->lock);
    uint64_t has = sthi_held_bytes(rt) + rt->options.reserved;
    uint64_t less = sthi_finder_without(has, bytes, least_of(rt, spare));
    sthi_unlock(&rt->lock);
    *out_freed = less ? has - less : 0;
    return less;
}

void sthi_residency_forget(sth_device *device) {
    sthi_lock(&device->account_lock);
    device->finder = (sthi_finder){0};
    sthi_device_drop_phases(device);
    sthi_unlock(&device->account_lock);
}
