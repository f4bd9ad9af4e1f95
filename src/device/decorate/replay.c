/* Makes the calls of a trace (trace.c) again, on another device.
 *
 * Objects are found by their numbers: each kind has a table from number to what stands for it here, 0 where its call
 * failed; a call that uses such an object is skipped. Host memory that was registered is mapped anew, all other host
 * memory is one block as large as the largest copy; a framework's device memory is one allocation of that kind, made
 * only where the trace has such copies. Nothing here looks at bytes. No locks: one thread.
 *
 * A trace may come from anywhere. What no device was ever asked is CORRUPT_DATA and reaches none: a call without its
 * event, an expansion whose sizes do not agree, work for longer than MOST_BUSY_NS. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/infile.h"
#include "base/memory.h"
#include "device/device.h"
#include "device/entries.h"
#include "device/expand.h"
#include "device/four_bits.h"

enum { LINE = 4096, KINDS = 4 };
static const char letters[] = "mhse";
enum { MEMORY, HOST, STREAMS, EVENTS };
#define MOST_BUSY_NS INT64_C(10000000000) /* all sim_compute of a trace together */

typedef struct object {
    uint64_t here; /* address or handle; 0: not alive */
    uint64_t bytes;
    bool ring;
    void *pages; /* host memory: what stays mapped, `bytes`, also when it is no longer registered */
} object;

typedef struct replay {
    const char *path;
    sth_device *device;
    sth_replay_report *report;
    uint64_t line;
    object *objects[KINDS];
    size_t capacity[KINDS];
    void *host; /* for host memory that was not registered */
    uint64_t host_bytes;
    sth_devptr foreign;
    uint64_t foreign_bytes;
    bool default_busy;
    int64_t busy_ns; /* what sim_compute has asked for */
} replay;

static sth_status corrupt(const replay *r, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "trace", 0, r->path, "%s, line %" PRIu64 ": %s; is it a whole trace?", r->path,
                     r->line, what);
}

static sth_status no_memory(void) {
    return sthi_no_memory_in("trace", "replay", "the replay of a trace");
}

/* ---- reading fields */

static bool get_u64(const json_t *o, const char *key, uint64_t *out) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0) return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

typedef struct reference {
    bool given;   /* the field is there */
    bool known;   /* not "?" */
    uint64_t number, offset; /* 0: null, or the default stream */
} reference;

static bool get_reference(const json_t *o, const char *key, int what, reference *out) {
    const json_t *v = json_object_get(o, key);
    const char *text = json_string_value(v);
    *out = (reference){.given = v != NULL, .known = true};
    if (!v || json_is_null(v)) return true;
    if (!text) return false;
    if (!strcmp(text, "?")) {
        out->known = false;
        return true;
    }
    char *end;
    if (*text++ != letters[what] || *text < '0' || *text > '9') return false;
    out->number = strtoull(text, &end, 10);
    bool spans = what == MEMORY || what == HOST; /* handles have no inside */
    if (spans && *end == '+' && end[1] >= '0' && end[1] <= '9') out->offset = strtoull(end + 1, &end, 10);
    return *end == 0;
}

static object *object_of(const replay *r, int what, uint64_t number) {
    return number < r->capacity[what] && r->objects[what][number].here ? &r->objects[what][number] : NULL;
}

/* *out_there: false where the object was never made here, or has no `bytes` from there on. What is unknown is
 * `otherwise`. */
static sth_status get_address(const replay *r, const json_t *o, const char *key, int what, uint64_t otherwise,
                              uint64_t bytes, uint64_t *out, bool *out_there) {
    reference ref;
    if (!get_reference(o, key, what, &ref)) return corrupt(r, key);
    *out = 0;
    if (!ref.known) *out = otherwise;
    if (!ref.given || !ref.known || ref.number == 0) return STH_OK;
    const object *it = object_of(r, what, ref.number);
    uint64_t span = it ? it->bytes : 0;
    if (it && it->ring) span *= 2;
    if (!it || !sthi_range_inside(ref.offset, bytes, span)) *out_there = false;
    else *out = it->here + ref.offset;
    return STH_OK;
}

