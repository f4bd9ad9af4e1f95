/* check: wrong use of a device is an error that names the call and the object, and the call is not made.
 *
 * Found: ending what is not alive (a second free), with another size or by the other call; copies, poison and expansion
 * outside of a live allocation; streams and events that are not this device's; events used before they were recorded or
 * timed without timing; host memory registered twice; what is left at close. Each is the call's error and, with
 * check(log=PATH), a line appended to a file, for void calls and callers that look away.
 *
 * Not found: a handle that the device has given out again since it ended; order between streams (delay and poison are
 * for that). Streams and memory that are unknown are let through on cards, where a framework makes its own.
 * Locks: one for the books, not held during the inner call; `devices_lock`, taken before it, for the list of all
 * checked devices, where the owner of an object is looked for. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/decorate/book.h"
#include "device/decorate/layer.h"
#include "device/expand.h"

typedef enum kind { MEMORY, PINS, STREAMS, EVENTS, KINDS } kind;
static const char *const kind_names[KINDS] = {"memory", "registered host memory", "stream", "event"};

typedef struct check_layer {
    sthi_layer layer;
    struct check_layer *next; /* in the list of all */
    sthi_mutex lock;
    sthi_book books[KINDS];
    uint64_t calls;
    FILE *log; /* NULL: none */
} check_layer;

static sthi_mutex devices_lock = {PTHREAD_MUTEX_INITIALIZER};
static check_layer *devices;

static sth_status init(sthi_layer *l) {
    check_layer *k = (check_layer *)l;
    sthi_mutex_init(&k->lock);
    sthi_lock(&devices_lock);
    k->next = devices;
    devices = k;
    sthi_unlock(&devices_lock);
    return STH_OK;
}

static void fini(sthi_layer *l) {
    check_layer *k = (check_layer *)l;
    sthi_lock(&devices_lock);
    check_layer **at = &devices;
    while (*at != k) at = &(*at)->next;
    *at = k->next;
    sthi_unlock(&devices_lock);
    for (int i = 0; i < KINDS; i++) sthi_book_fini(&k->books[i]);
    if (k->log) fclose(k->log);
    sthi_mutex_fini(&k->lock);
}

/* O_NONBLOCK: a pipe that nobody reads fails, and is not waited for. */
static FILE *open_log(const char *path) {
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0666);
    if (fd < 0) return NULL;
    FILE *file = fcntl(fd, F_SETFL, O_APPEND) ? NULL : fdopen(fd, "a");
    if (!file) close(fd);
    return file;
}

static sth_status set(sthi_layer *l, const char *key, const char *value) {
    check_layer *k = (check_layer *)l;
    if (strcmp(key, "log") != 0 || k->log) return sthi_layer_bad_option(l, key, value, "log=PATH, once");
    k->log = open_log(value);
    if (!k->log)
        return sthi_fail(STH_IO, "errno", errno, value, "the log of check cannot be opened at %s: %s", value,
                         strerror(errno));
    return STH_OK;
}

/* ---- complaints; the lock is not held */

__attribute__((format(printf, 4, 5))) static sth_status complain(check_layer *k, sth_status status, sthi_entry entry,
                                                                 const char *format, ...) {
    char what[640];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    const char *call = entry < STHI_ENTRY_COUNT ? sthi_entries[entry].name : "close";
    if (k->log) {
        sthi_lock(&k->lock);
        fprintf(k->log, "%s: %s\n", call, what);
        fflush(k->log);
        sthi_unlock(&k->lock);
    }
    return sthi_fail(status, "check", 0, call, "%s: %s", call, what);
}

static bool known_elsewhere(const check_layer *k, kind what, uint64_t key) {
    bool found = false;
    sthi_lock(&devices_lock);
    for (check_layer *d = devices; d && !found; d = d->next) {
        if (d == k || d->layer.fork_depth != k->layer.fork_depth) continue; /* a parent's lock may never come free */
        sthi_lock(&d->lock);
        found = sthi_book_find(&d->books[what], key) || sthi_book_holding(&d->books[what], key);
        sthi_unlock(&d->lock);
    }
    sthi_unlock(&devices_lock);
    return found;
}

