/* Random calls with tables of rows; see rows_calls.h. */
#include "rows_calls.h"

#include "base/random.h"
#include "base/thread.h"

enum { ASKED = 3 };

typedef struct caller {
    const rows_calls *calls;
    unsigned seed, count;
    uint8_t seen[ASKED][CALLS_PARTS][CALLS_BYTES_MOST];
    bool right;
} caller;

static bool read_slot(const rows_calls *r, uint64_t slot, sth_stream stream, uint8_t (*to)[CALLS_BYTES_MOST]) {
    for (unsigned p = 0; p < CALLS_PARTS; p++)
        if (r->device->ops->copy_d2h(r->device->self, to[p], r->pool[p] + slot * r->part_bytes[p], r->part_bytes[p],
                                     stream) != STH_OK)
            return false;
    return true;
}

static bool make_call(caller *c, sth_stream stream, uint64_t *drawn) {
    const rows_calls *r = c->calls;
    uint32_t table = (uint32_t)(sthi_random64(c->seed, (*drawn)++) % r->tables);
    uint32_t count = 1 + (uint32_t)(sthi_random64(c->seed, (*drawn)++) % ASKED);
    int64_t ids[ASKED], slots[ASKED];
    for (uint32_t i = 0; i < count; i++) ids[i] = (int64_t)(sthi_random64(c->seed, (*drawn)++) % r->row_count);
    sth_rows_lease lease;
    if (sth_rows_acquire(r->rows, table, ids, 8, count, 1, stream, slots, &lease) != STH_OK) return false;
    for (uint32_t i = 0; i < count; i++)
        if (!read_slot(r, lease.first + (uint64_t)slots[i], stream, c->seen[i])) return false;
    if (sth_rows_release(r->rows, &lease, stream) != STH_OK) return false;
    if (r->device->ops->stream_synchronize(r->device->self, stream) != STH_OK) return false;
    for (uint32_t i = 0; i < count; i++)
        for (unsigned p = 0; p < CALLS_PARTS; p++)
            if (!r->is_row(r->world, table, (uint32_t)ids[i], p, c->seen[i][p])) return false;
    return true;
}

static void *call(void *context) {
    caller *c = context;
    sth_device *d = c->calls->device;
    sth_stream stream;
    uint64_t drawn = 0;
    if (d->ops->stream_create(d->self, 0, &stream) != STH_OK) return NULL;
    c->right = true;
    for (unsigned n = 0; c->right && n < c->count; n++) c->right = make_call(c, stream, &drawn);
    d->ops->stream_destroy(d->self, stream);
    return NULL;
}

bool make_calls(const rows_calls *calls, unsigned seed, unsigned count) {
    caller c = {.calls = calls, .seed = seed, .count = count};
    (void)call(&c);
    return c.right;
}

bool make_calls_of_threads(const rows_calls *calls, unsigned count) {
    enum { THREADS = 4 };
    sthi_thread threads[THREADS];
    caller callers[THREADS];
    unsigned started = 0;
    bool right = true;
    for (; right && started < THREADS; started += right) {
        callers[started] = (caller){.calls = calls, .seed = 100 + started, .count = count};
        right = sthi_thread_start(&threads[started], "caller", call, &callers[started]) == STH_OK;
    }
    for (unsigned i = 0; i < started; i++) sthi_thread_join(threads[i]);
    for (unsigned i = 0; i < started; i++) right = right && callers[i].right;
    return right;
}
