/* Seal: records, staging, the first order and the first plan. */
#include "runtime/seal.h"

#include "load/charge.h"
#include "load/issue.h"
#include "load/read/keep.h"
#include "load/stages.h"
#include "load/staging.h"
#include "runtime/budget.h"
#include "runtime/geometry.h"
#include "runtime/measure.h"
#include "runtime/news.h"
#include "runtime/order.h"
#include "runtime/publish.h"
#include "runtime/records.h"
#include "state/state.h"

/* The first plan, with what is free on the device. Where others leave too little the runtime is parked: it asks
 * them to give way when it is used, not when it is made. */
static sth_status first_plan(sth_runtime *rt) {
    uint64_t smallest = sthi_smallest_budget(rt);
    if (smallest > rt->options.budget) return sthi_budget_error(rt, sthi_largest_unit(rt));
    uint64_t most = sthi_min_u64(rt->options.budget, sthi_account_most(rt)); /* if all others were gone */
    uint64_t left = sthi_hold(rt, rt->options.budget);
    rt->share.parked = (rt->options.parked || left < smallest) && smallest <= most;
    sth_status rc = rt->share.parked ? STH_OK : sthi_measure_link(rt);
    if (rc == STH_OK && !rt->share.parked) rc = sthi_name_refusal(rt, sthi_geometry_install(rt));
    sthi_settle(rt);
    return rc;
}

static sth_status seal_locked(sth_runtime *rt) {
    if (!rt->unit_count) return sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a runtime without units");
    STHI_TRY(sthi_expand_open(rt));
    for (uint32_t i = 0; i < rt->unit_count; i++) { /* by now the arenas are filled and pinned */
        sthi_unit *u = &rt->units[i];
        bool whole = !u->segments || rt->expand.on; /* else the host expands it into slabs */
        uint64_t image = u->segments ? u->packed_bytes : u->bytes;
        u->direct = whole && u->host && u->arena && sthi_arena_is_pinned(u->arena, u->host, image);
    }
    STHI_TRY(sthi_records_open(rt));
    STHI_TRY(sthi_staging_open(rt));
    sth_status rc = sthi_order_guess(rt);
    if (rc == STH_OK) rc = first_plan(rt);
    if (rc == STH_OK) sthi_keep_choose(rt);
    if (rc == STH_OK) sthi_pump(rt);
    return rc;
}

sth_status sthi_runtime_seal(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    const char *again = rt->sealed ? "sealed already" : "sealing failed before: it can only be destroyed";
    sth_status rc = rt->seal_tried ? sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "runtime: %s", again)
                                   : seal_locked(rt);
    rt->sealed = rt->sealed || rc == STH_OK;
    rt->seal_tried = true;
    if (rc == STH_OK) {
        sthi_news_sealed(rt);
        sthi_publish_open(rt);
    }
    sthi_unlock_and_say(rt);
    return rc;
}
