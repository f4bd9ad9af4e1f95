/* Streams, events and submission on the simulated device.
 *
 * Invariants: an operation holds a reference to its fence until it is retired; sequence numbers grow in
 * the order of submission, so all of a stream's queue is younger than its head; a wait only ever refers to
 * a recording that was submitted before it, hence no cycle of waits can exist.
 * Lock: the device's, held throughout except where a real-time wait lets it go.
 * Stream 0 is the calling thread: its operations are carried out before the call returns. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/clock.h"
#include "device/expand.h"
#include "device/sim/sim.h"

enum { EXPAND_SHIFT = 10 }; /* expansion brings 1 TB/s */

static sth_status no_memory(const char *what) {
    return sthi_fail(STH_OUT_OF_HOST_MEMORY, "sim", 0, what, "no host memory for one more %s", what);
}

/* ---- operations and fences: taken from pools that only grow, so that a steady state allocates nothing */

static sim_fence *fence_take(sim_device *d) {
    sim_fence *f = d->fence_pool;
    if (f) d->fence_pool = f->next;
    else if (!(f = sthi_alloc(sizeof *f))) return NULL;
    *f = (sim_fence){.refs = 1};
    return f;
}

static void fence_drop(sim_device *d, sim_fence *f) {
    if (!f || --f->refs) return;
    f->next = d->fence_pool;
    d->fence_pool = f;
}

static sim_op *op_take(sim_device *d) {
    sim_op *op = d->op_pool;
    if (op) d->op_pool = op->next;
    else op = sthi_alloc(sizeof *op);
    return op;
}

static void op_drop(sim_device *d, sim_op *op) {
    fence_drop(d, op->fence);
    op->next = d->op_pool;
    d->op_pool = op;
}

int64_t sthi_sim_link_ns(const sim_device *d, uint64_t bytes) {
    uint64_t rate = d->options.link_bytes_per_s;
    if (!rate) return 0;
    uint64_t whole = bytes / rate, rest = bytes % rate;
    if (whole >= SIM_LONGEST_NS / 1000000000) return SIM_LONGEST_NS;
    /* rest < rate: in doubles only where the product would not fit. */
    uint64_t product;
    if (sthi_mul_u64(rest, 1000000000, &product)) rest = product / rate + (product % rate != 0);
    else rest = (uint64_t)((double)rest / (double)rate * 1e9);
    return (int64_t)(whole * 1000000000 + rest);
}

void sthi_sim_effect(const sim_op *op, int64_t at_ns) {
    switch (op->kind) {
    case SIM_OP_COPY: memcpy(op->dst, op->src, op->bytes); break;
    case SIM_OP_POISON: memset(op->dst, 0xFF, op->bytes); break;
    case SIM_OP_EXPAND: op->expand.reference(&op->expand); break;
    case SIM_OP_RECORD:
        op->fence->time_ns = at_ns;
        op->fence->done = true;
        break;
    case SIM_OP_COMPUTE:
    case SIM_OP_WAIT: break;
    }
}

void sthi_sim_retire(sim_device *d, sim_stream *s) {
    sim_op *op = s->head;
    s->head = op->next;
    if (!s->head) s->tail = NULL;
    op_drop(d, op);
}

/* ---- submission */

static int64_t now_locked(const sim_device *d) { return d->options.virtual_time ? d->now_ns : sthi_now_ns(); }

static void append(sim_stream *s, sim_op *op) {
    if (s->tail) s->tail->next = op;
    else s->head = op;
    s->tail = op;
}

/* Takes over the reference to op.fence, also on failure. */
static sth_status submit(sim_device *d, sim_stream *s, sim_op op) {
    bool caller = s == &d->caller;
    op.seq = ++d->next_seq;
    op.ready_ns = now_locked(d);
    if (caller && !d->options.virtual_time) {
        sthi_sim_real_inline(d, &op);
        fence_drop(d, op.fence);
        return STH_OK;
    }
    sim_op *kept = op_take(d);
    if (!kept) {
        fence_drop(d, op.fence);
        return no_memory("operation");
    }
    *kept = op;
    append(s, kept);
    if (caller) return sthi_sim_drain(d, s);
    if (!d->options.virtual_time) sthi_cond_signal(&s->work);
    return STH_OK;
}

