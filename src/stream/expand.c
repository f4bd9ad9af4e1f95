/* Units that cross the link packed: pieces, stages, and the expansion into the place.
 *
 *   planned loads:    copy stream --full--> expand stream (the writer of the place) --emptied--> copy stream
 *   loads on demand:  all on the demand stream, through a stage of their own
 *
 * A stage is overwritten behind the expansion that read it last: the copy waits for `emptied`, which is recorded behind
 * it. Where that could not be recorded the load fails, and the next copy waits for the whole stream instead.
 * Lock held throughout, but for sthi_expand_on_host. */
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "device/four_bits.h"
#include "quant/segment.h"
#include "stream/engine.h"

enum { SLACK = 3 * 4096 }; /* what direct reads need in a slab beside the bytes */

/* ---- sizes */

bool sthi_packed_on_link(const sth_runtime *rt, const sthi_unit *u) { return u->segment_count && rt->expands; }

uint64_t sthi_source_bytes(const sth_runtime *rt, const sthi_unit *u) {
    return sthi_packed_on_link(rt, u) ? u->wire_bytes : u->bytes;
}

static uint64_t place_end(const sth_segment *s) { return s->place_offset + sthi_segment_place_bytes(s); }

sthi_piece_of sthi_next_piece(const sth_runtime *rt, const sthi_unit *u, uint64_t begin) {
    uint64_t bytes = sthi_min_u64(rt->chunk, u->bytes - begin);
    if (!sthi_packed_on_link(rt, u))
        return (sthi_piece_of){.begin = begin, .bytes = bytes, .from = begin, .from_bytes = bytes};
    uint32_t first = 0, last, low = 0, high = u->segment_count;
    while (low < high) { /* the first segment that ends behind `begin` */
        uint32_t middle = low + (high - low) / 2;
        if (place_end(&u->segments[middle]) <= begin) low = middle + 1;
        else high = middle;
    }
    first = low;
    sthi_piece_of p = {.begin = begin, .segment = first};
    if (first == u->segment_count) { /* padding behind the last one */
        p.bytes = u->bytes - begin;
        return p;
    }
    uint64_t end, next_begin, next_end;
    sthi_segment_span(&u->segments[first], &p.from, &end);
    for (last = first + 1; last < u->segment_count; last++, end = next_end) {
        sthi_segment_span(&u->segments[last], &next_begin, &next_end);
        if (next_end - p.from > rt->stage_bytes) break;
    }
    p.from_bytes = end - p.from;
    p.segments = last - first;
    p.bytes = (last < u->segment_count ? u->segments[last].place_offset : u->bytes) - begin;
    return p;
}

/* ---- stages */

uint64_t sthi_stages_bytes(const sth_runtime *rt) { return STHI_STAGES * rt->stage_bytes; }

uint64_t sthi_held_bytes(const sth_runtime *rt) {
    return sthi_places_total(&rt->places) + (rt->stages ? sthi_stages_bytes(rt) : 0);
}

/* out_needs: what of the device. */
static sth_status largest_segment(sth_runtime *rt, uint64_t *out, uint32_t *out_needs) {
    *out = 0;
    *out_needs = STH_CAP_EXPAND;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        for (uint32_t k = 0; k < rt->units[i].segment_count; k++) {
            uint64_t begin, end;
            sthi_segment_span(&rt->units[i].segments[k], &begin, &end);
            *out = sthi_max_u64(*out, end - begin);
            if (sthi_is_four_bits((int)rt->units[i].segments[k].encoding)) *out_needs |= STH_CAP_EXPAND_FILES;
        }
    return sthi_round_up(*out, STHI_ALIGN, out) ? STH_OK : STH_INVALID_ARGUMENT;
}

