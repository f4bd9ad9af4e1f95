/* Pieces: what is copied at once. Of a plain unit a chunk; of a packed one whole segments that fit
 * a stage. Pure. Lock held. */
#include "load/pieces.h"

#include "quant/segment.h"
#include "state/state.h"

bool sthi_packed_on_link(const sth_runtime *rt, const sthi_unit *u) { return u->segment_count && rt->expand.on; }

uint64_t sthi_wire_bytes_packed(const sth_runtime *rt, const sthi_unit *u) {
    return sthi_packed_on_link(rt, u) && !u->encoded.plain ? u->wire_bytes : u->bytes;
}

uint64_t sthi_source_bytes(const sth_runtime *rt, const sthi_unit *u) {
    return u->encoded.crosses_plain ? u->bytes : sthi_wire_bytes_packed(rt, u);
}

bool sthi_may_cross_plain(const sth_runtime *rt, const sthi_unit *u) {
    return (u->flags & STH_UNIT_EITHER) && u->master && sthi_packed_on_link(rt, u) && !u->encoded.plain;
}

sthi_piece_of sthi_next_piece(const sth_runtime *rt, const sthi_unit *u, uint64_t begin) {
    uint64_t bytes = sthi_min_u64(rt->copies.chunk, u->bytes - begin);
    if (!sthi_packed_on_link(rt, u))
        return (sthi_piece_of){.begin = begin, .bytes = bytes, .from = begin, .from_bytes = bytes};
    uint32_t first = 0, last, low = 0, high = u->segment_count;
    while (low < high) { /* the first segment that ends behind `begin` */
        uint32_t middle = low + (high - low) / 2;
        if (sthi_segment_end(&u->segments[middle]) <= begin) low = middle + 1;
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
        if (next_end - p.from > rt->expand.stage_bytes) break;
    }
    p.from_bytes = end - p.from;
    p.segments = last - first;
    p.bytes = (last < u->segment_count ? u->segments[last].place_offset : u->bytes) - begin;
    return p;
}