static sim_stream *find(sim_device *d, sth_stream id) {
    for (sim_stream *s = d->streams; s; s = s->next)
        if (s->id == id) return s;
    return NULL;
}

static sth_status find_or_fail(sim_device *d, sth_stream id, sim_stream **out) {
    *out = find(d, id);
    if (*out) return STH_OK;
    char object[40];
    snprintf(object, sizeof object, "stream %" PRIu64, id);
    return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, object, "%s is not a live stream of this device",
                     object);
}

static sth_status submit_to(sim_device *d, sth_stream id, sim_op op) {
    sim_stream *s;
    sth_status status = find_or_fail(d, id, &s);
    if (status == STH_OK) return submit(d, s, op);
    fence_drop(d, op.fence);
    return status;
}

static bool has_older(const sim_device *d, const sim_stream *only, uint64_t seq) {
    for (const sim_stream *s = d->streams; s; s = s->next)
        if ((!only || s == only) && s->head && s->head->seq <= seq) return true;
    return false;
}

sth_status sthi_sim_drain(sim_device *d, const sim_stream *only) {
    uint64_t seq = d->next_seq;
    while (has_older(d, only, seq)) {
        if (d->options.virtual_time) STHI_TRY(sthi_sim_step(d));
        else sthi_cond_wait(&d->done, &d->lock);
    }
    if (d->options.virtual_time) sthi_sim_advance(d, d->now_ns);
    return STH_OK;
}

/* ---- copies, poison, compute */

/* foreign: the device's side of the copy is memory that it did not allocate. */
static sth_status copy(sth_backend_device *device, int link, void *dst, const void *src, uint64_t bytes,
                       sth_stream stream, bool foreign) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    sim_stream *s;
    sth_status status = find_or_fail(d, stream, &s);
    if (status == STH_OK && bytes > 0) {
        if (!dst || !src)
            status = sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, "copy", "the host address of a copy is NULL");
        else if (!foreign) status = sthi_sim_check_live(d, (uintptr_t)(link == SIM_H2D ? dst : src), bytes);
        if (status == STH_OK)
            status = submit(
                d, s, (sim_op){.kind = SIM_OP_COPY, .link = link, .dst = dst, .src = src, .bytes = bytes});
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_copy_h2d(sth_backend_device *device, sth_devptr dst, const void *src, uint64_t bytes,
                             sth_stream stream) {
    return copy(device, SIM_H2D, (void *)(uintptr_t)dst, src, bytes, stream, false);
}

sth_status sthi_sim_copy_d2h(sth_backend_device *device, void *dst, sth_devptr src, uint64_t bytes,
                             sth_stream stream) {
    return copy(device, SIM_D2H, dst, (const void *)(uintptr_t)src, bytes, stream, false);
}

sth_status sthi_sim_copy_d2h_foreign(sth_backend_device *device, void *dst, sth_devptr src, uint64_t bytes,
                                     sth_stream stream) {
    return copy(device, SIM_D2H, dst, (const void *)(uintptr_t)src, bytes, stream, true);
}

sth_status sthi_sim_copy_h2d_foreign(sth_backend_device *device, sth_devptr dst, const void *src, uint64_t bytes,
                                     sth_stream stream) {
    return copy(device, SIM_H2D, (void *)(uintptr_t)dst, src, bytes, stream, true);
}

void sthi_sim_poison(sth_backend_device *device, sth_devptr p, uint64_t bytes, sth_stream stream) {
    sim_device *d = sthi_sim_of(device);
    if (!d->options.poison || bytes == 0 || sthi_sim_enter(d)) return;
    sthi_lock(&d->lock);
    sim_op op = {.kind = SIM_OP_POISON, .dst = (void *)(uintptr_t)p, .bytes = bytes};
    if (sthi_sim_check_live(d, p, bytes) == STH_OK) (void)submit_to(d, stream, op);
    sthi_unlock(&d->lock);
}

