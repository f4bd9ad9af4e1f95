/* Life of a runtime: options, units, seal, budget, end. The owner and every lease hold a reference; what
 * leases still need when the owner lets go stays until the last of them is released. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "core/plan.h"
#include "quant/segment.h"
#include "store/store.h"
#include "stream/engine.h"

enum { CHUNK_MAX = 8 << 20, RUN_MAX = 32 << 20, CHUNK_MIN = 64 << 10, MEASURE_MAX = 128 << 20, EVENT_CAP = 4096,
       USES_MAX = 1 << 24, READERS_MOST = 256, CHUNK_MOST = 1 << 30 };
/* No memory has more; sums of a few such sizes fit 64 bits. */
#define BYTES_MOST (UINT64_C(1) << 60)

void sthi_runtime_options_init(sth_runtime_options *o) {
    *o = (sth_runtime_options){.size = sizeof *o, .prefetch_window = 3, .reader_threads = STH_READERS_AUTO,
                               .copy_priority = -1, .telemetry_max_bytes = UINT64_C(64) << 20};
}

static sth_status bad_option(const char *name, const char *why) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "options: %s %s", name, why);
}

static sth_status check_numbers(const sth_runtime_options *o) {
    if (o->policy != STH_POLICY_PLANNED && o->policy != STH_POLICY_STATIC) return bad_option("policy", "is unknown");
    if (!(o->link_bytes_per_s >= 0) || !isfinite(o->link_bytes_per_s))
        return bad_option("link_bytes_per_s", "must be finite, and 0 or more");
    if (o->least_room > BYTES_MOST) return bad_option("least_room", "is more than any memory has");
    if (o->reader_threads > READERS_MOST && o->reader_threads != STH_READERS_AUTO)
        return bad_option("reader_threads", "is above 256");
    return STH_OK;
}

static sth_status check_options(const sth_runtime_options *o) {
    STHI_TRY(check_numbers(o));
    if (o->budget == 0 || o->reserved >= o->budget)
        return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                         "a budget of %llu bytes leaves nothing for units: %llu of them are used already",
                         (unsigned long long)o->budget, (unsigned long long)o->reserved);
    if (!o->allocator.alloc != !o->allocator.free)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "allocator", "give both alloc and free, or neither");
    if (o->policy == STH_POLICY_STATIC && o->high_watermark && o->low_watermark >= o->high_watermark)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "high_watermark",
                         "the high watermark must be greater than the low one");
    return STH_OK;
}

static uint64_t choose_chunk(const sth_runtime_options *o) {
    uint64_t chunk = o->chunk_bytes ? o->chunk_bytes : (o->budget - o->reserved) / 64;
    if (!o->chunk_bytes) chunk = chunk < CHUNK_MIN ? CHUNK_MIN : chunk > CHUNK_MAX ? CHUNK_MAX : chunk;
    sthi_round_up(sthi_min_u64(chunk, CHUNK_MOST), STHI_ALIGN, &chunk);
    return chunk;
}

sth_status sthi_runtime_create(sth_device *device, const sth_runtime_options *options, sth_runtime **out) {
    STHI_TRY(check_options(options));
    sth_runtime *rt = sthi_zalloc(1, sizeof *rt);
    if (!rt) return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for a runtime");
    rt->options = *options;
    rt->options.budget = sthi_min_u64(options->budget, BYTES_MOST);
    rt->limit = rt->options.budget;
    rt->chunk = choose_chunk(&rt->options);
    atomic_init(&rt->refs, 1);
    atomic_init(&rt->dropped, STHI_NO_SLOT);
    rt->ring_extent = rt->demand_extent = STH_NONE;
    rt->edition = 1;
    rt->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&rt->lock);
    sthi_cond_init(&rt->changed);
    sthi_cond_init(&rt->work);
    sthi_device_retain(device);
    rt->device = device;
    rt->name = sthi_strdup(options->name ? options->name : "model");
    rt->options.name = NULL; /* the caller's string */
    sth_status rc = sthi_residency_join(rt);
    if (rc == STH_OK) rc =
        sthi_telemetry_create(options->telemetry_path, options->telemetry_max_bytes, &rt->telemetry);
    rt->options.telemetry_path = NULL; /* the caller's string */
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_create, options->copy_priority, &rt->copy_stream);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_create, options->copy_priority, &rt->demand_stream);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        sthi_runtime_destroy(rt);
        return sthi_error_restore(&why);
    }
    *out = rt;
    return STH_OK;
}