/* ---- one call */

static void leave_place(const sth_expand *e) { (void)e; } /* the bytes are not those of the trace anyway */

/* Of memory that is not known here nobody can say how large it is: such an expansion is left out. */
static sth_status get_part(const replay *r, const json_t *o, const char *key, uint64_t bytes, uint64_t *out,
                           bool *out_there) {
    reference ref;
    if (get_reference(o, key, MEMORY, &ref) && !ref.known) *out_there = false;
    return get_address(r, o, key, MEMORY, 0, bytes, out, out_there);
}

static bool get_u32(const json_t *o, const char *key, uint32_t *out) {
    uint64_t n;
    if (!get_u64(o, key, &n) || n > UINT32_MAX) return false;
    *out = (uint32_t)n;
    return true;
}

/* The factor is not in a trace: nobody looks at what comes out. */
static bool get_four_bits(const json_t *o, sth_expand *e) {
    e->factor = 1;
    return get_u64(o, "pitch", &e->pitch) && get_u32(o, "rank", &e->rank) && get_u32(o, "group", &e->group) &&
           get_u32(o, "hadamard", &e->hadamard);
}

static sth_status read_expand(const replay *r, const json_t *o, sth_expand *e, bool *out_there) {
    uint64_t encoding, dtype;
    sthi_expand_bytes bytes;
    *e = (sth_expand){.reference = leave_place};
    if (!get_u64(o, "rows", &e->rows) || !get_u64(o, "cols", &e->cols) || !get_u64(o, "stride", &e->stride) ||
        !get_u64(o, "place_bytes", &e->place_bytes) || !get_u64(o, "encoding", &encoding) ||
        !get_u64(o, "dtype", &dtype) || encoding > INT_MAX || dtype > INT_MAX)
        return corrupt(r, "an expansion without its sizes");
    e->encoding = (int)encoding;
    e->dtype = (int)dtype;
    if (sthi_is_four_bits(e->encoding) && !get_four_bits(o, e)) return corrupt(r, "an expansion without its sizes");
    const char *wrong = sthi_expand_wrong_sizes(e, &bytes);
    if (wrong) {
        char what[128];
        snprintf(what, sizeof what, "an expansion %s", wrong);
        return corrupt(r, what);
    }
#define GET_PART(part, name) STHI_TRY(get_part(r, o, #part, bytes.part, &e->part, out_there));
    STHI_EXPAND_PARTS(GET_PART)
#undef GET_PART
    return get_part(r, o, "place", e->place_bytes, &e->place, out_there);
}

/* What an entry needs of `event` and `other`; event_destroy takes NULL. */
static int events_needed(sthi_entry entry) {
    switch (entry) {
    case STHI_ENTRY_event_record:
    case STHI_ENTRY_stream_wait:
    case STHI_ENTRY_event_query:
    case STHI_ENTRY_event_synchronize: return 1;
    case STHI_ENTRY_event_elapsed_ns: return 2;
    default: return 0;
    }
}

static sth_status get_event(const replay *r, const json_t *o, const char *key, bool needed, sth_event **out,
                            bool *out_there) {
    uint64_t address;
    reference ref;
    STHI_TRY(get_address(r, o, key, EVENTS, 0, 0, &address, out_there));
    *out = (sth_event *)(uintptr_t)address;
    if (!needed || address || !get_reference(o, key, EVENTS, &ref)) return STH_OK;
    if (ref.known && !ref.number) return corrupt(r, "a call without its event");
    *out_there = false; /* it is unknown, or was never made here */
    return STH_OK;
}

static sth_status add_busy(replay *r, const sthi_call *c) {
    if (c->entry != STHI_ENTRY_sim_compute || c->number < 0) return STH_OK; /* less than 0: the device refuses it */
    if (c->number > MOST_BUSY_NS - r->busy_ns) return corrupt(r, "the streams are busy for more than 10 s");
    r->busy_ns += c->number;
    return STH_OK;
}

