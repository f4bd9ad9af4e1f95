/* Lines for the log about plans: what streams, what stays, what a step is predicted to take, and why a plan changed.
 * They are composed under the lock and wait in `news` until a caller's thread lets it go (base/log.h). Lock held. */
#include "runtime/news.h"

#include <stdio.h>

#include "base/arith.h"
#include "core/plan.h"

/* Units of the model that have a part in steps, those that stay among them, and their bytes. */
typedef struct shares {
    uint32_t units, resident;
    uint64_t bytes, resident_bytes;
} shares;

static shares count(const sth_runtime *rt) {
    shares n = {0};
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (u->flags & STH_UNIT_ASIDE) continue;
        n.units++;
        n.bytes += u->bytes;
        if (!u->resident) continue;
        n.resident++;
        n.resident_bytes += u->bytes;
    }
    return n;
}

void sthi_news_sealed(sth_runtime *rt) {
    if (!sthi_logs(STH_LOG_INFO)) return;
    const sth_plan *plan = rt->planned.plan;
    shares n = count(rt);
    char predicted[128] = "its plan is made when it is first used";
    if (plan)
        snprintf(predicted, sizeof predicted,
                 "the copies of a step take %.1f ms at %.1f GB/s; compute is not known yet",
                 sthi_ms(plan->prediction.link_ns), rt->link.rate / 1e9);
    else if (!rt->share.parked) snprintf(predicted, sizeof predicted, "the policy is static");
    sthi_log_keep(&rt->telemetry.news, STH_LOG_INFO,
                  "'%.80s' streams: %u of %u units (%s of %s), %u stay (%s); what the model keeps on the device beside "
                  "them %s, budget %s; %s",
                  rt->name, n.units - n.resident, n.units, sthi_size(n.bytes - n.resident_bytes).text,
                  sthi_size(n.bytes).text, n.resident, sthi_size(n.resident_bytes).text,
                  sthi_size(rt->options.reserved).text,
                  sthi_size(rt->options.budget).text, predicted);
}

void sthi_news_plan(sth_runtime *rt, const char *why) {
    const sth_plan *plan = rt->planned.plan;
    if (!plan || !sthi_logs(STH_LOG_INFO)) return;
    const sth_prediction *p = &plan->prediction;
    shares n = count(rt);
    sthi_log_keep(&rt->telemetry.news, STH_LOG_INFO,
                  "'%.80s' has a new plan, because %s: %u of %u units stream, %s a step; %s stay, the ring has %s; "
                  "%.1f ms a step predicted, bound by %s",
                  rt->name, why, n.units - n.resident, n.units, sthi_size(p->bytes_per_step).text,
                  sthi_size(p->resident_bytes).text, sthi_size(p->ring_bytes).text, sthi_ms(p->step_ns),
                  sthi_bound_name(p->bound_by));
}

void sthi_news_kept(sth_runtime *rt, const char *why) {
    const sth_plan *plan = rt->planned.plan;
    if (!plan) return;
    sthi_log_keep(&rt->telemetry.news, STH_LOG_DEBUG,
                  "'%.80s' keeps its plan, which was looked at because %s: %.1f ms a step predicted, bound by %s",
                  rt->name, why, sthi_ms(plan->prediction.step_ns), sthi_bound_name(plan->prediction.bound_by));
}
