/* The stand-in's streams: a thread for each, which runs what is enqueued in order, as late as the schedule says. Work
 * that something waits for, directly or through events, comes at once. Number 0 is the default stream.
 * Everything runs with the lock held; threads let it go while they sleep. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_parts.h"

typedef enum kind { RUN, WAIT, RECORD } kind;

typedef struct op {
    struct op *next;
    uint64_t index;
    kind kind;
    fake_work work;
    unsigned char *staged;   /* RUN: bytes of pageable memory, taken when the copy was enqueued */
    bool pageable;           /* its host memory is not registered */
    unsigned slot;           /* WAIT: until this stream has come so far */
    uint64_t until;
    void *event;             /* RECORD */
    struct timespec due;     /* not before, unless forced */
    bool dropped;            /* it does not run any more */
} op;

typedef struct stream {
    bool used, closing;
    uint64_t enqueued, completed, forced; /* go on counting when the place is used again */
    fake_clock clock;
    op *head, **tail;
    pthread_cond_t wake;
} stream;

typedef struct event {
    bool timing, recorded;
    unsigned slot;
    uint64_t index;
    fake_clock clock;
    struct timespec when;
} event;

pthread_cond_t fake_done = PTHREAD_COND_INITIALIZER;
static stream streams[FAKE_SLOTS];
static table events;
static uint64_t seed;
static unsigned late_us;

void fake_schedule(uint64_t of_seed, unsigned us) {
    seed = of_seed;
    late_us = us;
}

void fake_kill(void) {
    for (int i = 0; i < FAKE_SLOTS; i++) {
        if (!streams[i].used) continue;
        for (op *o = streams[i].head; o; o = o->next) o->dropped = true;
        pthread_cond_signal(&streams[i].wake);
    }
    pthread_cond_broadcast(&fake_done);
}

static struct timespec due_time(void) {
    struct timespec t = {0, 0};
    if (!seed || !late_us) return t;
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    unsigned choice = (unsigned)(seed >> 20) % 4;
    uint64_t us = choice == 0 ? 0 : choice == 3 ? (uint64_t)late_us * 10 : (seed >> 24) % late_us;
    if (!us) return t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t ns = (uint64_t)t.tv_nsec + us * 1000;
    t.tv_sec += (time_t)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    return t;
}

/* ---- running */

static void copy(op *o) {
    fake_touch *to = &o->work.touch[0], *from = &o->work.touch[1];
    memcpy((char *)(uintptr_t)to->p, o->staged ? (const char *)o->staged : from->p, to->bytes);
}

static void run(op *o) {
    for (int i = 0; i < o->work.touches; i++) {
        const fake_touch *t = &o->work.touch[i];
        bool there = t->device ? fake_is_live(t->p, t->bytes) : o->pageable || fake_is_pinned(t->p, t->bytes);
        if (there) continue;
        fake_complain("%s runs when its %s is no more", o->work.what,
                      t->device ? "device memory" : "registered memory");
        return;
    }
    if (o->work.run) o->work.run(o->work.arguments);
    else copy(o);
}

static void note_time(const stream *s, const op *o) {
    span *found = fake_find(&events, o->event); /* it may be gone, or recorded again */
    event *e = found ? (event *)(void *)found->p : NULL;
    if (e && &streams[e->slot] == s && e->index == o->index) clock_gettime(CLOCK_MONOTONIC, &e->when);
}

static bool is_due(const op *o) {
    struct timespec now;
    if (!o->due.tv_sec) return true;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec > o->due.tv_sec || (now.tv_sec == o->due.tv_sec && now.tv_nsec >= o->due.tv_nsec);
}

static void *work(void *argument) {
    stream *s = argument;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        op *o = s->head;
        if (!o && s->closing) break;
        if (!o) {
            pthread_cond_wait(&s->wake, &fake_lock);
            continue;
        }
        if (!o->dropped && o->kind == WAIT && streams[o->slot].completed < o->until) {
            pthread_cond_wait(&fake_done, &fake_lock);
            continue;
        }
        if (!o->dropped && o->kind != WAIT && s->forced < o->index && !is_due(o)) {
            pthread_cond_timedwait(&s->wake, &fake_lock, &o->due);
            continue;
        }
        if (!o->dropped && o->kind == RUN) run(o);
        if (!o->dropped && o->kind == RECORD) note_time(s, o);
        s->completed = o->index;
        s->head = o->next;
        if (!s->head) s->tail = &s->head;
        free(o->staged);
        free(o);
        pthread_cond_broadcast(&fake_done);
    }
    s->used = false;
    pthread_cond_destroy(&s->wake);
    pthread_cond_broadcast(&fake_done);
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}

