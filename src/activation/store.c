/* Records of saved storages, their states, and the copies that move them.
 *
 * A record spilled or brought back owns a slab; the slab's event stands behind the last copy that used it, and
 * copies on one slab are ordered by it: out behind the one before, in behind out. So a slab may be given back
 * and taken again while a copy is enqueued. What the device's memory needs is told apart: a record is let go
 * of when its event has passed, or when the caller's stream has been made to wait for it.
 *
 * Invariants: a live record is in no list, in `kept` (KEPT and fit to be spilled, the best first: in the order of
 * saving, then what backward has asked for and may ask for again), in `cheap` (likewise, of recomputable ones), in
 * `planned` or `planned_cheap` (likewise, of those that go as soon as they can), in `spilling` (in the order of their
 * copies) or in `restored` (asked for, and may be again, oldest first); one that is held, or that could not be spilled,
 * is in none; device_bytes is the sum of
 * the bytes of KEPT, SPILLING, RESTORING and RESTORED ones, spilling_bytes of SPILLING ones; ahead_count and
 * ahead_bytes are of those that were brought back and not asked for.
 * Lock: `lock` guards all of it. Held for bookkeeping and enqueueing, and while host memory is taken and pinned;
 * on the simulated device also while stream 0 waits for a copy, where that is the caller's. With checksums
 * also while a copy is waited for. Leaves below it: the blocks', the device's. */
#include "activation/store.h"

#include <inttypes.h>
#include <stdio.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "activation/order.h"
#include "activation/slabs.h"
#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "base/thread.h"
#include "conductor/arbiter.h"
#include "device/device.h"
#include "telemetry/devtime.h"

enum { RECORDS_EACH = 128, CHUNKS = 4096, LOOK_AHEAD = 512, MOST_SAVES = 1 << 20 };
static const uint64_t MIB = 1 << 20, CHUNK_BYTES = 32 << 20, TIMED_BYTES = 64 << 10;

typedef struct record {
    uint32_t index, generation; /* the latter never 0 */
    sth_activation_state state;
    uint32_t ordinal;
    uint64_t pass, step, bytes, checksum;
    sthi_slab *slab; /* of spilled ones, and of KEPT ones that were recalled */
    bool summed, passing, planned, recomputable, asked, ahead;
    bool held; /* somebody else may write to its memory */
    bool listed;
    struct record *before, *after; /* in the list; `after` also among the free ones */
} record;

typedef struct list {
    record *first, *last;
} list;

struct sth_activation {
    sth_device *device;
    sth_activation_options options;
    unsigned fork_depth;
    sthi_mutex lock;
    bool closed, relieving; /* the latter: above high, and not yet below low */
    bool backward;          /* this pass has been asked for something */
    bool stray;             /* a copy out that failed half-way may be under way, and no record knows of it */
    sth_stream out, in;
    sthi_lane *out_lane, *in_lane; /* NULL without a conductor */
    sthi_slabs *slabs;
    sthi_order order;
    record *chunks[CHUNKS];
    uint32_t record_count;
    record *free;
    list planned, planned_cheap, cheap, kept, spilling, restored;
    sth_record in_use; /* asked for last */
    uint64_t pass, step, live;
    uint64_t device_bytes, spilling_bytes, peak_bytes, ahead_bytes, projected; /* the last: most in this pass */
    uint32_t spilling_count, ahead_count;
    sth_event *copy_begin, *copy_end; /* round a copy out that is timed, one at a time */
    uint64_t timed_bytes;              /* of it; 0: none is */
    double link;                       /* bytes per second, 0 while not known */
    sth_activation_stats counted;
};

void sthi_activation_options_init(sth_activation_options *options) {
    *options = (sth_activation_options){
        .size = sizeof *options,
        .high = 20000 * MIB,
        .low = 16000 * MIB,
        .max_d2h = 1,
        .max_h2d = 1,
        .ahead_bytes = (uint64_t)1 << 30,
    };
}

/* ---- the conductor */

static void close_lanes(sth_activation *a) {
    sthi_lane_close(a->out_lane);
    sthi_lane_close(a->in_lane);
    a->out_lane = a->in_lane = NULL;
}

/* When backward asks for the record, by what it did the last time; one that it waits for is late already. */
static int64_t due_ns(const sth_activation *a, const record *r) {
    const sthi_trace *last = &a->order.last;
    int64_t now = a->device->ops->now_ns(a->device->self);
    if (r->asked || r->ordinal >= last->count || !a->order.cursor || a->order.cursor > last->asked_count) return now;
    int64_t from = last->saved[last->asked[a->order.cursor - 1]].asked_ns, to = last->saved[r->ordinal].asked_ns;
    return to > from ? now + to - from : now;
}