/* Frees all that no lease can reach. */
static void free_rest(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_arena_release(rt->units[i].arena);
        sthi_free(rt->units[i].name);
        sthi_free(rt->units[i].group);
        sthi_free(rt->units[i].ranges);
        sthi_free(rt->units[i].segments);
        sthi_free(rt->units[i].tensors);
    }
    sthi_plan_destroy(rt->plan);
    sthi_bundles_destroy(rt->bundles);
    sthi_free(rt->units);
    sthi_free(rt->plan_units);
    sthi_free(rt->order);
    sthi_free(rt->order_next);
    sthi_free(rt->order_held);
    sthi_free(rt->load_uses);
    sthi_free(rt->residents);
    sthi_free(rt->trace);
    sthi_free(rt->extent_key);
    sthi_free(rt->sync);
    sthi_places_fini(&rt->places);
    sthi_residency_leave(rt);
    sthi_free(rt->name);
    sthi_device_release(rt->device);
    sthi_cond_fini(&rt->work);
    sthi_cond_fini(&rt->changed);
    sthi_mutex_fini(&rt->lock);
    sthi_free(rt);
}

static void free_events(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->event_count; i++) STHI_DEV(rt, event_destroy, rt->events[i]);
    rt->event_count = 0;
    sthi_free(rt->events);
    rt->events = NULL;
    rt->event_cap = 0;
}

void sthi_runtime_unref(sth_runtime *rt) {
    if (atomic_fetch_sub(&rt->refs, 1) != 1) return;
    /* The owner is gone and this was the last lease. */
    sthi_drain_drops(rt);
    for (uint32_t i = 0; i < rt->places.slot_cap; i++) rt->places.slots[i].leases = 0;
    sthi_extents_free_all(rt);
    free_events(rt);
    free_rest(rt);
}

void sthi_leave(sth_runtime *rt) {
    if (!--rt->callers && rt->shut) sthi_cond_broadcast(&rt->changed);
}

static void end_copies(sth_runtime *rt) {
    sthi_lanes_close(rt);
    sthi_expand_close(rt); /* it waits for copies, which are enqueued before it */
    if (rt->copy_stream) STHI_DEV(rt, stream_destroy, rt->copy_stream); /* waits for what is enqueued */
    if (rt->demand_stream) STHI_DEV(rt, stream_destroy, rt->demand_stream);
    rt->copy_stream = rt->demand_stream = 0;
    sthi_staging_close(rt);
    sthi_forget_traces(rt, STH_NONE);
    for (int i = 0; i < 2; i++) sthi_event_give(rt, rt->masters[i].event);
    for (int i = 0; i < STHI_AWAITED; i++) sthi_event_give(rt, rt->awaited[i].event);
}

/* All but the records, and the places that are leased. */
static void shut_down(sth_runtime *rt) {
    if (rt->step_open) sthi_timing_end_late(rt);
    rt->step_open = false;
    sthi_drain_drops(rt);
    sthi_cancel_queue(rt);
    sthi_timing_harvest(rt, true);
    sthi_extents_free_all(rt);
    sthi_stages_free(rt);
    sthi_timing_close(rt);
    sthi_telemetry_destroy(rt->telemetry, true);
    rt->telemetry = NULL;
    end_copies(rt);
}

sth_status sthi_runtime_not_here(const sth_runtime *rt) {
    if (!rt) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "runtime", "runtime is NULL");
    return sthi_fail_in_child(rt->name, "the runtime");
}

