/* Rows: life, tables, the pool, figures. Which row lies where is decided in core/rows.c; calls are in call.c.
 *
 * Invariants: while the pool is closed plan.views is 0 and nothing is leased; `filled` and `used` have a number for
 * each slot. Lock: `lock`, a leaf; the device is called under it, and waited for in close and pass_end. Does not own
 * the pool's memory, nor that of the tables. */
#include "rows/rows.h"

#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"

#define CALLS_END_NS 60000000000 /* longer than any call: one that does not end hangs */

void sthi_rows_options_init(sth_rows_options *options) {
    *options = (sth_rows_options){.size = sizeof *options, .view_most = 1023, .copy_priority = -1};
}

static void free_records(sth_rows *rows) {
    for (uint32_t i = 0; i < rows->plan.table_count; i++) {
        sthi_free(rows->images[i].name);
        sthi_rows_file_free(rows->images[i].file);
    }
    sthi_rows_ram_fini(&rows->ram);
    for (uint32_t i = 0; i < STHI_ROWS_USES; i++) sthi_free(rows->uses[i].slots);
    sthi_free(rows->images);
    sthi_free(rows->filled);
    sthi_free(rows->used);
    sthi_free(rows->counts);
    sthi_rows_scratch_free(&rows->scratch);
    sthi_free(rows->name);
    sthi_rows_fini(&rows->plan);
    sthi_cond_fini(&rows->ended);
    sthi_mutex_fini(&rows->lock);
    sthi_free(rows);
}

static sth_status open_device(sth_rows *rows) {
    sth_device *d = rows->device;
    STHI_TRY(d->ops->stream_create(d->self, rows->options.copy_priority, &rows->stream));
    sth_status rc = sthi_rows_ring_open(&rows->fills, d);
    if (rc == STH_OK) rc = sthi_rows_ring_open(&rows->calls, d);
    if (rc == STH_OK) return STH_OK;
    sthi_rows_ring_close(&rows->fills, d);
    sthi_rows_ring_close(&rows->calls, d);
    d->ops->stream_destroy(d->self, rows->stream);
    return rc;
}

sth_status sthi_rows_create(sth_device *device, const sth_rows_options *options, sth_rows **out) {
    sth_rows *rows = sthi_zalloc(1, sizeof *rows);
    if (!rows) return sthi_no_memory("rows", "a record of tables of rows");
    rows->device = device;
    rows->options = *options;
    rows->fork_depth = sthi_fork_depth();
    rows->epoch = 1;
    sthi_mutex_init(&rows->lock);
    sthi_cond_init(&rows->ended);
    sthi_rows_init(&rows->plan);
    sthi_rows_ram_init(&rows->ram);
    rows->name = sthi_strdup(options->name ? options->name : "model");
    sth_status rc = rows->name ? open_device(rows) : sthi_no_memory("rows", "a name");
    if (rc != STH_OK) {
        free_records(rows);
        return rc;
    }
    sthi_device_retain(device);
    *out = rows;
    return STH_OK;
}

sth_status sthi_rows_here(const sth_rows *rows) {
    return rows->fork_depth == sthi_fork_depth() ? STH_OK : sthi_fail_in_child("rows", "the tables of rows");
}

void sthi_rows_destroy(sth_rows *rows) {
    if (!rows || sthi_rows_here(rows) != STH_OK) return;
    (void)sthi_rows_close(rows);
    sth_device *d = rows->device;
    d->ops->stream_destroy(d->self, rows->stream); /* waits for what is enqueued */
    sthi_rows_ring_close(&rows->fills, d);
    sthi_rows_ring_close(&rows->calls, d);
    free_records(rows);
    sthi_device_release(d);
}

/* ---- tables */

sth_status sthi_rows_known(const sth_rows *rows, uint32_t table) {
    if (table < rows->plan.table_count) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "table", "there is no table %u: there are %u", table,
                     rows->plan.table_count);
}

static sth_status grow_scratch(sth_rows *rows, uint32_t row_count) {
    if (row_count <= rows->scratch.largest) return STH_OK;
    uint32_t *counts = sthi_realloc(rows->counts, row_count, sizeof *counts);
    if (!counts) return sthi_no_memory("rows", "a table of %u rows", row_count);
    memset(counts, 0, row_count * sizeof *counts);
    rows->counts = counts;
    return sthi_rows_scratch_grow(&rows->scratch, row_count);
}

static void take_parts(const sth_rows *rows, sthi_rows_image *image, const void *const *parts) {
    for (uint32_t i = 0; i < rows->options.part_count; i++) image->parts[i] = parts[i];
    image->seen = 0;
}

static sth_status check_closed(const sth_rows *rows, const char *name) {
    if (!rows->plan.views) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, NULL, 0, name, "table '%s' comes while the pool is open", name);
}

