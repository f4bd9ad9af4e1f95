/* A back end of one's own, in one file: two devices named "own:0" and "own:1", whose memory is the host's.
 *
 *   cc -shared -fPIC -Iinclude examples/own_backend.c -o libown.so
 *   stagehand doctor --backend ./libown.so              or, in any program: STAGEHAND_BACKENDS=/path/to/libown.so
 *
 * It carries out every call before it returns, on the thread that calls. So streams are always idle, an event has
 * happened as soon as it is recorded, and what the rules of stagehand/backend.h say about order and waiting holds by
 * itself. A back end with queues must keep those rules; this one shows all the others. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stagehand/backend.h"

enum { DEVICES = 2, ALIGN = 512 };
static const uint64_t MEMORY = (uint64_t)256 << 20;

static const sth_backend_host *host; /* how errors reach the library */

/* ---- what is alive: memory, registered host memory and streams, so that ending one twice is found */

typedef enum kind { DEVICE_MEMORY, HOST_MEMORY, STREAM } kind;

typedef struct thing {
    struct thing *next;
    kind kind;
    uint64_t id; /* its address, or the stream's number */
    uint64_t bytes;
} thing;

struct sth_backend_device {
    int index;
    pid_t pid; /* a child after fork() has another */
    pthread_mutex_t lock;
    thing *things; /* guarded by lock, as is all below */
    uint64_t used, last_stream;
};

struct sth_event {
    bool timing, recorded;
    int64_t ns;
};

static sth_status fail(sth_status status, const char *object, const char *message) {
    return host->error_set(status, "own", 0, object, message);
}

static sth_status check_fork(const sth_backend_device *d) {
    if (d->pid == getpid()) return STH_OK;
    return fail(STH_INVALID_STATE, "own", "the device was opened before this process was forked; open it again");
}

static sth_status add(sth_backend_device *d, kind what, uint64_t id, uint64_t bytes) {
    thing *t = malloc(sizeof *t);
    if (!t) return fail(STH_OUT_OF_HOST_MEMORY, "own", "no host memory for a record");
    *t = (thing){.next = d->things, .kind = what, .id = id, .bytes = bytes};
    d->things = t;
    return STH_OK;
}

static thing **find(sth_backend_device *d, kind what, uint64_t id) {
    thing **at = &d->things;
    while (*at && ((*at)->kind != what || (*at)->id != id)) at = &(*at)->next;
    return at;
}

/* False, with the reason in the record, where there is no such thing: nothing has changed then. */
static bool take_away(sth_backend_device *d, kind what, uint64_t id, uint64_t bytes) {
    pthread_mutex_lock(&d->lock);
    thing **at = find(d, what, id), *t = *at;
    bool found = t && t->bytes == bytes;
    if (found) {
        *at = t->next;
        if (what == DEVICE_MEMORY) d->used -= bytes;
        free(t);
    }
    pthread_mutex_unlock(&d->lock);
    if (!found) fail(STH_INVALID_ARGUMENT, "own", "what is to be ended is not alive, or is of another size");
    return found;
}

/* ---- devices */

static int count_devices(void) { return DEVICES; }

static sth_status open_device(int index, const sth_sim_options *sim, sth_backend_device **out) {
    (void)sim;
    if (index >= DEVICES) return fail(STH_BACKEND_UNAVAILABLE, "own", "there are two devices, own:0 and own:1");
    sth_backend_device *d = calloc(1, sizeof *d);
    if (!d) return fail(STH_OUT_OF_HOST_MEMORY, "own", "no host memory to open a device");
    d->index = index;
    d->pid = getpid();
    pthread_mutex_init(&d->lock, NULL);
    *out = d;
    return STH_OK;
}