static sthi_way ask_lane(sthi_lane *lane, uint64_t bytes, int64_t due) {
    if (lane) return sthi_lane_begin(lane, bytes, due, CHUNK_BYTES);
    return (sthi_way){.piece = CHUNK_BYTES, .flight = STHI_NO_FLIGHT};
}

/* ---- life */

static void fini(sth_activation *a) {
    const sth_backend_ops *ops = a->device->ops;
    close_lanes(a);
    if (a->out) ops->stream_destroy(a->device->self, a->out); /* waits for what is enqueued */
    if (a->in) ops->stream_destroy(a->device->self, a->in);
    if (a->copy_begin) ops->event_destroy(a->device->self, a->copy_begin);
    if (a->copy_end) ops->event_destroy(a->device->self, a->copy_end);
    for (uint32_t i = 0; i < a->record_count; i++) {
        record *r = &a->chunks[i / RECORDS_EACH][i % RECORDS_EACH];
        if (r->slab) sthi_slabs_give(a->slabs, r->slab);
    }
    for (uint32_t i = 0; i < CHUNKS && a->chunks[i]; i++) sthi_free(a->chunks[i]);
    sthi_slabs_destroy(a->slabs);
    sthi_order_fini(&a->order);
    sthi_mutex_fini(&a->lock);
    sthi_device_release(a->device);
    sthi_free(a);
}

sth_status sthi_activation_create(sth_device *device, const sth_activation_options *options, sth_activation **out) {
    sth_activation *a = sthi_zalloc(1, sizeof *a);
    if (!a) return sthi_no_memory("activation", "a store's record");
    a->device = device;
    sthi_device_retain(device);
    a->options = *options;
    a->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&a->lock);
    sthi_order_pass(&a->order, 0);
    sth_status rc = sthi_slabs_create(device, options, &a->slabs);
    if (rc == STH_OK) rc = device->ops->stream_create(device->self, options->priority, &a->out);
    if (rc == STH_OK) rc = device->ops->stream_create(device->self, options->priority, &a->in);
    if (rc == STH_OK) rc = device->ops->event_create(device->self, true, &a->copy_begin);
    if (rc == STH_OK) rc = device->ops->event_create(device->self, true, &a->copy_end);
    if (rc != STH_OK) {
        sthi_error_copy first;
        sthi_error_save(&first);
        fini(a);
        return sthi_error_restore(&first);
    }
    *out = a;
    return STH_OK;
}

static bool in_child(const sth_activation *a) { return a->fork_depth != sthi_fork_depth(); }

void sthi_activation_destroy(sth_activation *a) {
    if (a && !in_child(a)) fini(a);
}

/* Sums and lists agree, as far as a look tells. */
static void check(const sth_activation *a) {
    STHI_INVARIANT(a->live <= a->record_count);
    STHI_INVARIANT(a->spilling_bytes <= a->device_bytes && a->ahead_bytes <= a->device_bytes);
    STHI_INVARIANT(!a->spilling_count == !a->spilling.first);
    STHI_INVARIANT(a->ahead_count || !a->ahead_bytes);
    STHI_INVARIANT(!a->kept.first == !a->kept.last && !a->restored.first == !a->restored.last);
}

/* Takes the lock on success. */
static sth_status enter(sth_activation *a) {
    if (in_child(a)) return sthi_fail_in_child("activation", "the store");
    sthi_lock(&a->lock);
    check(a);
    return STH_OK;
}

static sth_status leave(sth_activation *a, sth_status rc) {
    check(a);
    sthi_unlock(&a->lock);
    return rc;
}

sth_status sthi_activation_close(sth_activation *a) {
    STHI_TRY(enter(a));
    a->closed = true;
    sthi_slabs_close(a->slabs);
    return leave(a, STH_OK);
}

sth_status sthi_activation_set_marks(sth_activation *a, uint64_t high, uint64_t low) {
    STHI_TRY(enter(a));
    a->options.high = high;
    a->options.low = low;
    return leave(a, STH_OK);
}

sth_status sthi_activation_set_caps(sth_activation *a, uint32_t max_d2h, uint32_t max_h2d) {
    STHI_TRY(enter(a));
    a->options.max_d2h = max_d2h;
    a->options.max_h2d = max_h2d;
    return leave(a, STH_OK);
}

sth_status sthi_activation_set_pinned_limit(sth_activation *a, uint64_t bytes) {
    STHI_TRY(enter(a));
    sthi_slabs_set_pinned_limit(a->slabs, bytes);
    return leave(a, STH_OK);
}

sth_status sthi_activation_set_conductor(sth_activation *a, sth_conductor *c) {
    STHI_TRY(enter(a));
    close_lanes(a);
    sth_status rc = c ? sthi_lane_open(c, a->device, a->out, STH_DIRECTION_D2H, a, &a->out_lane) : STH_OK;
    if (c && rc == STH_OK) rc = sthi_lane_open(c, a->device, a->in, STH_DIRECTION_H2D, a, &a->in_lane);
    if (rc != STH_OK) close_lanes(a);
    return leave(a, rc);
}