/* Padding behind a piece stays where it is. */
static void count_pieces(const sth_runtime *rt, sthi_unit *u) {
    sthi_piece_of p;
    for (uint64_t begin = 0; begin < u->bytes; begin += p.bytes) {
        p = sthi_next_piece(rt, u, begin);
        u->wire_bytes += p.from_bytes;
    }
}

sth_status sthi_expand_open(sth_runtime *rt) {
    uint64_t bytes;
    uint32_t needs;
    STHI_TRY(largest_segment(rt, &bytes, &needs));
    if (!bytes) return STH_OK;
    if (rt->options.pool && bytes + SLACK > sthi_pool_slab_bytes(rt->options.pool)) {
        snprintf(rt->expand_error, sizeof rt->expand_error,
                 "the pool's slabs are smaller than %llu bytes, the largest segment",
                 (unsigned long long)(bytes + SLACK));
        return STH_OK;
    }
    const sth_backend_ops *ops = rt->device->ops;
    bool may = (rt->device->capabilities & needs) == needs;
    sth_status rc = may ? ops->expand_ready(rt->device->self)
                        : sthi_fail(STH_UNSUPPORTED, NULL, 0, "expand", "%s has no kernels%s", ops->backend,
                                      needs == STH_CAP_EXPAND ? "" : " for the 4 bits of files");
    if (rc != STH_OK) { /* the host expands */
        strncpy(rt->expand_error, sthi_error_last()->message, sizeof rt->expand_error - 1);
        return STH_OK;
    }
    STHI_TRY(STHI_DEV(rt, stream_create, rt->options.copy_priority, &rt->expand_stream));
    for (int i = 0; i < STHI_STAGES; i++) {
        STHI_TRY(STHI_DEV(rt, event_create, false, &rt->stage[i].full));
        STHI_TRY(STHI_DEV(rt, event_create, false, &rt->stage[i].emptied));
    }
    rt->stage_bytes = bytes;
    rt->expands = true;
    for (uint32_t i = 0; i < rt->unit_count; i++)
        if (rt->units[i].segment_count) count_pieces(rt, &rt->units[i]);
    return STH_OK;
}

sth_status sthi_stages_alloc(sth_runtime *rt) {
    if (rt->stages || !rt->expands) return STH_OK;
    STHI_TRY(sthi_charge(rt, sthi_stages_bytes(rt)));
    sth_status rc = sthi_place_alloc(rt, sthi_stages_bytes(rt), &rt->stages);
    if (rc != STH_OK) {
        sthi_uncharge(rt, sthi_stages_bytes(rt));
        rt->stages = 0;
        return rc;
    }
    for (int i = 0; i < STHI_STAGES; i++) rt->stage[i].used = false;
    rt->device_peak = sthi_max_u64(rt->device_peak, sthi_held_bytes(rt));
    return STH_OK;
}

void sthi_stages_free(sth_runtime *rt) {
    if (!rt->stages) return;
    const sth_stream streams[] = {rt->copy_stream, rt->demand_stream, rt->expand_stream};
    for (int i = 0; i < 3; i++)
        if (streams[i]) (void)STHI_DEV(rt, stream_synchronize, streams[i]);
    sthi_place_free(rt, rt->stages, sthi_stages_bytes(rt));
    sthi_uncharge(rt, sthi_stages_bytes(rt));
    rt->stages = 0;
}

void sthi_expand_close(sth_runtime *rt) {
    if (rt->expand_stream) STHI_DEV(rt, stream_destroy, rt->expand_stream);
    rt->expand_stream = 0;
    for (int i = 0; i < STHI_STAGES; i++) {
        if (rt->stage[i].full) STHI_DEV(rt, event_destroy, rt->stage[i].full);
        if (rt->stage[i].emptied) STHI_DEV(rt, event_destroy, rt->stage[i].emptied);
        rt->stage[i] = (sthi_stage){0};
    }
}

/* ---- a piece */

static const uint8_t *memory_at(sth_devptr p) { return (const uint8_t *)(uintptr_t)p; }

