/* Slabs on their way: taken from the pool, in flight until the device has copied them, waited for.
 *
 * Each slab is in exactly one of: the pool's free list, a job, a flight, the hands of a demand load
 * or of whoever waits for its flight. A shared pool's slabs also come back from other runtimes,
 * which do not know us.
 *
 * Lock held; dropped while waiting for a slab's copy. */
#include "load/read/slabs.h"

#include "base/invariant.h"
#include "load/events.h"
#include "load/read/jobs.h"
#include "state/state.h"

enum { SLAB_POLL_NS = 1000000 };

/* The pool counts slabs that are lost, so that whoever waits for one hears of it. */
static void set_lost(sth_runtime *rt, sthi_flight *f, bool lost) {
    if (f->lost != lost) sthi_pool_lose(rt->slabs.pool, lost ? 1 : -1);
    f->lost = lost;
}

void sthi_flight_land(sth_runtime *rt, sthi_flight *f) {
    set_lost(rt, f, false);
    sthi_event_give(rt, f->emptied);
    (void)sthi_pool_release(rt->slabs.pool, &f->slab, 1);
}

/* The oldest flight becomes the newest: others may be over. */
static void stay_in_the_air(sth_runtime *rt, sthi_flight f) {
    set_lost(rt, &f, true);
    rt->slabs.flights[rt->slabs.flight_tail++ % rt->slabs.count] = f;
}

void sthi_flights_reap(sth_runtime *rt) {
    for (uint64_t looks = rt->slabs.flight_tail - rt->slabs.flight_head; looks > 0; looks--) {
        sthi_flight *f = &rt->slabs.flights[rt->slabs.flight_head % rt->slabs.count];
        bool done = false;
        bool told = f->emptied && STHI_DEV(rt, event_query, f->emptied, &done) == STH_OK;
        if (told) set_lost(rt, f, false);
        if (told && !done) return;
        rt->slabs.flight_head++;
        if (told) sthi_flight_land(rt, f);
        else stay_in_the_air(rt, *f);
    }
}

sth_status sthi_slab_try(sth_runtime *rt, sth_slab *out, bool *out_got) {
    uint32_t count = 0;
    sthi_flights_reap(rt);
    sth_status rc = sthi_pool_try_acquire(rt->slabs.pool, rt->copies.chunk, out, 1, &count);
    if (rc == STH_SHUT_DOWN) {
        rt->slabs.pool_shut = true;
        sthi_cond_broadcast(&rt->changed);
    }
    *out_got = count == 1;
    return rc;
}

void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream) {
    sthi_flight f = {.slab = slab, .stream = stream};
    STHI_INVARIANT(rt->slabs.flight_tail - rt->slabs.flight_head < rt->slabs.count);
    if (sthi_event_take(rt, &f.emptied) == STH_OK &&
        STHI_DEV(rt, event_record, f.emptied, stream) != STH_OK) {
        sthi_event_give(rt, f.emptied);
        f.emptied = NULL;
    }
    rt->slabs.flights[rt->slabs.flight_tail++ % rt->slabs.count] = f;
    sthi_readers_wake(rt);
}

sth_status sthi_flights_wait(sth_runtime *rt, bool *out_any) {
    *out_any = rt->slabs.flight_head < rt->slabs.flight_tail;
    if (!*out_any) return STH_OK;
    sthi_flight f = rt->slabs.flights[rt->slabs.flight_head++ % rt->slabs.count];
    sthi_unlock(&rt->lock);
    sth_status rc = f.emptied ? STHI_DEV(rt, event_synchronize, f.emptied)
                              : STHI_DEV(rt, stream_synchronize, f.stream);
    sthi_lock(&rt->lock);
    if (rc != STH_OK) {
        stay_in_the_air(rt, f);
        return rc;
    }
    sthi_flight_land(rt, &f);
    sthi_readers_wake(rt);
    sthi_cond_broadcast(&rt->changed);
    return STH_OK;
}

/* One look for a slab: free, ours filled ahead of need, or on its way back. *out_got says whether. */
static sth_status look_for_slab(sth_runtime *rt, sth_slab *out, bool *out_got) {
    *out_got = false;
    for (;;) {
        bool flying = false;
        if (rt->shut) return sthi_shut_down(rt);
        sth_status rc = sthi_slab_try(rt, out, out_got);
        if (rc == STH_OK && !*out_got && sthi_jobs_give_newest(rt)) rc = sthi_slab_try(rt, out, out_got);
        if (rc == STH_SHUT_DOWN || *out_got) return rc;
        STHI_TRY(sthi_flights_wait(rt, &flying)); /* it says better than the pool why there is none */
        if (!flying) STHI_TRY(rc);
        if (!flying) return STH_OK;
    }
}

void sthi_need_slabs(sth_runtime *rt, int change) {
    rt->slabs.needy = (uint32_t)((int)rt->slabs.needy + change);
    sthi_pool_hungry(rt->slabs.pool, change);
}

bool sthi_others_come_first(const sth_runtime *rt) { return !rt->slabs.needy && sthi_pool_is_hungry(rt->slabs.pool); }

sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out) {
    bool got = false;
    sth_status rc = look_for_slab(rt, out, &got);
    if (rc != STH_OK || got) return rc;
    /* A reader fills the one that there is, another load holds it, or another runtime. */
    sthi_need_slabs(rt, 1);
    while (rc == STH_OK && !got) {
        sthi_cond_wait_for(&rt->changed, &rt->lock, SLAB_POLL_NS);
        rc = look_for_slab(rt, out, &got);
    }
    sthi_need_slabs(rt, -1);
    return rc;
}
