/* The end of a runtime. The owner and every lease hold a reference; what leases still need when the
 * owner lets go stays until the last of them is released. Lock not held. */
#include "runtime/end.h"

#include "base/memory.h"
#include "core/plan.h"
#include "runtime/bundle.h"
#include "runtime/drops.h"
#include "runtime/extents.h"
#include "runtime/planning.h"
#include "runtime/share/join.h"
#include "state/state.h"

/* Frees all that no lease can reach. */
static void free_rest(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_arena_release(rt->units[i].arena);
        sthi_free(rt->units[i].name);
        sthi_free(rt->units[i].group);
        sthi_free(rt->units[i].ranges);
        sthi_free(rt->units[i].segments);
        sthi_free(rt->units[i].tensors);
    }
    sthi_plan_destroy(rt->planned.plan);
    sthi_bundles_destroy(rt->planned.bundles);
    sthi_made_drop(&rt->planned.before);
    sthi_free(rt->units);
    sthi_free(rt->planned.units);
    sthi_free(rt->order.uses);
    sthi_free(rt->order.next);
    sthi_free(rt->order.held);
    sthi_free(rt->planned.load_uses);
    sthi_free(rt->program.residents);
    sthi_free(rt->step.trace);
    sthi_free(rt->step.held);
    sthi_free(rt->extents.kind);
    sthi_free(rt->sync);
    sthi_places_fini(&rt->places);
    sthi_residency_leave(rt);
    sthi_log_drop(rt->telemetry.news);
    sthi_free(rt->name);
    sthi_device_release(rt->device);
    sthi_cond_fini(&rt->readers.work);
    sthi_cond_fini(&rt->changed);
    sthi_mutex_fini(&rt->lock);
    sthi_free(rt);
}

static void free_events(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->events.count; i++) STHI_DEV(rt, event_destroy, rt->events.free[i]);
    rt->events.count = 0;
    sthi_free(rt->events.free);
    rt->events.free = NULL;
    rt->events.cap = 0;
}

void sthi_runtime_unref(sth_runtime *rt) {
    if (atomic_fetch_sub(&rt->refs, 1) != 1) return;
    /* The owner is gone and this was the last lease. */
    sthi_drain_drops(rt);
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) rt->places.slots[i].leases = 0;
    sthi_extents_free_all(rt);
    free_events(rt);
    free_rest(rt);
}
