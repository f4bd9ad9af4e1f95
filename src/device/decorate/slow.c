/* slow(percent=P): copies between host and device cross the link as if it had less of its rate: each takes P percent of
 * its time (default 200). Before a copy the same bytes go the same way P/100 - 1 times, a part of them for the
 * remainder, so that the link is as busy as a slower one would be, and events around the copy see its time. What
 * arrives is the same. Kernels, latencies of single calls and copies inside the device stay as they are. */
#include <string.h>

#include "base/error.h"
#include "device/decorate/layer.h"

enum { MOST_PERCENT = 10000 };

typedef struct slow_layer {
    sthi_layer layer;
    uint64_t percent;
} slow_layer;

static sth_status init(sthi_layer *l) {
    ((slow_layer *)l)->percent = 200;
    return STH_OK;
}

static sth_status set(sthi_layer *l, const char *key, const char *value) {
    slow_layer *s = (slow_layer *)l;
    bool good = !strcmp(key, "percent") && sthi_layer_number(value, MOST_PERCENT, &s->percent) && s->percent >= 100;
    return good ? STH_OK : sthi_layer_bad_option(l, key, value, "percent: a whole number from 100 to 10000");
}

static sth_status copy(const sthi_layer *l, const sthi_call *c, uint64_t bytes) {
    const sth_backend_ops *o = l->inner;
    switch (c->entry) {
    case STHI_ENTRY_copy_h2d: return o->copy_h2d(l->inner_self, c->address, c->host, bytes, c->stream);
    case STHI_ENTRY_copy_d2h: return o->copy_d2h(l->inner_self, c->host, c->address, bytes, c->stream);
    case STHI_ENTRY_copy_h2d_foreign: return o->copy_h2d_foreign(l->inner_self, c->address, c->host, bytes, c->stream);
    case STHI_ENTRY_copy_d2h_foreign: return o->copy_d2h_foreign(l->inner_self, c->host, c->address, bytes, c->stream);
    default: return STH_OK;
    }
}

static sth_status before(sthi_layer *l, const sthi_call *c) {
    uint64_t extra = ((slow_layer *)l)->percent - 100;
    if (!c->has_bytes || !c->has_host || !c->has_address) return STH_OK; /* no copy over the link */
    for (; extra >= 100; extra -= 100) STHI_TRY(copy(l, c, c->bytes));
    uint64_t part = c->bytes / 100 * extra;
    return part ? copy(l, c, part) : STH_OK;
}

const sthi_decorator sthi_slow_decorator = {
    .name = "slow", .size = sizeof(slow_layer), .init = init, .set = set, .before = before};
