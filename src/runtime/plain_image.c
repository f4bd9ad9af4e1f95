/* Plain images beside packed ones. At rest a losslessly packed unit has its packed image alone. While somebody looks at
 * its weights it has a master, too, which is compared and encoded as that of any other (load/repack.c).
 *
 *   given --drop--> asked --thread--> compared --same--> gone --told--> no master
 *     ^               |                   |
 *     +----keep-------+     differs: marked as written, asked again; the caller has it back after MOST_TRIES
 *
 * The master goes only where the packed image says all that it holds. Both are compared as a whole, by a thread that
 * ends when nothing is left to be compared, and without the lock: the caller promises that nobody writes the one, and
 * the other is only ever encoded from it. Before the master goes the thread waits, with the lock held, for copies and
 * reads that may read it, as another image for a unit does (image.c). `keep` waits for a comparison under way. */
#include "runtime/plain_image.h"

#include "load/fingerprint.h"
#include "quant/segment.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "state/state.h"

enum { MOST_TRIES = 4 }; /* values may not fit their segments, and others are written again and again */

static sth_status check(const sth_runtime *rt, uint32_t unit) {
    if (rt->shut) return sthi_shut_down(rt);
    if (!rt->sealed) return sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a master is given or dropped after seal only");
    STHI_TRY(sthi_check_unit(rt, unit));
    const sthi_unit *u = &rt->units[unit];
    if (u->segments && u->host && !u->checkpoint) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name, "unit '%s' has no packed image in host memory", u->name);
}

static sth_status give(sth_runtime *rt, uint32_t unit, const void *master) {
    STHI_TRY(check(rt, unit));
    sthi_unit *u = &rt->units[unit];
    if (!master || (uintptr_t)master % STHI_ALIGN)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name,
                         "the master of unit '%s' must start at a multiple of %d", u->name, STHI_ALIGN);
    if (u->master)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, u->name, "unit '%s' has a master already", u->name);
    u->master = master;
    if (!(u->flags & STH_UNIT_WRITABLE)) u->flags |= STH_UNIT_WATCHED;
    u->encoded = (sthi_encoded){.print = sthi_fingerprint_place(u, master, u->bytes)};
    u->fingerprint = u->encoded.print; /* of what is on the device, too, and of what is under way */
    u->seen_epoch = rt->step.epoch;
    return STH_OK;
}

sth_status sthi_unit_give_master(sth_runtime *rt, uint32_t unit, const void *master) {
    sthi_lock(&rt->lock);
    sth_status rc = give(rt, unit, master);
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_unit_drop_master(sth_runtime *rt, uint32_t unit) {
    sthi_lock(&rt->lock);
    sth_status rc = check(rt, unit);
    sthi_unit *u = rc == STH_OK ? &rt->units[unit] : NULL;
    if (u && !u->master)
        rc = sthi_fail(STH_INVALID_STATE, NULL, 0, u->name, "unit '%s' has no master to drop", u->name);
    if (rc == STH_OK) u->encoded.drop = STHI_DROP_ASKED, u->encoded.tries = 0;
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_unit_keep_master(sth_runtime *rt, uint32_t unit, bool *out_kept) {
    sthi_lock(&rt->lock);
    sth_status rc = check(rt, unit);
    if (rc == STH_OK) {
        sthi_unit *u = &rt->units[unit];
        rt->callers++;
        while (u->encoded.drop == STHI_DROP_COMPARED && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
        u->encoded.drop = STHI_DROP_NOT;
        *out_kept = u->master != NULL;
        sthi_leave(rt);
    }
    sthi_unlock(&rt->lock);
    return rc;
}

/* ---- the thread; lock held, and dropped meanwhile */

/* Whether the image is one of what the master holds, as far as is known. */
static bool may_be_same(const sthi_unit *u) {
    return u->encoded.drop == STHI_DROP_ASKED && !u->encoded.stale && !u->encoded.plain;
}

static sthi_unit *next_asked(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (may_be_same(&rt->units[i])) return &rt->units[i];
    return NULL;
}

static sth_status let_go(sth_runtime *rt, sthi_unit *u) {
    while (rt->reads.images && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    bool changed = u->encoded.stale || u->encoded.plain; /* a word of a write came late */
    if (changed || rt->shut || rt->graph.state != STHI_GRAPH_IDLE) return STH_OK; /* no stream may be waited for */
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.stream));
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream));
    if (u->encoded.crosses_plain) rt->graph.edition++;
    u->master = NULL;
    u->encoded = (sthi_encoded){.drop = STHI_DROP_GONE};
    return STH_OK;
}

static void compare(sth_runtime *rt, sthi_unit *u) {
    u->encoded.drop = STHI_DROP_COMPARED;
    const sthi_unit known = *u; /* its segments, image and master stay where they are; units may not */
    uint32_t unit = (uint32_t)(u - rt->units);
    bool same = false;
    sthi_unlock(&rt->lock);
    sth_status rc = sthi_segments_same(known.segments, known.segment_count, known.host, known.master, 1, &same);
    if (rc == STH_OK && !same) (void)sthi_unit_mark_written(rt, unit);
    sthi_lock(&rt->lock);
    u = &rt->units[unit];
    if (rc == STH_OK && same) rc = let_go(rt, u);
    bool counts = rt->graph.state == STHI_GRAPH_IDLE;
    if (u->encoded.drop != STHI_DROP_GONE) {
        u->encoded.tries += counts;
        u->encoded.drop = u->encoded.tries < MOST_TRIES && rc == STH_OK ? STHI_DROP_ASKED : STHI_DROP_NOT;
    }
    sthi_cond_broadcast(&rt->changed);
}

static void *comparing(void *arg) {
    sth_runtime *rt = arg;
    sthi_unit *u;
    sthi_lock(&rt->lock);
    while (!rt->shut && rt->graph.state == STHI_GRAPH_IDLE && (u = next_asked(rt)) != NULL) compare(rt, u);
    rt->expand.comparing = false;
    sthi_cond_broadcast(&rt->changed);
    sthi_unlock(&rt->lock);
    return NULL;
}

/* Lock held, dropped while a thread that has come to its end is joined. */
static void join(sth_runtime *rt) {
    if (!rt->expand.has_thread) return;
    rt->expand.has_thread = false;
    sthi_unlock(&rt->lock);
    sthi_thread_join(rt->expand.comparer);
    sthi_lock(&rt->lock);
}

static void start(sth_runtime *rt) {
    if (rt->expand.comparing || rt->graph.state != STHI_GRAPH_IDLE || !next_asked(rt)) return;
    join(rt);
    if (rt->shut || rt->expand.comparing) return;
    /* Without one masters stay: more host memory, and all else as it was. */
    rt->expand.comparing = rt->expand.has_thread =
        sthi_thread_start(&rt->expand.comparer, "sth-compare", comparing, rt) == STH_OK;
}

sth_status sthi_runtime_dropped_masters(sth_runtime *rt, bool wait, uint32_t *units, uint32_t capacity,
                                        uint32_t *out_count) {
    *out_count = 0;
    sthi_lock(&rt->lock);
    rt->callers++;
    start(rt);
    while (wait && rt->expand.comparing && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    for (uint32_t i = 0; i < rt->unit_count && *out_count < capacity; i++) {
        if (rt->units[i].encoded.drop != STHI_DROP_GONE) continue;
        rt->units[i].encoded.drop = STHI_DROP_NOT;
        units[(*out_count)++] = i;
    }
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    return STH_OK;
}

void sthi_masters_close(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    join(rt);
    sthi_unlock(&rt->lock);
}
