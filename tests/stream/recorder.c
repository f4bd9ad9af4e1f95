#include "stream/recorder.h"

#include "base/error.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS = 1 << 16, WINDOWS = 16, STREAMS = 16, OPS = 65536 };

typedef enum kind { COPY, RECORD, WAIT, POISON, EXPAND, USE } kind;
typedef struct op {
    kind kind;
    uint32_t stream; /* index of `streams` */
    uint32_t number; /* of the recording of an event, or of the use */
    sth_devptr to;
    const void *from;
    uint64_t bytes;
    int64_t compute_ns;
    sth_expand expand;
} op;

struct recording {
    op *ops;
    uint32_t count, streams, records, uses;
    uint8_t **saw; /* [2 * uses] */
    sth_backend_device *device; /* of the last launch */
    sth_stream branch[STREAMS]; /* of that launch: [1, streams) are its own */
};

static struct {
    sth_backend_ops ops;
    const sth_backend_ops *inner;
    bool on;
    recording *now;
    sth_stream streams[STREAMS];
    uint32_t stream_of[OPS]; /* of each recording of an event */
    bool joined[STREAMS];
    struct {
        sth_event *event;
        bool captured;
        uint32_t number;
    } events[EVENTS];
    uint32_t refusals, fail_in;
    uint64_t copies;
    struct {
        const uint8_t *begin, *end;
    } windows[WINDOWS]; /* host memory that was registered; of those given back the range is empty */
    uint32_t window_count;
    pthread_mutex_t lock; /* of the windows: registrars are threads */
    bool failed;
    const char *first;
} r;

static void refuse(const char *why) {
    if (!r.refusals++) r.first = why;
}

uint32_t recorder_refusals(const char **out_first) {
    uint32_t n = r.refusals;
    *out_first = n ? r.first : "";
    r.refusals = 0;
    return n;
}

static int stream_index(sth_stream stream) {
    for (uint32_t i = 0; r.on && i < r.now->streams; i++)
        if (r.streams[i] == stream) return (int)i;
    return -1;
}

static op *add(kind k, int stream) {
    if (r.now->count == OPS) abort();
    op *o = &r.now->ops[r.now->count++];
    *o = (op){.kind = k, .stream = (uint32_t)stream};
    if (stream) r.joined[stream] = k == WAIT && r.joined[stream];
    return o;
}

/* A table by address: the first free place from where an event belongs. At most half of it is ever in use. */
static uint32_t belongs(const sth_event *event) { return (uint32_t)((uintptr_t)event / 16 * 2654435761u) % EVENTS; }

static uint32_t known(sth_event *event) {
    uint32_t i = belongs(event), seen = 0;
    for (; r.events[i].event && r.events[i].event != event; i = (i + 1) % EVENTS)
        if (++seen > EVENTS / 2) abort();
    r.events[i].event = event;
    return i;
}

/* Those behind it that would not be found past the gap move up. */
static void forget(sth_event *event) {
    uint32_t gap = known(event);
    for (uint32_t i = (gap + 1) % EVENTS; r.events[i].event; i = (i + 1) % EVENTS) {
        uint32_t home = belongs(r.events[i].event);
        if ((i - home) % EVENTS < (i - gap) % EVENTS) continue;
        r.events[gap] = r.events[i];
        gap = i;
    }
    memset(&r.events[gap], 0, sizeof r.events[gap]);
}

uint64_t recorder_copies(void) { return r.copies; }

bool recorder_fail(uint32_t n) {
    bool failed = r.failed;
    r.fail_in = n;
    r.failed = false;
    return failed;
}

static bool fails(int stream) {
    if (stream < 0 || !r.fail_in || --r.fail_in) return false;
    r.failed = true;
    (void)sthi_fail(STH_DEVICE_ERROR, "recorder", 0, NULL, "this call was to fail");
    return true;
}

static bool outside(const char *what) {
    if (r.on) refuse(what);
    return true;
}

static sth_status host_register(sth_backend_device *self, void *at, uint64_t bytes, sth_devptr *out) {
    sth_status rc = r.inner->host_register(self, at, bytes, out);
    pthread_mutex_lock(&r.lock);
    uint32_t i = 0;
    while (i < r.window_count && r.windows[i].begin != r.windows[i].end) i++;
    if (i == WINDOWS) abort();
    if (i == r.window_count) r.window_count++;
    r.windows[i].begin = at;
    r.windows[i].end = rc == STH_OK ? r.windows[i].begin + bytes : r.windows[i].begin;
    pthread_mutex_unlock(&r.lock);
    return rc;
}

static void host_unregister(sth_backend_device *self, void *at, uint64_t bytes) {
    pthread_mutex_lock(&r.lock);
    for (uint32_t i = 0; i < r.window_count; i++)
        if (r.windows[i].begin == at) r.windows[i].end = at;
    pthread_mutex_unlock(&r.lock);
    r.inner->host_unregister(self, at, bytes);
}