static bool start(stream *s) {
    pthread_t thread;
    s->head = NULL;
    s->tail = &s->head;
    s->closing = false;
    pthread_cond_init(&s->wake, NULL);
    if (pthread_create(&thread, NULL, work, s)) return false;
    pthread_detach(thread);
    s->used = true;
    return true;
}

/* NULL where there is no such stream. */
static stream *stream_of(void *handle) {
    stream *s = handle ? handle : &streams[0];
    if (handle && (s <= &streams[0] || s >= &streams[FAKE_SLOTS])) return NULL;
    if (!handle && !s->used && !start(s)) return NULL;
    return s->used && !s->closing ? s : NULL;
}

static unsigned slot_of(const stream *s) { return (unsigned)(s - streams); }

/* What was enqueued up to `index` comes at once, and what it waits for. */
static void force(stream *s, uint64_t index) {
    if (s->forced >= index) return;
    s->forced = index;
    if (!s->used) return;
    pthread_cond_signal(&s->wake);
    for (op *o = s->head; o && o->index <= index; o = o->next)
        if (o->kind == WAIT) force(&streams[o->slot], o->until);
}

static void wait_for(stream *s, uint64_t index) {
    force(s, index);
    while (s->completed < index) pthread_cond_wait(&fake_done, &fake_lock);
}

void fake_wait_for_all(void) {
    uint64_t until[FAKE_SLOTS];
    for (int i = 0; i < FAKE_SLOTS; i++) until[i] = streams[i].enqueued;
    for (int i = 0; i < FAKE_SLOTS; i++) force(&streams[i], until[i]);
    for (int i = 0; i < FAKE_SLOTS; i++) wait_for(&streams[i], until[i]);
}

/* ---- enqueueing */

static op *append(stream *s, kind k) {
    op *o = calloc(1, sizeof *o);
    if (!o) abort();
    fake_clock_join(&s->clock, fake_order_host());
    o->kind = k;
    o->index = s->clock.at[slot_of(s)] = ++s->enqueued;
    if (k != WAIT) o->due = due_time();
    *s->tail = o;
    s->tail = &o->next;
    pthread_cond_signal(&s->wake);
    return o;
}

static fake_code enqueue(void *handle, const fake_work *w, op **out) {
    stream *s = stream_of(handle);
    if (!s) return FAKE_INVALID_HANDLE;
    for (int i = 0; i < w->touches; i++)
        if (w->touch[i].device && !fake_is_live(w->touch[i].p, w->touch[i].bytes)) {
            fake_complain("%s is given device memory that is not there", w->what);
            return FAKE_INVALID_VALUE;
        }
    *out = append(s, RUN);
    (*out)->work = *w;
    fake_order_enqueue(slot_of(s), (*out)->index, &s->clock, w->touch, w->touches, w->what);
    return FAKE_OK;
}

fake_code fake_enqueue(void *handle, const fake_work *w) {
    op *o;
    return enqueue(handle, w, &o);
}

/* Pageable memory is read before the call returns, and written before it returns. */
static fake_code copy_of_host(fake_touch to, fake_touch from, void *handle, const char *what) {
    const fake_touch *host = to.device ? &from : &to;
    bool pageable = !fake_is_pinned(host->p, host->bytes);
    fake_work w = {.touch = {to, from}, .touches = pageable && to.device ? 1 : 2, .what = what};
    op *o;
    fake_code r = enqueue(handle, &w, &o);
    if (r != FAKE_OK || !pageable) return r;
    o->pageable = true;
    if (to.device) {
        o->staged = malloc(from.bytes + 1);
        if (!o->staged) abort();
        memcpy(o->staged, from.p, from.bytes);
        return r;
    }
    return fake_stream_synchronize(handle);
}

static const char *host_address(uint64_t p) { return (const char *)(uintptr_t)p; }

fake_code fake_copy_h2d(uint64_t dst, const void *src, size_t bytes, void *handle) {
    return copy_of_host((fake_touch){host_address(dst), bytes, true, true}, (fake_touch){src, bytes, false, false},
                        handle, "a copy to the device");
}

fake_code fake_copy_d2h(void *dst, uint64_t src, size_t bytes, void *handle) {
    return copy_of_host((fake_touch){dst, bytes, false, true}, (fake_touch){host_address(src), bytes, true, false},
                        handle, "a copy from the device");
}

fake_code fake_copy_d2d(uint64_t dst, uint64_t src, size_t bytes, void *handle) {
    fake_work w = {.touch = {{host_address(dst), bytes, true, true}, {host_address(src), bytes, true, false}},
                   .touches = 2, .what = "a copy within the device"};
    return fake_enqueue(handle, &w);
}

/* ---- streams */

