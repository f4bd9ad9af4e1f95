/* Another host image for a unit: its bytes are elsewhere from now on. A unit that is encoded from a master gets
 * another master. A unit of a file gets an image in host memory and is never read from its file again.
 *
 * The old memory may be given back when the call returns, so it waits, with the lock held, for copies that are
 * enqueued, and for reads into slabs. Rare: a weight of a file was written, or a weight was given other data while
 * its old data is still in use. */
#include "runtime/image.h"

#include "base/memory.h"
#include "load/queue.h"
#include "runtime/drops.h"
#include "runtime/graph.h"
#include "runtime/lease.h"
#include "runtime/program.h"
#include "state/state.h"

static sth_status check_image(const sth_runtime *rt, uint32_t unit, const void *host, sth_arena *arena) {
    if (rt->shut) return sthi_shut_down(rt);
    if (!rt->sealed) return sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "an image is changed after seal only");
    STHI_TRY(sthi_check_unit(rt, unit));
    const sthi_unit *u = &rt->units[unit];
    if (u->store)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name, "unit '%s' comes from a store and has no image",
                         u->name);
    if (u->segments && u->checkpoint)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, u->name,
                         "unit '%s' is quantised in its file, and its place in the plan is that of so few bytes",
                         u->name);
    if (!host || (uintptr_t)host % STHI_ALIGN)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name,
                         "the image of unit '%s' must start at a multiple of %d", u->name, STHI_ALIGN);
    if (u->segments) return STH_OK; /* the master is read by the host alone */
    if (!rt->slabs.count && !(arena && sthi_arena_is_pinned(arena, host, u->bytes)))
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
    while (rt->reads.images && !rt->shut) sthi_cond_wait(&rt->changed, &rt->lock);
    if (rt->shut) return sthi_shut_down(rt);
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copies.stream));
    return STHI_DEV(rt, stream_synchronize, rt->copies.demand_stream);
}

static void leave_file(sth_runtime *rt, sthi_unit *u) {
    if (!u->checkpoint) return;
    if (u->kept.image) rt->stats.ram_bytes -= u->bytes;
    sthi_free(u->kept.chunks);
    sthi_free(u->ranges);
    u->kept.image = u->kept.chunks = NULL;
    u->in_ram = false;
    u->checkpoint = NULL;
    u->ranges = NULL;
    u->range_count = 0;
    u->host_bytes = u->bytes;
}

/* Returns the arena that is not used any more, or NULL. */
static sth_arena *take_image(sthi_unit *u, const void *host, sth_arena *arena) {
    sth_arena *old = u->arena;
    if (arena) sthi_arena_retain(arena);
    u->arena = arena;
    const void *image = arena ? sthi_arena_image(arena, host) : NULL;
    u->host = image ? image : host;
    u->direct = arena && sthi_arena_is_pinned(arena, host, u->bytes);
    return old;
}

/* A plan may let it cross as it is where it is pinned. */
static void set_master(sthi_unit *u, const void *host, sth_arena *arena) {
    u->master = host;
    if (arena && sthi_arena_is_pinned(arena, host, u->bytes)) return;
    u->flags &= ~(uint32_t)STH_UNIT_EITHER;
    u->encoded.crosses_plain = false;
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
        rt->graph.edition++;
        leave_file(rt, u);
        if (u->segments) set_master(u, host, arena);
        else old = take_image(u, host, arena);
        u->encoded.stale = u->segments != NULL;
        if (!(u->flags & STH_UNIT_WRITABLE)) u->flags |= STH_UNIT_WATCHED;
        if (u->slot != STHI_NO_SLOT) rt->places.slots[u->slot].stale = true;
        u->writes.changed = rt->writes.marked = true;
    }
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    sthi_arena_release(old);
    return rc;
}
