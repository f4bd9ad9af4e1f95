/* A call: its rows are leased, what is missing is copied, the caller's stream waits; its end.
 *
 * A copy into a slot is enqueued behind the last call that used the slot, and behind the copy before,
 * which went by the same stream. A call waits for the newest copy among its slots: copies end in the
 * order of the stream. Lock: the rows', let go before the caller's stream waits, since that may be
 * the calling thread. */
#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "load/fingerprint.h"
#include "rows/rows.h"
#include "telemetry/devtime.h"

enum {
    WIDE_PARTS = 8, WIDE_OF_THEM = 7, /* a call that uses 7/8 of its table's rows, */
    AHEAD_SHARE = 4                   /* is followed by a quarter of the next one's */
};

/* ---- host memory that was written */

static uint64_t sample(const sth_rows *rows, uint32_t table) {
    const sthi_rows_image *image = &rows->images[table];
    uint64_t print = 0;
    for (uint32_t i = 0; i < rows->options.part_count; i++)
        print = print * 1099511628211u ^
                sthi_fingerprint(image->parts[i], rows->options.part_bytes[i] * rows->plan.tables[table].rows);
    return print;
}

static sth_status compare(sth_rows *rows, uint32_t table) {
    sthi_rows_image *image = &rows->images[table];
    if (image->file || image->seen == rows->epoch) return STH_OK; /* reads compare files with what they were */
    uint64_t print = sample(rows, table);
    if (image->seen && print != image->print) {
        if (rows->options.read_only)
            return sthi_fail(STH_INVALID_STATE, NULL, 0, image->name,
                             "'%.160s' was written between two steps without a word, in a runtime that was told that "
                             "nobody does so: write inside `with runtime.writing():`, do it again there, or wrap with "
                             "inference_mode=False (C: sth_rows_written after the write)", image->name);
        sthi_rows_forget(&rows->plan, table);
    }
    image->print = print;
    image->seen = rows->epoch;
    return STH_OK;
}

/* ---- copies */

/* Copies to come wait for the call. */
static sth_status come_behind(sth_rows *rows, uint64_t number) {
    sth_event *event = sthi_rows_ring_event(&rows->calls, number);
    if (!event) return STH_OK;
    STHI_TRY(rows->device->ops->stream_wait(rows->device->self, rows->stream, event));
    sthi_rows_ring_pass(&rows->calls, number);
    return STH_OK;
}

/* One part of rows that are neighbors in host memory and in the pool. */
static sth_status copy_part(sth_rows *rows, uint32_t part, uint32_t slot, const uint8_t *from, uint32_t count) {
    sth_device *d = rows->device;
    sth_status (*copy)(sth_backend_device *, sth_devptr, const void *, uint64_t, sth_stream) =
        d->ops->copy_h2d_foreign ? d->ops->copy_h2d_foreign : d->ops->copy_h2d;
    uint64_t each = rows->options.part_bytes[part], bytes = count * each;
    sth_devptr to = rows->parts[part] + slot * each;
    if (d->ops->poison) d->ops->poison(d->self, to, bytes, rows->stream);
    sthi_devspan *span = sthi_devspan_begin(d, rows->stream, STHI_TRACK_COPY_DEMAND, "experts", "rows", bytes);
    sth_status rc = copy(d->self, to, from, bytes, rows->stream);
    sthi_devspan_end(span, rows->stream);
    STHI_TRY(rc);
    rows->h2d_bytes += bytes;
    rows->copies++;
    return STH_OK;
}

static sth_status copy_run(sth_rows *rows, uint32_t table, sthi_rows_load first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) STHI_TRY(come_behind(rows, rows->used[first.slot + i]));
    for (uint32_t part = 0; part < rows->options.part_count; part++) {
        const uint8_t *from = rows->images[table].parts[part] + first.row * rows->options.part_bytes[part];
        STHI_TRY(copy_part(rows, part, first.slot, from, count));
    }
    return STH_OK;
}

