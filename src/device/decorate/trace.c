/* trace(file=PATH): one line of JSON for each call, which replay.c makes again.
 *
 *   {"stagehand_trace":1,"backend":"sim"}
 *   {"call":"alloc","bytes":4096,"made":"m1","status":"OK","us":12}
 *   {"call":"copy_h2d","memory":"m1+512","host":"h1+0","bytes":100,"stream":"s1","status":"OK","us":15}
 *
 * Objects are numbered in the order in which they were made: m memory, h registered host memory, s streams ("s0" is
 * the default stream), e events. What is not known is "?": a framework's memory, host memory that is not registered.
 * A call that makes something is written when it has returned, a void call before it is made: so a line that uses an
 * object comes behind the line that made it, and no address is met again before its end is written. `us`: microseconds
 * since the device was opened. What only asks (info, now_ns) is left out.
 * Lock: one for the books and the file, not held during the inner call. A file that cannot be written on is left
 * alone from then on, and close says so. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/outfile.h"
#include "device/decorate/book.h"
#include "device/decorate/layer.h"
#include "device/four_bits.h"

enum { LINE = 1536 };

typedef enum kind { MEMORY, HOST, STREAMS, EVENTS, KINDS } kind;
static const char kind_letters[KINDS] = {'m', 'h', 's', 'e'};

typedef struct trace_layer {
    sthi_layer layer;
    sthi_mutex lock;
    sthi_book books[KINDS];
    uint64_t made[KINDS];
    int64_t begin_ns;
    FILE *file;
    int failed; /* errno */
    char path[1024];
} trace_layer;

typedef struct line {
    char text[LINE];
    size_t length;
} line;

static sth_status init(sthi_layer *l) {
    sthi_mutex_init(&((trace_layer *)l)->lock);
    return STH_OK;
}

static void fini(sthi_layer *l) {
    trace_layer *t = (trace_layer *)l;
    if (t->file) fclose(t->file);
    for (int i = 0; i < KINDS; i++) sthi_book_fini(&t->books[i]);
    sthi_mutex_fini(&t->lock);
}

static sth_status set(sthi_layer *l, const char *key, const char *value) {
    trace_layer *t = (trace_layer *)l;
    if (strcmp(key, "file") != 0 || !*value || strlen(value) >= sizeof t->path || t->path[0])
        return sthi_layer_bad_option(l, key, value, "file=PATH, once");
    snprintf(t->path, sizeof t->path, "%s", value);
    return STH_OK;
}

/* An earlier trace makes room; anything else stays. */
static sth_status open_file(trace_layer *t) {
    static const char *const starts[] = {"{\"stagehand_trace\":"};
    int fd;
    uint64_t bytes;
    STHI_TRY(sthi_outfile_open(t->path, "a trace", &fd, &bytes));
    sth_status status = STH_OK;
    if (!sthi_outfile_begins(fd, bytes, starts, 1))
        status = sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, t->path,
                           "%s holds something else than a trace: name a new file, or one that trace wrote", t->path);
    else if ((bytes && ftruncate(fd, 0)) || !(t->file = fdopen(fd, "a")))
        status =
            sthi_fail(STH_IO, "errno", errno, t->path, "the trace %s cannot be written: %s", t->path, strerror(errno));
    if (status != STH_OK) close(fd);
    return status;
}

static sth_status start(sthi_layer *l) {
    trace_layer *t = (trace_layer *)l;
    if (!t->path[0])
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "trace", "trace needs a file: trace(file=PATH)");
    STHI_TRY(open_file(t));
    setvbuf(t->file, NULL, _IOLBF, 1 << 16); /* whole lines, also when the process dies */
    t->begin_ns = sthi_now_ns();
    fprintf(t->file, "{\"stagehand_trace\":1,\"backend\":\"%s\"}\n", l->inner->backend);
    return STH_OK;
}

/* ---- lines */

__attribute__((format(printf, 2, 3))) static void put(line *to, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(to->text + to->length, sizeof to->text - to->length, format, args);
    va_end(args);
    if (n > 0 && (size_t)n < sizeof to->text - to->length) to->length += (size_t)n;
}

/* "m3+512" for an address, "e2" for a handle, "?" for what is not known. Locked. */
static void put_object(line *to, const trace_layer *t, const char *field, kind what, uint64_t key) {
    const sthi_note *n = what == MEMORY || what == HOST ? sthi_book_holding(&t->books[what], key)
                                                        : sthi_book_find(&t->books[what], key);
    put(to, ",\"%s\":", field);
    if (what == STREAMS && key == 0) put(to, "\"s0\"");
    else if (!key) put(to, "null");
    else if (!n) put(to, "\"?\"");
    else if (n->span) put(to, "\"%c%" PRIu64 "+%" PRIu64 "\"", kind_letters[what], n->number, key - n->key);
    else put(to, "\"%c%" PRIu64 "\"", kind_letters[what], n->number);
}

static void put_expand(line *to, const trace_layer *t, const sth_expand *e) {
    put(to, ",\"encoding\":%d,\"dtype\":%d,\"rows\":%" PRIu64 ",\"cols\":%" PRIu64 ",\"stride\":%" PRIu64, e->encoding,
        e->dtype, e->rows, e->cols, e->stride);
    put_object(to, t, "codes", MEMORY, e->codes);
    put_object(to, t, "scales", MEMORY, e->scales);
    put_object(to, t, "zeros", MEMORY, e->zeros);
    put_object(to, t, "place", MEMORY, e->place);
    put(to, ",\"place_bytes\":%" PRIu64, e->place_bytes);
    if (!sthi_is_four_bits(e->encoding)) return;
    put_object(to, t, "up", MEMORY, e->up);
    put_object(to, t, "down", MEMORY, e->down);
    put_object(to, t, "smooth", MEMORY, e->smooth);
    put(to, ",\"pitch\":%" PRIu64 ",\"rank\":%u,\"group\":%u,\"hadamard\":%u", e->pitch, e->rank, e->group,
        e->hadamard);
}

