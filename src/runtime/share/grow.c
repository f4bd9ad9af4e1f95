/* A runtime takes what has become free on its device, before a step. Lock held. */
#include "runtime/share/grow.h"

#include "load/charge.h"
#include "runtime/geometry.h"
#include "runtime/news.h"
#include "state/state.h"

enum {
    WORTH_GROWING = 8, /* a new plan is made for a 1/8 more memory, or all that is wanted, */
    WORTH_LITTLE = 64  /* which is to be 1/64 at least: the device waits for the plan */
};

uint64_t sthi_wanted(const sth_runtime *rt) {
    uint64_t all = rt->options.reserved;
    for (uint32_t i = 0; i < rt->unit_count; i++) all += rt->units[i].bytes;
    return rt->options.policy == STH_POLICY_STATIC ? rt->options.budget : sthi_min_u64(all, rt->options.budget);
}

void sthi_grow(sth_runtime *rt) {
    uint64_t want = sthi_wanted(rt);
    if (rt->share.parked || rt->share.limit >= want || rt->leases.bytes || rt->share.arriving) return;
    sthi_account_lock(rt);
    uint64_t left = sthi_account_free(&rt->device->account), has = rt->share.member.charge;
    sthi_account_unlock(rt);
    uint64_t more = want > has ? sthi_min_u64(left, want - has) : 0;
    if (!more || more < has / WORTH_LITTLE || (has + more < want && more < has / WORTH_GROWING)) return;
    if (has + more <= rt->share.limit) return; /* it was planned with that already */
    rt->stats.replans++;
    if (sthi_geometry_install_in_haste(rt, rt->options.budget) == STH_OK) sthi_news_plan(rt, "more memory is free");
    else rt->planned.again = true; /* on demand, and again when the step ends */
}