/* ---- lists and records */

/* before: in the list, or NULL: r is the first. */
static void insert_behind(list *l, record *before, record *r) {
    STHI_INVARIANT(!r->listed && !r->held && !r->passing);
    STHI_INVARIANT(!before || before->listed);
    r->before = before;
    r->after = before ? before->after : l->first;
    if (r->before) r->before->after = r;
    else l->first = r;
    if (r->after) r->after->before = r;
    else l->last = r;
    r->listed = true;
}

static void append(list *l, record *r) { insert_behind(l, l->last, r); }

static void prepend(list *l, record *r) { insert_behind(l, NULL, r); }

static void unlink_from(list *l, record *r) {
    if (!r->listed) return;
    STHI_INVARIANT(r->before ? r->before->after == r : l->first == r);
    STHI_INVARIANT(r->after ? r->after->before == r : l->last == r);
    if (r->before) r->before->after = r->after;
    else l->first = r->after;
    if (r->after) r->after->before = r->before;
    else l->last = r->before;
    r->before = r->after = NULL;
    r->listed = false;
}

static list *kept_list(sth_activation *a, const record *r) {
    if (r->planned) return r->recomputable ? &a->planned_cheap : &a->planned;
    return r->recomputable ? &a->cheap : &a->kept;
}

static bool comes_before(const record *x, const record *y) {
    if (x->asked != y->asked) return y->asked;
    return x->pass != y->pass ? x->pass < y->pass : x->ordinal < y->ordinal;
}

/* To its place among KEPT ones. Most are among the last. */
static void enlist(sth_activation *a, record *r) {
    list *l = kept_list(a, r);
    record *before = l->last;
    while (before && comes_before(r, before)) before = before->before;
    insert_behind(l, before, r);
}

/* From whichever list its state says. */
static void unlist(sth_activation *a, record *r) {
    if (r->state == STH_ACTIVATION_KEPT) unlink_from(kept_list(a, r), r);
    else unlink_from(r->state == STH_ACTIVATION_SPILLING ? &a->spilling : &a->restored, r);
}

/* It goes no more before others. */
static void unplan(sth_activation *a, record *r) {
    unlist(a, r);
    r->planned = false;
}

static bool add_chunk(sth_activation *a) {
    uint32_t n = a->record_count / RECORDS_EACH;
    record *chunk = n < CHUNKS ? sthi_zalloc(RECORDS_EACH, sizeof *chunk) : NULL;
    if (!chunk) return false;
    a->chunks[n] = chunk;
    for (uint32_t i = RECORDS_EACH; i-- > 0;) {
        chunk[i].index = a->record_count + i;
        chunk[i].generation = 1;
        chunk[i].after = a->free;
        a->free = &chunk[i];
    }
    a->record_count += RECORDS_EACH;
    return true;
}

static sth_record handle_of(const record *r) { return (uint64_t)r->generation << 32 | r->index; }

static record *find(sth_activation *a, sth_record handle) {
    uint32_t index = (uint32_t)handle, generation = (uint32_t)(handle >> 32);
    if (index >= a->record_count) return NULL;
    record *r = &a->chunks[index / RECORDS_EACH][index % RECORDS_EACH];
    STHI_INVARIANT(r->index == index && r->generation);
    return r->generation == generation && r->state != STH_ACTIVATION_RELEASED ? r : NULL;
}

static sth_status find_or_fail(sth_activation *a, sth_record handle, record **out) {
    *out = find(a, handle);
    if (*out) return STH_OK;
    return sthi_fail(STH_STALE, NULL, 0, "activation", "record %#" PRIx64 " was released, or is none of this store",
                     handle);
}

static const char *const state_names[] = {
#define NAME(name, text) text,
    STH_ACTIVATION_STATE_LIST(NAME)
#undef NAME
};

static sth_status wrong_state(const record *r, const char *what) {
    char object[64];
    snprintf(object, sizeof object, "saved tensor %u of step %" PRIu64, r->ordinal, r->step);
    return sthi_fail(STH_INVALID_STATE, NULL, 0, object, "%s is %s: it cannot be %s", object, state_names[r->state],
                     what);
}

static void add_device_bytes(sth_activation *a, uint64_t bytes) {
    a->device_bytes += bytes;
    a->peak_bytes = sthi_max_u64(a->peak_bytes, a->device_bytes);
}

/* ---- the link's rate */

/* Times a copy out of some size, where none is being timed. What fails here costs a measurement. */
static bool begin_timing(sth_activation *a, uint64_t bytes) {
    return !a->timed_bytes && bytes >= TIMED_BYTES &&
           a->device->ops->event_record(a->device->self, a->copy_begin, a->out) == STH_OK;
}

