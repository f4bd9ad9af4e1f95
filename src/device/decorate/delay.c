/* delay(seed=S, call_us=N, stream_us=N): every call waits for up to N microseconds before it is made, and where the
 * device can compute for so long, up to N microseconds of work go before each copy and expansion on its stream. So
 * threads and streams meet in orders that they seldom meet in. The n-th call's delay follows from seed and n alone. */
#include <string.h>
#include <time.h>

#include "base/random.h"
#include "device/decorate/layer.h"

enum { MOST_US = 10000000 };

typedef struct delay_layer {
    sthi_layer layer;
    uint64_t seed, call_us, stream_us;
    _Atomic uint64_t met;
} delay_layer;

static sth_status init(sthi_layer *l) {
    delay_layer *d = (delay_layer *)l;
    d->seed = 1;
    d->call_us = d->stream_us = 200;
    return STH_OK;
}

static sth_status set(sthi_layer *l, const char *key, const char *value) {
    delay_layer *d = (delay_layer *)l;
    bool good = false;
    if (!strcmp(key, "seed")) good = sthi_layer_number(value, UINT64_MAX / 2, &d->seed);
    else if (!strcmp(key, "call_us")) good = sthi_layer_number(value, MOST_US, &d->call_us);
    else if (!strcmp(key, "stream_us")) good = sthi_layer_number(value, MOST_US, &d->stream_us);
    return good ? STH_OK
                : sthi_layer_bad_option(l, key, value, "seed, call_us, stream_us: whole numbers, 10 seconds at most");
}

static bool moves_bytes(sthi_entry e) {
    return e == STHI_ENTRY_copy_h2d || e == STHI_ENTRY_copy_d2h || e == STHI_ENTRY_copy_h2d_foreign ||
           e == STHI_ENTRY_copy_d2h_foreign || e == STHI_ENTRY_expand;
}

static sth_status before(sthi_layer *l, const sthi_call *c) {
    delay_layer *d = (delay_layer *)l;
    uint64_t n = atomic_fetch_add_explicit(&d->met, 1, memory_order_relaxed);
    uint64_t ns = sthi_random64(d->seed, 2 * n) % (1000 * d->call_us + 1);
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    if (ns) nanosleep(&t, NULL);
    if (!d->stream_us || !l->inner->sim_compute || !moves_bytes(c->entry)) return STH_OK;
    int64_t work = (int64_t)(sthi_random64(d->seed, 2 * n + 1) % (1000 * d->stream_us + 1));
    return l->inner->sim_compute(l->inner_self, c->stream, work);
}

const sthi_decorator sthi_delay_decorator = {
    .name = "delay", .size = sizeof(delay_layer), .init = init, .set = set, .before = before};
