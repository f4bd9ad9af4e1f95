/* A runtime among others on its device: it asks for room, gives way, parks and comes back.
 *
 * The device's account (core/account.h) knows who occupies what; its lock is a leaf, taken under a runtime's lock or
 * alone. Whoever asks others to give way holds no runtime's lock: it pins the other's record, so that its destroy
 * waits, and the other gives way under its own lock. A change of plan runs inside a hold: bytes freed on the way
 * stay claimed, so that no third runtime takes them before the new plan is laid out.
 * Does not decide who gives way (account.c), who is protected (protect.c), nor how memory is laid out (geometry.c). */
#include "runtime/share/arrive.h"

#include "base/clock.h"
#include "load/charge.h"
#include "load/issue.h"
#include "load/queue.h"
#include "load/room.h"
#include "load/stages.h"
#include "runtime/geometry.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/share/protect.h"
#include "runtime/step.h"
#include "state/state.h"

#define WAIT_NS (INT64_C(30) * 1000000000) /* for runtimes that other threads are using */
enum { WORTH_GROWING = 8 }; /* a new plan is made for a 1/8 more memory, or all that is wanted */

/* ---- asking */

static sth_status no_room(sth_runtime *rt, uint64_t least) {
    sthi_account *a = &rt->device->account;
    char need[32], left[32], cap[32], who[448];
    uint64_t can = rt->share.member.charge + sthi_account_free(a);
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, rt->name,
                     "'%s' needs at least %s (%llu bytes) on the device; of the cap of %s (%llu bytes) that its models "
                     "share there are %s (%llu bytes) for it: %s. Release a reservation, give the others smaller "
                     "budgets, or raise the cap", rt->name, sthi_format_size(least, need, sizeof need),
                     (unsigned long long)least, sthi_format_size(a->cap, cap, sizeof cap),
                     (unsigned long long)a->cap, sthi_format_size(can, left, sizeof left), (unsigned long long)can,
                     a->charge > rt->share.member.charge ? sthi_account_describe(a, &rt->share.member, who, sizeof who)
                                                   : "nothing else is there");
}

/* Has one other runtime give way. False: none can; *out_wait: one that is in use could.
 * *out_inside: a thread was inside the one that was asked, or held a lease. Account locked; dropped
 * meanwhile. */
static bool ask_one(sth_runtime *rt, uint64_t request, uint64_t least, uint64_t want, bool *out_wait,
                    bool *out_inside) {
    sthi_account *a = &rt->device->account;
    uint64_t room = rt->share.member.charge + sthi_account_free(a);
    sthi_member *other =
        sthi_account_victim(a, &rt->share.member, request, room < least, sthi_this_thread(), out_wait);
    if (!other) return false;
    uint64_t bytes = (sthi_account_shield(other) == STHI_SHIELD_NONE ? want : least) - room;
    uint64_t had = other->charge;
    other->pins++;
    sthi_account_unlock(rt);
    sth_runtime *owner = other->owner;
    sthi_lock(&owner->lock);
    bool inside = !sthi_give_way(owner, bytes);
    sthi_unlock(&owner->lock);
    sthi_account_lock(rt);
    other->pins--;
    if (other->charge >= had) other->tried = request; /* what it gave somebody else may have taken: ask again then */
    if (inside) *out_inside = true;
    sthi_cond_broadcast(&rt->device->account_changed);
    return true;
}

sth_status sthi_request_room(sth_runtime *rt, uint64_t least, uint64_t want) {
    sthi_account *a = &rt->device->account;
    sth_status rc = STH_OK;
    sthi_account_lock(rt);
    uint64_t number = ++a->requests;
    int64_t until = sthi_now_ns() + WAIT_NS;
    bool inside = false;
    for (;;) {
        uint64_t room = rt->share.member.charge + sthi_account_free(a);
        bool wait = false;
        if (room >= want) break;
        if (sthi_account_reach(a, &rt->share.member) >= least || room >= least)
            if (ask_one(rt, number, least, want, &wait, &inside)) continue;
        room = rt->share.member.charge + sthi_account_free(a);
        if (room >= least) break;
        int64_t left = until - sthi_now_ns() - (wait ? 0 : WAIT_NS - STHI_INSIDE_NS);
        if ((wait || inside) && left > 0 && !sthi_account_thread_busy(a, sthi_this_thread())) {
            (void)sthi_cond_wait_for(&rt->device->account_changed, &rt->device->account_lock,
                                     left < STHI_LOOK_NS ? left : STHI_LOOK_NS);
            number = ++a->requests; /* whoever could not give way before may now */
            inside = false;
            continue;
        }
        rc = no_room(rt, least);
        break;
    }
    if (rc == STH_OK) (void)sthi_account_hold(a, &rt->share.member, want);
    sthi_account_unlock(rt);
    return rc;
}

/* ---- giving way */

bool sthi_stepping(const sth_runtime *rt) {
    return rt->step.open && !rt->step.implicit && !rt->step.paused;
}

bool sthi_wait_inside(sth_runtime *rt, int64_t *until) {
    int64_t now = sthi_now_ns();
    if (!*until) *until = now + STHI_INSIDE_NS;
    if (now >= *until) return false;
    rt->callers++; /* destroy waits */
    (void)sthi_cond_wait_for(&rt->changed, &rt->lock, STHI_LOOK_NS);
    sthi_leave(rt);
    return true;
}

bool sthi_idle(const sth_runtime *rt, uint32_t known) {
    return !sthi_stepping(rt) && !rt->leases.bytes && rt->callers <= known;
}

