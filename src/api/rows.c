/* Exported functions of stagehand/rows.h: check the arguments, then hand over to src/rows. */
#include "rows/rows.h"

#include "api/arguments.h"

void sth_rows_options_init(sth_rows_options *options) {
    if (options) sthi_rows_options_init(options);
}

static sth_status check_options(const sth_rows_options *o) {
    if (o->size != sizeof *o)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "options were not set up by sth_rows_options_init of this version");
    if (!o->part_count || o->part_count > STH_ROWS_PARTS_MAX || !o->view_most)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options", "part_count is from 1 to %d, view_most above 0",
                         STH_ROWS_PARTS_MAX);
    for (uint32_t i = 0; i < o->part_count; i++)
        if (!o->part_bytes[i] || o->part_bytes[i] > UINT64_MAX >> 32)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options", "part %u of a row has an impossible size", i);
    return STH_OK;
}

sth_status sth_rows_create(sth_device *device, const sth_rows_options *options, sth_rows **out_rows) {
    if (!device || !options || !out_rows) return null_argument("device, options or out_rows");
    STHI_TRY(check_options(options));
    return sthi_rows_create(device, options, out_rows);
}

void sth_rows_destroy(sth_rows *rows) { sthi_rows_destroy(rows); }

static sth_status check_parts(const sth_rows *rows, const void *const *parts) {
    for (uint32_t i = 0; i < rows->options.part_count; i++)
        if (!parts[i]) return null_argument("a part");
    return STH_OK;
}

sth_status sth_rows_add_table(sth_rows *rows, const char *name, uint32_t row_count, const void *const *parts,
                              uint32_t *out_table) {
    if (!rows || !name || !parts || !out_table) return null_argument("rows, name, parts or out_table");
    if (!row_count || row_count > INT32_MAX)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "table '%s' has %u rows", name, row_count);
    STHI_TRY(check_parts(rows, parts));
    return sthi_rows_add_table(rows, name, row_count, parts, out_table);
}

sth_status sth_rows_add_file_table(sth_rows *rows, const char *name, uint32_t row_count, sth_checkpoint *checkpoint,
                                   const sth_file_range *ranges, uint32_t range_count, const uint64_t *part_offsets,
                                   uint32_t *out_table) {
    if (!rows || !name || !checkpoint || !ranges || !part_offsets || !out_table)
        return null_argument("rows, name, checkpoint, ranges, part_offsets or out_table");
    if (!row_count || row_count > INT32_MAX || !range_count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "table '%s' has %u rows in %u ranges", name, row_count,
                         range_count);
    return sthi_rows_add_file_table(rows, name, row_count, checkpoint, ranges, range_count, part_offsets, out_table);
}

sth_status sth_rows_set_host(sth_rows *rows, uint32_t table, const void *const *parts) {
    if (!rows || !parts) return null_argument("rows or parts");
    STHI_TRY(check_parts(rows, parts));
    return sthi_rows_set_host(rows, table, parts);
}

sth_status sth_rows_open(sth_rows *rows, uint32_t slots, const sth_devptr *parts, sth_stream stream) {
    if (!rows || !parts) return null_argument("rows or parts");
    if (!slots || slots > INT32_MAX)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "slots", "a pool of %u slots", slots);
    return sthi_rows_open(rows, slots, parts, stream);
}

sth_status sth_rows_close(sth_rows *rows) { return rows ? sthi_rows_close(rows) : null_argument("rows"); }

sth_status sth_rows_acquire(sth_rows *rows, uint32_t table, const void *ids, uint32_t id_bytes, uint32_t count,
                            uint32_t per_token, sth_stream stream, void *out_ids, sth_rows_lease *out_lease) {
    if (!rows || !ids || !out_lease) return null_argument("rows, ids or out_lease");
    if ((id_bytes != 4 && id_bytes != 8) || !count || !per_token)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "ids",
                         "ids have 4 or 8 bytes, and there is at least one of them; per_token is above 0");
    return sthi_rows_acquire(rows, table, ids, id_bytes, count, per_token, stream, out_ids, out_lease);
}

sth_status sth_rows_release(sth_rows *rows, const sth_rows_lease *lease, sth_stream stream) {
    if (!rows || !lease) return null_argument("rows or lease");
    return sthi_rows_release(rows, lease, stream);
}

sth_status sth_rows_written(sth_rows *rows, uint32_t table) {
    return rows ? sthi_rows_written(rows, table) : null_argument("rows");
}

sth_status sth_rows_fence(sth_rows *rows) { return rows ? sthi_rows_fence(rows) : null_argument("rows"); }

sth_status sth_rows_pass_end(sth_rows *rows) { return rows ? sthi_rows_pass_end(rows) : null_argument("rows"); }

sth_status sth_rows_synchronize(sth_rows *rows) { return rows ? sthi_rows_synchronize(rows) : null_argument("rows"); }

sth_status sth_rows_stats_get(sth_rows *rows, sth_rows_stats *out_stats) {
    if (!rows || !out_stats) return null_argument("rows or out_stats");
    return sthi_rows_stats(rows, out_stats);
}

sth_status sth_rows_table_stats_get(sth_rows *rows, uint32_t table, sth_rows_table_stats *out_stats) {
    if (!rows || !out_stats) return null_argument("rows or out_stats");
    return sthi_rows_table_stats(rows, table, out_stats);
}

static bool has_parts(const sth_rows_budget *pool) {
    if (!pool || !pool->part_count || pool->part_count > STH_ROWS_PARTS_MAX) return false;
    for (uint32_t i = 0; i < pool->part_count; i++)
        if (!pool->part_bytes[i]) return false;
    return true;
}

uint64_t sth_rows_bytes(const sth_rows_budget *pool, uint32_t slots) {
    return has_parts(pool) ? sthi_rows_bytes(pool, slots) : 0;
}

uint32_t sth_rows_slots(const sth_rows_budget *pool, uint64_t bytes) {
    return has_parts(pool) ? sthi_rows_slots(pool, bytes) : 0;
}

uint64_t sth_rows_smallest(const sth_rows_budget *pool, uint32_t slots) {
    return has_parts(pool) ? sthi_rows_smallest(pool, slots) : 0;
}

double sth_rows_expected(uint32_t row_count, uint32_t per_token, uint32_t tokens) {
    return row_count && per_token <= row_count ? sthi_rows_expected(row_count, per_token, tokens) : 0;
}