static sth_status not_alive(check_layer *k, const sthi_call *c, kind what, uint64_t key) {
    const char *why = known_elsewhere(k, what, key) ? "it belongs to another device" : "was it ended before?";
    return complain(k, STH_INVALID_ARGUMENT, c->entry, "%s 0x%" PRIx64 " is not alive on this device; %s",
                    kind_names[what], key, why);
}

/* ---- what calls use */

/* Nobody else makes streams or memory on a device that is the host's. */
static bool may_be_a_frameworks(const check_layer *k, kind what, uint64_t key) {
    return !(k->layer.capabilities & STH_CAP_HOST_IS_DEVICE) && !known_elsewhere(k, what, key);
}

static sth_status check_stream(check_layer *k, const sthi_call *c) {
    if (c->stream == 0) return STH_OK;
    sthi_lock(&k->lock);
    bool known = sthi_book_find(&k->books[STREAMS], c->stream);
    sthi_unlock(&k->lock);
    if (known || may_be_a_frameworks(k, STREAMS, c->stream)) return STH_OK;
    return not_alive(k, c, STREAMS, c->stream);
}

/* needs: recorded, timing. */
static sth_status check_event(check_layer *k, const sthi_call *c, const sth_event *event, bool recorded, bool timing) {
    sthi_note found = {0};
    sthi_lock(&k->lock);
    const sthi_note *n = sthi_book_find(&k->books[EVENTS], (uintptr_t)event);
    if (n) found = *n;
    sthi_unlock(&k->lock);
    if (!n) return not_alive(k, c, EVENTS, (uintptr_t)event);
    if (recorded && !found.recorded)
        return complain(k, STH_INVALID_STATE, c->entry,
                        "event 0x%" PRIx64 " (made by call %" PRIu64 ") was never recorded: record it before this",
                        found.key, found.number);
    if (timing && !found.timing)
        return complain(k, STH_INVALID_STATE, c->entry,
                        "event 0x%" PRIx64 " (made by call %" PRIu64 ") was created without timing", found.key,
                        found.number);
    return STH_OK;
}

static sth_status check_range(check_layer *k, const sthi_call *c, const char *what, sth_devptr p, uint64_t bytes) {
    if (bytes == 0) return STH_OK;
    sthi_note found = {0};
    sthi_lock(&k->lock);
    const sthi_note *n = sthi_book_holding(&k->books[MEMORY], p);
    if (n) found = *n;
    sthi_unlock(&k->lock);
    if (!n) return may_be_a_frameworks(k, MEMORY, p) ? STH_OK : not_alive(k, c, MEMORY, p);
    if (bytes <= found.bytes && sthi_range_inside(p - found.key, bytes, found.span)) return STH_OK;
    return complain(k, STH_INVALID_ARGUMENT, c->entry,
                    "%s: %" PRIu64 " bytes from 0x%" PRIx64 " on run out of the %s at 0x%" PRIx64 " of %" PRIu64
                    " bytes (made by call %" PRIu64 ")",
                    what, bytes, p, found.ring ? "ring" : "memory", found.key, found.bytes, found.number);
}

static sth_status check_copy(check_layer *k, const sthi_call *c, bool foreign) {
    STHI_TRY(check_stream(k, c));
    if (c->bytes && !c->host) return complain(k, STH_INVALID_ARGUMENT, c->entry, "the host address is NULL");
    return foreign ? STH_OK : check_range(k, c, "the copy", c->address, c->bytes);
}

static sth_status check_expand(check_layer *k, const sthi_call *c) {
    const sth_expand *e = c->expand;
    sthi_expand_bytes bytes;
    STHI_TRY(check_stream(k, c));
    STHI_TRY(check_range(k, c, "the place", e->place, e->place_bytes));
    const char *wrong = sthi_expand_wrong_sizes(e, &bytes);
    if (wrong) return complain(k, STH_INVALID_ARGUMENT, c->entry, "the expansion %s", wrong);
#define CHECK_PART(part, name) \
    if (bytes.part && e->part) STHI_TRY(check_range(k, c, name, e->part, bytes.part));
    STHI_EXPAND_PARTS(CHECK_PART)
#undef CHECK_PART
    return STH_OK;
}

