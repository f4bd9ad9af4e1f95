/* The link between lanes: who waits for whom, how large pieces are, and what may begin later.
 *
 * A flight is a run of copies on a lane's stream between two events, recorded before and behind it. A stream waits only
 * for flights whose first event has passed: they are on the link, so that waiting does not leave it idle; and
 * their last event is recorded by then, so that all waits point to the past.
 * Invariants: a lane's flights end in the order of the ring; `bytes` is the sum of those in it; a flight that is
 * being enqueued has no recorded end, and nothing behind it is taken off the ring.
 * Lock: the conductor's, also while the device is called. References of a lane are atomic: the download takes one
 * for each copy, since it enqueues without its lock. */
#include "conductor/arbiter.h"

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "conductor/conductor.h"

enum { FLIGHTS = 32, MEASURED_BYTES = 64 << 10, ALLOWANCE_PIECES = 2, SHARE = 2, SLACK = 2 };

typedef struct flight {
    sth_event *begin, *end; /* kept from one flight to the next */
    uint64_t bytes;
    int64_t due_ns;
    bool begun, ended; /* passed the first event, as last seen; the last one is recorded */
    bool lost;         /* its last event could not be recorded: as if it were done */
} flight;

struct sthi_lane {
    sth_conductor *conductor;
    sth_device *device;
    sth_stream stream;
    sth_direction direction;
    const void *runtime;
    const void *card; /* lanes with the same one share a link, and may wait for each other's events */
    int index;
    atomic_int refs;
    flight flights[FLIGHTS];
    uint64_t head, tail; /* history numbers */
    uint64_t bytes;
    bool beside;                /* copies the other way had little time, when it was last asked whether one may begin */
    uint64_t begun, loads_from; /* since then: bytes begun on this lane; all that were loaded before */
    sthi_lane *next;
};

static flight *flight_at(sthi_lane *l, uint64_t n) { return &l->flights[n % FLIGHTS]; }

/* ---- life */

/* Most devices' events mean nothing to another device; those of one card may. */
static void find_card(sthi_lane *l) {
    sth_device *d = l->device;
    sth_device_info info;
    l->card = d;
    if (!(d->capabilities & STH_CAP_SHARED_EVENTS) || d->ops->info(d->self, &info) != STH_OK) return;
    l->card = d->ops;
    l->index = info.index;
}

static bool same_card(const sthi_lane *a, const sthi_lane *b) { return a->card == b->card && a->index == b->index; }

sth_status sthi_lane_open(sth_conductor *c, sth_device *device, sth_stream stream, sth_direction direction,
                          const void *runtime, sthi_lane **out) {
    sthi_lane *l = sthi_zalloc(1, sizeof *l);
    if (!l) return sthi_no_memory("conductor", "a lane's record");
    *l = (sthi_lane){.conductor = c, .device = device, .stream = stream, .direction = direction, .runtime = runtime};
    atomic_init(&l->refs, 1);
    sthi_device_retain(device);
    find_card(l);
    atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    sthi_lock(&c->lock);
    l->next = c->lanes;
    c->lanes = l;
    sthi_unlock(&c->lock);
    *out = l;
    return STH_OK;
}

void sthi_lane_retain(sthi_lane *l) { atomic_fetch_add_explicit(&l->refs, 1, memory_order_relaxed); }

void sthi_lane_close(sthi_lane *l) {
    if (!l || atomic_fetch_sub_explicit(&l->refs, 1, memory_order_acq_rel) != 1) return;
    sth_conductor *c = l->conductor;
    if (sthi_conductor_in_child(c)) return;
    sthi_lock(&c->lock);
    for (sthi_lane **at = &c->lanes; *at; at = &(*at)->next)
        if (*at == l) {
            *at = l->next;
            break;
        }
    sthi_unlock(&c->lock);
    for (int i = 0; i < FLIGHTS; i++) {
        if (l->flights[i].begin) l->device->ops->event_destroy(l->device->self, l->flights[i].begin);
        if (l->flights[i].end) l->device->ops->event_destroy(l->device->self, l->flights[i].end);
    }
    sthi_device_release(l->device);
    sthi_free(l);
    sthi_conductor_unref(c);
}

/* ---- what is on the link. Locked. */

static bool passed(const sthi_lane *l, sth_event *event) {
    bool done = false;
    return l->device->ops->event_query(l->device->self, event, &done) == STH_OK && done;
}

static void measure(sthi_lane *l, const flight *f) {
    int64_t ns;
    if (f->bytes < MEASURED_BYTES) return;
    if (l->device->ops->event_elapsed_ns(l->device->self, f->begin, f->end, &ns) == STH_OK)
        sthi_tokens_measured(&l->conductor->tokens, l->direction, f->bytes, (double)ns);
}

/* Takes off what is done. */
static void harvest(sthi_lane *l) {
    STHI_INVARIANT(l->tail - l->head <= FLIGHTS);
    while (l->head != l->tail) {
        flight *f = flight_at(l, l->head);
        if (!f->lost && (!f->ended || !passed(l, f->end))) return;
        if (!f->lost) measure(l, f);
        STHI_INVARIANT(f->bytes <= l->bytes);
        l->bytes -= f->bytes;
        l->head++;
    }
    STHI_INVARIANT(!l->bytes); /* of an empty ring */
}

static bool on_the_link(const sthi_lane *l, flight *f) {
    if (!f->begun && f->ended) f->begun = passed(l, f->begin);
    return f->begun;
}