static void end_timing(sth_activation *a, bool timed, uint64_t bytes) {
    if (timed && a->device->ops->event_record(a->device->self, a->copy_end, a->out) == STH_OK) a->timed_bytes = bytes;
}

static void read_timing(sth_activation *a) {
    const sth_backend_ops *ops = a->device->ops;
    bool done = false;
    int64_t ns = 0;
    if (!a->timed_bytes || ops->event_query(a->device->self, a->copy_end, &done) != STH_OK || !done) return;
    if (ops->event_elapsed_ns(a->device->self, a->copy_begin, a->copy_end, &ns) == STH_OK && ns > 0) {
        double rate = (double)a->timed_bytes * 1e9 / (double)ns;
        a->link = a->link > 0 ? 0.8 * a->link + 0.2 * rate : rate;
    }
    a->timed_bytes = 0;
}

/* ---- passes */

sth_status sthi_activation_pass(sth_activation *a, uint64_t step) {
    STHI_TRY(enter(a));
    uint64_t low = a->options.low;
    a->order.now.spare = a->projected < low ? low - a->projected : 0;
    read_timing(a);
    sthi_order_pass(&a->order, a->link);
    a->pass++;
    a->step = step;
    a->projected = 0;
    a->backward = false;
    a->peak_bytes = a->device_bytes;
    return leave(a, STH_OK);
}

sth_status sthi_activation_save(sth_activation *a, uint64_t bytes, bool passing, sth_record *out) {
    STHI_TRY(enter(a));
    if (a->order.now.count == MOST_SAVES) { /* forwards that no backward follows, and graphs that never die */
        sthi_order_pass(&a->order, a->link);
        a->pass++;
    }
    record *r = a->free || add_chunk(a) ? a->free : NULL;
    uint32_t ordinal;
    sthi_saved saved = {.bytes = bytes, .saved_ns = a->device->ops->now_ns(a->device->self), .passing = passing};
    if (r) saved.record = handle_of(r);
    if (!r || !sthi_order_save(&a->order, saved, &ordinal))
        return leave(a, sthi_no_memory("activation", "the record of one more saved tensor"));
    a->free = r->after;
    *r = (record){.index = r->index,
                  .generation = r->generation,
                  .state = STH_ACTIVATION_KEPT,
                  .ordinal = ordinal,
                  .pass = a->pass,
                  .step = a->step,
                  .bytes = bytes,
                  .passing = passing};
    r->planned = !passing && sthi_order_plan_says_go(&a->order, ordinal, bytes);
    if (!passing) append(kept_list(a, r), r);
    a->live++;
    a->counted.saved++;
    a->device_bytes += bytes; /* its peak is taken when room has been made */
    *out = handle_of(r);
    return leave(a, STH_OK);
}

/* KEPT -> DROPPED */
static void drop(sth_activation *a, record *r) {
    STHI_INVARIANT(r->state == STH_ACTIVATION_KEPT && r->recomputable);
    STHI_INVARIANT(r->bytes <= a->device_bytes);
    unplan(a, r);
    r->state = STH_ACTIVATION_DROPPED;
    a->device_bytes -= r->bytes;
    if (r->pass == a->pass) a->order.now.saved[r->ordinal].gone = true;
    a->counted.dropped++;
}

static sth_status recomputable(sth_activation *a, record *r) {
    if (r->state != STH_ACTIVATION_KEPT || r->passing) return wrong_state(r, "dropped");
    bool listed = r->listed;
    unlist(a, r);
    r->recomputable = true;
    if (r->pass == a->pass) a->order.now.saved[r->ordinal].recomputable = true;
    if (listed) enlist(a, r);
    return STH_OK;
}

sth_status sthi_activation_recomputable(sth_activation *a, sth_record handle) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    return leave(a, rc == STH_OK ? recomputable(a, r) : rc);
}

sth_status sthi_activation_drop(sth_activation *a, sth_record handle) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    if (rc == STH_OK && (r->state != STH_ACTIVATION_KEPT || !r->recomputable)) rc = wrong_state(r, "dropped");
    if (rc == STH_OK) drop(a, r);
    return leave(a, rc);
}

static sth_status set_held(sth_activation *a, record *r, bool held) {
    if (r->state != STH_ACTIVATION_KEPT) return wrong_state(r, held ? "held" : "let loose");
    if (r->held == held) return STH_OK;
    r->held = held;
    if (held) unlist(a, r);
    else if (!r->passing && a->in_use != handle_of(r)) enlist(a, r);
    return STH_OK;
}

sth_status sthi_activation_set_held(sth_activation *a, sth_record handle, bool held) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    return leave(a, rc == STH_OK ? set_held(a, r, held) : rc);
}

