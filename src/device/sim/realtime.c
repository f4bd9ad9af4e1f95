/* Real time: operations take as long as the simulated device says, on one worker thread per stream.
 *
 * A schedule is computed (an operation starts when its stream, its link and its submission allow) and the
 * worker then makes wall time catch up with it, so that a worker that wakes late does not slow the link
 * down. Bytes are moved as late as the host's memcpy allows: whoever reads the destination or reuses the
 * source without waiting sees the wrong data.
 * Lock: the device's, let go while sleeping or moving bytes. The head of a stream belongs to its worker. */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

#include "base/clock.h"
#include "device/sim/sim.h"

enum { SPIN_NS = 120000 }; /* a sleep wakes up to about this late */

static void sleep_until(int64_t t) {
    int64_t left = t - sthi_now_ns();
    if (left > SPIN_NS) sthi_sleep_ns(left - SPIN_NS);
    while (sthi_now_ns() < t) sched_yield();
}

/* Processor time of this thread: a worker that is preempted has not copied any slower. */
static int64_t worked_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Returns when the copy ended on the device's schedule. */
static int64_t real_copy(sim_device *d, const sim_op *op, int64_t ready) {
    int64_t start = sthi_sim_max(ready, d->link_free_ns[op->link]);
    int64_t free_at = start + sthi_sim_link_ns(d, op->bytes);
    int64_t end = free_at + d->options.copy_latency_ns;
    d->link_free_ns[op->link] = free_at;
    int64_t guess = (int64_t)(d->copy_ns_per_byte * (double)op->bytes);
    sthi_unlock(&d->lock);

    sleep_until(sthi_sim_max(start, end - guess - guess / 4));
    int64_t before = worked_ns();
    sthi_sim_effect(op, end);
    int64_t spent = worked_ns() - before;
    end = sthi_sim_max(end, start + spent); /* the host is slower than the link: say so */
    sleep_until(end);

    sthi_lock(&d->lock);
    if (op->bytes >= 65536)
        d->copy_ns_per_byte += ((double)spent / (double)op->bytes - d->copy_ns_per_byte) / 4;
    return end;
}

/* Carries one operation out that may start at `ready`; returns its end. */
static int64_t execute(sim_device *d, sim_op *op, int64_t ready) {
    int64_t end = ready;
    switch (op->kind) {
    case SIM_OP_COPY: return real_copy(d, op, ready);
    case SIM_OP_COMPUTE:
        end = ready + op->duration_ns;
        sthi_unlock(&d->lock);
        sleep_until(end);
        sthi_lock(&d->lock);
        return end;
    case SIM_OP_EXPAND: {
        sthi_unlock(&d->lock);
        int64_t before = worked_ns();
        sthi_sim_effect(op, end);
        end = sthi_sim_max(ready + op->duration_ns, ready + (worked_ns() - before));
        sthi_lock(&d->lock);
        return end;
    }
    case SIM_OP_WAIT: sthi_sim_real_wait(d, op->fence); return sthi_sim_max(ready, op->fence->time_ns);
    case SIM_OP_POISON:
        sthi_unlock(&d->lock);
        sthi_sim_effect(op, end);
        sthi_lock(&d->lock);
        return end;
    case SIM_OP_RECORD: sthi_sim_effect(op, end); return end;
    }
    return end;
}

void sthi_sim_real_wait(sim_device *d, const sim_fence *fence) {
    while (!fence->done) sthi_cond_wait(&d->done, &d->lock);
}

void sthi_sim_real_inline(sim_device *d, sim_op *op) { (void)execute(d, op, op->ready_ns); }

void *sthi_sim_worker(void *stream) {
    sim_stream *s = stream;
    sim_device *d = s->device;
    sthi_lock(&d->lock);
    for (;;) {
        while (!s->head && !s->closing) sthi_cond_wait(&s->work, &d->lock);
        if (!s->head) break;
        s->free_ns = execute(d, s->head, sthi_sim_max(s->free_ns, s->head->ready_ns));
        sthi_sim_retire(d, s);
        sthi_cond_broadcast(&d->done);
    }
    sthi_unlock(&d->lock);
    return NULL;
}
