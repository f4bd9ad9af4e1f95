/* A device's clock: an event whose time on the timeline was seen, the anchor, and how far others lie from it. Elapsed
 * times are floats on some devices, which lose microseconds over minutes: the anchor moves along every few seconds.
 *
 * Spans that were marked wait in `pending` until the device has passed them; their events are used again. Lock: `lock`
 * guards clocks and spans; the device is called under it, so it comes above the device's and the timeline's, and below
 * all others. */
#include "telemetry/devtime.h"

#include <string.h>

#include "base/memory.h"
#include "base/thread.h"

enum { CLOCKS = 16, TRIES = 3, PENDING = 4096, TEXT = 96 };
static const int64_t ANCHOR_NS = 5000000000; /* for so long an anchor is good */

typedef struct device_clock {
    sth_device *device; /* retained */
    sth_stream stream;
    sth_event *anchor, *next;
    int64_t anchor_ns;
    bool coming; /* `next` is recorded and takes the anchor's place when it has passed */
} device_clock;

struct sthi_devspan {
    sthi_devspan *after;
    sth_device *device;
    sth_event *begin, *end;
    sthi_track track;
    uint64_t bytes;
    char source[TEXT], name[TEXT];
};

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};
static device_clock clocks[CLOCKS];
static uint32_t clock_count;
static sthi_devspan *pending, **pending_end = &pending, *idle;
static uint32_t pending_count;

#define DEV(d, op, ...) ((d)->ops->op((d)->self, __VA_ARGS__))

/* ---- clocks. Lock held. */

static void close_clock(device_clock *c) {
    if (c->anchor) DEV(c->device, event_destroy, c->anchor);
    if (c->next) DEV(c->device, event_destroy, c->next);
    if (c->stream) DEV(c->device, stream_destroy, c->stream);
    sthi_device_release(c->device);
    *c = (device_clock){0};
}

/* The first tries warm up; the last one counts. */
static bool set_anchor(device_clock *c) {
    for (int i = 0; i < TRIES; i++) {
        int64_t before = sthi_timeline_now();
        if (DEV(c->device, event_record, c->anchor, c->stream) != STH_OK) return false;
        if (DEV(c->device, event_synchronize, c->anchor) != STH_OK) return false;
        c->anchor_ns = before + (sthi_timeline_now() - before) / 2;
    }
    return true;
}

static device_clock *open_clock(sth_device *device) {
    if (clock_count == CLOCKS) return NULL;
    device_clock *c = &clocks[clock_count];
    *c = (device_clock){.device = device};
    sthi_device_retain(device);
    if (DEV(device, stream_create, 0, &c->stream) == STH_OK && DEV(device, event_create, true, &c->anchor) == STH_OK &&
        DEV(device, event_create, true, &c->next) == STH_OK && set_anchor(c)) {
        clock_count++;
        return c;
    }
    close_clock(c);
    return NULL;
}

static device_clock *find_clock(sth_device *device) {
    for (uint32_t i = 0; i < clock_count; i++)
        if (clocks[i].device == device) return &clocks[i];
    return open_clock(device);
}

static bool elapsed(sth_device *d, sth_event *from, sth_event *to, int64_t *out) {
    return DEV(d, event_elapsed_ns, from, to, out) == STH_OK;
}

/* The anchor moves along. */
static void follow(device_clock *c) {
    bool done = false;
    int64_t ns;
    if (!c->coming) {
        if (sthi_timeline_now() - c->anchor_ns > ANCHOR_NS)
            c->coming = DEV(c->device, event_record, c->next, c->stream) == STH_OK;
        return;
    }
    if (DEV(c->device, event_query, c->next, &done) != STH_OK || !done) return;
    if (!elapsed(c->device, c->anchor, c->next, &ns)) return;
    sth_event *old = c->anchor;
    c->anchor = c->next;
    c->anchor_ns += ns;
    c->next = old;
    c->coming = false;
}