static void reference(const sth_expand *e) {
    sth_segment s = {.encoding = (sth_transfer)e->encoding, .dtype = (sth_dtype)e->dtype, .rows = e->rows,
                     .cols = e->cols, .stride = e->stride, .pitch = e->pitch, .rank = e->rank, .group = e->group,
                     .hadamard = e->hadamard, .factor = e->factor};
    sthi_segment_parts parts = {memory_at(e->codes), memory_at(e->scales), memory_at(e->zeros),
                                memory_at(e->up),    memory_at(e->down),   memory_at(e->smooth)};
    sthi_segment_decode_part(&s, &parts, 0, e->place_bytes, (void *)(uintptr_t)e->place);
}

/* stage: the address of the packed image's first byte. */
static sth_status expand(sth_runtime *rt, const sth_segment *s, sth_devptr stage, sth_devptr place, sth_stream on) {
    sth_expand e = {.encoding = (int)s->encoding, .dtype = (int)s->dtype, .rows = s->rows, .cols = s->cols,
                    .stride = s->stride, .codes = stage + s->codes, .place = place + s->place_offset,
                    .place_bytes = sthi_segment_place_bytes(s), .reference = reference};
    if (s->scales != STH_TRANSFER_NONE) e.scales = stage + s->scales;
    if (s->zeros != STH_TRANSFER_NONE) e.zeros = stage + s->zeros;
    if (!sthi_is_four_bits(e.encoding)) return STHI_DEV(rt, expand, &e, on);
    if (s->rank) e.up = stage + s->up, e.down = stage + s->down;
    if (s->smooth != STH_TRANSFER_NONE) e.smooth = stage + s->smooth;
    e.pitch = s->pitch, e.rank = s->rank, e.group = s->group, e.hadamard = s->hadamard, e.factor = s->factor;
    return STHI_DEV(rt, expand, &e, on);
}

static sthi_stage *choose_stage(sth_runtime *rt, bool demand, sth_devptr *out) {
    uint32_t i = demand ? STHI_STAGES - 1 : rt->next_stage++ % (STHI_STAGES - 1);
    *out = rt->stages + i * rt->stage_bytes;
    return &rt->stage[i];
}

/* The copy goes behind the expansion that read the stage last. */
static sth_status wait_for_stage(sth_runtime *rt, sthi_stage *stage, sth_stream copies) {
    if (!stage->used) return STH_OK;
    if (stage->unsure) STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->expand_stream));
    else STHI_TRY(STHI_DEV(rt, stream_wait, copies, stage->emptied));
    stage->unsure = false;
    return STH_OK;
}

static sth_status name_expansion(const sthi_unit *u, const sth_segment *s) {
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(why.status, why.domain, why.native, why.object,
                     "unit '%.160s', tensor '%.160s': expanding bytes [%llu, %llu) of its place: %s", u->name,
                     sthi_tensor_name(u, s->place_offset), (unsigned long long)s->place_offset,
                     (unsigned long long)place_end(s), why.message);
}

static sth_status expand_piece(sth_runtime *rt, const sthi_unit *u, const sthi_piece_of *p, sth_devptr stage,
                               sth_devptr place, sth_stream on) {
    for (uint32_t i = 0; i < p->segments; i++) {
        const sth_segment *s = &u->segments[p->segment + i];
        if (expand(rt, s, stage - p->from, place, on) != STH_OK) return name_expansion(u, s);
    }
    return STH_OK;
}