/* The image's rows lie at `parts`, or, where that is NULL, in its file. */
static sth_status add_table(sth_rows *rows, const char *name, uint32_t row_count, const void *const *parts,
                            sthi_rows_file *file, uint32_t *out) {
    if (rows->plan.table_count == rows->image_cap) {
        uint32_t cap = rows->image_cap ? 2 * rows->image_cap : 16;
        sthi_rows_image *grown = sthi_realloc(rows->images, cap, sizeof *grown);
        if (!grown) return sthi_no_memory(name, "table '%s'", name);
        rows->images = grown;
        rows->image_cap = cap;
    }
    STHI_TRY(grow_scratch(rows, row_count));
    sthi_rows_image image = {.name = sthi_strdup(name)};
    if (!image.name) return sthi_no_memory(name, "table '%s'", name);
    sth_status rc = sthi_rows_add(&rows->plan, row_count, out);
    if (rc != STH_OK) {
        sthi_free(image.name);
        return rc;
    }
    if (parts) take_parts(rows, &image, parts);
    image.file = file;
    rows->images[*out] = image;
    return STH_OK;
}

sth_status sthi_rows_add_table(sth_rows *rows, const char *name, uint32_t row_count, const void *const *parts,
                               uint32_t *out) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = check_closed(rows, name);
    if (rc == STH_OK) rc = add_table(rows, name, row_count, parts, NULL, out);
    sthi_unlock(&rows->lock);
    return rc;
}

sth_status sthi_rows_add_file_table(sth_rows *rows, const char *name, uint32_t row_count, sth_checkpoint *checkpoint,
                                    const sth_file_range *ranges, uint32_t range_count, const uint64_t *part_offsets,
                                    uint32_t *out) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_rows_file *file = NULL;
    sthi_lock(&rows->lock);
    sth_status rc = check_closed(rows, name);
    if (rc == STH_OK)
        rc = sthi_rows_file_add(rows, name, row_count, checkpoint, ranges, range_count, part_offsets, &file);
    if (rc == STH_OK) rc = add_table(rows, name, row_count, NULL, file, out);
    if (rc != STH_OK) sthi_rows_file_free(file);
    sthi_unlock(&rows->lock);
    return rc;
}

static void leave_file(sth_rows *rows, sthi_rows_image *image) {
    if (!image->file) return;
    if (rows->ram.plan.views) sthi_rows_forget(&rows->ram.plan, image->file->table);
    sthi_rows_file_free(image->file);
    image->file = NULL;
}

sth_status sthi_rows_set_host(sth_rows *rows, uint32_t table, const void *const *parts) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = sthi_rows_known(rows, table);
    /* Copies under way read the old memory, which the caller is about to let go. */
    if (rc == STH_OK) rc = sthi_rows_ring_wait(&rows->fills, rows->device);
    if (rc == STH_OK) {
        leave_file(rows, &rows->images[table]);
        take_parts(rows, &rows->images[table], parts);
        sthi_rows_forget(&rows->plan, table);
    }
    sthi_unlock(&rows->lock);
    return rc;
}

sth_status sthi_rows_written(sth_rows *rows, uint32_t table) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = sthi_rows_known(rows, table);
    if (rc == STH_OK) {
        rows->images[table].seen = 0;
        sthi_rows_forget(&rows->plan, table);
    }
    sthi_unlock(&rows->lock);
    return rc;
}

sth_status sthi_rows_fence(sth_rows *rows) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    rows->epoch++;
    sthi_unlock(&rows->lock);
    return STH_OK;
}

sth_status sthi_rows_synchronize(sth_rows *rows) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = rows->stale_reads ? sthi_rows_ring_wait(&rows->fills, rows->device) : STH_OK;
    if (rc == STH_OK) rows->stale_reads = false;
    sthi_unlock(&rows->lock);
    return rc;
}

sth_status sthi_rows_pass_end(sth_rows *rows) {
    return rows->options.read_only ? sthi_rows_here(rows) : sthi_rows_synchronize(rows);
}

/* ---- the pool */

static sth_status take_records(sth_rows *rows, uint32_t slots) {
    uint64_t **lists[] = {&rows->filled, &rows->used};
    for (int i = 0; i < 2; i++) {
        sthi_free(*lists[i]);
        *lists[i] = sthi_zalloc(slots, sizeof **lists[i]);
        if (!*lists[i]) return sthi_no_memory("rows", "records of %u slots", slots);
    }
    for (uint32_t i = 0; i < STHI_ROWS_USES; i++) { /* their size was that of another pool */
        sthi_free(rows->uses[i].slots);
        rows->uses[i].slots = NULL;
    }
    return sthi_rows_lay(&rows->plan, slots, rows->options.view_most);
}

/* Copies come behind what the memory was used for before. */
static sth_status begin_behind(sth_rows *rows, sth_stream stream) {
    const sth_device *d = rows->device;
    uint64_t number;
    sth_event *old = sthi_rows_ring_old(&rows->calls);
    if (old) STHI_TRY(d->ops->stream_wait(d->self, rows->stream, old));
    STHI_TRY(sthi_rows_ring_record(&rows->calls, rows->device, stream, &number));
    return d->ops->stream_wait(d->self, rows->stream, sthi_rows_ring_event(&rows->calls, number));
}