/* A child has none of the threads, locks in any state, and a file that is the parent's: nothing is touched there. */
void sthi_runtime_destroy(sth_runtime *rt) {
    if (!rt || sthi_is_child(rt->fork_depth)) return;
    sthi_lock(&rt->lock);
    rt->shut = true;
    rt->program_on = false;
    sthi_cond_broadcast(&rt->changed);
    while (rt->callers) sthi_cond_wait(&rt->changed, &rt->lock);
    sthi_unlock(&rt->lock);
    sthi_residency_retire(rt);
    sthi_staging_stop(rt);
    sthi_lock(&rt->lock);
    shut_down(rt);
    sthi_unlock(&rt->lock);
    sthi_runtime_unref(rt);
}

static sth_status check_unit(sth_runtime *rt, const sth_unit_desc *d) {
    const char *name = d->name ? d->name : "";
    if (rt->seal_tried || rt->shut)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, name, "unit '%s' comes after seal", name);
    if (!*name) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "a unit needs a name");
    if (!d->bytes || d->bytes > BYTES_MOST || rt->all_bytes > BYTES_MOST - d->bytes)
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
    if (d->packed_bytes > BYTES_MOST)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "unit '%s' has an impossible packed size", name);
    if (d->segments && (!d->segment_count || !d->packed_bytes || (d->master && !d->host)))
        return sthi_fail(
            STH_INVALID_ARGUMENT, NULL, 0, name,
            "unit '%s' is packed: give its segments, the bytes of its packed image, and a master only where "
            "that image is in host memory",
            name);
    return d->segments ? sthi_segments_check(d->segments, d->segment_count, d->bytes, d->packed_bytes, name) : STH_OK;
}

static int by_place(const void *left, const void *right) {
    const sth_file_range *a = left, *b = right;
    return a->place_offset < b->place_offset ? -1 : a->place_offset > b->place_offset;
}

const char *sthi_tensor_name(const sthi_unit *u, uint64_t place_offset) {
    const char *name = u->name;
    for (uint32_t i = 0; i < u->tensor_count && u->tensors[i].place_offset <= place_offset; i++)
        name = u->tensors[i].name;
    return name;
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
        if (!grown)
            return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, d->name, "no memory for unit '%s'", d->name);
        rt->units = grown;
        rt->unit_cap = cap;
    }
    sthi_unit u = {.flags = d->flags, .slot = STHI_NO_SLOT, .host = d->host, .host_bytes = d->bytes,
                   .checkpoint = d->checkpoint, .store = d->store, .range_count = d->range_count,
                   .first_use = STH_NONE, .bundle = STH_NONE,
                   .unwritten_steps = STHI_UNWRITTEN_STEPS};
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
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, d->name, "no memory for unit '%s'", d->name);
    }
    if (d->range_count) memcpy(u.ranges, d->ranges, d->range_count * sizeof *u.ranges);
    if (d->range_count) qsort(u.ranges, d->range_count, sizeof *u.ranges, by_place);
    if (d->segments) {
        memcpy(u.segments, d->segments, d->segment_count * sizeof *u.segments);
        u.segment_count = d->segment_count;
        u.packed_bytes = u.host_bytes = d->packed_bytes;
        u.master = d->master;
        if (u.master) u.packed_print = sthi_fingerprint_place(&u, u.master, d->bytes);
    }
    if (d->arena) {
        sthi_arena_retain(d->arena);
        u.arena = d->arena;
    }
    *out = rt->unit_count;
    rt->all_bytes += u.bytes;
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

uint64_t sthi_run_bytes(const sth_runtime *rt) { return sthi_max_u64(rt->chunk, RUN_MAX); }