void sthi_park(sth_runtime *rt) {
    rt->program.on = false;
    sthi_cancel_queue(rt);
    sthi_extents_free_all(rt);
    sthi_stages_free(rt);
    sthi_plan_drop(rt);
    rt->share.parked = true;
    rt->share.settled = false;
}

/* Plans for `bytes` less than it has now. */
static bool shrink(sth_runtime *rt, uint64_t bytes) {
    uint64_t has = sthi_held_bytes(rt) + rt->options.reserved;
    if (has < bytes || has - bytes < sthi_smallest_budget(rt)) return false;
    return sthi_geometry_install_within(rt, has - bytes) == STH_OK;
}

bool sthi_give_way(sth_runtime *rt, uint64_t bytes) {
    sthi_drain_drops(rt);
    if (rt->shut || !rt->sealed) return true;
    if (rt->share.parked) {
        sthi_closing_free(rt);
        return true;
    }
    if (!sthi_idle(rt, 0)) return !rt->callers && !rt->leases.bytes;
    if (rt->step.open) (void)sthi_step_end_locked(rt);
    rt->stats.yields++;
    if (shrink(rt, bytes)) sthi_pump(rt);
    else sthi_park(rt);
    return true;
}

/* ---- coming */

/* What it would use if it could: all of its units, within its budget. */
static uint64_t wanted(const sth_runtime *rt) {
    uint64_t all = rt->options.reserved;
    for (uint32_t i = 0; i < rt->unit_count; i++) all += rt->units[i].bytes;
    return rt->options.policy == STH_POLICY_STATIC ? rt->options.budget : sthi_min_u64(all, rt->options.budget);
}

/* Lays memory out within what the request holds. Lock held. */
static sth_status come(sth_runtime *rt) {
    if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    sthi_drain_drops(rt);
    sthi_closing_free(rt);
    if (!rt->share.parked && !sthi_idle(rt, 1)) return STH_OK; /* in use since: at the begin of its next step */
    if (rt->step.open) STHI_TRY(sthi_step_end_locked(rt));
    bool was = rt->share.parked;
    sthi_hold(rt, rt->options.budget);
    sth_status rc = sthi_measure_link(rt);
    rt->share.parked = false;
    if (rc == STH_OK) rc = sthi_name_refusal(rt, sthi_geometry_install(rt));
    if (rc == STH_OK && was) rt->planned.again = false;
    /* Units that steps have shown to come on demand need room beside the others, which the first plan did not. */
    if (rc == STH_BUDGET_TOO_SMALL && rt->order.recorded) rc = sthi_without_plan(rt, rc);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        sthi_park(rt);
        (void)sthi_error_restore(&why);
    }
    sthi_settle(rt);
    if (rc == STH_OK) sthi_pump(rt); /* its residents, ahead of its next step */
    return rc;
}

static sth_status arrive_locked(sth_runtime *rt) {
    while (rt->share.arriving && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    if (!rt->sealed)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rt->name, "'%s' is not sealed: it has no plan", rt->name);
    uint64_t least = sthi_least_to_plan(rt), want = sthi_max_u64(wanted(rt), least);
    if (!rt->share.parked && (rt->share.limit >= want || !sthi_idle(rt, 0))) return STH_OK;
    rt->share.arriving = true;
    rt->callers++;
    bool must = rt->share.parked;
    sthi_unlock(&rt->lock);
    sth_status rc = sthi_request_room(rt, must ? least : 0, want);
    sthi_lock(&rt->lock);
    if (rc == STH_OK) {
        rc = come(rt);
        sthi_settle(rt);
    }
    rt->share.arriving = false;
    sthi_leave(rt);
    sthi_cond_broadcast(&rt->changed);
    return rc;
}

sth_status sthi_arrive(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    sth_status rc = arrive_locked(rt);
    if (rc == STH_OK) rt->share.settled = true;
    sthi_unlock(&rt->lock);
    return rc;
}

void sthi_grow(sth_runtime *rt) {
    uint64_t want = wanted(rt);
    if (rt->share.parked || rt->share.limit >= want || rt->leases.bytes || rt->share.arriving) return;
    sthi_account_lock(rt);
    uint64_t left = sthi_account_free(&rt->device->account), has = rt->share.member.charge;
    sthi_account_unlock(rt);
    uint64_t more = want > has ? sthi_min_u64(left, want - has) : 0;
    if (!more || (has + more < want && more < has / WORTH_GROWING)) return;
    if (has + more <= rt->share.limit) return; /* it was planned with that already */
    rt->stats.replans++;
    if (sthi_geometry_install(rt) != STH_OK) rt->planned.again = true; /* on demand, and again when the step ends */
}

bool sthi_more_room(sth_runtime *rt, uint64_t bytes) {
    sthi_error_copy why;
    sthi_error_save(&why);
    uint64_t has = sthi_held_bytes(rt) + rt->options.reserved;
    uint64_t budget = rt->options.budget;
    if (rt->share.limit >= budget || bytes > budget || has > budget - bytes) return false;
    sthi_unlock(&rt->lock);
    bool got = sthi_request_room(rt, has + bytes, has + bytes) == STH_OK;
    sthi_lock(&rt->lock);
    bool some = false;
    if (got) {
        some = !rt->shut && !rt->share.parked && sthi_rearrange(rt, bytes) == STH_OK &&
               sthi_held_bytes(rt) > has - rt->options.reserved;
        sthi_settle(rt);
    }
    if (!some && !got) return false; /* the account's refusal says more than the plan's */
    if (!some) (void)sthi_error_restore(&why);
    return some;
}

/* ---- life in the account */

sth_status sthi_residency_join(sth_runtime *rt) {
    sthi_account *a = &rt->device->account;
    if (!rt->name) return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for a runtime's name");
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