static void poison(sth_rows *rows, uint32_t slots) {
    const sth_device *d = rows->device;
    for (uint32_t i = 0; d->ops->poison && i < rows->options.part_count; i++)
        d->ops->poison(d->self, rows->parts[i], slots * rows->options.part_bytes[i], rows->stream);
}

static sth_status open_pool(sth_rows *rows, uint32_t slots, const sth_devptr *parts, sth_stream stream) {
    if (rows->plan.views) return sthi_fail(STH_INVALID_STATE, NULL, 0, rows->name, "the pool is open");
    STHI_TRY(sthi_rows_ram_open(rows));
    STHI_TRY(take_records(rows, slots));
    for (uint32_t i = 0; i < rows->options.part_count; i++) rows->parts[i] = parts[i];
    sth_status rc = begin_behind(rows, stream);
    if (rc == STH_OK) poison(rows, slots);
    else (void)sthi_rows_lay(&rows->plan, 0, 1);
    return rc;
}

sth_status sthi_rows_open(sth_rows *rows, uint32_t slots, const sth_devptr *parts, sth_stream stream) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = open_pool(rows, slots, parts, stream);
    sthi_unlock(&rows->lock);
    return rc;
}

/* own: of the calling thread alone. */
static bool in_use(const sth_rows *rows, bool own) {
    for (uint32_t i = 0; i < STHI_ROWS_USES; i++)
        if (rows->uses[i].live && (!own || pthread_equal(rows->uses[i].thread, pthread_self()))) return true;
    return false;
}

/* Calls of other threads end by themselves; one of this thread would be waited for in vain. */
static void wait_for_calls(sth_rows *rows) {
    const int64_t until = sthi_now_ns() + CALLS_END_NS;
    int64_t left = CALLS_END_NS;
    while (in_use(rows, false) && !in_use(rows, true) && left > 0) {
        sthi_cond_wait_for(&rows->ended, &rows->lock, left);
        left = until - sthi_now_ns();
    }
}

static sth_status close_pool(sth_rows *rows) {
    wait_for_calls(rows);
    if (!rows->plan.views) return STH_OK; /* another thread closed it meanwhile */
    if (in_use(rows, false))
        return sthi_fail(STH_INVALID_STATE, NULL, 0, rows->name,
                         "rows of '%s' are in use: end the calls that use them first", rows->name);
    STHI_TRY(rows->device->ops->stream_synchronize(rows->device->self, rows->stream));
    STHI_TRY(sthi_rows_ring_wait(&rows->calls, rows->device));
    return sthi_rows_lay(&rows->plan, 0, 1);
}

sth_status sthi_rows_close(sth_rows *rows) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = rows->plan.views ? close_pool(rows) : STH_OK;
    sthi_unlock(&rows->lock);
    return rc;
}

/* ---- figures */

sth_status sthi_rows_stats(sth_rows *rows, sth_rows_stats *out) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    *out = (sth_rows_stats){.tables = rows->plan.table_count, .slots = rows->plan.slot_count,
                            .views = rows->plan.views, .h2d_bytes = rows->h2d_bytes, .copies = rows->copies,
                            .ram_slots = rows->ram.plan.slot_count,
                            .ram_bytes = rows->ram.plan.slot_count * rows->ram.slot_bytes,
                            .read_bytes = rows->ram.read_bytes};
    if (rows->ram.arena) out->ram_pinned_bytes = sthi_arena_pinned_bytes(rows->ram.arena);
    for (uint32_t t = 0; t < rows->ram.plan.table_count; t++) out->ram_hits += rows->ram.plan.tables[t].hits;
    for (uint32_t i = 0; i < rows->options.part_count; i++) out->row_bytes += rows->options.part_bytes[i];
    for (uint32_t t = 0; t < rows->plan.table_count; t++) {
        const sthi_rows_table *table = &rows->plan.tables[t];
        out->asked += table->asked;
        out->hits += table->hits;
        out->brought += table->brought;
        out->ahead += table->ahead;
    }
    sthi_unlock(&rows->lock);
    return STH_OK;
}

sth_status sthi_rows_table_stats(sth_rows *rows, uint32_t table, sth_rows_table_stats *out) {
    STHI_TRY(sthi_rows_here(rows));
    sthi_lock(&rows->lock);
    sth_status rc = table < rows->plan.table_count ? STH_OK : STH_NOT_FOUND;
    if (rc == STH_OK) {
        const sthi_rows_table *t = &rows->plan.tables[table];
        *out = (sth_rows_table_stats){.name = rows->images[table].name, .rows = t->rows, .held = t->held,
                                      .asked = t->asked, .hits = t->hits, .brought = t->brought, .ahead = t->ahead};
    }
    sthi_unlock(&rows->lock);
    if (rc != STH_OK) return sthi_fail(rc, NULL, 0, "table", "there is no table %u", table);
    return STH_OK;
}
