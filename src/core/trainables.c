/* The price of a trained weight's home. See trainables.h.
 *
 * On the host a weight crosses the link once a step, as it has been written, and its gradient crosses back. On the
 * device its gradient and its state displace as many bytes of others, as far as they are more than the slack: those
 * cross for forward and for backward. The weight itself displaces nothing, for on the host it has a place, too. What
 * the optimizer's own pass over host memory takes is in host_ns; for large weights it runs beside backward. */
#include "core/trainables.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

enum { CROSSINGS = 2 /* of a frozen weight that streams, in a step */ };

typedef struct candidate {
    uint64_t need; /* on the device */
    uint32_t index;
} candidate;

static bool whole_need(const sth_trainable *w, uint64_t *out) {
    uint64_t sum;
    return sthi_add_u64(w->bytes, w->gradient_bytes, &sum) && sthi_add_u64(sum, w->state_bytes, out);
}

static int by_need(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->need != b->need) return a->need < b->need ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static bool pays(const sth_trainables_input *in, const sth_trainable *w, uint64_t slack) {
    uint64_t beside = w->gradient_bytes + w->state_bytes, displaced = beside > slack ? beside - slack : 0;
    double link_ns = 1e9 / in->link_bytes_per_s;
    double there = CROSSINGS * (double)displaced * link_ns;
    double here = (double)in->host_ns + ((double)w->bytes + (double)w->gradient_bytes) * link_ns;
    return there <= here;
}

static sth_status check(const sth_trainables_input *in, candidate *order) {
    if (!(in->link_bytes_per_s > 0) || in->host_ns < 0)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "trainables: a link of %g bytes/s, %lld ns of the host",
                         in->link_bytes_per_s, (long long)in->host_ns);
    for (uint32_t i = 0; i < in->count; i++) {
        order[i].index = i;
        if (!whole_need(&in->weights[i], &order[i].need))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "trainables: weight %u has an impossible size", i);
    }
    return STH_OK;
}

static uint64_t choose(const sth_trainables_input *in, const candidate *order, sth_home *homes) {
    uint64_t taken = 0, slack = in->slack;
    for (uint32_t i = 0; i < in->count; i++) {
        const sth_trainable *w = &in->weights[order[i].index];
        sth_home *home = &homes[order[i].index];
        *home = STH_HOME_DEVICE;
        if (order[i].need > in->room - taken) *home = STH_HOME_ROOM;
        else if (!in->wanted && !pays(in, w, slack)) *home = STH_HOME_PRICE;
        if (*home != STH_HOME_DEVICE) continue;
        taken += order[i].need;
        slack -= sthi_min_u64(slack, w->gradient_bytes + w->state_bytes);
    }
    return taken;
}

sth_status sthi_trainables_choose(const sth_trainables_input *in, sth_home *homes, uint64_t *out_bytes) {
    candidate *order = sthi_alloc((in->count + (size_t)1) * sizeof *order);
    if (!order) return sthi_no_memory(NULL, "trained weights");
    sth_status rc = check(in, order);
    if (rc == STH_OK) {
        if (in->count) qsort(order, in->count, sizeof *order, by_need);
        *out_bytes = choose(in, order, homes);
    }
    sthi_free(order);
    return rc;
}
