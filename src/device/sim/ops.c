/* Operations and fences of the simulated device: where they are taken from, what each does, and
 * its end.
 *
 * Both come from pools that only grow, so that a steady state allocates nothing.
 * Invariant: an operation holds a reference to its fence until it is retired.
 * Lock: the device's, held by the caller. Knows no order and no time: realtime.c and virtual.c
 * keep those. */
#include <string.h>

#include "base/arith.h"
#include "base/memory.h"
#include "device/sim/sim.h"

sim_fence *sthi_sim_fence_take(sim_device *d) {
    sim_fence *f = d->fence_pool;
    if (f) d->fence_pool = f->next;
    else if (!(f = sthi_alloc(sizeof *f))) return NULL;
    *f = (sim_fence){.refs = 1};
    return f;
}

void sthi_sim_fence_drop(sim_device *d, sim_fence *f) {
    if (!f || --f->refs) return;
    f->next = d->fence_pool;
    d->fence_pool = f;
}

sim_op *sthi_sim_op_take(sim_device *d) {
    sim_op *op = d->op_pool;
    if (op) d->op_pool = op->next;
    else op = sthi_alloc(sizeof *op);
    return op;
}

static void op_drop(sim_device *d, sim_op *op) {
    sthi_sim_fence_drop(d, op->fence);
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