static sth_status read_call(replay *r, const json_t *o, sthi_call *c, sth_expand *e, bool *out_there) {
    uint64_t address = 0;
    (void)get_u64(o, "bytes", &c->bytes);
    c->number = json_integer_value(json_object_get(o, "number"));
    STHI_TRY(get_address(r, o, "memory", MEMORY, r->foreign, c->bytes, &c->address, out_there));
    STHI_TRY(get_address(r, o, "stream", STREAMS, 0, 0, &c->stream, out_there));
    STHI_TRY(get_event(r, o, "event", events_needed(c->entry) > 0, &c->event, out_there));
    STHI_TRY(get_event(r, o, "other", events_needed(c->entry) > 1, &c->other, out_there));
    STHI_TRY(get_address(r, o, "host", HOST, (uintptr_t)r->host, c->bytes, &address, out_there));
    c->host = (void *)(uintptr_t)address;
    STHI_TRY(add_busy(r, c));
    if (c->entry != STHI_ENTRY_expand) return STH_OK;
    c->expand = e;
    return read_expand(r, o, e, out_there);
}

static int kind_made(sthi_entry entry) {
    switch (entry) {
    case STHI_ENTRY_alloc:
    case STHI_ENTRY_ring_alloc: return MEMORY;
    case STHI_ENTRY_host_register: return HOST;
    case STHI_ENTRY_stream_create: return STREAMS;
    case STHI_ENTRY_event_create: return EVENTS;
    default: return -1;
    }
}

/* A place for what the call makes: *out is NULL where it makes nothing. Before the call, so that nothing is lost. */
static sth_status reserve(replay *r, const json_t *o, int what, object **out) {
    reference made;
    *out = NULL;
    if (what < 0 || !json_object_get(o, "made")) return STH_OK;
    if (!get_reference(o, "made", what, &made) || !made.number || made.number > r->line)
        return corrupt(r, "made"); /* each line makes one object at most */
    if (made.number >= r->capacity[what]) {
        size_t capacity = 2 * made.number + 64;
        object *objects = sthi_realloc(r->objects[what], capacity, sizeof *objects);
        if (!objects) return no_memory();
        memset(objects + r->capacity[what], 0, (capacity - r->capacity[what]) * sizeof *objects);
        r->objects[what] = objects;
        r->capacity[what] = capacity;
    }
    *out = &r->objects[what][made.number];
    return (*out)->here || (*out)->pages ? corrupt(r, "an object is made twice") : STH_OK;
}

/* The field that names what the call ends; NULL: it ends nothing. */
static const char *field_ended(sthi_entry entry, int *out_kind) {
    static const char *const fields[KINDS] = {"memory", "host", "stream", "event"};
    switch (entry) {
    case STHI_ENTRY_free:
    case STHI_ENTRY_ring_free: *out_kind = MEMORY; break;
    case STHI_ENTRY_host_unregister: *out_kind = HOST; break;
    case STHI_ENTRY_stream_destroy: *out_kind = STREAMS; break;
    case STHI_ENTRY_event_destroy: *out_kind = EVENTS; break;
    default: return NULL;
    }
    return fields[*out_kind];
}

/* True where the call ends something that the trace does not know: there is nothing here that could stand for it. */
static bool ends_unknown(const json_t *o, sthi_entry entry) {
    int what;
    reference ref;
    const char *field = field_ended(entry, &what);
    return field && get_reference(o, field, what, &ref) && !ref.known;
}

/* Host pages stay mapped to the end: a copy that the trace did not wait for may still be under way there. */
static void forget(replay *r, const json_t *o, sthi_entry entry) {
    int what;
    reference ref;
    const char *field = field_ended(entry, &what);
    if (!field || !get_reference(o, field, what, &ref)) return;
    object *it = object_of(r, what, ref.number);
    if (!it) return;
    it->here = 0;
}

static void compare(replay *r, const json_t *o, const sthi_call *c, sth_status rc) {
    const char *then = json_string_value(json_object_get(o, "status"));
    if (!then || !strcmp(then, sthi_status_name(rc))) return;
    if (c->entry == STHI_ENTRY_event_elapsed_ns && rc == STH_INVALID_STATE) return; /* this device is slower: not yet */
    if (r->report->different++ == 0)
        snprintf(r->report->first_different, sizeof r->report->first_different, "line %" PRIu64 ": %s was %s and is %s",
                 r->line, sthi_entries[c->entry].name, then, sthi_status_name(rc));
}

