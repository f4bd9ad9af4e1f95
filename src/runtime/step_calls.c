/* Steps and passes as the caller marks them: the public calls round step.c. Each takes the lock. */
#include "runtime/step_calls.h"

#include "load/awaited.h"
#include "runtime/graph.h"
#include "runtime/news.h"
#include "runtime/share/arrive.h"
#include "runtime/step.h"
#include "runtime/timing.h"
#include "state/state.h"

static sth_status check_shut(const sth_runtime *rt) {
    if (!rt->shut) return STH_OK;
    return sthi_shut_down(rt);
}

static sth_status check_sealed(const sth_runtime *rt) {
    STHI_TRY(check_shut(rt));
    return rt->sealed ? STH_OK : sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a step before seal");
}

static sth_status check_open(const sth_runtime *rt) {
    STHI_TRY(check_shut(rt));
    return rt->step.open ? STH_OK : sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "no step is open");
}

sth_status sthi_step_pause(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    rt->callers++; /* the wait may drop the lock */
    sth_status rc = check_sealed(rt);
    if (rc == STH_OK) rc = sthi_graph_free(rt);
    if (rc == STH_OK) rc = sthi_step_pause_locked(rt);
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_step_begin(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    while (!rt->share.settled && rt->sealed && !rt->shut && (!rt->step.open || rt->step.implicit)) {
        sthi_unlock(&rt->lock);
        STHI_TRY(sthi_arrive(rt));
        sthi_lock(&rt->lock); /* it may have given way again by now */
    }
    sth_status rc = check_sealed(rt);
    if (rc == STH_OK && rt->step.open && !rt->step.implicit)
        rc = sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a step is open already; end it first");
    if (rc == STH_OK && rt->step.open) rc = sthi_step_end_locked(rt);
    if (rc == STH_OK) rc = sthi_step_begin_locked(rt, false);
    sthi_unlock_and_say(rt);
    return rc;
}

/* What went wrong with the telemetry file, once. */
static sth_status telemetry_failure(sth_runtime *rt) {
    if (rt->telemetry.error.status == STH_OK) return STH_OK;
    sth_status said = sthi_error_restore(&rt->telemetry.error);
    rt->telemetry.error.status = STH_OK;
    return said;
}

sth_status sthi_runtime_flush_telemetry(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = check_shut(rt);
    if (rc == STH_OK && rt->sealed) sthi_timing_harvest(rt, true);
    if (rc == STH_OK && sthi_telemetry_flush(rt->telemetry.file) != STH_OK) sthi_error_save(&rt->telemetry.error);
    if (rc == STH_OK) rc = telemetry_failure(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_step_end(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = check_open(rt);
    if (rc == STH_OK) rc = sthi_graph_free(rt);
    if (rc == STH_OK) rc = sthi_step_end_locked(rt);
    if (rc == STH_OK) rc = telemetry_failure(rt);
    sthi_unlock_and_say(rt);
    return rc;
}

sth_status sthi_pass_end(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = rt->shut ? STH_OK : sthi_awaited_wait(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_step_mark_backward(sth_runtime *rt, bool backward) {
    sthi_lock(&rt->lock);
    if (rt->step.open && rt->step.backward != backward) {
        sthi_timing_turn(rt);
        rt->step.backward = backward;
    }
    sthi_unlock(&rt->lock);
    return STH_OK;
}