/* Rate of copies in such pieces, as the runtime will issue them. */
static sth_status measure_copies(sth_runtime *rt, const uint8_t *from, uint64_t bytes, uint64_t piece, double *out) {
    sth_devptr place = 0;
    STHI_TRY(STHI_DEV(rt, alloc, bytes, &place));
    sth_event *begin = NULL, *end = NULL;
    int64_t best = INT64_MAX;
    sth_status rc = STHI_DEV(rt, event_create, true, &begin);
    if (rc == STH_OK) rc = STHI_DEV(rt, event_create, true, &end);
    for (int lap = 0; rc == STH_OK && lap < 3; lap++) {
        int64_t ns = 0;
        rc = STHI_DEV(rt, event_record, begin, rt->copy_stream);
        for (uint64_t at = 0; rc == STH_OK && at < bytes; at += piece)
            rc = STHI_DEV(rt, copy_h2d, place + at, from + at, sthi_min_u64(piece, bytes - at), rt->copy_stream);
        if (rc == STH_OK) rc = STHI_DEV(rt, event_record, end, rt->copy_stream);
        if (rc == STH_OK) rc = STHI_DEV(rt, event_synchronize, end);
        if (rc == STH_OK) rc = STHI_DEV(rt, event_elapsed_ns, begin, end, &ns);
        if (rc == STH_OK && ns > 0 && ns < best) best = ns;
    }
    if (begin) STHI_DEV(rt, event_destroy, begin);
    if (end) STHI_DEV(rt, event_destroy, end);
    STHI_DEV(rt, free, place, bytes);
    if (rc == STH_OK) *out = best == INT64_MAX ? 1e12 : (double)bytes / ((double)best / 1e9);
    return rc;
}

/* Everything is staged: the rate of one slab's copy. */
static sth_status measure_staged(sth_runtime *rt, uint64_t room) {
    sth_slab slab;
    STHI_TRY(sthi_slab_wait(rt, &slab));
    const uint8_t *from = sthi_pool_slab_address(rt->pool, slab);
    sth_status rc = measure_copies(rt, from, sthi_min_u64(rt->chunk, room), rt->chunk, &rt->link);
    (void)sthi_pool_release(rt->pool, &slab, 1);
    return rc;
}

sth_status sthi_measure_link(sth_runtime *rt) {
    if (rt->link <= 0) rt->link = rt->options.link_bytes_per_s;
    if (rt->link > 0) return STH_OK;
    const sthi_unit *largest = NULL;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (rt->units[i].direct &&
            (!largest || sthi_source_bytes(rt, &rt->units[i]) > sthi_source_bytes(rt, largest)))
            largest = &rt->units[i];
    uint64_t room = sthi_budget_for_units(rt);
    if (!largest) return measure_staged(rt, room);
    uint64_t whole = sthi_packed_on_link(rt, largest) ? sthi_source_bytes(rt, largest)
                                                      : sthi_bytes_in_a_row(rt, (uint32_t)(largest - rt->units), room);
    uint64_t bytes = sthi_min_u64(sthi_min_u64(whole, MEASURE_MAX), room);
    uint64_t piece = sthi_packed_on_link(rt, largest) ? rt->stage_bytes : sthi_run_bytes(rt);
    return measure_copies(rt, largest->host, bytes, piece, &rt->link);
}

static sth_status allocate_records(sth_runtime *rt) {
    uint32_t slots = 2 * rt->unit_count + 256, units = rt->unit_count;
    uint64_t uses = sthi_max_u64(8 * (uint64_t)units, 1024);
    rt->order_cap = rt->trace_cap = (uint32_t)sthi_min_u64(uses, USES_MAX);
    rt->event_cap = EVENT_CAP;
    STHI_TRY(sthi_places_init(&rt->places, STHI_EXTENT_CAP, slots));
    rt->sync = sthi_zalloc(slots, sizeof *rt->sync);
    rt->extent_key = sthi_zalloc(STHI_EXTENT_CAP, sizeof *rt->extent_key);
    rt->plan_units = sthi_zalloc(units, sizeof *rt->plan_units);
    rt->order = sthi_zalloc(rt->order_cap, sizeof *rt->order);
    rt->order_next = sthi_zalloc(rt->order_cap, sizeof *rt->order_next);
    rt->order_held = sthi_zalloc(rt->order_cap, sizeof *rt->order_held);
    rt->load_uses = sthi_zalloc(rt->order_cap, sizeof *rt->load_uses);
    rt->residents = sthi_zalloc(units, sizeof *rt->residents);
    rt->trace = sthi_zalloc(rt->trace_cap, sizeof *rt->trace);
    rt->events = sthi_zalloc(rt->event_cap, sizeof *rt->events);
    if (!rt->sync || !rt->extent_key || !rt->plan_units || !rt->order || !rt->order_next || !rt->order_held ||
        !rt->load_uses || !rt->residents || !rt->trace || !rt->events)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for the records of %u units",
                         units);
    for (uint32_t i = 0; i < slots; i++) {
        atomic_init(&rt->sync[i].drops, 0);
        rt->sync[i].timed_use = rt->sync[i].use = STH_NONE;
    }
    return sthi_timing_open(rt);
}

