/* Another host image for a unit: its bytes are elsewhere from now on.
 *
 * The old memory may be given back when the call returns, so it waits, with the lock held, for copies that are
 * enqueued, and for reads into slabs. Rare: a weight was given other data while its old data is still in use. */
#include "stream/engine.h"

static sth_status check_image(const sth_runtime *rt, uint32_t unit, const void *host, sth_arena *arena) {
    if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    if (!rt->sealed) return sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "an image is changed after seal only");
    STHI_TRY(sthi_check_unit(rt, unit));
    const sthi_unit *u = &rt->units[unit];
    if (u->checkpoint || u->store)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name,
                         "unit '%s' comes from a file or a store and has no image", u->name);
    if (u->segments)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, u->name,
                         "unit '%s' crosses the link packed: write its master and mark it", u->name);
    if (!host || (uintptr_t)host % STHI_ALIGN)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name,
                         "the image of unit '%s' must start at a multiple of %d", u->name, STHI_ALIGN);
    if (!rt->slab_count && !(arena && sthi_arena_is_pinned(arena, host, u->bytes)))
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, u->name,
                         "the new image of unit '%s' is not pinned, and this runtime has no slabs to stage it through",
                         u->name);
    return STH_OK;
}

static sth_status let_go_of_image(sth_runtime *rt, uint32_t unit) {
    sthi_drain_drops(rt);
    if (sthi_queued(rt, unit)) {
        sthi_cancel_queue(rt);
        sthi_program_skip(rt);
    }
    while (rt->images_in_read && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    if (rt->shut) return sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copy_stream));
    return STHI_DEV(rt, stream_synchronize, rt->demand_stream);
}

sth_status sthi_unit_set_host(sth_runtime *rt, uint32_t unit, const void *host, sth_arena *arena) {
    sthi_lock(&rt->lock);
    rt->callers++;
    sth_status rc = sthi_graph_free(rt);
    if (rc == STH_OK) rc = check_image(rt, unit, host, arena);
    if (rc == STH_OK) rc = let_go_of_image(rt, unit);
    sth_arena *old = NULL;
    if (rc == STH_OK) {
        sthi_unit *u = &rt->units[unit];
        old = u->arena;
        rt->edition++;
        if (arena) sthi_arena_retain(arena);
        u->arena = arena;
        u->host = host;
        u->direct = arena && sthi_arena_is_pinned(arena, host, u->bytes);
        if (u->slot != STHI_NO_SLOT) rt->places.slots[u->slot].stale = true;
        u->changed = rt->marked = true;
    }
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    sthi_arena_release(old);
    return rc;
}
