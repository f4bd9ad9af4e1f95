/* Threads that ask for room again take turns (core/turns.h). Lock: the account's, a leaf. */
#include "runtime/share/turns.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"
#include "load/charge.h"
#include "state/state.h"

sth_status sthi_turn_begin(sth_device *device) {
    sthi_turn *fresh = sthi_alloc(sizeof *fresh);
    if (!fresh) return sthi_no_memory(NULL, "a thread that waits for room on the device");
    sthi_lock(&device->account_lock);
    sthi_turn *turn = sthi_turns_find(&device->turns, sthi_this_thread());
    if (turn) turn->depth++;
    else sthi_turns_add(&device->turns, fresh, sthi_this_thread(), sthi_now_ns() + STHI_WAIT_NS);
    sthi_unlock(&device->account_lock);
    if (turn) sthi_free(fresh);
    return STH_OK;
}

bool sthi_turn_is_first(sth_device *device) {
    sthi_lock(&device->account_lock);
    bool first = sthi_turns_is_first(&device->turns, sthi_this_thread());
    sthi_unlock(&device->account_lock);
    return first;
}

/* Nobody says when a thread leaves a model that has no memory: the first looks again by itself. */
bool sthi_turn_wait(sth_device *device) {
    uint64_t thread = sthi_this_thread();
    sthi_lock(&device->account_lock);
    sthi_turn *turn = sthi_turns_find(&device->turns, thread);
    int64_t left = turn ? turn->until_ns - sthi_now_ns() : 0;
    bool first = sthi_turns_is_first(&device->turns, thread);
    if (first && left > 0)
        (void)sthi_cond_wait_for(&device->account_changed, &device->account_lock,
                                 left < STHI_LOOK_NS ? left : STHI_LOOK_NS);
    while (!first && left > 0) {
        (void)sthi_cond_wait_for(&device->account_changed, &device->account_lock, left);
        first = sthi_turns_is_first(&device->turns, thread);
        left = turn->until_ns - sthi_now_ns();
    }
    sthi_unlock(&device->account_lock);
    return left > 0;
}

void sthi_turn_end(sth_device *device) {
    sthi_lock(&device->account_lock);
    sthi_turn *turn = sthi_turns_end(&device->turns, sthi_this_thread());
    sthi_cond_broadcast(&device->account_changed);
    sthi_unlock(&device->account_lock);
    sthi_free(turn);
}