sth_status sthi_sim_expand_ready(sth_backend_device *device) {
    STHI_TRY(sthi_sim_enter(sthi_sim_of(device)));
    if (sthi_sim_of(device)->options.no_expand)
        return sthi_fail(STH_UNSUPPORTED, "sim", 0, "expand", "the simulated device was opened without expansion");
    return STH_OK;
}

sth_status sthi_sim_expand(sth_backend_device *device, const sth_expand *e, sth_stream stream) {
    sim_device *d = sthi_sim_of(device);
    sthi_expand_bytes bytes;
    STHI_TRY(sthi_sim_enter(d));
    STHI_TRY(sthi_expand_check(e, "sim", &bytes));
    sthi_lock(&d->lock);
    sth_status status = sthi_sim_check_live(d, e->place, e->place_bytes);
#define MUST_LIVE(part, name) \
    if (status == STH_OK && bytes.part) status = sthi_sim_check_live(d, e->part, bytes.part);
    STHI_EXPAND_PARTS(MUST_LIVE)
#undef MUST_LIVE
    uint64_t takes = sthi_min_u64(e->place_bytes >> EXPAND_SHIFT, SIM_LONGEST_NS);
    sim_op op = {.kind = SIM_OP_EXPAND, .expand = *e, .duration_ns = (int64_t)takes};
    if (status == STH_OK) status = submit_to(d, stream, op);
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_compute_on(sth_backend_device *device, sth_stream stream, int64_t ns) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    if (ns < 0 || ns > SIM_LONGEST_NS)
        return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, "compute",
                         "%" PRId64 " ns of work: give 0 to an hour", ns);
    sthi_lock(&d->lock);
    sth_status status = submit_to(d, stream, (sim_op){.kind = SIM_OP_COMPUTE, .duration_ns = ns});
    sthi_unlock(&d->lock);
    return status;
}

/* ---- events */

static sth_status recorded_or_fail(const sth_event *e) {
    if (e->last) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, "sim", 0, "event",
                     "the event has never been recorded: record it before this");
}

sth_status sthi_sim_event_create(sth_backend_device *device, bool timing, sth_event **out) {
    STHI_TRY(sthi_sim_enter(sthi_sim_of(device)));
    sth_event *e = sthi_zalloc(1, sizeof *e);
    if (!e) return no_memory("event");
    e->timing = timing;
    *out = e;
    return STH_OK;
}

void sthi_sim_event_destroy(sth_backend_device *device, sth_event *e) {
    sim_device *d = sthi_sim_of(device);
    if (!e || sthi_sim_check_fork(d)) return;
    sthi_lock(&d->lock);
    fence_drop(d, e->last);
    sthi_unlock(&d->lock);
    sthi_free(e);
}

static sth_status record_locked(sim_device *d, sth_event *e, sth_stream stream) {
    sim_stream *s;
    STHI_TRY(find_or_fail(d, stream, &s));
    sim_fence *fresh = fence_take(d);
    if (!fresh) return no_memory("fence");
    fresh->refs = 2; /* the operation's and the event's */
    sth_status status = submit(d, s, (sim_op){.kind = SIM_OP_RECORD, .fence = fresh});
    if (status != STH_OK) {
        fence_drop(d, fresh);
        return status;
    }
    fence_drop(d, e->last);
    e->last = fresh;
    return STH_OK;
}

