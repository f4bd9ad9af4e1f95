/* Units, as they are added before seal: checked, copied, named. Lock not held. */
#include "runtime/units.h"

#include <string.h>

#include "base/memory.h"
#include "load/fingerprint.h"
#include "load/read/from_store.h"
#include "quant/segment.h"
#include "state/state.h"
#include "store/opened.h"
#include "store/store.h"

static sth_status check_unit(sth_runtime *rt, const sth_unit_desc *d) {
    const char *name = d->name ? d->name : "";
    if (rt->seal_tried || rt->shut)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, name, "unit '%s' comes after seal", name);
    if (!*name) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "a unit needs a name");
    if (!d->bytes || d->bytes > STHI_BYTES_MOST || rt->planned.all_bytes > STHI_BYTES_MOST - d->bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "unit '%s' has an impossible size", name);
    if (!!d->host + !!d->checkpoint + !!d->store != 1)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name,
                         "unit '%s' needs exactly one source: a host image, a checkpoint or a store", name);
    if (d->store) STHI_TRY(sthi_store_unit_check(d));
    for (uint32_t i = 0; i < d->range_count; i++) {
        const sth_file_range *r = &d->ranges[i];
        uint64_t room = d->segments ? d->packed_bytes : d->bytes;
        if (!sthi_range_inside(r->place_offset, r->bytes, room) || r->place_offset % STHI_ALIGN)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name,
                             "unit '%s': range %u does not fit its place or is not at a multiple of %u", name,
                             i, STHI_ALIGN);
    }
    if (d->packed_bytes > STHI_BYTES_MOST)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "unit '%s' has an impossible packed size", name);
    if (d->segments && (!d->segment_count || !d->packed_bytes || (d->master && !d->host)))
        return sthi_fail(
            STH_INVALID_ARGUMENT, NULL, 0, name,
            "unit '%s' is packed: give its segments, the bytes of its packed image, and a master only where "
            "that image is in host memory",
            name);
    return d->segments ? sthi_segments_check(d->segments, d->segment_count, d->bytes, d->packed_bytes, name) : STH_OK;
}

/* One block: the records, then their names. NULL: no memory. */
static sth_unit_tensor *copy_tensors(const sth_unit_desc *d) {
    size_t records = d->tensor_count * sizeof *d->tensors, bytes = records;
    for (uint32_t i = 0; i < d->tensor_count; i++) bytes += strlen(d->tensors[i].name) + 1;
    sth_unit_tensor *copy = sthi_alloc(bytes);
    char *at = (char *)copy + records;
    for (uint32_t i = 0; copy && i < d->tensor_count; i++, at += strlen(at) + 1) {
        copy[i] = d->tensors[i];
        copy[i].name = strcpy(at, d->tensors[i].name);
    }
    return copy;
}

static sth_status add_unit(sth_runtime *rt, const sth_unit_desc *d, uint32_t *out) {
    STHI_TRY(check_unit(rt, d));
    if (rt->unit_count == rt->unit_cap) {
        uint32_t cap = rt->unit_cap ? rt->unit_cap * 2 : 64;
        sthi_unit *grown = sthi_realloc(rt->units, cap, sizeof *grown);
        if (!grown) return sthi_no_memory(d->name, "unit '%s'", d->name);
        rt->units = grown;
        rt->unit_cap = cap;
    }
    sthi_unit u = {.flags = d->flags, .slot = STHI_NO_SLOT, .host = d->host, .host_bytes = d->bytes,
                   .checkpoint = d->checkpoint, .store = d->store, .range_count = d->range_count,
                   .first_use = STH_NONE, .bundle = STH_NONE,
                   .writes.unwritten_steps = STHI_UNWRITTEN_STEPS};
    sthi_round_up(d->bytes, STHI_ALIGN, &u.bytes);
    u.name = sthi_strdup(d->name);
    u.group = sthi_strdup(d->group ? d->group : "");
    u.ranges = d->range_count ? sthi_alloc(d->range_count * sizeof *u.ranges) : NULL;
    u.segments = d->segments ? sthi_alloc(d->segment_count * sizeof *u.segments) : NULL;
    u.tensors = d->tensor_count ? copy_tensors(d) : NULL;
    u.tensor_count = d->tensor_count;
    bool lacks = (d->range_count && !u.ranges) || (d->segments && !u.segments) || (d->tensor_count && !u.tensors);
    if (!u.name || !u.group || lacks) {
        sthi_free(u.tensors);
        sthi_free(u.segments);
        sthi_free(u.name);
        sthi_free(u.group);
        sthi_free(u.ranges);
        return sthi_no_memory(d->name, "unit '%s'", d->name);
    }
    if (d->range_count) memcpy(u.ranges, d->ranges, d->range_count * sizeof *u.ranges);
    sthi_ranges_sort(u.ranges, d->range_count);
    if (d->segments) {
        memcpy(u.segments, d->segments, d->segment_count * sizeof *u.segments);
        u.segment_count = d->segment_count;
        u.packed_bytes = u.host_bytes = d->packed_bytes;
        u.master = d->master;
        if (u.master) u.encoded.print = sthi_fingerprint_place(&u, u.master, d->bytes);
    }
    if (d->arena) {
        sthi_arena_retain(d->arena);
        u.arena = d->arena;
        const void *image = sthi_arena_image(d->arena, u.host);
        if (image) u.host = image;
    }
    *out = rt->unit_count;
    rt->planned.all_bytes += u.bytes;
    rt->units[rt->unit_count++] = u;
    return STH_OK;
}

sth_status sthi_runtime_add_unit(sth_runtime *rt, const sth_unit_desc *d, uint32_t *out) {
    if (!d->store || !sthi_store_checkpoint(d->store)) return add_unit(rt, d, out);
    sth_unit_desc files;
    sth_file_range *ranges;
    STHI_TRY(sthi_store_unit_of_files(d, &files, &ranges));
    sth_status rc = add_unit(rt, &files, out);
    sthi_free(ranges);
    return rc;
}