static void give_slab(sth_activation *a, record *r) {
    if (r->slab) sthi_slabs_give(a->slabs, r->slab);
    r->slab = NULL;
}

/* ---- out */

static sth_status sum_bytes(sth_activation *a, const record *r, uint64_t *out) {
    STHI_TRY(a->device->ops->event_synchronize(a->device->self, r->slab->event));
    *out = XXH3_64bits(r->slab->memory, r->bytes);
    return STH_OK;
}

/* SPILLING -> SPILLED of the oldest: its copy is done, or `stream` waits for it. */
static sth_status settle(sth_activation *a, sth_stream stream, bool done, record *r) {
    if (a->options.checksums) {
        STHI_TRY(sum_bytes(a, r, &r->checksum));
        r->summed = done = true;
    }
    if (!done) {
        STHI_TRY(a->device->ops->stream_wait(a->device->self, stream, r->slab->event));
        a->counted.waits++;
    }
    unlist(a, r);
    r->state = STH_ACTIVATION_SPILLED;
    a->spilling_count--;
    a->spilling_bytes -= r->bytes;
    a->device_bytes -= r->bytes;
    return STH_OK;
}

/* One that was brought back and is needed last: the record, or NULL. */
static record *furthest_ahead(sth_activation *a) {
    record *found = NULL;
    uint32_t ordinal;
    for (uint32_t n = 0; n < LOOK_AHEAD && sthi_order_next(&a->order, n, &ordinal); n++) {
        if (ordinal >= a->order.now.count) continue;
        record *r = find(a, a->order.now.saved[ordinal].record);
        if (r && r->ahead) found = r;
    }
    return found;
}

static void not_ahead(sth_activation *a, record *r) {
    if (!r->ahead) return;
    STHI_INVARIANT(a->ahead_count && r->bytes <= a->ahead_bytes);
    r->ahead = false;
    a->ahead_count--;
    a->ahead_bytes -= r->bytes;
}

static sth_status drop_copy(sth_activation *a, record *r, sth_stream stream) {
    STHI_INVARIANT(r->state == STH_ACTIVATION_RESTORING || r->state == STH_ACTIVATION_RESTORED);
    STHI_INVARIANT(r->recomputable || r->slab);
    STHI_INVARIANT(r->bytes <= a->device_bytes);
    if (r->state == STH_ACTIVATION_RESTORING)
        STHI_TRY(a->device->ops->stream_wait(a->device->self, stream, r->slab->event));
    not_ahead(a, r);
    unlist(a, r);
    r->state = r->recomputable ? STH_ACTIVATION_DROPPED : STH_ACTIVATION_SPILLED;
    a->device_bytes -= r->bytes;
    return STH_OK;
}

/* Of those that go as soon as they can, else, above the mark, of all others of the kind. */
static record *first_to_go(const sth_activation *a, const list *planned, const list *others) {
    if (planned->first) return planned->first;
    return a->relieving ? others->first : NULL;
}

static sth_status relieve(sth_activation *a, uint64_t used, uint64_t need, sth_stream stream, sth_record *out,
                          sth_relief *out_relief) {
    const sth_activation_options *o = &a->options;
    record *oldest = a->spilling.first;
    uint64_t total = sthi_max_u64(used, a->device_bytes) + need, projected = total - a->spilling_bytes;
    bool done = false;
    a->projected = sthi_max_u64(a->projected, projected);
    *out_relief = STH_RELIEF_NONE;
    *out = 0;
    if (oldest) STHI_TRY(a->device->ops->event_query(a->device->self, oldest->slab->event, &done));
    if (projected > o->high) a->relieving = true;
    if (projected <= o->low) a->relieving = false;
    record *cheap = first_to_go(a, &a->planned_cheap, &a->cheap);
    if (cheap && !a->closed) {
        *out = handle_of(cheap);
        *out_relief = STH_RELIEF_DROP;
        return STH_OK;
    }
    record *victim = first_to_go(a, &a->planned, &a->kept);
    bool spill = victim && o->max_d2h && !a->closed;
    if (spill && total <= o->high && !sthi_lane_may(a->out_lane, victim->bytes)) spill = false; /* later */
    /* The copy of one more may begin: a cap that is reached is made room in by the oldest. */
    if (spill && a->spilling_count < o->max_d2h && !done) {
        *out = handle_of(victim);
        *out_relief = STH_RELIEF_SPILL;
        return STH_OK;
    }
    if (oldest && (done || (spill && a->relieving) || total > o->high)) {
        STHI_TRY(settle(a, stream, done, oldest));
        *out = handle_of(oldest);
        *out_relief = STH_RELIEF_LET_GO;
        return STH_OK;
    }
    if (total <= o->high) return STH_OK;
    record *copied = a->ahead_count ? furthest_ahead(a) : NULL; /* the host has these bytes already */
    if (!copied) copied = a->restored.first;
    if (copied) {
        STHI_TRY(drop_copy(a, copied, stream));
        *out = handle_of(copied);
        *out_relief = STH_RELIEF_LET_GO;
    }
    return STH_OK;
}