static void put_call(line *to, const trace_layer *t, const sthi_call *c) {
    put(to, "{\"call\":\"%s\"", sthi_entries[c->entry].name);
    if (c->has_address) put_object(to, t, "memory", MEMORY, c->address);
    if (c->has_host) put_object(to, t, "host", HOST, (uintptr_t)c->host);
    if (c->has_bytes) put(to, ",\"bytes\":%" PRIu64, c->bytes);
    if (c->has_number) put(to, ",\"number\":%" PRId64, c->number);
    if (c->has_event) put_object(to, t, "event", EVENTS, (uintptr_t)c->event);
    if (c->has_other) put_object(to, t, "other", EVENTS, (uintptr_t)c->other);
    if (c->has_stream) put_object(to, t, "stream", STREAMS, c->stream);
    if (c->expand) put_expand(to, t, c->expand);
}

static void write_line(trace_layer *t, line *l) {
    put(l, ",\"us\":%" PRId64 "}\n", (sthi_now_ns() - t->begin_ns) / 1000);
    if (t->failed) return;
    errno = 0;
    if (fputs(l->text, t->file) < 0 || ferror(t->file)) t->failed = errno ? errno : EIO;
}

/* ---- what is made and ended */

static void note(trace_layer *t, line *l, kind what, sthi_note n) {
    n.number = ++t->made[what];
    put(l, ",\"made\":\"%c%" PRIu64 "\"", kind_letters[what], n.number);
    (void)sthi_book_add(&t->books[what], n); /* without memory for it: "?" from here on */
}

static void note_made(trace_layer *t, line *l, const sthi_call *c) {
    bool ring = c->entry == STHI_ENTRY_ring_alloc;
    switch (c->entry) {
    case STHI_ENTRY_alloc:
    case STHI_ENTRY_ring_alloc:
        note(t, l, MEMORY, (sthi_note){.key = *c->out_address, .span = ring ? 2 * c->bytes : c->bytes});
        break;
    case STHI_ENTRY_host_register: note(t, l, HOST, (sthi_note){.key = (uintptr_t)c->host, .span = c->bytes}); break;
    case STHI_ENTRY_stream_create: note(t, l, STREAMS, (sthi_note){.key = *c->out_stream}); break;
    case STHI_ENTRY_event_create: note(t, l, EVENTS, (sthi_note){.key = (uintptr_t)*c->out_event}); break;
    default: break;
    }
}

static void forget(trace_layer *t, kind what, uint64_t key) {
    const sthi_note *n = sthi_book_find(&t->books[what], key);
    if (n) sthi_book_remove(&t->books[what], n);
}

static void forget_ended(trace_layer *t, const sthi_call *c) {
    switch (c->entry) {
    case STHI_ENTRY_free:
    case STHI_ENTRY_ring_free: forget(t, MEMORY, c->address); break;
    case STHI_ENTRY_host_unregister: forget(t, HOST, (uintptr_t)c->host); break;
    case STHI_ENTRY_stream_destroy: forget(t, STREAMS, c->stream); break;
    case STHI_ENTRY_event_destroy: forget(t, EVENTS, (uintptr_t)c->event); break;
    default: break;
    }
}

static sth_status before(sthi_layer *l, const sthi_call *c) {
    trace_layer *t = (trace_layer *)l;
    if (sthi_entries[c->entry].kind != STHI_VOID) return STH_OK;
    line text = {.length = 0};
    sthi_lock(&t->lock);
    put_call(&text, t, c);
    write_line(t, &text);
    forget_ended(t, c);
    sthi_unlock(&t->lock);
    return STH_OK;
}

static sth_status after(sthi_layer *l, const sthi_call *c, sth_status rc) {
    trace_layer *t = (trace_layer *)l;
    if (c->entry == STHI_ENTRY_info) return rc;
    line text = {.length = 0};
    sthi_lock(&t->lock);
    put_call(&text, t, c);
    if (rc == STH_OK) note_made(t, &text, c);
    if (rc == STH_OK && c->out_done) put(&text, ",\"done\":%s", *c->out_done ? "true" : "false");
    if (rc == STH_OK && c->out_ns) put(&text, ",\"ns\":%" PRId64, *c->out_ns);
    put(&text, ",\"status\":\"%s\"", sthi_status_name(rc));
    write_line(t, &text);
    sthi_unlock(&t->lock);
    return rc;
}

static sth_status closing(sthi_layer *l) {
    trace_layer *t = (trace_layer *)l;
    if (!t->failed) return STH_OK;
    return sthi_fail(STH_IO, "errno", t->failed, t->path, "the trace %s ends early: %s", t->path, strerror(t->failed));
}

const sthi_decorator sthi_trace_decorator = {.name = "trace",
                                             .size = sizeof(trace_layer),
                                             .init = init,
                                             .set = set,
                                             .start = start,
                                             .before = before,
                                             .after = after,
                                             .closing = closing,
                                             .fini = fini};
