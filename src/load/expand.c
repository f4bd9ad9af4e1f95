/* Units that cross the link packed: a piece's copy into a stage, and its expansion into the place.
 *
 *   planned loads:    copy stream --full--> expand stream (the writer of the place) --emptied--> copy stream
 *   loads on demand:  all on the demand stream, through a stage of their own
 *
 * A unit whose image is of no use (repack.c) goes the same way from its master, a stage at a time, and
 * its bytes are expanded as they are. One that the plan lets cross as it is has a pinned master: the copy
 * stream fills the place, behind its last readers, and the expand stream, which is its writer for all
 * others, waits for that.
 *
 * A stage is overwritten behind the expansion that read it last: the copy waits for `emptied`,
 * which is recorded behind it. Where that could not be recorded the load fails, and the next copy
 * waits for the whole stream instead. Lock held. */
#include "load/expand.h"

#include "device/four_bits.h"
#include "load/copy.h"
#include "load/events.h"
#include "load/expand_rate.h"
#include "load/names.h"
#include "load/pieces.h"
#include "load/stages.h"
#include "quant/segment.h"
#include "state/state.h"
#include "telemetry/devtime.h"

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
    uint32_t i = demand ? rt->expand.count - 1 : rt->expand.next_stage++ % (rt->expand.count - 1);
    *out = rt->expand.stages + i * rt->expand.stage_bytes;
    return &rt->expand.stage[i];
}

/* The copy goes behind the expansion that read the stage last. */
static sth_status wait_for_stage(sth_runtime *rt, sthi_stage *stage, sth_stream copies) {
    if (!stage->used) return STH_OK;
    if (stage->unsure) STHI_TRY(STHI_DEV(rt, stream_synchronize, rt->expand.stream));
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
                     (unsigned long long)sthi_segment_end(s), why.message);
}

/* Packed bytes [from, from + bytes) of a unit, which are at `host`, and the segments in them. */
typedef struct arriving {
    const uint8_t *host;
    uint64_t from, bytes, place_bytes;
    const sth_segment *segments;
    uint32_t count;
} arriving;

static sth_status expand_all(sth_runtime *rt, const sthi_unit *u, const arriving *a, sth_devptr stage,
                             sth_devptr place, sth_stream on) {
    sthi_devspan *span = sthi_devspan_begin(rt->device, on, STHI_TRACK_EXPAND, rt->name, u->name, a->place_bytes);
    bool timed = sthi_expand_rate_begin(rt, a->place_bytes, on);
    sth_status rc = STH_OK;
    for (uint32_t i = 0; i < a->count && rc == STH_OK; i++)
        if (expand(rt, &a->segments[i], stage - a->from, place, on) != STH_OK) rc = name_expansion(u, &a->segments[i]);
    if (timed) sthi_expand_rate_end(rt, on);
    sthi_devspan_end(span, on);
    return rc;
}

static sth_status through_stage(sth_runtime *rt, int32_t slot, const arriving *a) {
    const sthi_slot *s = &rt->places.slots[slot];
    const sthi_unit *u = &rt->units[s->unit];
    sth_stream writer = rt->sync[slot].filled_by, copies = sthi_copies_on(rt, slot);
    bool demand = writer == copies;
    sth_devptr at, place = rt->places.extents[s->extent].base + s->offset;
    sthi_stage *stage = choose_stage(rt, demand, &at);
    if (!demand) STHI_TRY(wait_for_stage(rt, stage, copies));
    STHI_TRY(sthi_copy_bytes(rt, s->unit, at, a->host, a->bytes, copies));
    if (demand) return expand_all(rt, u, a, at, place, writer);
    stage->used = stage->unsure = true; /* until it is known when the expansion has run */
    STHI_TRY(STHI_DEV(rt, event_record, stage->full, copies));
    STHI_TRY(STHI_DEV(rt, stream_wait, writer, stage->full));
    sth_status rc = expand_all(rt, u, a, at, place, writer);
    if (STHI_DEV(rt, event_record, stage->emptied, writer) == STH_OK) stage->unsure = false;
    else if (rc == STH_OK) rc = sthi_error_last()->status;
    return rc;
}