/* The copies of `loads` have a number. */
static sth_status number_copies(sth_rows *rows, const sthi_rows_load *loads, uint32_t count, uint64_t *out) {
    /* The event of the number to come was recorded long ago: this is no wait as a rule. */
    sth_event *old = sthi_rows_ring_old(&rows->fills);
    if (old) STHI_TRY(rows->device->ops->event_synchronize(rows->device->self, old));
    STHI_TRY(sthi_rows_ring_record(&rows->fills, rows->device, rows->stream, out));
    for (uint32_t i = 0; i < count; i++) rows->filled[loads[i].slot] = *out;
    return STH_OK;
}

static sth_status copy_all(sth_rows *rows, uint32_t table, uint32_t count) {
    const sthi_rows_load *loads = rows->scratch.loads;
    uint64_t number;
    for (uint32_t i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count; n++)
            if (loads[i + n].row != loads[i].row + n || loads[i + n].slot != loads[i].slot + n) break;
        STHI_TRY(copy_run(rows, table, loads[i], n));
    }
    rows->stale_reads = true;
    return number_copies(rows, loads, count, &number);
}

static sth_status copy_group(sth_rows *rows, uint32_t table, const sthi_rows_load *loads, uint32_t count,
                             uint64_t *out_number) {
    for (uint32_t i = 0; i < count; i++) {
        STHI_TRY(come_behind(rows, rows->used[loads[i].slot]));
        for (uint32_t part = 0; part < rows->options.part_count; part++)
            STHI_TRY(copy_part(rows, part, loads[i].slot, sthi_rows_ram_part(rows, table, loads[i].row, part), 1));
    }
    return number_copies(rows, loads, count, out_number);
}

/* Uses of a row among those that were asked for, which both ascend. */
static uint32_t uses_of(const sth_rows *rows, uint32_t asked, uint32_t *at, uint32_t row) {
    while (*at < asked && rows->scratch.asked[*at] < row) ++*at;
    return *at < asked && rows->scratch.asked[*at] == row ? rows->scratch.times[*at] : 1;
}

/* Group after group: the disk reads one while the link copies the one before. */
static sth_status bring_from_files(sth_rows *rows, uint32_t table, uint32_t count, uint32_t asked, uint32_t tokens) {
    uint32_t at = 0, most = sthi_rows_ram_group(&rows->ram);
    for (uint32_t i = 0, n; i < count; i += n) {
        const sthi_rows_load *loads = &rows->scratch.loads[i];
        n = count - i < most ? count - i : most;
        for (uint32_t k = 0; k < n; k++) rows->ram.scratch.times[k] = uses_of(rows, asked, &at, loads[k].row);
        STHI_TRY(sthi_rows_ram_read(rows, table, loads, rows->ram.scratch.times, n, tokens));
        uint64_t number = 0;
        sth_status rc = copy_group(rows, table, loads, n, &number);
        if (rc != STH_OK) (void)rows->device->ops->stream_synchronize(rows->device->self, rows->stream);
        sthi_rows_ram_end(rows, table, loads, n, number);
        STHI_TRY(rc);
    }
    return STH_OK;
}

/* The rows in `loads` come to their slots; after a failure they are in none. asked: of those that the call asks for,
 * each used by some of `tokens`; 0: nobody asked. */
static sth_status bring(sth_rows *rows, uint32_t table, uint32_t count, uint32_t asked, uint32_t tokens) {
    if (!count) return STH_OK;
    sth_status rc = rows->images[table].file ? bring_from_files(rows, table, count, asked, tokens)
                                             : copy_all(rows, table, count);
    if (rc == STH_OK) return STH_OK;
    for (uint32_t i = 0; i < count; i++) sthi_rows_lose(&rows->plan, rows->scratch.loads[i].slot);
    return rc;
}

/* Behind a call that used nearly all rows: the link goes on with those of the next table. What fails comes when it is
 * asked for. */
