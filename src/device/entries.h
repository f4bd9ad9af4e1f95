/* The entries of a back end's table in one list, and a call of one as a record. Whoever goes through all entries (the
 * check of a table, decorators, the replayer of traces) goes through this list; a new entry is one line here. */
#ifndef STHI_DEVICE_ENTRIES_H
#define STHI_DEVICE_ENTRIES_H
#include "stagehand/backend.h"

/* X(need, kind, name, parameters, fields, arguments), in the table's order.
 *   need        NEEDED, OPTIONAL, or the capability whose devices need it
 *   kind        STATUS or VOID: passes through decorators. PLAIN: asks something that they have nothing to say about
 *   fields      the record of the call, from its parameters
 *   arguments   of the entry, from the record c */
#define STHI_ENTRIES(X)                                                                                                \
    X(NEEDED, PLAIN, count, (void), (), ())                                                                            \
    X(NEEDED, PLAIN, open, (void), (), ())                                                                             \
    X(NEEDED, PLAIN, close, (void), (), ())                                                                            \
    X(NEEDED, PLAIN, capabilities, (void), (), ())                                                                     \
    X(NEEDED, STATUS, info, (sth_backend_device * self, sth_device_info *out), (.out_info = out), (self, c->out_info)) \
    X(NEEDED, PLAIN, now_ns, (void), (), ())                                                                           \
    X(NEEDED, STATUS, alloc, (sth_backend_device * self, uint64_t bytes, sth_devptr *out),                             \
      (STHI_BYTES(bytes), .out_address = out), (self, c->bytes, c->out_address))                                       \
    X(NEEDED, VOID, free, (sth_backend_device * self, sth_devptr p, uint64_t bytes),                                   \
      (STHI_ADDRESS(p), STHI_BYTES(bytes)), (self, c->address, c->bytes))                                              \
    X(NEEDED, STATUS, stream_create, (sth_backend_device * self, int priority, sth_stream *out),                       \
      (STHI_NUMBER(priority), .out_stream = out), (self, (int)c->number, c->out_stream))                               \
    X(NEEDED, VOID, stream_destroy, (sth_backend_device * self, sth_stream stream), (STHI_STREAM(stream)),             \
      (self, c->stream))                                                                                               \
    X(NEEDED, STATUS, stream_synchronize, (sth_backend_device * self, sth_stream stream), (STHI_STREAM(stream)),       \
      (self, c->stream))                                                                                               \
    X(NEEDED, STATUS, copy_h2d,                                                                                        \
      (sth_backend_device * self, sth_devptr dst, const void *src, uint64_t bytes, sth_stream stream),                 \
      (STHI_ADDRESS(dst), STHI_HOST(src), STHI_BYTES(bytes), STHI_STREAM(stream)),                                     \
      (self, c->address, c->host, c->bytes, c->stream))                                                                \
    X(NEEDED, STATUS, copy_d2h,                                                                                        \
      (sth_backend_device * self, void *dst, sth_devptr src, uint64_t bytes, sth_stream stream),                       \
      (STHI_HOST(dst), STHI_ADDRESS(src), STHI_BYTES(bytes), STHI_STREAM(stream)),                                     \
      (self, c->host, c->address, c->bytes, c->stream))                                                                \
    X(NEEDED, STATUS, event_create, (sth_backend_device * self, bool timing, sth_event **out),                         \
      (STHI_NUMBER(timing), .out_event = out), (self, c->number != 0, c->out_event))                                   \
    X(NEEDED, VOID, event_destroy, (sth_backend_device * self, sth_event *event), (STHI_EVENT(event)),                 \
      (self, c->event))                                                                                                \
    X(NEEDED, STATUS, event_record, (sth_backend_device * self, sth_event *event, sth_stream stream),                  \
      (STHI_EVENT(event), STHI_STREAM(stream)), (self, c->event, c->stream))                                           \
    X(NEEDED, STATUS, stream_wait, (sth_backend_device * self, sth_stream stream, sth_event *event),                   \
      (STHI_STREAM(stream), STHI_EVENT(event)), (self, c->stream, c->event))                                           \
    X(NEEDED, STATUS, event_query, (sth_backend_device * self, sth_event *event, bool *out),                           \
      (STHI_EVENT(event), .out_done = out), (self, c->event, c->out_done))                                             \
    X(NEEDED, STATUS, event_synchronize, (sth_backend_device * self, sth_event *event), (STHI_EVENT(event)),           \
      (self, c->event))                                                                                                \
    X(NEEDED, STATUS, event_elapsed_ns, (sth_backend_device * self, sth_event *a, sth_event *b, int64_t *out),         \
      (STHI_EVENT(a), STHI_OTHER(b), .out_ns = out), (self, c->event, c->other, c->out_ns))                            \
    X(STH_CAP_PINNED_HOST, STATUS, host_register,                                                                      \
      (sth_backend_device * self, void *p, uint64_t bytes, sth_devptr *out),                                           \
      (STHI_HOST(p), STHI_BYTES(bytes), .out_address = out), (self, c->host, c->bytes, c->out_address))                \
    X(STH_CAP_PINNED_HOST, VOID, host_unregister, (sth_backend_device * self, void *p, uint64_t bytes),                \
      (STHI_HOST(p), STHI_BYTES(bytes)), (self, c->host, c->bytes))                                                    \
    X(STH_CAP_RING, PLAIN, ring_granularity, (void), (), ())                                                           \
    X(STH_CAP_RING, STATUS, ring_alloc, (sth_backend_device * self, uint64_t bytes, sth_devptr *out),                  \
      (STHI_BYTES(bytes), .out_address = out), (self, c->bytes, c->out_address))                                       \
    X(STH_CAP_RING, VOID, ring_free, (sth_backend_device * self, sth_devptr p, uint64_t bytes),                        \
      (STHI_ADDRESS(p), STHI_BYTES(bytes)), (self, c->address, c->bytes))                                              \
    X(STH_CAP_EXPAND, STATUS, expand_ready, (sth_backend_device * self), (.out_ns = NULL), (self))                     \
    X(STH_CAP_EXPAND, STATUS, expand, (sth_backend_device * self, const sth_expand *e, sth_stream stream),             \
      (.expand = e, STHI_STREAM(stream)), (self, c->expand, c->stream))                                                \
    X(OPTIONAL, VOID, poison, (sth_backend_device * self, sth_devptr p, uint64_t bytes, sth_stream stream),            \
      (STHI_ADDRESS(p), STHI_BYTES(bytes), STHI_STREAM(stream)), (self, c->address, c->bytes, c->stream))              \
    X(OPTIONAL, STATUS, copy_d2h_foreign,                                                                              \
      (sth_backend_device * self, void *dst, sth_devptr src, uint64_t bytes, sth_stream stream),                       \
      (STHI_HOST(dst), STHI_ADDRESS(src), STHI_BYTES(bytes), STHI_STREAM(stream)),                                     \
      (self, c->host, c->address, c->bytes, c->stream))                                                                \
    X(OPTIONAL, STATUS, copy_h2d_foreign,                                                                              \
      (sth_backend_device * self, sth_devptr dst, const void *src, uint64_t bytes, sth_stream stream),                 \
      (STHI_ADDRESS(dst), STHI_HOST(src), STHI_BYTES(bytes), STHI_STREAM(stream)),                                     \
      (self, c->address, c->host, c->bytes, c->stream))                                                                \
    X(OPTIONAL, STATUS, sim_compute, (sth_backend_device * self, sth_stream stream, int64_t ns),                       \
      (STHI_STREAM(stream), STHI_NUMBER(ns)), (self, c->stream, c->number))