sth_status sthi_activation_relieve(sth_activation *a, uint64_t used, uint64_t need, sth_stream stream,
                                   sth_record *out, sth_relief *out_relief) {
    STHI_TRY(enter(a));
    sth_status rc = relieve(a, used, need, stream, out, out_relief);
    if (rc == STH_OK && *out_relief == STH_RELIEF_NONE) add_device_bytes(a, 0);
    return leave(a, rc);
}

static sth_status copy_out(sth_activation *a, const sthi_slab *slab, sth_devptr source, uint64_t bytes,
                           sth_stream stream) {
    sth_device *d = a->device;
    const sth_backend_ops *ops = d->ops;
    sth_status (*copy)(sth_backend_device *, void *, sth_devptr, uint64_t, sth_stream) =
        ops->copy_d2h_foreign ? ops->copy_d2h_foreign : ops->copy_d2h;
    if (slab->recorded) STHI_TRY(ops->stream_wait(d->self, a->out, slab->event));
    STHI_TRY(ops->event_record(d->self, slab->event, stream));
    STHI_TRY(ops->stream_wait(d->self, a->out, slab->event));
    sthi_way way = ask_lane(a->out_lane, bytes, STHI_DUE_LAST);
    bool timed = begin_timing(a, bytes);
    sthi_devspan *span = sthi_devspan_begin(d, a->out, STHI_TRACK_SPILL, "activations", "spill", bytes);
    sth_status rc = STH_OK;
    for (uint64_t at = 0; at < bytes && rc == STH_OK; at += way.piece)
        rc = copy(d->self, slab->memory + at, source + at, sthi_min_u64(way.piece, bytes - at), a->out);
    sthi_devspan_end(span, a->out);
    if (a->out_lane) sthi_lane_end(a->out_lane, way.flight);
    STHI_TRY(rc);
    end_timing(a, timed, bytes);
    return ops->event_record(d->self, slab->event, a->out);
}

static sth_status spill(sth_activation *a, record *r, sth_devptr source, sth_stream stream) {
    sthi_slab *slab = NULL;
    if (r->state != STH_ACTIVATION_KEPT) return wrong_state(r, "spilled");
    if (a->closed) return sthi_fail(STH_SHUT_DOWN, NULL, 0, "activation", "the store was closed; make a new one");
    unplan(a, r); /* on a failure too: it is not tried again */
    give_slab(a, r); /* of an earlier copy, which the new one comes behind */
    STHI_TRY(sthi_slabs_take(a->slabs, r->bytes, &slab));
    sth_status rc = copy_out(a, slab, source, r->bytes, stream);
    if (rc != STH_OK) { /* something may be enqueued all the same */
        sthi_error_copy first;
        sthi_error_save(&first);
        a->stray = a->device->ops->stream_synchronize(a->device->self, a->out) != STH_OK;
        slab->recorded = a->stray && slab->recorded;
        sthi_slabs_give(a->slabs, slab);
        return sthi_error_restore(&first);
    }
    STHI_INVARIANT(!r->slab && !r->listed);
    STHI_INVARIANT(slab->bytes >= r->bytes);
    slab->recorded = true;
    r->slab = slab;
    r->summed = false;
    r->state = STH_ACTIVATION_SPILLING;
    append(&a->spilling, r);
    a->spilling_count++;
    a->spilling_bytes += r->bytes;
    if (r->pass == a->pass) a->order.now.saved[r->ordinal].gone = true;
    a->counted.spilled++;
    a->counted.spill_bytes += r->bytes;
    return STH_OK;
}

sth_status sthi_activation_spill(sth_activation *a, sth_record handle, sth_devptr source, sth_stream stream) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    return leave(a, rc == STH_OK ? spill(a, r, source, stream) : rc);
}

/* ---- back */

/* What was in use is so no more once something else is asked for; it may be asked for again. */
static void use(sth_activation *a, record *r) {
    record *before = find(a, a->in_use);
    a->in_use = handle_of(r);
    if (r->state == STH_ACTIVATION_KEPT) unplan(a, r);
    else unlist(a, r);
    if (!before || before == r || before->listed || before->passing || before->held) return;
    if (before->state == STH_ACTIVATION_KEPT) append(kept_list(a, before), before);
    if (before->state == STH_ACTIVATION_RESTORED) append(&a->restored, before);
}