static bool grow(void *array, uint32_t count, size_t each) {
    void **at = array;
    void *grown = sthi_realloc(*at, count, each);
    if (grown) *at = grown;
    return grown != NULL;
}

void sthi_records_grow(sth_runtime *rt) {
    uint32_t cap = (uint32_t)sthi_min_u64(4 * (uint64_t)rt->trace_cap, USES_MAX), old = rt->order_cap;
    /* What has grown when one fails is larger than it says, no more. */
    if (!grow(&rt->order, cap, sizeof *rt->order) || !grow(&rt->order_next, cap, sizeof *rt->order_next) ||
        !grow(&rt->order_held, cap, sizeof *rt->order_held) ||
        !grow(&rt->load_uses, cap, sizeof *rt->load_uses) || !grow(&rt->trace, cap, sizeof *rt->trace))
        return;
    memset(rt->load_uses + old, 0, (cap - old) * sizeof *rt->load_uses);
    rt->order_cap = rt->trace_cap = cap;
}

static uint32_t largest_unit(const sth_runtime *rt) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < rt->unit_count; i++)
        if (rt->units[i].bytes > rt->units[best].bytes) best = i;
    return best;
}

/* Bytes for units that the planner and the caller cannot do without. */
static uint64_t least_for_units(sth_runtime *rt) {
    if (!rt->unit_count) return 0;
    uint64_t smallest = sthi_max_u64(rt->units[largest_unit(rt)].bytes, rt->options.least_room);
    if (rt->options.policy == STH_POLICY_STATIC || !rt->order_count) return smallest;
    sth_plan_input in;
    bool holds = rt->plan_holds;
    sthi_plan_hold(rt, false);
    sthi_plan_input(rt, &in);
    sthi_plan_map_once(&in);
    uint64_t least = 0;
    if (sthi_plan_smallest(&in, &least) == STH_OK) smallest = sthi_max_u64(smallest, least);
    sthi_plan_hold(rt, holds);
    return smallest;
}

/* As much as was leased at once in one of the last steps, too. A single one of long ago says nothing of those to
 * come. */
static uint64_t smallest_for_units(sth_runtime *rt) {
    uint64_t smallest = least_for_units(rt);
    for (uint32_t i = 0; i < STHI_PEAK_STEPS; i++) smallest = sthi_max_u64(smallest, rt->leased_peak[i]);
    return smallest;
}

/* `least`, `enough`: bytes for units, without which it cannot go on, and with which it can. */
static sth_status budget_error(sth_runtime *rt, uint32_t unit, uint64_t least, uint64_t enough) {
    const sthi_unit *u = &rt->units[unit];
    char need[32], have[32], at_least[32], given[160], room[32], more[120] = "";
    uint64_t beside = rt->options.reserved + sthi_stages_bytes(rt);
    least += beside;
    enough += beside;
    sthi_format_size(rt->options.budget, have, sizeof have);
    if (rt->limit < rt->options.budget && rt->limit < least)
        snprintf(given, sizeof given, "of the budget of %s the device and its other models leave %llu bytes", have,
                 (unsigned long long)rt->limit);
    else
        snprintf(given, sizeof given, "the budget is %s", have);
    if (enough > least)
        snprintf(more, sizeof more, ", and %s (%llu bytes) has room for that wherever the others lie",
                 sthi_format_size(enough, room, sizeof room), (unsigned long long)enough);
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, u->name,
                     "unit '%s' needs %s (%llu bytes) on the device, but %s; the smallest budget that works is at "
                     "least %s (%llu bytes)%s", u->name, sthi_format_size(u->bytes, need, sizeof need),
                     (unsigned long long)u->bytes, given, sthi_format_size(least, at_least, sizeof at_least),
                     (unsigned long long)least, more);
}