static sth_status check_register(check_layer *k, const sthi_call *c) {
    uint64_t end;
    if (!c->host || !c->bytes || !sthi_add_u64((uintptr_t)c->host, c->bytes, &end))
        return complain(k, STH_INVALID_ARGUMENT, c->entry, "%" PRIu64 " bytes at %p are no range of host memory",
                        c->bytes, c->host);
    sthi_lock(&k->lock);
    bool meets = sthi_book_meets(&k->books[PINS], (uintptr_t)c->host, c->bytes);
    sthi_unlock(&k->lock);
    if (!meets) return STH_OK;
    return complain(k, STH_INVALID_ARGUMENT, c->entry, "some of the %" PRIu64 " bytes at %p is registered already",
                    c->bytes, c->host);
}

/* ---- what calls end: out of the book before the inner call, which may give the same address to another thread */

static sth_status end(check_layer *k, const sthi_call *c, kind what, uint64_t key) {
    bool ring = c->entry == STHI_ENTRY_ring_free;
    sthi_note found = {0};
    if (!key) return STH_OK;
    sthi_lock(&k->lock);
    const sthi_note *n = sthi_book_find(&k->books[what], key);
    if (n) found = *n;
    bool good = n && found.bytes == c->bytes && found.ring == ring;
    if (good) sthi_book_remove(&k->books[what], n);
    sthi_unlock(&k->lock);
    if (good) return STH_OK;
    if (!n) return not_alive(k, c, what, key);
    return complain(k, STH_INVALID_ARGUMENT, c->entry,
                    "%s 0x%" PRIx64 " (made by call %" PRIu64 ") is %s of %" PRIu64 
                    " bytes, and the call says %s of %" PRIu64,
                    kind_names[what], key, found.number, found.ring ? "a ring" : "a range", found.bytes,
                    ring ? "a ring" : "a range", c->bytes);
}

static sth_status before(sthi_layer *l, const sthi_call *c) {
    check_layer *k = (check_layer *)l;
    switch (c->entry) {
    case STHI_ENTRY_free:
    case STHI_ENTRY_ring_free: return end(k, c, MEMORY, c->address);
    case STHI_ENTRY_host_unregister: return end(k, c, PINS, (uintptr_t)c->host);
    case STHI_ENTRY_stream_destroy: return end(k, c, STREAMS, c->stream);
    case STHI_ENTRY_event_destroy: return end(k, c, EVENTS, (uintptr_t)c->event);
    case STHI_ENTRY_host_register: return check_register(k, c);
    case STHI_ENTRY_copy_h2d:
    case STHI_ENTRY_copy_d2h: return check_copy(k, c, false);
    case STHI_ENTRY_copy_h2d_foreign:
    case STHI_ENTRY_copy_d2h_foreign: return check_copy(k, c, true);
    case STHI_ENTRY_poison:
        STHI_TRY(check_stream(k, c));
        return check_range(k, c, "the poison", c->address, c->bytes);
    case STHI_ENTRY_expand: return check_expand(k, c);
    case STHI_ENTRY_stream_synchronize:
    case STHI_ENTRY_sim_compute: return check_stream(k, c);
    case STHI_ENTRY_event_record:
        STHI_TRY(check_stream(k, c));
        return check_event(k, c, c->event, false, false);
    case STHI_ENTRY_stream_wait:
        STHI_TRY(check_stream(k, c));
        return check_event(k, c, c->event, true, false);
    case STHI_ENTRY_event_query:
    case STHI_ENTRY_event_synchronize: return check_event(k, c, c->event, true, false);
    case STHI_ENTRY_event_elapsed_ns:
        STHI_TRY(check_event(k, c, c->event, true, true));
        return check_event(k, c, c->other, true, true);
    default: return STH_OK;
    }
}

/* ---- what calls make */

