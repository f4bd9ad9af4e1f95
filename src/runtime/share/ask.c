/* A runtime has others give way. Whoever asks holds no runtime's lock: it pins the other's record
 * in the account, so that its destroy waits, and the other gives way under its own lock. */
#include "runtime/share/ask.h"

#include "base/clock.h"
#include "load/charge.h"
#include "load/room.h"
#include "runtime/geometry.h"
#include "runtime/share/give.h"
#include "state/state.h"

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
    int64_t until = sthi_now_ns() + STHI_WAIT_NS;
    bool inside = false;
    for (;;) {
        uint64_t room = rt->share.member.charge + sthi_account_free(a);
        bool wait = false;
        if (room >= want) break;
        if (sthi_account_reach(a, &rt->share.member) >= least || room >= least)
            if (ask_one(rt, number, least, want, &wait, &inside)) continue;
        room = rt->share.member.charge + sthi_account_free(a);
        if (room >= least) break;
        int64_t left = until - sthi_now_ns() - (wait ? 0 : STHI_WAIT_NS - STHI_INSIDE_NS);
        if ((wait || inside) && left > 0 && !sthi_account_thread_busy(a, sthi_this_thread())) {
            (void)sthi_cond_wait_for(&rt->device->account_changed, &rt->device->account_lock,
                                     left < STHI_LOOK_NS ? left : STHI_LOOK_NS);
            number = ++a->requests; /* whoever could not give way before may now */
            inside = false;
            continue;
        }
        sthi_account_exceed(a, &rt->share.member, least, rt->device->default_cap);
        if (rt->share.member.charge + sthi_account_free(a) < least) rc = no_room(rt, least);
        break;
    }
    if (rc == STH_OK) (void)sthi_account_hold(a, &rt->share.member, want);
    sthi_account_unlock(rt);
    return rc;
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