sth_status sthi_budget_error(sth_runtime *rt, uint32_t unit) {
    uint64_t least = smallest_for_units(rt);
    return budget_error(rt, unit, least, least);
}

sth_status sthi_no_place_error(sth_runtime *rt, uint32_t unit, uint64_t enough) {
    uint64_t beside = rt->options.reserved + sthi_stages_bytes(rt);
    uint64_t least = sthi_max_u64(rt->leased_bytes + rt->units[unit].bytes, rt->units[largest_unit(rt)].bytes);
    if (rt->limit >= rt->options.budget && least + beside <= rt->options.budget) /* what is free lies apart */
        least = rt->options.budget + 1 - beside;
    return budget_error(rt, unit, least, sthi_max_u64(enough, smallest_for_units(rt)));
}

uint64_t sthi_smallest_budget(sth_runtime *rt) {
    return smallest_for_units(rt) + rt->options.reserved + sthi_stages_bytes(rt);
}

uint64_t sthi_least_to_plan(sth_runtime *rt) {
    return least_for_units(rt) + rt->options.reserved + sthi_stages_bytes(rt);
}

uint64_t sthi_least_to_load(const sth_runtime *rt) {
    return rt->options.reserved + sthi_stages_bytes(rt) + (rt->unit_count ? rt->units[largest_unit(rt)].bytes : 0);
}

/* A plan's refusal, said with the unit's name. */
sth_status sthi_name_refusal(sth_runtime *rt, sth_status rc) {
    return rc == STH_BUDGET_TOO_SMALL ? sthi_budget_error(rt, largest_unit(rt)) : rc;
}

/* The first plan, with what is free on the device. Where others leave too little the runtime is parked: it asks
 * them to give way when it is used, not when it is made. */
static sth_status first_plan(sth_runtime *rt) {
    uint64_t smallest = sthi_smallest_budget(rt);
    if (smallest > rt->options.budget) return sthi_budget_error(rt, largest_unit(rt));
    uint64_t most = sthi_min_u64(rt->options.budget, sthi_account_cap(rt)); /* if all others were gone */
    uint64_t left = sthi_hold(rt, rt->options.budget);
    rt->parked = (rt->options.parked || left < smallest) && smallest <= most;
    sth_status rc = rt->parked ? STH_OK : sthi_measure_link(rt);
    if (rc == STH_OK && !rt->parked) rc = sthi_name_refusal(rt, sthi_geometry_install(rt));
    sthi_settle(rt);
    return rc;
}

static sth_status seal_locked(sth_runtime *rt) {
    if (!rt->unit_count) return sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "a runtime without units");
    STHI_TRY(sthi_expand_open(rt));
    for (uint32_t i = 0; i < rt->unit_count; i++) { /* by now the arenas are filled and pinned */
        sthi_unit *u = &rt->units[i];
        bool whole = !u->segments || rt->expands; /* else the host expands it into slabs */
        uint64_t image = u->segments ? u->packed_bytes : u->bytes;
        u->direct = whole && u->host && u->arena && sthi_arena_is_pinned(u->arena, u->host, image);
    }
    STHI_TRY(allocate_records(rt));
    STHI_TRY(sthi_staging_open(rt));
    uint32_t *guess = sthi_alloc(rt->unit_count * sizeof *guess);
    if (!guess) return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "no memory for the first order");
    for (uint32_t i = 0; i < rt->unit_count; i++) guess[i] = i;
    sth_status rc = sthi_order_set(rt, guess, rt->unit_count);
    sthi_free(guess);
    if (rc == STH_OK) rc = first_plan(rt);
    if (rc == STH_OK) sthi_keep_choose(rt);
    if (rc == STH_OK) sthi_pump(rt);
    return rc;
}