static bool time_of(sth_device *device, sth_event *event, int64_t *out) {
    device_clock *c = find_clock(device);
    if (!c) return false;
    follow(c);
    int64_t ns;
    if (!elapsed(device, c->anchor, event, &ns)) return false;
    *out = c->anchor_ns + ns;
    return true;
}

bool sthi_devtime_of(sth_device *device, sth_event *event, int64_t *out) {
    sthi_lock(&lock);
    bool known = time_of(device, event, out);
    sthi_unlock(&lock);
    return known;
}

/* ---- spans. Lock held. */

static void destroy_span(sthi_devspan *s) {
    if (s->begin) DEV(s->device, event_destroy, s->begin);
    if (s->end) DEV(s->device, event_destroy, s->end);
    sthi_free(s);
}

/* One with events of the device. */
static sthi_devspan *take_span(sth_device *device) {
    for (sthi_devspan **at = &idle; *at; at = &(*at)->after)
        if ((*at)->device == device) {
            sthi_devspan *found = *at;
            *at = found->after;
            return found;
        }
    sthi_devspan *s = sthi_zalloc(1, sizeof *s);
    if (!s) return NULL;
    s->device = device;
    if (DEV(device, event_create, true, &s->begin) == STH_OK && DEV(device, event_create, true, &s->end) == STH_OK)
        return s;
    destroy_span(s);
    return NULL;
}

static void give_span(sthi_devspan *s) {
    s->after = idle;
    idle = s;
}

static void show(const sthi_devspan *s) {
    sthi_slice slice = {.track = s->track, .source = s->source, .name = s->name, .bytes = s->bytes, .step = -1};
    if (time_of(s->device, s->begin, &slice.begin_ns) && time_of(s->device, s->end, &slice.end_ns))
        sthi_timeline_slice(&slice);
}

/* Those that the device has passed become slices. */
static void harvest(bool wait) {
    for (sthi_devspan **at = &pending, *s; (s = *at);) {
        bool done = wait && DEV(s->device, event_synchronize, s->end) == STH_OK;
        if (!done && (DEV(s->device, event_query, s->end, &done) != STH_OK || !done)) {
            at = &s->after;
            continue;
        }
        show(s);
        *at = s->after;
        if (!*at) pending_end = at;
        pending_count--;
        give_span(s);
    }
}

static void copy_text(char *to, const char *from) {
    size_t n = strlen(from);
    if (n > TEXT - 1) n = TEXT - 1;
    memcpy(to, from, n);
    to[n] = '\0';
}

sthi_devspan *sthi_devspan_begin(sth_device *device, sth_stream stream, sthi_track track, const char *source,
                                 const char *name, uint64_t bytes) {
    if (!sthi_timeline_on()) return NULL;
    sthi_lock(&lock);
    harvest(false);
    sthi_devspan *s = pending_count < PENDING && find_clock(device) ? take_span(device) : NULL;
    if (s && DEV(device, event_record, s->begin, stream) != STH_OK) {
        give_span(s);
        s = NULL;
    }
    if (s) {
        s->track = track;
        s->bytes = bytes;
        copy_text(s->source, source);
        copy_text(s->name, name);
    }
    sthi_unlock(&lock);
    return s;
}

void sthi_devspan_end(sthi_devspan *s, sth_stream stream) {
    if (!s) return;
    sthi_lock(&lock);
    if (clock_count == 0) { /* the recording has ended meanwhile */
        destroy_span(s);
    } else if (DEV(s->device, event_record, s->end, stream) == STH_OK) {
        s->after = NULL;
        *pending_end = s;
        pending_end = &s->after;
        pending_count++;
    } else {
        give_span(s);
    }
    sthi_unlock(&lock);
}

void sthi_devspans_end(void) {
    sthi_lock(&lock);
    harvest(true);
    while (pending) { /* the device did not say when they passed */
        sthi_devspan *s = pending;
        pending = s->after;
        give_span(s);
    }
    pending_end = &pending;
    pending_count = 0;
    while (idle) {
        sthi_devspan *s = idle;
        idle = s->after;
        destroy_span(s);
    }
    while (clock_count) close_clock(&clocks[--clock_count]);
    sthi_unlock(&lock);
}
