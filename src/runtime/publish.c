/* What the runtime stores for the live view. Nothing is computed for it that is not known. */
#include "runtime/publish.h"

#include <stdio.h>
#include <string.h>

#include "load/room.h"
#include "telemetry/top.h"

void sthi_publish_open(sth_runtime *rt) {
    sth_device_info info = {0};
    char device[160];
    if (STHI_DEV(rt, info, &info) != STH_OK) return;
    bool named = strcmp(info.name, info.backend) != 0;
    snprintf(device, sizeof device, "%s:%d%s%s", info.backend, info.index, named ? " " : "", named ? info.name : "");
    rt->telemetry.top = sthi_top_open(rt->name, device);
    sthi_publish(rt);
}

void sthi_publish(sth_runtime *rt) {
    if (!rt->telemetry.top) return;
    const sth_plan *plan = rt->planned.plan;
    sth_top_figures f = {
        .steps = rt->stats.steps,
        .budget = rt->options.budget,
        .limit = rt->share.limit,
        .device_bytes = sthi_held_bytes(rt) + rt->options.reserved,
        .h2d_bytes = rt->stats.h2d_bytes,
        .d2h_bytes = rt->stats.d2h_bytes,
        .demand_loads = rt->stats.demand_loads,
        .replans = rt->stats.replans,
        .link_bytes_per_s = (uint64_t)rt->link.rate,
        .planned = plan != NULL,
        .parked = rt->share.parked,
    };
    if (plan) {
        f.resident_bytes = plan->prediction.resident_bytes;
        f.ring_bytes = plan->prediction.ring_bytes;
        f.streamed_bytes = plan->prediction.streamed_bytes;
        f.bytes_per_step = plan->prediction.bytes_per_step;
        f.bound_by = plan->prediction.bound_by;
    }
    if (sthi_telemetry_count(rt->telemetry.file)) (void)sthi_telemetry_get(rt->telemetry.file, 0, &f.step);
    sthi_top_store(rt->telemetry.top, &f);
}

void sthi_publish_close(sth_runtime *rt) {
    sthi_top_close(rt->telemetry.top);
    rt->telemetry.top = NULL;
}
