/* The rate at which the device expands packed bytes, as steps show it: events round one expansion at a time, read
 * between steps once the device has passed them. The first of a step is timed, and of those as long as the longest
 * half, since what a launch takes would count in short ones. It runs beside the model's compute, and takes longer for
 * that: so much of the device it costs the step, and so plans price it. Samples are smoothed. A rate that has become
 * another one has the plan looked at again. No timing inside a capture: its replays would not tell. Lock held. */
#include "load/expand_rate.h"

#include "state/state.h"

static const double FRESH = 0.25;  /* of a sample in the rate */
static const double UNLIKE = 0.15; /* from the rate that the plan was made with */

bool sthi_expand_rate_begin(sth_runtime *rt, uint64_t bytes, sth_stream on) {
    sthi_expand_rate *r = &rt->expand.rate;
    uint32_t caps = rt->device->capabilities;
    bool device = !(caps & STH_CAP_HOST_IS_DEVICE) || caps & STH_CAP_VIRTUAL_TIME; /* else the CPU expands */
    if (!device || r->timed || rt->graph.state != STHI_GRAPH_IDLE) return false;
    r->longest = sthi_max_u64(r->longest, bytes);
    if (2 * bytes < r->longest) return false;
    for (int i = 0; i < 2; i++)
        if (!r->events[i] && STHI_DEV(rt, event_create, true, &r->events[i]) != STH_OK) return false;
    if (STHI_DEV(rt, event_record, r->events[0], on) != STH_OK) return false;
    r->bytes = bytes;
    return true;
}

void sthi_expand_rate_end(sth_runtime *rt, sth_stream on) {
    rt->expand.rate.timed = STHI_DEV(rt, event_record, rt->expand.rate.events[1], on) == STH_OK;
}

void sthi_expand_rate_read(sth_runtime *rt) {
    sthi_expand_rate *r = &rt->expand.rate;
    bool done = false;
    int64_t ns = 0;
    if (!r->timed) return;
    if (STHI_DEV(rt, event_query, r->events[1], &done) == STH_OK && !done) return;
    r->timed = false;
    if (!done || STHI_DEV(rt, event_elapsed_ns, r->events[0], r->events[1], &ns) != STH_OK || ns <= 0) return;
    double seen = (double)r->bytes * 1e9 / (double)ns;
    r->bytes_per_s = r->bytes_per_s > 0 ? (1 - FRESH) * r->bytes_per_s + FRESH * seen : seen;
    double known = r->planned > 0 ? r->planned : STHI_EXPAND_RATE_GUESSED;
    r->changed = r->bytes_per_s > known * (1 + UNLIKE) || r->bytes_per_s < known * (1 - UNLIKE);
}

void sthi_expand_rate_close(sth_runtime *rt) {
    for (int i = 0; i < 2; i++) {
        if (rt->expand.rate.events[i]) STHI_DEV(rt, event_destroy, rt->expand.rate.events[i]);
        rt->expand.rate.events[i] = NULL;
    }
    rt->expand.rate.timed = false;
}