sth_status sthi_sim_event_record(sth_backend_device *device, sth_event *e, sth_stream stream) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    sth_status status = record_locked(d, e, stream);
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_stream_wait(sth_backend_device *device, sth_stream stream, sth_event *e) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    sth_status status = recorded_or_fail(e);
    if (status == STH_OK) {
        e->last->refs++;
        status = submit_to(d, stream, (sim_op){.kind = SIM_OP_WAIT, .fence = e->last});
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_event_query(sth_backend_device *device, sth_event *e, bool *out_done) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter_wait(d));
    sthi_lock(&d->lock);
    sth_status status = recorded_or_fail(e);
    if (status == STH_OK) {
        if (d->options.virtual_time) sthi_sim_advance(d, d->now_ns);
        *out_done = e->last->done;
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_event_synchronize(sth_backend_device *device, sth_event *e) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter_wait(d));
    sthi_lock(&d->lock);
    sth_status status = recorded_or_fail(e);
    if (status == STH_OK) {
        sim_fence *f = e->last; /* another thread may record the event again meanwhile */
        f->refs++;
        if (d->options.virtual_time) status = sthi_sim_virtual_wait(d, f);
        else sthi_sim_real_wait(d, f);
        fence_drop(d, f);
    }
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_event_elapsed_ns(sth_backend_device *device, sth_event *a, sth_event *b, int64_t *out) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sthi_lock(&d->lock);
    if (d->options.virtual_time) sthi_sim_advance(d, d->now_ns);
    bool ready = a->timing && b->timing && a->last && b->last && a->last->done && b->last->done;
    int64_t ns = ready ? b->last->time_ns - a->last->time_ns : 0;
    sthi_unlock(&d->lock);
    if (!ready)
        return sthi_fail(STH_INVALID_STATE, "sim", 0, "event",
                         "elapsed time needs two events created with timing, recorded and done");
    *out = ns;
    return STH_OK;
}

/* ---- streams */

static void unlink_stream(sim_device *d, const sim_stream *gone) {
    sim_stream **link = &d->streams;
    while (*link != gone) link = &(*link)->next;
    *link = gone->next;
}

sth_status sthi_sim_stream_create(sth_backend_device *device, int priority, sth_stream *out) {
    (void)priority; /* the simulated link serves in the order in which copies become ready */
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter(d));
    sim_stream *s = sthi_zalloc(1, sizeof *s);
    if (!s) return no_memory("stream");
    s->device = d;
    sthi_cond_init(&s->work);
    sthi_lock(&d->lock);
    sth_status status = STH_OK;
    if (!d->options.virtual_time)
        status = sthi_thread_start(&s->worker, "sth-sim-stream", sthi_sim_worker, s);
    if (status == STH_OK) {
        *out = s->id = ++d->next_id;
        s->next = d->streams;
        d->streams = s;
    }
    sthi_unlock(&d->lock);
    if (status == STH_OK) return STH_OK;
    sthi_cond_fini(&s->work);
    sthi_free(s);
    return status;
}

/* Locked, and again on return. */
static void end_stream(sim_device *d, sim_stream *s) {
    (void)sthi_sim_drain(d, s);
    unlink_stream(d, s);
    if (!d->options.virtual_time) {
        s->closing = true;
        sthi_cond_signal(&s->work);
        sthi_unlock(&d->lock);
        sthi_thread_join(s->worker);
        sthi_lock(&d->lock);
    }
    while (s->head) sthi_sim_retire(d, s);
    sthi_cond_fini(&s->work);
    sthi_free(s);
}

void sthi_sim_stream_destroy(sth_backend_device *device, sth_stream id) {
    sim_device *d = sthi_sim_of(device);
    if (id == 0 || sthi_sim_check_fork(d)) return;
    sim_stream *s;
    sthi_lock(&d->lock);
    if (find_or_fail(d, id, &s) == STH_OK) end_stream(d, s);
    sthi_unlock(&d->lock);
}

sth_status sthi_sim_stream_synchronize(sth_backend_device *device, sth_stream id) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_enter_wait(d));
    sim_stream *s;
    sthi_lock(&d->lock);
    sth_status status = find_or_fail(d, id, &s);
    if (status == STH_OK) status = sthi_sim_drain(d, s);
    sthi_unlock(&d->lock);
    return status;
}

void sthi_sim_streams_fini(sim_device *d) {
    sthi_lock(&d->lock);
    (void)sthi_sim_drain(d, NULL);
    while (d->streams != &d->caller) end_stream(d, d->streams);
    while (d->caller.head) sthi_sim_retire(d, &d->caller);
    sthi_unlock(&d->lock);
    for (sim_op *op; (op = d->op_pool); sthi_free(op)) d->op_pool = op->next;
    for (sim_fence *f; (f = d->fence_pool); sthi_free(f)) d->fence_pool = f->next;
}