/* Registers memory that is none of the trace's: it is made first. */
static bool needs_pages(const json_t *o, sthi_entry entry) {
    reference host;
    return entry == STHI_ENTRY_host_register && get_reference(o, "host", HOST, &host) && !host.known;
}

static uint64_t result_of(const sthi_call *c, int what) {
    switch (what) {
    case MEMORY: return *c->out_address;
    case HOST: return (uintptr_t)c->host;
    case STREAMS: return *c->out_stream;
    default: return (uintptr_t)*c->out_event;
    }
}

/* What is made here and is not in the trace ends at once: no later call can name it. */
static void end_surplus(const replay *r, const sthi_call *c, int what) {
    const sth_backend_ops *ops = r->device->ops;
    sth_backend_device *self = r->device->self;
    bool ring = c->entry == STHI_ENTRY_ring_alloc;
    if (what == MEMORY) (ring ? ops->ring_free : ops->free)(self, *c->out_address, c->bytes);
    if (what == HOST) ops->host_unregister(self, c->host, c->bytes);
    if (what == STREAMS) ops->stream_destroy(self, *c->out_stream);
    if (what == EVENTS) ops->event_destroy(self, *c->out_event);
}

/* Work on the default stream may still use host memory that is not registered. */
static void note_default_stream(replay *r, const json_t *o, sthi_entry entry) {
    const char *stream = json_string_value(json_object_get(o, "stream"));
    if (stream && !strcmp(stream, "s0")) r->default_busy = entry != STHI_ENTRY_stream_synchronize;
}

/* Makes the call, and keeps what it makes under the number that it has in the trace. */
static sth_status make(replay *r, const json_t *o, sthi_call *c) {
    sth_devptr address = 0;
    sth_stream stream = 0;
    sth_event *event = NULL;
    sth_device_info info;
    bool done;
    int64_t ns;
    object *place;
    int what = kind_made(c->entry);
    STHI_TRY(reserve(r, o, what, &place));
    bool fresh = needs_pages(o, c->entry);
    if (fresh && !c->bytes) return corrupt(r, "host memory of no bytes");
    if (fresh && !(c->host = sthi_pages_map(c->bytes, 0))) return no_memory();
    c->out_address = &address;
    c->out_stream = &stream;
    c->out_event = &event;
    c->out_info = &info;
    c->out_done = &done;
    c->out_ns = &ns;
    sth_status rc = sthi_call_make(r->device->ops, r->device->self, c);
    r->report->calls++;
    compare(r, o, c, rc);
    note_default_stream(r, o, c->entry);
    bool kept = rc == STH_OK && place && (fresh || what != HOST);
    if (kept)
        *place = (object){result_of(c, what), c->bytes, c->entry == STHI_ENTRY_ring_alloc, fresh ? c->host : NULL};
    else if (rc == STH_OK && what >= 0) end_surplus(r, c, what);
    if (fresh && !kept) sthi_pages_unmap(c->host, c->bytes);
    return STH_OK;
}

static sth_status replay_line(replay *r, const json_t *o) {
    const char *name = json_string_value(json_object_get(o, "call"));
    sthi_call c = {.entry = name ? sthi_entry_named(name) : STHI_ENTRY_COUNT};
    sth_expand e;
    bool there = true;
    if (c.entry == STHI_ENTRY_COUNT || sthi_entries[c.entry].kind == STHI_PLAIN)
        return corrupt(r, "no call that is known");
    STHI_TRY(read_call(r, o, &c, &e, &there));
    if (!there || ends_unknown(o, c.entry)) r->report->skipped++;
    else STHI_TRY(make(r, o, &c));
    forget(r, o, c.entry);
    return STH_OK;
}

/* ---- the file */

