/* Units whose bytes come from a store (stagehand/store.h): their ranges name layers. A store of files is no store any
 * more once the unit is added: its ranges become ranges of the files, which are read as readers.md says. All others are
 * asked for their bytes chunk by chunk by whoever fills a slab, ahead of issue. Lock: where a line says so. */
#include "load/read/from_store.h"

#include <string.h>

#include "base/memory.h"
#include "load/names.h"
#include "state/state.h"
#include "store/store.h"

sth_status sthi_store_unit_check(const sth_unit_desc *d) {
    for (uint32_t i = 0; i < d->range_count; i++) {
        const sth_file_range *r = &d->ranges[i];
        const sth_store_layer *l = r->file < d->store->layer_count ? &d->store->layers[r->file] : NULL;
        if (!l || !sthi_range_inside(r->file_offset, r->bytes, l->bytes))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, d->name,
                             "unit '%s': range %u is not inside layer %u of the store '%s', which has %u layers",
                             d->name, i, r->file, d->store->kind, d->store->layer_count);
    }
    return STH_OK;
}

sth_status sthi_store_unit_of_files(const sth_unit_desc *d, sth_unit_desc *out, sth_file_range **out_ranges) {
    STHI_TRY(sthi_store_unit_check(d));
    uint32_t count = 0, at = 0;
    for (uint32_t i = 0; i < d->range_count; i++) count += sthi_store_file_ranges(d->store, &d->ranges[i], NULL, 0);
    sth_file_range *ranges = sthi_zalloc(count ? count : 1, sizeof *ranges);
    if (!ranges) return sthi_no_memory(d->name, "unit '%s'", d->name);
    for (uint32_t i = 0; i < d->range_count; i++)
        at += sthi_store_file_ranges(d->store, &d->ranges[i], ranges + at, count - at);
    *out = *d;
    out->store = NULL;
    out->checkpoint = sthi_store_checkpoint(d->store);
    out->ranges = *out_ranges = ranges;
    out->range_count = count;
    return STH_OK;
}

sth_status sthi_range_read(const sthi_unit *u, const sth_file_range *r, uint64_t offset, uint64_t bytes, void *to) {
    if (u->checkpoint) {
        if (sthi_checkpoint_read(u->checkpoint, r->file, offset, bytes, to) == STH_OK) return STH_OK;
        return sthi_name_failure(u, r->file, offset);
    }
    if (sthi_store_read(u->store, r->file, offset, bytes, to) == STH_OK) return STH_OK;
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(why.status, why.domain, why.native, why.object, "unit '%s', %s", u->name, why.message);
}

sth_status sthi_store_chunk(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *image) {
    uint64_t at = begin, end = begin + bytes;
    for (uint32_t i = 0; i < u->range_count; i++) { /* in the order of the place */
        const sth_file_range *r = &u->ranges[i];
        uint64_t from = sthi_max_u64(r->place_offset, at), stop = sthi_min_u64(r->place_offset + r->bytes, end);
        if (from >= stop) continue;
        memset(image + (at - begin), 0, from - at);
        STHI_TRY(sthi_range_read(u, r, r->file_offset + (from - r->place_offset), stop - from, image + (from - begin)));
        at = stop;
    }
    memset(image + (at - begin), 0, end - at);
    return STH_OK;
}

bool sthi_store_next(const sth_runtime *rt, uint32_t unit, sth_store **out_store, uint32_t *out_layer) {
    bool seen = false;
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        const sthi_unit *u = &rt->units[rt->queue.requests[n % STHI_REQUEST_CAP].unit];
        if (seen && u->store && !u->in_ram && u->range_count && u->slot == STHI_NO_SLOT) {
            *out_store = u->store;
            *out_layer = u->ranges[0].file;
            return true;
        }
        seen = seen || u == &rt->units[unit];
    }
    return false;
}