static sth_status order_behind(sth_runtime *rt, sth_stream waits, sth_stream on) {
    sth_event *event = NULL;
    STHI_TRY(sthi_event_take(rt, &event));
    sth_status rc = STHI_DEV(rt, event_record, event, on);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_wait, waits, event);
    sthi_event_give(rt, event);
    return rc;
}

/* Expanded from where it stays packed on the device, which the first load after it was written fills. */
static sth_status from_device(sth_runtime *rt, int32_t slot, const arriving *a) {
    const sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    sth_stream writer = rt->sync[slot].filled_by, copies = rt->copies.stream;
    sth_devptr at = u->stays.at + a->from, place = rt->places.extents[s->extent].base + s->offset;
    if (u->stays.here == u->wire_bytes) {
        rt->graph.copy_number++; /* uses have to wait for this one, too */
        return expand_all(rt, u, a, at, place, writer);
    }
    STHI_TRY(order_behind(rt, copies, writer)); /* what it was before may be read still */
    STHI_TRY(sthi_copy_bytes(rt, s->unit, at, a->host, a->bytes, copies));
    STHI_TRY(order_behind(rt, writer, copies));
    return expand_all(rt, u, a, at, place, writer);
}

/* A capture brings what is not there through stages, in each replay. */
static bool stays_on_device(sth_runtime *rt, int32_t slot) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    bool planned = rt->sync[slot].filled_by == rt->expand.stream;
    return u->stays.at && planned && (u->stays.here == u->wire_bytes || rt->graph.state != STHI_GRAPH_CAPTURING);
}

/* Straight into the place. */
static sth_status as_it_is(sth_runtime *rt, int32_t slot, const sthi_piece_of *p) {
    const sthi_slot *s = &rt->places.slots[slot];
    const sthi_unit *u = &rt->units[s->unit];
    sth_stream writer = rt->sync[slot].filled_by, copies = sthi_copies_on(rt, slot);
    sth_devptr place = rt->places.extents[s->extent].base + s->offset;
    if (writer != copies) STHI_TRY(order_behind(rt, copies, writer));
    STHI_TRY(sthi_copy_bytes(rt, s->unit, place + p->begin, u->master + p->begin, p->bytes, copies));
    return writer != copies ? order_behind(rt, writer, copies) : STH_OK;
}

static sth_status from_master(sth_runtime *rt, int32_t slot, const sthi_piece_of *p) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    for (uint64_t at = p->begin, end = p->begin + p->bytes, n; at < end; at += n) {
        n = sthi_min_u64(rt->expand.stage_bytes, end - at);
        sth_segment bytes = {.encoding = STH_TRANSFER_VERBATIM, .place_offset = at, .rows = 1, .cols = n, .codes = at,
                             .scales = STH_TRANSFER_NONE, .zeros = STH_TRANSFER_NONE, .smooth = STH_TRANSFER_NONE};
        STHI_TRY(through_stage(rt, slot, &(arriving){u->master + at, at, n, n, &bytes, 1}));
    }
    return STH_OK;
}

sth_status sthi_expand_piece(sth_runtime *rt, int32_t slot, const sthi_piece_of *p, const uint8_t *from) {
    sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    if (!p->segments) return STH_OK;
    STHI_TRY(sthi_stages_alloc(rt));
    if (u->encoded.plain) return from_master(rt, slot, p);
    arriving a = {from, p->from, p->from_bytes, p->bytes, &u->segments[p->segment], p->segments};
    bool stays = stays_on_device(rt, slot);
    if (!stays && u->encoded.crosses_plain) return as_it_is(rt, slot, p);
    if (!stays) return through_stage(rt, slot, &a);
    bool fills = u->stays.here < u->wire_bytes;
    if (fills && p->begin == 0) u->stays.here = 0;
    STHI_TRY(from_device(rt, slot, &a));
    if (fills) u->stays.here += a.bytes;
    return STH_OK;
}