fake_code fake_stream_create(void **out) {
    for (int i = 1; i < FAKE_SLOTS; i++)
        if (!streams[i].used) {
            if (!start(&streams[i])) return FAKE_OUT_OF_MEMORY;
            *out = &streams[i];
            return FAKE_OK;
        }
    return FAKE_OUT_OF_MEMORY;
}

/* Like a driver, does not wait: what is enqueued still runs. */
fake_code fake_stream_destroy(void *handle) {
    stream *s = handle ? stream_of(handle) : NULL;
    if (!s) return FAKE_INVALID_HANDLE;
    s->closing = true;
    pthread_cond_signal(&s->wake);
    return FAKE_OK;
}

fake_code fake_stream_synchronize(void *handle) {
    stream *s = stream_of(handle);
    if (!s) return FAKE_INVALID_HANDLE;
    fake_clock clock = s->clock;
    wait_for(s, s->enqueued);
    fake_order_seen(&clock);
    return FAKE_OK;
}

fake_code fake_synchronize(void) {
    fake_clock clock = {{0}};
    for (int i = 0; i < FAKE_SLOTS; i++) clock.at[i] = streams[i].enqueued;
    fake_wait_for_all();
    fake_order_seen(&clock);
    return FAKE_OK;
}

/* ---- events */

static event *event_of(void *handle) { return fake_find(&events, handle) ? handle : NULL; }

fake_code fake_event_create(void **out, bool timing) {
    event *e = calloc(1, sizeof *e);
    if (!e || !fake_add(&events, (span){.p = (char *)e})) return FAKE_OUT_OF_MEMORY;
    e->timing = timing;
    *out = e;
    return FAKE_OK;
}

fake_code fake_event_destroy(void *handle) {
    span *s = fake_find(&events, handle);
    if (!s) return FAKE_INVALID_HANDLE;
    fake_drop(&events, s);
    free(handle);
    return FAKE_OK;
}

fake_code fake_event_record(void *handle, void *on) {
    event *e = event_of(handle);
    stream *s = stream_of(on);
    if (!e || !s) return FAKE_INVALID_HANDLE;
    op *o = append(s, RECORD);
    o->event = e;
    e->recorded = true;
    e->slot = slot_of(s);
    e->index = o->index;
    e->clock = s->clock;
    return FAKE_OK;
}

static bool was_recorded(const event *e, const char *what) {
    if (!e->recorded) fake_complain("%s an event that was never recorded", what);
    return e->recorded;
}

/* Like a driver, does nothing for an event that was never recorded. */
fake_code fake_stream_wait(void *on, void *handle) {
    stream *s = stream_of(on);
    event *e = event_of(handle);
    if (!e || !s) return FAKE_INVALID_HANDLE;
    if (!was_recorded(e, "a stream is to wait for")) return FAKE_OK;
    op *o = append(s, WAIT);
    o->slot = e->slot;
    o->until = e->index;
    fake_clock_join(&s->clock, &e->clock);
    return FAKE_OK;
}

fake_code fake_event_query(void *handle) {
    event *e = event_of(handle);
    if (!e) return FAKE_INVALID_HANDLE;
    if (!was_recorded(e, "the host asks for")) return FAKE_OK;
    if (streams[e->slot].completed < e->index) return FAKE_NOT_READY;
    fake_order_seen(&e->clock);
    return FAKE_OK;
}

fake_code fake_event_synchronize(void *handle) {
    event *e = event_of(handle);
    if (!e) return FAKE_INVALID_HANDLE;
    if (!was_recorded(e, "the host waits for")) return FAKE_OK;
    fake_clock clock = e->clock;
    wait_for(&streams[e->slot], e->index);
    fake_order_seen(&clock);
    return FAKE_OK;
}

fake_code fake_event_elapsed(float *out_ms, void *first, void *second) {
    event *a = event_of(first), *b = event_of(second);
    if (!a || !b || !a->timing || !b->timing || !a->recorded || !b->recorded) return FAKE_INVALID_HANDLE;
    if (streams[a->slot].completed < a->index || streams[b->slot].completed < b->index) return FAKE_NOT_READY;
    *out_ms =
        (float)((double)(b->when.tv_sec - a->when.tv_sec) * 1e3 + (double)(b->when.tv_nsec - a->when.tv_nsec) / 1e6);
    return FAKE_OK;
}

long fake_streams_live(void) {
    long n = (long)events.count;
    for (int i = 1; i < FAKE_SLOTS; i++) n += streams[i].used && !streams[i].closing;
    return n;
}

void fake_streams_reset(void) {
    for (int i = 1; i < FAKE_SLOTS; i++)
        if (streams[i].used) (void)fake_stream_destroy(&streams[i]);
    for (; events.count; events.count--) free(events.items[events.count - 1].p);
}