sth_status sthi_expand_piece(sth_runtime *rt, int32_t slot, const sthi_piece_of *p, const uint8_t *from) {
    const sthi_slot *s = &rt->places.slots[slot];
    const sthi_unit *u = &rt->units[s->unit];
    if (!p->segments) return STH_OK;
    STHI_TRY(sthi_stages_alloc(rt));
    sth_stream writer = rt->sync[slot].filled_by, copies = sthi_copies_on(rt, slot);
    bool demand = writer == copies;
    sth_devptr at, place = rt->places.extents[s->extent].base + s->offset;
    sthi_stage *stage = choose_stage(rt, demand, &at);
    if (!demand) STHI_TRY(wait_for_stage(rt, stage, copies));
    STHI_TRY(sthi_copy_bytes(rt, s->unit, at, from, p->from_bytes, copies));
    if (demand) return expand_piece(rt, u, p, at, place, writer);
    stage->used = stage->unsure = true; /* until it is known when the expansion has run */
    STHI_TRY(STHI_DEV(rt, event_record, stage->full, copies));
    STHI_TRY(STHI_DEV(rt, stream_wait, writer, stage->full));
    sth_status rc = expand_piece(rt, u, p, at, place, writer);
    if (STHI_DEV(rt, event_record, stage->emptied, writer) == STH_OK) stage->unsure = false;
    else if (rc == STH_OK) rc = sthi_error_last()->status;
    return rc;
}

/* ---- on the host */

/* A segment's part of the packed image from the files, read into memory of its own. */
static sth_status read_packed(const sthi_unit *u, uint64_t begin, uint64_t end, uint8_t *to) {
    memset(to, 0, end - begin);
    for (uint32_t i = 0; i < u->range_count; i++) {
        const sth_file_range *r = &u->ranges[i];
        uint64_t from = sthi_max_u64(begin, r->place_offset), stop = sthi_min_u64(end, r->place_offset + r->bytes);
        if (from >= stop) continue;
        uint64_t offset = r->file_offset + (from - r->place_offset);
        STHI_TRY(sthi_range_read(u, r, offset, stop - from, to + (from - begin)));
    }
    return STH_OK;
}

static sth_status expand_part(const sthi_unit *u, const sth_segment *s, uint64_t begin, uint64_t end, uint8_t *out) {
    if (!u->checkpoint) {
        sthi_segment_decode(s, u->host, 0, begin, end, out);
        return STH_OK;
    }
    uint64_t from, stop;
    sthi_segment_span(s, &from, &stop);
    uint8_t *packed = sthi_alloc(stop - from);
    if (!packed) return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, u->name, "no memory to expand unit '%s'", u->name);
    sth_status rc = read_packed(u, from, stop, packed);
    if (rc == STH_OK) sthi_segment_decode(s, packed, from, begin, end, out);
    sthi_free(packed);
    return rc;
}

sth_status sthi_expand_on_host(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *out) {
    for (uint32_t i = 0; i < u->segment_count; i++) {
        const sth_segment *s = &u->segments[i];
        uint64_t from = sthi_max_u64(begin, s->place_offset), stop = sthi_min_u64(begin + bytes, place_end(s));
        if (from >= stop) continue;
        STHI_TRY(expand_part(u, s, from - s->place_offset, stop - s->place_offset, out + (from - begin)));
    }
    return STH_OK;
}

/* ---- the master was written */

sth_status sthi_repack(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    uint64_t now = u->repack ? 0 : sthi_fingerprint_master(u);
    if (!u->master || (!u->repack && (!now || now == u->packed_print))) return STH_OK;
    /* Copies of the packed image may be under way. */
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->copy_stream));
    STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->demand_stream));
    u->repack = false;
    u->packed_print = sthi_fingerprint_place(u, u->master, u->bytes);
    void *packed = (void *)(uintptr_t)u->host;
    uint32_t failed = 0;
    sth_status rc = sthi_segments_encode(u->segments, u->segment_count, u->master, packed, 0, NULL, &failed);
    if (rc == STH_OK) return STH_OK;
    u->repack = true;
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(why.status, why.domain, why.native, u->name,
                     "unit '%.160s', tensor '%.160s' was written and cannot be encoded again: %s", u->name,
                     sthi_tensor_name(u, u->segments[failed].place_offset), why.message);
}
