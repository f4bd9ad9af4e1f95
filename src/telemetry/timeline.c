/* The ring of a recording, the texts in it, and who the threads are. Lock: `lock`, a leaf, guards the recording; list
 * operations under it, never the file. Does not know devices (devtime.c) nor the file's form (chrome.c). */
#define _GNU_SOURCE
#include "telemetry/timeline.h"

#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/outfile.h"
#include "base/thread.h"
#include "telemetry/recorded.h"

enum {
    EVENTS = 1 << 18,
    EVENTS_LEAST = 1024,
    EVENTS_MOST = 1 << 24,
    TEXTS = 1024,       /* at first; there are as many as units */
    TEXTS_MOST = 1 << 20,
    THREADS = 1024
};

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};
static sthi_recording *current;
static atomic_uint_fast64_t arrows;

void sthi_timeline_options_init(sth_timeline_options *o) {
    *o = (sth_timeline_options){.size = sizeof *o, .events = EVENTS};
}

int64_t sthi_timeline_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

uint64_t sthi_timeline_arrow(void) { return atomic_fetch_add_explicit(&arrows, 1, memory_order_relaxed) + 1; }

/* ---- texts. Lock held. */

static uint32_t hash_of(const char *text) {
    uint32_t h = 2166136261u;
    for (; *text; text++) h = (h ^ (uint8_t)*text) * 16777619u;
    return h;
}

/* Where the text stands in the table, or would. */
static uint32_t place_of(const sthi_recording *r, const char *text) {
    uint32_t mask = 2 * r->text_cap - 1, at = hash_of(text) & mask;
    while (r->index[at] && strcmp(r->texts[r->index[at] - 1], text)) at = (at + 1) & mask;
    return at;
}

static bool grow_texts(sthi_recording *r) {
    uint32_t cap = r->text_cap ? 2 * r->text_cap : TEXTS;
    if (cap > TEXTS_MOST) return false;
    char **texts = sthi_realloc(r->texts, cap, sizeof *texts);
    if (texts) r->texts = texts;
    uint32_t *index = texts ? sthi_zalloc(2 * cap, sizeof *index) : NULL;
    if (!index) return false;
    sthi_free(r->index);
    r->index = index;
    r->text_cap = cap;
    for (uint32_t i = 0; i < r->text_count; i++) r->index[place_of(r, r->texts[i])] = i + 1;
    return true;
}

/* The number of a text. One for which there is no memory is the first of all. */
static uint32_t text_number(sthi_recording *r, const char *text) {
    uint32_t at = place_of(r, text);
    if (r->index[at]) return r->index[at] - 1;
    if (r->text_count == r->text_cap) {
        if (!grow_texts(r)) return 0;
        at = place_of(r, text);
    }
    char *copy = sthi_strdup(text);
    if (!copy) return 0;
    r->texts[r->text_count] = copy;
    r->index[at] = ++r->text_count;
    return r->text_count - 1;
}

static uint32_t thread_number(sthi_recording *r) {
    static _Thread_local long id;
    if (!id) id = syscall(SYS_gettid);
    for (uint32_t i = 0; i < r->thread_count; i++)
        if (r->threads[i].id == id) return i;
    if (r->thread_count == THREADS) return 0;
    sthi_recorded_thread *t = &r->threads[r->thread_count];
    *t = (sthi_recorded_thread){.id = id};
    (void)prctl(PR_GET_NAME, t->name);
    return r->thread_count++;
}

/* ---- entries */

static sthi_recorded *next(sthi_recording *r) { return &r->ring[r->count++ % r->cap]; }

static bool of_thread(sthi_track track) {
    static const bool of[] = {
#define OF(name, text, thread) thread,
        STHI_TRACK_LIST(OF)
#undef OF
    };
    return of[track];
}

void sthi_timeline_slice(const sthi_slice *s) {
    sthi_lock(&lock);
    sthi_recording *r = current;
    if (r && s->begin_ns >= r->begun_ns) {
        *next(r) = (sthi_recorded){.begin_ns = s->begin_ns,
                                   .duration_ns = s->end_ns > s->begin_ns ? s->end_ns - s->begin_ns : 0,
                                   .bytes = s->bytes,
                                   .arrow_from = s->arrow_from,
                                   .arrow_to = s->arrow_to >= r->first_arrow ? s->arrow_to : 0,
                                   .step = s->step,
                                   .source = text_number(r, s->source),
                                   .name = text_number(r, s->name),
                                   .thread = of_thread(s->track) ? thread_number(r) : 0,
                                   .track = s->track};
    }
    sthi_unlock(&lock);
}