/* The newest flight of a lane that has begun and is due before the time; NULL: none. */
static flight *ahead_of(sthi_lane *l, int64_t due_ns) {
    flight *found = NULL;
    for (uint64_t n = l->head; n != l->tail; n++) {
        flight *f = flight_at(l, n);
        if (f->lost) continue;
        if (!f->ended || !on_the_link(l, f)) break;
        if (f->due_ns < due_ns) found = f;
    }
    return found;
}

/* A load that is on the link and has little time to spare. */
static bool pressed(sthi_lane *l, int64_t now) {
    double rate = l->conductor->tokens.rate[l->direction];
    const flight *f = ahead_of(l, STHI_DUE_LAST);
    if (!f) return false;
    return rate <= 0 || (double)(f->due_ns - now) < SLACK * (double)l->bytes * 1e9 / rate;
}

/* ---- for runtimes */

static bool make_events(sthi_lane *l, flight *f) {
    const sth_backend_ops *ops = l->device->ops;
    if (!f->begin && ops->event_create(l->device->self, true, &f->begin) != STH_OK) f->begin = NULL;
    if (!f->end && ops->event_create(l->device->self, true, &f->end) != STH_OK) f->end = NULL;
    return f->begin && f->end;
}

/* A flight of its own; where there is no room, or no event, none. */
static uint64_t open_flight(sthi_lane *l, uint64_t bytes, int64_t due_ns) {
    if (l->tail - l->head == FLIGHTS) return STHI_NO_FLIGHT;
    flight *f = flight_at(l, l->tail);
    if (!make_events(l, f) || l->device->ops->event_record(l->device->self, f->begin, l->stream) != STH_OK)
        return STHI_NO_FLIGHT;
    f->bytes = bytes;
    f->due_ns = due_ns;
    f->begun = f->ended = f->lost = false;
    l->bytes += bytes;
    return l->tail++;
}

sthi_way sthi_lane_begin(sthi_lane *l, uint64_t bytes, int64_t due_ns, uint64_t whole) {
    sth_conductor *c = l->conductor;
    sthi_way way = {.piece = whole, .flight = STHI_NO_FLIGHT};
    bool competes = false;
    if (sthi_conductor_in_child(c)) return way;
    sthi_lock(&c->lock);
    harvest(l);
    for (sthi_lane *o = c->shut ? NULL : c->lanes; o; o = o->next) {
        if (o == l || !same_card(o, l)) continue;
        harvest(o);
        if (o->direction != l->direction || o->runtime != l->runtime) competes |= o->head != o->tail;
        flight *f = o->direction == l->direction ? ahead_of(o, due_ns) : NULL;
        if (f && l->device->ops->stream_wait(l->device->self, l->stream, f->end) == STH_OK) way.waits = true;
    }
    if (competes) way.piece = sthi_min_u64(whole, c->options.piece_bytes);
    c->split += bytes > way.piece && way.piece < whole;
    c->ordered += way.waits;
    if (way.waits) sthi_conductor_note(c, STH_CONDUCTOR_ORDERED, bytes, l->direction, 0);
    if (!c->shut) way.flight = open_flight(l, bytes, due_ns);
    l->begun += bytes;
    c->flights += way.flight != STHI_NO_FLIGHT;
    c->flight_bytes[l->direction] += bytes;
    sthi_unlock(&c->lock);
    return way;
}

void sthi_lane_end(sthi_lane *l, uint64_t n) {
    if (n == STHI_NO_FLIGHT || sthi_conductor_in_child(l->conductor)) return;
    sthi_lock(&l->conductor->lock);
    STHI_INVARIANT(n - l->head < l->tail - l->head);
    flight *f = flight_at(l, n);
    STHI_INVARIANT(!f->ended && !f->lost);
    f->ended = l->device->ops->event_record(l->device->self, f->end, l->stream) == STH_OK;
    f->lost = !f->ended;
    sthi_unlock(&l->conductor->lock);
}

/* Some other runtime's copy the other way is on the link and has little time. Locked. */
static bool somebody_pressed(const sthi_lane *l) {
    int64_t now = l->device->ops->now_ns(l->device->self);
    for (sthi_lane *o = l->conductor->lanes; o; o = o->next) {
        if (o->direction == l->direction || o->runtime == l->runtime || !same_card(o, l)) continue;
        harvest(o);
        if (pressed(o, now)) return true;
    }
    return false;
}

/* Beside loads that have little time a few pieces may go, and then a share of what is loaded: while both directions
 * are in use each is slower, but a link that is loaded all the time must not keep spills off altogether. A limit on
 * what is under way would not do: a lane that begins one copy when the last one ends takes its direction whole. */
bool sthi_lane_may(sthi_lane *l, uint64_t bytes) {
    if (!l || sthi_conductor_in_child(l->conductor)) return true;
    sth_conductor *c = l->conductor;
    sthi_lock(&c->lock);
    harvest(l);
    bool beside = !c->shut && somebody_pressed(l), may = true;
    uint64_t loaded = c->flight_bytes[1 - l->direction];
    if (beside && !l->beside) {
        l->begun = l->bytes;
        l->loads_from = loaded;
    }
    l->beside = beside;
    if (beside && l->begun) {
        uint64_t share = ALLOWANCE_PIECES * c->options.piece_bytes + (loaded - l->loads_from) / SHARE;
        may = l->begun < share && bytes <= share - l->begun;
    }
    c->deferred += !may;
    if (!may) sthi_conductor_note(c, STH_CONDUCTOR_DEFERRED, bytes, l->direction, 0);
    sthi_unlock(&c->lock);
    return may;
}