/* There is no memory for the note: the object goes again, and the call fails. */
static sth_status undo(check_layer *k, const sthi_call *made) {
    sthi_call c = {.entry = STHI_ENTRY_COUNT, .bytes = made->bytes, .host = made->host};
    switch (made->entry) {
    case STHI_ENTRY_alloc: c.entry = STHI_ENTRY_free; c.address = *made->out_address; break;
    case STHI_ENTRY_ring_alloc: c.entry = STHI_ENTRY_ring_free; c.address = *made->out_address; break;
    case STHI_ENTRY_stream_create: c.entry = STHI_ENTRY_stream_destroy; c.stream = *made->out_stream; break;
    case STHI_ENTRY_event_create: c.entry = STHI_ENTRY_event_destroy; c.event = *made->out_event; break;
    default: c.entry = STHI_ENTRY_host_unregister; break;
    }
    (void)sthi_call_make(k->layer.inner, k->layer.inner_self, &c);
    return sthi_no_memory_in("check", sthi_entries[made->entry].name,
                             "a note of what %s made", sthi_entries[made->entry].name);
}

static sth_status note(check_layer *k, const sthi_call *c, kind what, sthi_note n) {
    sthi_lock(&k->lock);
    n.number = k->calls;
    bool meets = sthi_book_meets(&k->books[what], n.key, n.span);
    bool added = !meets && sthi_book_add(&k->books[what], n);
    sthi_unlock(&k->lock);
    if (added) return STH_OK;
    if (!meets) return undo(k, c);
    return complain(k, STH_INTERNAL, c->entry, "the back end gave %s 0x%" PRIx64 ", some of which is in use already",
                    kind_names[what], n.key);
}

static void note_recorded(check_layer *k, const sth_event *event) {
    sthi_lock(&k->lock);
    sthi_note *n = sthi_book_find(&k->books[EVENTS], (uintptr_t)event);
    if (n) n->recorded = true;
    sthi_unlock(&k->lock);
}

static void count_call(check_layer *k) {
    sthi_lock(&k->lock);
    k->calls++;
    sthi_unlock(&k->lock);
}

static sth_status after(sthi_layer *l, const sthi_call *c, sth_status rc) {
    check_layer *k = (check_layer *)l;
    count_call(k);
    if (rc != STH_OK) return rc;
    bool ring = c->entry == STHI_ENTRY_ring_alloc;
    switch (c->entry) {
    case STHI_ENTRY_alloc:
    case STHI_ENTRY_ring_alloc:
        return note(k, c, MEMORY, (sthi_note){.key = *c->out_address, .bytes = c->bytes,
                                              .span = ring ? 2 * c->bytes : c->bytes, .ring = ring});
    case STHI_ENTRY_host_register:
        return note(k, c, PINS, (sthi_note){.key = (uintptr_t)c->host, .bytes = c->bytes, .span = c->bytes});
    case STHI_ENTRY_stream_create: return note(k, c, STREAMS, (sthi_note){.key = *c->out_stream});
    case STHI_ENTRY_event_create:
        return note(k, c, EVENTS, (sthi_note){.key = (uintptr_t)*c->out_event, .timing = c->number});
    case STHI_ENTRY_event_record: note_recorded(k, c->event); return STH_OK;
    default: return STH_OK;
    }
}

/* ---- the end */

static sth_status closing(sthi_layer *l) {
    check_layer *k = (check_layer *)l;
    sth_status rc = STH_OK;
    for (int what = 0; what < KINDS; what++) {
        const sthi_book *b = &k->books[what];
        if (b->count == 0) continue;
        const sthi_note *first = &b->notes[0];
        rc = complain(k, STH_INVALID_STATE, STHI_ENTRY_COUNT,
                      "%zu of %s left; the first is 0x%" PRIx64 " of %" PRIu64 " bytes, made by call %" PRIu64,
                      b->count, kind_names[what], first->key, first->bytes, first->number);
    }
    return rc;
}

const sthi_decorator sthi_check_decorator = {.name = "check",
                                             .size = sizeof(check_layer),
                                             .init = init,
                                             .set = set,
                                             .before = before,
                                             .after = after,
                                             .closing = closing,
                                             .fini = fini};