static void ask(sth_activation *a, record *r) {
    if (!r->asked && r->pass == a->pass) {
        sthi_order_ask(&a->order, r->ordinal, a->device->ops->now_ns(a->device->self));
        a->backward = true;
    }
    r->asked = true;
    not_ahead(a, r);
    use(a, r);
    if (r->state != STH_ACTIVATION_SPILLING) return;
    STHI_INVARIANT(a->spilling_count && r->slab);
    r->state = STH_ACTIVATION_KEPT;
    a->spilling_count--;
    a->spilling_bytes -= r->bytes;
    a->counted.recalled++; /* its copy goes on: the slab's event says until when */
}

sth_status sthi_activation_ask(sth_activation *a, sth_record handle, sth_activation_state *out) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    if (rc == STH_OK) {
        ask(a, r);
        *out = r->state;
    }
    return leave(a, rc);
}

static record *next_ahead(sth_activation *a, uint64_t used) {
    const sth_activation_options *o = &a->options;
    uint64_t total = sthi_max_u64(used, a->device_bytes);
    uint32_t ordinal;
    if (a->closed || !a->backward || a->ahead_count >= o->max_h2d) return NULL;
    for (uint32_t n = 0; n < LOOK_AHEAD && sthi_order_next(&a->order, n, &ordinal); n++) {
        if (ordinal >= a->order.now.count) continue;
        record *r = find(a, a->order.now.saved[ordinal].record);
        if (!r || r->state != STH_ACTIVATION_SPILLED || r->asked) continue;
        bool fits = total + r->bytes <= o->high && a->ahead_bytes + r->bytes <= o->ahead_bytes;
        return fits ? r : NULL; /* what comes later is not brought before it */
    }
    return NULL;
}

sth_status sthi_activation_ahead(sth_activation *a, uint64_t used, sth_record *out) {
    STHI_TRY(enter(a));
    const record *r = next_ahead(a, used);
    *out = r ? handle_of(r) : 0;
    return leave(a, STH_OK);
}

static sth_status verify(sth_activation *a, const record *r) {
    uint64_t found;
    char object[64];
    if (!r->summed) return STH_OK;
    STHI_TRY(sum_bytes(a, r, &found));
    if (found == r->checksum) return STH_OK;
    snprintf(object, sizeof object, "saved tensor %u of step %" PRIu64, r->ordinal, r->step);
    return sthi_fail(STH_CHANGED_DATA, NULL, 0, object,
                     "%s (%" PRIu64 " bytes) is not what was spilled: its checksum was %#" PRIx64 " and is %#" PRIx64,
                     object, r->bytes, r->checksum, found);
}

static sth_status copy_in(const sth_activation *a, const record *r, sth_devptr target, sth_stream stream) {
    sth_device *d = a->device;
    const sth_backend_ops *ops = d->ops;
    STHI_INVARIANT(r->slab && r->slab->recorded && r->slab->bytes >= r->bytes);
    sth_event *event = r->slab->event;
    sth_status (*copy)(sth_backend_device *, sth_devptr, const void *, uint64_t, sth_stream) =
        ops->copy_h2d_foreign ? ops->copy_h2d_foreign : ops->copy_h2d;
    STHI_TRY(ops->stream_wait(d->self, a->in, event)); /* the copy out */
    STHI_TRY(ops->event_record(d->self, event, stream)); /* what was done with the target's memory before */
    STHI_TRY(ops->stream_wait(d->self, a->in, event));
    sthi_way way = ask_lane(a->in_lane, r->bytes, a->in_lane ? due_ns(a, r) : 0);
    sthi_devspan *span = sthi_devspan_begin(d, a->in, STHI_TRACK_RESTORE, "activations", "restore", r->bytes);
    sth_status rc = STH_OK;
    for (uint64_t at = 0; at < r->bytes && rc == STH_OK; at += way.piece)
        rc = copy(d->self, target + at, r->slab->memory + at, sthi_min_u64(way.piece, r->bytes - at), a->in);
    sthi_devspan_end(span, a->in);
    if (a->in_lane) sthi_lane_end(a->in_lane, way.flight);
    STHI_TRY(rc);
    return ops->event_record(d->self, event, a->in);
}

static sth_status restore(sth_activation *a, record *r, sth_devptr target, sth_stream stream) {
    if (r->state != STH_ACTIVATION_SPILLED) return wrong_state(r, "restored");
    STHI_TRY(verify(a, r));
    sth_status rc = copy_in(a, r, target, stream);
    if (rc != STH_OK) { /* the target goes away: nothing may write to it any more */
        sthi_error_copy first;
        sthi_error_save(&first);
        (void)a->device->ops->stream_synchronize(a->device->self, a->in);
        return sthi_error_restore(&first);
    }
    r->state = STH_ACTIVATION_RESTORING;
    if (!r->asked) {
        r->ahead = true;
        a->ahead_count++;
        a->ahead_bytes += r->bytes;
        a->counted.ahead++;
    }
    add_device_bytes(a, r->bytes);
    a->counted.restored++;
    a->counted.restore_bytes += r->bytes;
    return STH_OK;
}