void sthi_timeline_counter(const char *source, const char *name, int64_t at_ns, double value) {
    sthi_lock(&lock);
    sthi_recording *r = current;
    if (r && at_ns >= r->begun_ns)
        *next(r) = (sthi_recorded){.begin_ns = at_ns,
                                   .value = value,
                                   .source = text_number(r, source),
                                   .name = text_number(r, name),
                                   .track = STHI_COUNTER_TRACK};
    sthi_unlock(&lock);
}

sthi_mark sthi_timeline_mark_watched(const char *what, const char *name) {
    unsigned by = sthi_onlookers();
    sthi_mark mark = {by & STHI_RECORDED ? sthi_timeline_now() : 0, by & STHI_PROFILED};
    if (mark.pushed) sthi_range_push(what, name);
    return mark;
}

void sthi_timeline_since_watched(sthi_mark mark, sthi_track track, const char *source, const char *name,
                                 uint64_t bytes) {
    if (mark.pushed) sthi_range_pop();
    if (!mark.begin_ns) return;
    sthi_slice slice = {.track = track, .source = source, .name = name, .begin_ns = mark.begin_ns,
                        .end_ns = sthi_timeline_now(), .bytes = bytes, .step = -1};
    sthi_timeline_slice(&slice);
}

/* ---- life */

static void destroy(sthi_recording *r) {
    if (!r) return;
    if (r->fd >= 0) (void)close(r->fd);
    for (uint32_t i = 0; i < r->text_count; i++) sthi_free(r->texts[i]);
    sthi_free(r->texts);
    sthi_free(r->index);
    sthi_free(r->threads);
    sthi_free(r->ring);
    sthi_free(r->path);
    sthi_free(r);
}

static sth_status open_file(sthi_recording *r) {
    static const char *const begins[] = {"{\"schemaVersion\":1,\"stagehand\"", "\x1f\x8b\x08"};
    uint64_t bytes;
    size_t length = strlen(r->path);
    r->compressed = length > 3 && !strcmp(r->path + length - 3, ".gz");
    STHI_TRY(sthi_outfile_open(r->path, "a trace", &r->fd, &bytes));
    if (sthi_outfile_begins(r->fd, bytes, &begins[r->compressed], 1)) return STH_OK;
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, r->path,
                     "'%.200s' holds something else than a trace; give the trace a file of its own", r->path);
}

static sth_status make(const sth_timeline_options *o, sthi_recording **out) {
    sthi_recording *r = *out = sthi_zalloc(1, sizeof *r);
    if (!r) return sthi_no_memory("timeline", "a recording");
    r->fd = -1;
    r->cap = o->events;
    r->path = sthi_strdup(o->path);
    r->ring = sthi_alloc((uint64_t)r->cap * sizeof *r->ring);
    r->threads = sthi_zalloc(THREADS, sizeof *r->threads);
    if (!r->path || !r->ring || !r->threads || !grow_texts(r))
        return sthi_no_memory("timeline", "a recording of %u events", r->cap);
    (void)text_number(r, "?");
    return open_file(r);
}

sth_status sthi_timeline_begin(const sth_timeline_options *o) {
    if (o->events < EVENTS_LEAST || o->events > EVENTS_MOST)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "events", "a recording holds %d to %d events, not %u",
                         EVENTS_LEAST, EVENTS_MOST, o->events);
    sthi_recording *r;
    sth_status rc = make(o, &r);
    sthi_lock(&lock);
    if (rc == STH_OK && current)
        rc = sthi_fail(STH_INVALID_STATE, NULL, 0, o->path, "a recording to '%.200s' is under way: end it first",
                       current->path);
    if (rc == STH_OK) {
        r->begun_ns = sthi_timeline_now();
        r->first_arrow = sthi_timeline_arrow();
        current = r;
        atomic_fetch_or_explicit(&sthi_onlooker_bits, STHI_RECORDED, memory_order_relaxed);
        r = NULL;
    }
    sthi_unlock(&lock);
    destroy(r);
    return rc;
}

sth_status sthi_timeline_end(uint64_t *out_lost) {
    sthi_lock(&lock);
    sthi_recording *r = current;
    current = NULL;
    atomic_fetch_and_explicit(&sthi_onlooker_bits, ~STHI_RECORDED, memory_order_relaxed);
    sthi_unlock(&lock);
    if (!r) return sthi_fail(STH_INVALID_STATE, NULL, 0, "timeline", "nothing is being recorded");
    if (out_lost) *out_lost = r->count > r->cap ? r->count - r->cap : 0;
    sth_status rc = sthi_chrome_write(r);
    destroy(r);
    return rc;
}