static void go_ahead(sth_rows *rows, uint32_t table, uint32_t used, uint32_t tokens) {
    const sthi_rows_table *t = &rows->plan.tables[table];
    uint32_t next = t->next;
    if (next == STHI_NO_ROW || (uint64_t)used * WIDE_PARTS < (uint64_t)t->rows * WIDE_OF_THEM) return;
    if (compare(rows, next) != STH_OK) return;
    uint32_t most = (rows->plan.tables[next].rows + AHEAD_SHARE - 1) / AHEAD_SHARE;
    (void)bring(rows, next, sthi_rows_ahead(&rows->plan, next, most, rows->scratch.loads), 0, tokens);
}

/* ---- calls */

static bool read_id(const void *ids, uint32_t id_bytes, uint32_t i, uint64_t *out) {
    int64_t id = id_bytes == 8 ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
    *out = (uint64_t)id;
    return id >= 0;
}

/* Distinct rows into `asked`, their uses into `times`; counts are 0 again. */
static sth_status distinct(sth_rows *rows, uint32_t table, const void *ids, uint32_t id_bytes, uint32_t count,
                           uint32_t *out_rows) {
    uint32_t all = rows->plan.tables[table].rows, found = 0;
    uint64_t id;
    sth_status rc = STH_OK;
    for (uint32_t i = 0; i < count; i++) {
        if (!read_id(ids, id_bytes, i, &id))
            rc = sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, rows->images[table].name,
                           "table '%s' is asked for row %lld", rows->images[table].name, (long long)(int64_t)id);
        else if (id < all) rows->counts[id]++;
    }
    for (uint32_t row = 0; row < all; row++) {
        if (!rows->counts[row]) continue;
        rows->scratch.asked[found] = row;
        rows->scratch.times[found++] = rows->counts[row];
        rows->counts[row] = 0;
    }
    *out_rows = found;
    return rc;
}

static sth_status take_use(sth_rows *rows, sthi_rows_use **out) {
    uint32_t i = 0;
    while (i < STHI_ROWS_USES && rows->uses[i].live) i++;
    if (i == STHI_ROWS_USES)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rows->name, "%d calls at once use rows of '%s', and no more can",
                         STHI_ROWS_USES, rows->name);
    sthi_rows_use *use = &rows->uses[i];
    if (!use->slots) use->slots = sthi_alloc(rows->plan.slot_count * sizeof *use->slots);
    if (!use->slots) return sthi_no_memory("rows", "a record of a call");
    *out = use;
    return STH_OK;
}

static void end_use(sth_rows *rows, sthi_rows_use *use) {
    for (uint32_t i = 0; i < use->count; i++) sthi_rows_end(&rows->plan, use->slots[i]);
    use->live = false;
    sthi_cond_broadcast(&rows->ended);
}

static sth_status too_many(const sth_rows *rows, uint32_t table, uint32_t asked) {
    uint32_t first, view = sthi_rows_view(&rows->plan, table, &first);
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, rows->images[table].name,
                     "a call uses %u rows of '%s' at once, and there are %u slots for them", asked,
                     rows->images[table].name, view);
}

static void renumber(const sth_rows *rows, const void *ids, uint32_t id_bytes, uint32_t count, void *out,
                     const sth_rows_lease *lease) {
    const sthi_rows_table *t = &rows->plan.tables[lease->table];
    for (uint32_t i = 0; i < count; i++) {
        uint64_t id;
        (void)read_id(ids, id_bytes, i, &id);
        uint32_t slot = id < t->rows ? rows->plan.where[t->first + id] - lease->first : lease->count;
        if (id_bytes == 8) ((int64_t *)out)[i] = slot;
        else ((int32_t *)out)[i] = (int32_t)slot;
    }
}