static bool crosses(const void *from, uint64_t bytes) {
    const uint8_t *begin = from;
    bool found = false;
    pthread_mutex_lock(&r.lock);
    for (uint32_t i = 0; i < r.window_count; i++)
        found |= begin >= r.windows[i].begin && begin < r.windows[i].end && begin + bytes > r.windows[i].end;
    pthread_mutex_unlock(&r.lock);
    return found;
}

static sth_status copy(sth_backend_device *self, sth_devptr to, const void *from, uint64_t bytes, sth_stream stream) {
    int s = stream_index(stream);
    r.copies++;
    if (crosses(from, bytes)) refuse("a copy from more than one registration");
    if (s < 0) return outside("a copy outside of the capture"), r.inner->copy_h2d(self, to, from, bytes, stream);
    if (fails(s)) return STH_DEVICE_ERROR;
    op *o = add(COPY, s);
    o->to = to, o->from = from, o->bytes = bytes;
    return STH_OK;
}

static void poison(sth_backend_device *self, sth_devptr at, uint64_t bytes, sth_stream stream) {
    int s = stream_index(stream);
    if (s < 0) {
        r.inner->poison(self, at, bytes, stream);
        return;
    }
    op *o = add(POISON, s);
    o->to = at, o->bytes = bytes;
}

static sth_status expand(sth_backend_device *self, const sth_expand *e, sth_stream stream) {
    int s = stream_index(stream);
    if (s < 0) return outside("an expansion outside of the capture"), r.inner->expand(self, e, stream);
    if (fails(s)) return STH_DEVICE_ERROR;
    add(EXPAND, s)->expand = *e;
    return STH_OK;
}

static sth_status record(sth_backend_device *self, sth_event *event, sth_stream stream) {
    int s = stream_index(stream);
    uint32_t e = known(event);
    if (fails(s)) return STH_DEVICE_ERROR;
    r.events[e].captured = s >= 0;
    if (s < 0) return r.inner->event_record(self, event, stream);
    bool joined = r.joined[s];
    r.events[e].number = r.now->records++;
    r.stream_of[r.events[e].number] = (uint32_t)s;
    add(RECORD, s)->number = r.events[e].number;
    r.joined[s] = joined;
    return STH_OK;
}

static void join(sth_stream stream) {
    if (r.now->streams == STREAMS) abort();
    r.joined[r.now->streams] = false;
    r.streams[r.now->streams++] = stream;
}

static sth_status wait(sth_backend_device *self, sth_stream stream, sth_event *event) {
    uint32_t e = known(event);
    int s = stream_index(stream);
    if (!r.on && r.events[e].captured) refuse("a wait for an event of a capture that has ended");
    if (s >= 0 && !r.events[e].captured) refuse("a wait inside the capture for an event of before it");
    if (!r.on || !r.events[e].captured) return r.inner->stream_wait(self, stream, event);
    if (fails(0)) return STH_DEVICE_ERROR;
    if (s < 0) join(stream);
    s = stream_index(stream);
    add(WAIT, s)->number = r.events[e].number;
    /* Nothing else may have come since on the stream that is waited for. */
    if (s == 0) {
        uint32_t from = r.stream_of[r.events[e].number], last = r.now->count;
        while (last-- && !(r.now->ops[last].stream == from)) {}
        if (r.now->ops[last].kind == RECORD && r.now->ops[last].number == r.events[e].number) r.joined[from] = true;
    }
    return STH_OK;
}

static void use_of(sth_event *event) {
    if (r.on) refuse("an event is asked inside a capture");
    else if (r.events[known(event)].captured) refuse("an event of a capture is asked");
}

static sth_status query(sth_backend_device *self, sth_event *event, bool *out) {
    use_of(event);
    return r.inner->event_query(self, event, out);
}

static sth_status event_synchronize(sth_backend_device *self, sth_event *event) {
    use_of(event);
    return r.inner->event_synchronize(self, event);
}

static sth_status elapsed(sth_backend_device *self, sth_event *a, sth_event *b, int64_t *out) {
    use_of(a);
    return r.inner->event_elapsed_ns(self, a, b, out);
}

static void destroy(sth_backend_device *self, sth_event *event) {
    if (event) forget(event); /* another may get its address */
    r.inner->event_destroy(self, event);
}

static sth_status synchronize(sth_backend_device *self, sth_stream stream) {
    outside("a stream is waited for inside a capture");
    return r.inner->stream_synchronize(self, stream);
}

static sth_status alloc(sth_backend_device *self, uint64_t bytes, sth_devptr *out) {
    outside("memory is taken inside a capture");
    return r.inner->alloc(self, bytes, out);
}

static void free_(sth_backend_device *self, sth_devptr at, uint64_t bytes) {
    outside("memory is given back inside a capture");
    r.inner->free(self, at, bytes);
}

static sth_status ring_alloc(sth_backend_device *self, uint64_t bytes, sth_devptr *out) {
    outside("a ring is made inside a capture");
    return r.inner->ring_alloc(self, bytes, out);
}

static void ring_free(sth_backend_device *self, sth_devptr at, uint64_t bytes) {
    outside("a ring is given back inside a capture");
    r.inner->ring_free(self, at, bytes);
}