sth_status sthi_runtime_seal(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    const char *again = rt->sealed ? "sealed already" : "sealing failed before: it can only be destroyed";
    sth_status rc = rt->seal_tried ? sthi_fail(STH_INVALID_STATE, NULL, 0, NULL, "runtime: %s", again)
                                   : seal_locked(rt);
    rt->sealed = rt->sealed || rc == STH_OK;
    rt->seal_tried = true;
    sthi_unlock(&rt->lock);
    return rc;
}

sth_status sthi_runtime_synchronize(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    if (rt->shut || !rt->sealed) {
        sthi_unlock(&rt->lock);
        return rt->shut ? sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down") : STH_OK;
    }
    sth_status busy = sthi_graph_free(rt);
    if (busy != STH_OK) {
        sthi_unlock(&rt->lock);
        return busy;
    }
    rt->callers++;
    sthi_drain_drops(rt);
    sthi_cancel_queue(rt);
    while (rt->masters_in_read) sthi_cond_wait(&rt->changed, &rt->lock);
    /* What was prefetched of writable units may be out of date after this. */
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (!(u->flags & STH_UNIT_WRITABLE)) continue;
        u->changed = rt->marked = true; /* as far as is known */
        if (u->slot != STHI_NO_SLOT && !rt->places.slots[u->slot].leases) rt->places.slots[u->slot].stale = true;
    }
    sth_stream copy = rt->copy_stream, demand = rt->demand_stream; /* expansions read nothing of the host's */
    sthi_unlock(&rt->lock);
    sth_status rc = STHI_DEV(rt, stream_synchronize, copy);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_synchronize, demand);
    sthi_lock(&rt->lock);
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    return rc;
}

/* Between steps. On failure the old budget stays in force. */
static sth_status change_budget(sth_runtime *rt, uint64_t budget) {
    uint64_t old = rt->options.budget;
    sthi_drain_drops(rt);
    sthi_closing_free(rt); /* what only leases kept that have ended is room for the plan */
    rt->options.budget = budget;
    if (rt->parked) return STH_OK; /* it counts when the runtime comes back */
    sth_status rc = rt->sealed ? sthi_geometry_install(rt) : STH_OK;
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        rt->options.budget = old;
        if (sthi_geometry_install(rt) != STH_OK) rt->replan = true;
        (void)sthi_error_restore(&why);
    } else if (budget > old && rt->limit < budget) {
        rt->settled = false; /* idle others may give way to it: its next step asks them */
    }
    rt->stats.replans++;
    sthi_pump(rt);
    return rc;
}

sth_status sthi_runtime_set_budget(sth_runtime *rt, uint64_t budget) {
    budget = sthi_min_u64(budget, BYTES_MOST);
    sthi_lock(&rt->lock);
    sth_status rc = STH_OK;
    uint64_t smallest = rt->sealed ? sthi_smallest_budget(rt) : rt->options.reserved + 1;
    if (rt->shut) rc = sthi_fail(STH_SHUT_DOWN, NULL, 0, NULL, "the runtime has been shut down");
    else if (rt->step_open && !rt->step_implicit)
        rc = sthi_fail(STH_INVALID_STATE, NULL, 0, "budget",
                       "the budget changes between steps, and a step is open");
    else if (budget < smallest)
        rc = sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
                       "a budget of %llu bytes is too small; the smallest that works is %llu bytes",
                       (unsigned long long)budget, (unsigned long long)smallest);
    if (rc == STH_OK && rt->step_open) rc = sthi_step_end_locked(rt);
    if (rc == STH_OK) rc = change_budget(rt, budget);
    sthi_unlock(&rt->lock);
    return rc;
}