/* Lock held. *out_wait: the event to wait for, NULL: none. */
static sth_status acquire(sth_rows *rows, uint32_t table, const void *ids, uint32_t id_bytes, uint32_t count,
                          uint32_t tokens, void *out_ids, sth_rows_lease *lease, sth_event **out_wait) {
    uint32_t asked, missing;
    sthi_rows_use *use = NULL;
    STHI_TRY(sthi_rows_known(rows, table));
    if (!rows->plan.views)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rows->name, "the pool of '%s' is closed", rows->name);
    STHI_TRY(compare(rows, table));
    STHI_TRY(distinct(rows, table, ids, id_bytes, count, &asked));
    STHI_TRY(take_use(rows, &use));
    const sthi_rows_scratch *s = &rows->scratch;
    if (!sthi_rows_ask(&rows->plan, table, s->asked, s->times, asked, tokens, s->loads, &missing))
        return too_many(rows, table, asked);
    use->live = true;
    use->thread = pthread_self();
    use->count = asked;
    for (uint32_t i = 0; i < asked; i++) use->slots[i] = sthi_rows_slot_of(&rows->plan, table, rows->scratch.asked[i]);
    sth_status rc = bring(rows, table, missing, asked, tokens);
    if (rc != STH_OK) {
        end_use(rows, use);
        return rc;
    }
    if (!++use->generation) use->generation = 1;
    *lease = (sth_rows_lease){.table = table, .index = (uint32_t)(use - rows->uses), .generation = use->generation};
    lease->count = sthi_rows_view(&rows->plan, table, &lease->first);
    if (out_ids) renumber(rows, ids, id_bytes, count, out_ids, lease);
    uint64_t newest = 0;
    for (uint32_t i = 0; i < asked; i++) newest = sthi_max_u64(newest, rows->filled[use->slots[i]]);
    *out_wait = sthi_rows_ring_event(&rows->fills, newest);
    go_ahead(rows, table, asked, tokens);
    return STH_OK;
}

sth_status sthi_rows_acquire(sth_rows *rows, uint32_t table, const void *ids, uint32_t id_bytes, uint32_t count,
                             uint32_t per_token, sth_stream stream, void *out_ids, sth_rows_lease *out) {
    STHI_TRY(sthi_rows_here(rows));
    sth_rows_lease lease;
    sth_event *wait = NULL;
    sthi_lock(&rows->lock);
    sth_status rc = acquire(rows, table, ids, id_bytes, count, (count - 1) / per_token + 1, out_ids, &lease, &wait);
    sthi_unlock(&rows->lock);
    STHI_TRY(rc);
    /* Recorded anew meanwhile it stands for a later copy, which is as good. */
    if (wait) rc = rows->device->ops->stream_wait(rows->device->self, stream, wait);
    if (rc != STH_OK) {
        sthi_lock(&rows->lock);
        end_use(rows, &rows->uses[lease.index]);
        sthi_unlock(&rows->lock);
        return rc;
    }
    *out = lease;
    return STH_OK;
}

/* The call's work has a number; where no event can be recorded it is waited for. Lock held. */
static sth_status number_call(sth_rows *rows, sth_stream stream, uint64_t *out) {
    sth_device *d = rows->device;
    sth_event *old = sthi_rows_ring_old(&rows->calls);
    *out = 0;
    if (!old || d->ops->stream_wait(d->self, rows->stream, old) == STH_OK)
        if (sthi_rows_ring_record(&rows->calls, rows->device, stream, out) == STH_OK) return STH_OK;
    return d->ops->stream_synchronize(d->self, stream);
}

/* A slot keeps the number of one call. One of another stream, which this one is not behind, is waited for at once. */
static sth_status note_call(sth_rows *rows, const sthi_rows_use *use, uint64_t number) {
    for (uint32_t i = 0; i < use->count; i++) {
        uint64_t *last = &rows->used[use->slots[i]];
        if (!sthi_rows_ring_before(&rows->calls, *last, number)) STHI_TRY(come_behind(rows, *last));
        *last = number;
    }
    return STH_OK;
}

sth_status sthi_rows_release(sth_rows *rows, const sth_rows_lease *lease, sth_stream stream) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sthi_rows_use *use = lease->index < STHI_ROWS_USES ? &rows->uses[lease->index] : NULL;
    bool known = use && use->live && use->generation == lease->generation;
    uint64_t number = 0;
    sth_status rc = known ? number_call(rows, stream, &number) : STH_OK;
    if (known && rc == STH_OK) rc = note_call(rows, use, number);
    if (known && rc == STH_OK) end_use(rows, use);
    sthi_unlock(&rows->lock);
    if (!known) return sthi_fail(STH_STALE, NULL, 0, rows->name, "this use of rows has ended");
    return rc;
}