sth_status recorder_open(const sth_sim_options *sim, sth_device **out) {
    sth_status rc = sthi_device_open("sim", sim, out);
    if (rc != STH_OK) return rc;
    memset(&r, 0, sizeof r);
    r.inner = (*out)->ops;
    r.ops = *r.inner;
    pthread_mutex_init(&r.lock, NULL);
    r.ops.host_register = host_register;
    r.ops.host_unregister = host_unregister;
    r.ops.copy_h2d = copy;
    r.ops.poison = poison;
    r.ops.expand = expand;
    r.ops.event_record = record;
    r.ops.stream_wait = wait;
    r.ops.event_query = query;
    r.ops.event_synchronize = event_synchronize;
    r.ops.event_elapsed_ns = elapsed;
    r.ops.event_destroy = destroy;
    r.ops.stream_synchronize = synchronize;
    r.ops.alloc = alloc;
    r.ops.free = free_;
    r.ops.ring_alloc = ring_alloc;
    r.ops.ring_free = ring_free;
    (*out)->ops = &r.ops;
    (*out)->capabilities |= STH_CAP_GRAPH_CAPTURE;
    return STH_OK;
}

void recorder_begin(sth_stream stream) {
    r.now = calloc(1, sizeof *r.now);
    if (r.now) r.now->ops = calloc(OPS, sizeof *r.now->ops);
    if (!r.now || !r.now->ops) abort();
    r.on = true;
    join(stream);
}

uint32_t recorder_use(sth_devptr address, uint64_t bytes, int64_t compute_ns) {
    op *o = add(USE, 0);
    o->to = address, o->bytes = bytes, o->compute_ns = compute_ns, o->number = r.now->uses++;
    return o->number;
}

recording *recorder_end(void) {
    for (uint32_t i = 1; i < r.now->streams; i++)
        if (!r.joined[i]) refuse("the capture ends before its streams have joined");
    r.on = false;
    r.now->saw = calloc(2 * r.now->uses + 1, sizeof *r.now->saw);
    if (!r.now->saw) abort();
    for (uint32_t i = 0; i < r.now->count; i++) {
        const op *o = &r.now->ops[i];
        for (int when = 0; o->kind == USE && when < 2; when++)
            if (!(r.now->saw[2 * o->number + (uint32_t)when] = malloc(o->bytes))) abort();
    }
    return r.now;
}

uint32_t recording_waits(const recording *g) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->count; i++) n += g->ops[i].kind == WAIT;
    return n;
}

/* Waits for the last launch. */
static void end_launch(recording *g) {
    for (uint32_t i = 1; g->device && i < g->streams; i++) r.inner->stream_destroy(g->device, g->branch[i]);
    g->device = NULL;
}

void recording_free(recording *g) {
    end_launch(g);
    for (uint32_t i = 0; i < 2 * g->uses; i++) free(g->saw[i]);
    free(g->saw);
    free(g->ops);
    free(g);
}

static void must(sth_status rc) {
    if (rc != STH_OK) abort();
}

static void enqueue(recording *g, sth_backend_device *self, const op *o, sth_stream s, sth_event **events) {
    switch (o->kind) {
    case COPY: must(r.inner->copy_h2d(self, o->to, o->from, o->bytes, s)); break;
    case POISON: r.inner->poison(self, o->to, o->bytes, s); break;
    case EXPAND: must(r.inner->expand(self, &o->expand, s)); break;
    case RECORD: must(r.inner->event_record(self, events[o->number], s)); break;
    case WAIT: must(r.inner->stream_wait(self, s, events[o->number])); break;
    case USE:
        must(r.inner->copy_d2h(self, g->saw[2 * o->number], o->to, o->bytes, s));
        must(r.inner->sim_compute(self, s, o->compute_ns));
        must(r.inner->copy_d2h(self, g->saw[2 * o->number + 1], o->to, o->bytes, s));
        break;
    }
}

void recording_launch(recording *g, sth_device *device, sth_stream stream) {
    sth_backend_device *self = device->self;
    end_launch(g);
    sth_stream *branch = g->branch;
    branch[0] = stream;
    sth_event **events = calloc(g->records + 1, sizeof *events), *edge;
    if (!events) abort();
    for (uint32_t i = 0; i <= g->records; i++) must(r.inner->event_create(self, false, &events[i]));
    edge = events[g->records];
    must(r.inner->event_record(self, edge, stream));
    for (uint32_t i = 1; i < g->streams; i++) {
        must(r.inner->stream_create(self, 0, &branch[i]));
        must(r.inner->stream_wait(self, branch[i], edge));
    }
    for (uint32_t i = 0; i < g->count; i++) enqueue(g, self, &g->ops[i], branch[g->ops[i].stream], events);
    for (uint32_t i = 1; i < g->streams; i++) {
        must(r.inner->event_record(self, edge, branch[i]));
        must(r.inner->stream_wait(self, stream, edge));
    }
    g->device = self;
    for (uint32_t i = 0; i <= g->records; i++) r.inner->event_destroy(self, events[i]);
    free(events);
}

const uint8_t *recording_saw(const recording *g, uint32_t use, int when) { return g->saw[2 * use + (uint32_t)when]; }
