/* Virtual time: a small discrete-event simulation on the calling thread.
 *
 * Each stream's head either runs (it has an end) or is about to start (it has an earliest time). The
 * earliest of all is carried out next, ends before starts, then in the order in which they became ready,
 * then in the order of submission: the same calls always give the same times and the same bytes.
 * Invariant: whatever was due at or before now_ns when the clock last moved has happened.
 * Lock: the device's, never let go. */
#include "base/error.h"
#include "device/sim/sim.h"

typedef struct happening {
    sim_stream *stream;
    int64_t at, ready;
    bool ends;
} happening;

/* False when the head waits for something that has not happened yet. */
static bool head_happening(const sim_device *d, sim_stream *s, happening *out) {
    const sim_op *op = s->head;
    if (op->started) {
        *out = (happening){s, op->end_ns, op->end_ns, true};
        return true;
    }
    int64_t ready = sthi_sim_max(s->free_ns, op->ready_ns);
    if (op->kind == SIM_OP_WAIT) {
        if (!op->fence->done) return false;
        ready = sthi_sim_max(ready, op->fence->time_ns);
    }
    int64_t at = op->kind == SIM_OP_COPY ? sthi_sim_max(ready, d->link_free_ns[op->link]) : ready;
    *out = (happening){s, at, ready, false};
    return true;
}

static bool earlier(const happening *a, const happening *b) {
    if (a->at != b->at) return a->at < b->at;
    if (a->ends != b->ends) return a->ends;
    if (a->ready != b->ready) return a->ready < b->ready;
    return a->stream->head->seq < b->stream->head->seq;
}

static bool next_happening(sim_device *d, happening *out) {
    bool found = false;
    for (sim_stream *s = d->streams; s; s = s->next) {
        happening h;
        if (!s->head || !head_happening(d, s, &h)) continue;
        if (!found || earlier(&h, out)) *out = h;
        found = true;
    }
    return found;
}

static void finish(sim_device *d, sim_stream *s, int64_t at) {
    sthi_sim_effect(s->head, at);
    s->free_ns = at;
    sthi_sim_retire(d, s);
}

static void start(sim_device *d, sim_stream *s, int64_t at) {
    sim_op *op = s->head;
    if (op->kind == SIM_OP_COPY) {
        d->link_free_ns[op->link] = at + sthi_sim_link_ns(d, op->bytes);
        op->end_ns = d->link_free_ns[op->link] + d->options.copy_latency_ns;
    } else if (op->kind == SIM_OP_COMPUTE || op->kind == SIM_OP_EXPAND) {
        op->end_ns = at + op->duration_ns;
    } else {
        finish(d, s, at);
        return;
    }
    op->started = true;
}

static void happen(sim_device *d, const happening *h) {
    d->now_ns = sthi_sim_max(d->now_ns, h->at);
    if (h->ends) finish(d, h->stream, h->at);
    else start(d, h->stream, h->at);
}

void sthi_sim_advance(sim_device *d, int64_t to_ns) {
    happening h;
    while (next_happening(d, &h) && h.at <= to_ns) happen(d, &h);
    d->now_ns = sthi_sim_max(d->now_ns, to_ns);
}

sth_status sthi_sim_step(sim_device *d) {
    happening h;
    if (!next_happening(d, &h))
        return sthi_fail(STH_INTERNAL, "sim", 0, "virtual time",
                         "waiting for work that can never happen: no stream of the device can go on");
    happen(d, &h);
    return STH_OK;
}

sth_status sthi_sim_virtual_wait(sim_device *d, const sim_fence *fence) {
    while (!fence->done) STHI_TRY(sthi_sim_step(d));
    sthi_sim_advance(d, d->now_ns);
    return STH_OK;
}