/* The first pass: how much of the host's and of a framework's memory the calls need. */
static sth_status measure_line(replay *r, const json_t *o) {
    reference ref;
    uint64_t bytes = 0;
    const char *name = json_string_value(json_object_get(o, "call"));
    sthi_entry entry = name ? sthi_entry_named(name) : STHI_ENTRY_COUNT;
    if (!get_u64(o, "bytes", &bytes) || ends_unknown(o, entry) || needs_pages(o, entry)) return STH_OK;
    if (get_reference(o, "host", HOST, &ref) && ref.given && !ref.known)
        r->host_bytes = sthi_max_u64(r->host_bytes, bytes);
    if (get_reference(o, "memory", MEMORY, &ref) && ref.given && !ref.known)
        r->foreign_bytes = sthi_max_u64(r->foreign_bytes, bytes);
    return STH_OK;
}

static sth_status each_line(replay *r, FILE *file, sth_status (*handle)(replay *, const json_t *)) {
    char text[LINE];
    sth_status rc = STH_OK;
    rewind(file);
    for (r->line = 1; rc == STH_OK && fgets(text, sizeof text, file); r->line++) {
        json_t *o = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        uint64_t version = 0;
        if (!json_is_object(o)) rc = corrupt(r, "it is no JSON object");
        else if (r->line > 1) rc = handle(r, o);
        else if (!get_u64(o, "stagehand_trace", &version) || version != 1) rc = corrupt(r, "it does not begin a trace");
        json_decref(o);
    }
    if (rc == STH_OK && r->line == 1) return corrupt(r, "the file is empty");
    if (rc == STH_OK && ferror(file))
        return sthi_fail(STH_IO, "errno", errno, r->path, "%s cannot be read: %s", r->path, strerror(errno));
    return rc;
}

static sth_status prepare(replay *r) {
    const sth_backend_ops *ops = r->device->ops;
    if (r->host_bytes && !(r->host = sthi_pages_map(r->host_bytes, 0))) return no_memory();
    return r->foreign_bytes ? ops->alloc(r->device->self, r->foreign_bytes, &r->foreign) : STH_OK;
}

/* What the trace left, and what was made here beside it. */
static void clean_up(replay *r) {
    const sth_backend_ops *ops = r->device->ops;
    sth_backend_device *self = r->device->self;
    for (size_t i = 0; i < r->capacity[STREAMS]; i++)
        if (r->objects[STREAMS][i].here) ops->stream_destroy(self, r->objects[STREAMS][i].here);
    if (r->default_busy) (void)ops->stream_synchronize(self, 0);
    for (size_t i = 0; i < r->capacity[EVENTS]; i++)
        if (r->objects[EVENTS][i].here) ops->event_destroy(self, (sth_event *)(uintptr_t)r->objects[EVENTS][i].here);
    for (size_t i = 0; i < r->capacity[HOST]; i++) {
        const object *it = &r->objects[HOST][i];
        if (it->here) ops->host_unregister(self, it->pages, it->bytes);
        if (it->pages) sthi_pages_unmap(it->pages, it->bytes);
    }
    for (size_t i = 0; i < r->capacity[MEMORY]; i++) {
        const object *it = &r->objects[MEMORY][i];
        if (it->here) (it->ring ? ops->ring_free : ops->free)(self, it->here, it->bytes);
    }
    if (r->foreign) ops->free(self, r->foreign, r->foreign_bytes);
    if (r->host) sthi_pages_unmap(r->host, r->host_bytes);
    for (int what = 0; what < KINDS; what++) sthi_free(r->objects[what]);
}

sth_status sthi_trace_replay(const char *path, sth_device *device, sth_replay_report *out) {
    FILE *file = NULL;
    STHI_TRY(sthi_infile_open(path, "a trace", &file));
    *out = (sth_replay_report){.size = sizeof *out};
    replay r = {.path = path, .device = device, .report = out};
    sth_status rc = each_line(&r, file, measure_line);
    if (rc == STH_OK) rc = prepare(&r);
    if (rc == STH_OK) rc = each_line(&r, file, replay_line);
    fclose(file);
    sthi_error_copy why;
    sthi_error_save(&why);
    clean_up(&r);
    return rc == STH_OK ? STH_OK : sthi_error_restore(&why);
}