static void close_device(sth_backend_device *d) {
    if (check_fork(d) != STH_OK) return;
    for (thing *t = d->things, *next; t; t = next) { /* what the owner forgot */
        next = t->next;
        if (t->kind == DEVICE_MEMORY) free((void *)(uintptr_t)t->id);
        free(t);
    }
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static uint32_t capabilities(sth_backend_device *d) {
    (void)d;
    return STH_CAP_PINNED_HOST | STH_CAP_MAPPED_HOST | STH_CAP_HOST_IS_DEVICE;
}

static sth_status info(sth_backend_device *d, sth_device_info *out) {
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    sth_device_info i = {.index = d->index, .capabilities = capabilities(d), .memory_total = MEMORY};
    snprintf(i.name, sizeof i.name, "host memory, number %d", d->index);
    snprintf(i.backend, sizeof i.backend, "own");
    pthread_mutex_lock(&d->lock);
    i.memory_free = MEMORY - d->used;
    pthread_mutex_unlock(&d->lock);
    *out = i;
    return STH_OK;
}

static int64_t now_ns(sth_backend_device *d) {
    (void)d;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- memory */

static sth_status alloc_locked(sth_backend_device *d, uint64_t bytes, sth_devptr *out) {
    if (bytes > MEMORY - d->used) {
        char message[128];
        snprintf(message, sizeof message, "%" PRIu64 " bytes were asked for and %" PRIu64 " are free", bytes,
                 MEMORY - d->used);
        return fail(STH_OUT_OF_DEVICE_MEMORY, "own", message);
    }
    void *p = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
    if (!p) return fail(STH_OUT_OF_HOST_MEMORY, "own", "the host has not that much memory left");
    sth_status rc = add(d, DEVICE_MEMORY, (uintptr_t)p, bytes);
    if (rc != STH_OK) {
        free(p);
        return rc;
    }
    d->used += bytes;
    *out = (uintptr_t)p;
    return STH_OK;
}

static sth_status alloc_memory(sth_backend_device *d, uint64_t bytes, sth_devptr *out) {
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    if (bytes == 0) return fail(STH_INVALID_ARGUMENT, "own", "0 bytes were asked for; give at least 1");
    pthread_mutex_lock(&d->lock);
    sth_status rc = alloc_locked(d, bytes, out);
    pthread_mutex_unlock(&d->lock);
    return rc;
}

static void free_memory(sth_backend_device *d, sth_devptr p, uint64_t bytes) {
    if (!p || check_fork(d) != STH_OK) return;
    if (take_away(d, DEVICE_MEMORY, p, bytes)) free((void *)(uintptr_t)p);
}

/* Nothing is pinned: this memory can be copied from as it is. What is promised about ranges holds all the same. */
static sth_status register_locked(sth_backend_device *d, uintptr_t p, uint64_t bytes) {
    for (const thing *t = d->things; t; t = t->next)
        if (t->kind == HOST_MEMORY && p < t->id + t->bytes && t->id < p + bytes)
            return fail(STH_INVALID_ARGUMENT, "own", "some of this host memory is registered already");
    return add(d, HOST_MEMORY, p, bytes);
}

static sth_status host_register(sth_backend_device *d, void *p, uint64_t bytes, sth_devptr *out_alias) {
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    pthread_mutex_lock(&d->lock);
    sth_status rc = register_locked(d, (uintptr_t)p, bytes);
    pthread_mutex_unlock(&d->lock);
    if (rc == STH_OK) *out_alias = (uintptr_t)p;
    return rc;
}

static void host_unregister(sth_backend_device *d, void *p, uint64_t bytes) {
    if (p && check_fork(d) == STH_OK) take_away(d, HOST_MEMORY, (uintptr_t)p, bytes);
}

/* ---- streams, copies, events */

static sth_status stream_create(sth_backend_device *d, int priority, sth_stream *out) {
    (void)priority;
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    pthread_mutex_lock(&d->lock);
    uint64_t id = d->last_stream + 1;
    sth_status rc = add(d, STREAM, id, 0);
    if (rc == STH_OK) *out = d->last_stream = id;
    pthread_mutex_unlock(&d->lock);
    return rc;
}

static void stream_destroy(sth_backend_device *d, sth_stream s) {
    if (s && check_fork(d) == STH_OK) take_away(d, STREAM, s, 0);
}

static sth_status check_stream(sth_backend_device *d, sth_stream s) {
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    pthread_mutex_lock(&d->lock);
    bool alive = s == 0 || *find(d, STREAM, s);
    pthread_mutex_unlock(&d->lock);
    return alive ? STH_OK : fail(STH_INVALID_ARGUMENT, "own", "the stream is not one of this device");
}

static sth_status copy(sth_backend_device *d, void *dst, const void *src, uint64_t bytes, sth_stream s) {
    sth_status rc = check_stream(d, s);
    if (rc == STH_OK && bytes) memcpy(dst, src, bytes);
    return rc;
}

static sth_status copy_h2d(sth_backend_device *d, sth_devptr dst, const void *src, uint64_t bytes, sth_stream s) {
    return copy(d, (void *)(uintptr_t)dst, src, bytes, s);
}

static sth_status copy_d2h(sth_backend_device *d, void *dst, sth_devptr src, uint64_t bytes, sth_stream s) {
    return copy(d, dst, (const void *)(uintptr_t)src, bytes, s);
}

static sth_status event_create(sth_backend_device *d, bool timing, sth_event **out) {
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    sth_event *e = calloc(1, sizeof *e);
    if (!e) return fail(STH_OUT_OF_HOST_MEMORY, "own", "no host memory for an event");
    e->timing = timing;
    *out = e;
    return STH_OK;
}

static void event_destroy(sth_backend_device *d, sth_event *e) {
    (void)d;
    free(e);
}

static sth_status event_record(sth_backend_device *d, sth_event *e, sth_stream s) {
    sth_status rc = check_stream(d, s);
    if (rc != STH_OK) return rc;
    e->ns = now_ns(d);
    e->recorded = true;
    return STH_OK;
}

static sth_status check_recorded(const sth_event *e) {
    return e->recorded ? STH_OK : fail(STH_INVALID_STATE, "own", "the event was never recorded; record it before this");
}

static sth_status stream_wait(sth_backend_device *d, sth_stream s, sth_event *e) {
    sth_status rc = check_stream(d, s);
    return rc == STH_OK ? check_recorded(e) : rc;
}

static sth_status event_query(sth_backend_device *d, sth_event *e, bool *out_done) {
    sth_status rc = check_fork(d);
    if (rc == STH_OK) rc = check_recorded(e);
    if (rc == STH_OK) *out_done = true;
    return rc;
}

static sth_status event_synchronize(sth_backend_device *d, sth_event *e) {
    sth_status rc = check_fork(d);
    return rc == STH_OK ? check_recorded(e) : rc;
}

static sth_status event_elapsed_ns(sth_backend_device *d, sth_event *a, sth_event *b, int64_t *out) {
    if (check_fork(d) != STH_OK) return STH_INVALID_STATE;
    if (!a->timing || !b->timing || !a->recorded || !b->recorded)
        return fail(STH_INVALID_STATE, "own", "elapsed time needs two events with timing that were recorded");
    *out = b->ns - a->ns;
    return STH_OK;
}

/* ---- the table */

static const sth_backend_ops table = {
    .abi = STH_BACKEND_ABI,
    .size = sizeof table,
    .backend = "own",
    .count = count_devices,
    .open = open_device,
    .close = close_device,
    .capabilities = capabilities,
    .info = info,
    .now_ns = now_ns,
    .alloc = alloc_memory,
    .free = free_memory,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_synchronize = check_stream, /* there is never anything to wait for */
    .copy_h2d = copy_h2d,
    .copy_d2h = copy_d2h,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .event_elapsed_ns = event_elapsed_ns,
    .host_register = host_register,
    .host_unregister = host_unregister,
};

__attribute__((visibility("default"))) const sth_backend_ops *stagehand_backend(const sth_backend_host *from) {
    host = from;
    if (from->abi == STH_BACKEND_ABI) return &table;
    fail(STH_UNSUPPORTED, "own", "made for another version of the library; compile it again");
    return NULL;
}