sth_status sthi_activation_restore(sth_activation *a, sth_record handle, sth_devptr target, sth_stream stream) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    return leave(a, rc == STH_OK ? restore(a, r, target, stream) : rc);
}

static sth_status arrive(sth_activation *a, record *r, sth_stream stream) {
    if (r->state == STH_ACTIVATION_KEPT) return STH_OK;
    if (r->state != STH_ACTIVATION_RESTORING && r->state != STH_ACTIVATION_RESTORED) return wrong_state(r, "used");
    if (!r->recomputable) STHI_TRY(a->device->ops->stream_wait(a->device->self, stream, r->slab->event));
    r->state = STH_ACTIVATION_RESTORED;
    return STH_OK;
}

sth_status sthi_activation_arrive(sth_activation *a, sth_record handle, sth_stream stream) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    return leave(a, rc == STH_OK ? arrive(a, r, stream) : rc);
}

sth_status sthi_activation_recomputed(sth_activation *a, sth_record handle) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    if (rc == STH_OK && r->state != STH_ACTIVATION_DROPPED) rc = wrong_state(r, "recomputed");
    if (rc != STH_OK) return leave(a, rc);
    r->state = STH_ACTIVATION_RESTORED;
    use(a, r); /* its inputs were asked for meanwhile */
    add_device_bytes(a, r->bytes);
    a->counted.recomputed++;
    return leave(a, STH_OK);
}

static sth_status let_go(sth_activation *a, record *r, sth_stream stream) {
    if (r->state == STH_ACTIVATION_RESTORING || r->state == STH_ACTIVATION_RESTORED)
        STHI_TRY(drop_copy(a, r, stream));
    if (r->state == STH_ACTIVATION_KEPT && !r->passing && !r->held) {
        unplan(a, r);
        prepend(kept_list(a, r), r); /* the next to go */
    }
    r->asked = false;
    return STH_OK;
}

sth_status sthi_activation_let_go(sth_activation *a, sth_record handle, sth_stream stream) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    return leave(a, rc == STH_OK ? let_go(a, r, stream) : rc);
}

/* ---- the end of a record */

static void end_record(sth_activation *a, record *r) {
    STHI_INVARIANT(a->live && r->state != STH_ACTIVATION_RELEASED);
    unlist(a, r);
    if (r->state == STH_ACTIVATION_SPILLING) {
        a->spilling_count--;
        a->spilling_bytes -= r->bytes;
    }
    if (r->state != STH_ACTIVATION_SPILLED && r->state != STH_ACTIVATION_DROPPED) a->device_bytes -= r->bytes;
    not_ahead(a, r);
    give_slab(a, r);
    r->state = STH_ACTIVATION_RELEASED;
    if (!++r->generation) r->generation = 1;
    r->after = a->free;
    a->free = r;
    a->live--;
}

sth_status sthi_activation_release(sth_activation *a, sth_record handle, sth_stream stream) {
    record *r;
    STHI_TRY(enter(a));
    sth_status rc = find_or_fail(a, handle, &r);
    if (rc != STH_OK) return leave(a, rc);
    const sth_backend_ops *ops = a->device->ops;
    bool recalled = r->state == STH_ACTIVATION_KEPT && r->slab;
    if (recalled || r->state == STH_ACTIVATION_SPILLING || r->state == STH_ACTIVATION_RESTORING) {
        rc = ops->stream_wait(a->device->self, stream, r->slab->event);
        if (rc != STH_OK && ops->event_synchronize(a->device->self, r->slab->event) == STH_OK) rc = STH_OK;
    }
    /* The stray copy's source may be this one's. */
    if (a->stray) {
        sth_status over = ops->stream_synchronize(a->device->self, a->out);
        a->stray = over != STH_OK;
        if (rc == STH_OK) rc = over;
    }
    end_record(a, r); /* also where the device refuses: nobody asks for it any more */
    return leave(a, rc);
}

sth_status sthi_activation_state_get(sth_activation *a, sth_record handle, sth_activation_state *out) {
    STHI_TRY(enter(a));
    const record *r = find(a, handle);
    *out = r ? r->state : STH_ACTIVATION_RELEASED;
    return leave(a, STH_OK);
}

sth_status sthi_activation_stats_get(sth_activation *a, sth_activation_stats *out) {
    STHI_TRY(enter(a));
    *out = a->counted;
    sthi_slabs_stats(a->slabs, out);
    out->records = a->live;
    out->kept_bytes = a->device_bytes;
    out->peak_bytes = a->peak_bytes;
    out->link_bytes_per_s = (uint64_t)a->link;
    return leave(a, STH_OK);
}