#define STHI_ADDRESS(x) .has_address = true, .address = (x)
#define STHI_BYTES(x) .has_bytes = true, .bytes = (x)
#define STHI_HOST(x) .has_host = true, .host = (void *)(uintptr_t)(x)
#define STHI_STREAM(x) .has_stream = true, .stream = (x)
#define STHI_EVENT(x) .has_event = true, .event = (x)
#define STHI_OTHER(x) .has_other = true, .other = (x)
#define STHI_NUMBER(x) .has_number = true, .number = (x)

typedef enum sthi_entry {
#define STHI_ENTRY_ENUM(need, kind, name, ...) STHI_ENTRY_##name,
    STHI_ENTRIES(STHI_ENTRY_ENUM)
#undef STHI_ENTRY_ENUM
        STHI_ENTRY_COUNT
} sthi_entry;

/* One call. Outputs are the caller's, NULL where the entry has none. */
typedef struct sthi_call {
    sthi_entry entry;
    bool has_address, has_bytes, has_host, has_stream, has_event, has_other, has_number;
    sth_devptr address;
    uint64_t bytes;
    void *host;
    sth_stream stream;
    sth_event *event, *other;
    int64_t number; /* priority, whether it times, nanoseconds */
    const sth_expand *expand;
    sth_device_info *out_info;
    sth_devptr *out_address;
    sth_stream *out_stream;
    sth_event **out_event;
    bool *out_done;
    int64_t *out_ns;
} sthi_call;

typedef enum sthi_entry_kind { STHI_PLAIN, STHI_STATUS, STHI_VOID } sthi_entry_kind;

typedef struct sthi_entry_facts {
    const char *name;
    size_t offset; /* in sth_backend_ops */
    bool needed;
    uint32_t capability;         /* 0: of none */
    const char *capability_name;
    sthi_entry_kind kind;
} sthi_entry_facts;

/* check.c */
extern const sthi_entry_facts sthi_entries[STHI_ENTRY_COUNT];
sthi_entry sthi_entry_named(const char *name); /* STHI_ENTRY_COUNT: none */

/* Makes the call on a table's device. OK from void calls; UNSUPPORTED where the table has no such entry, but for the
 * foreign copies, which then are plain ones. */
sth_status sthi_call_make(const sth_backend_ops *table, sth_backend_device *self, const sthi_call *c);
#endif
