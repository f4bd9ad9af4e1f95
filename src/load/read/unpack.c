/* Packed units, expanded on the host: where the device does not, and to compare (verify.c). Lock
 * not held. */
#include "load/read/unpack.h"

#include <string.h>

#include "base/memory.h"
#include "load/pieces.h"
#include "load/read/from_store.h"
#include "quant/segment.h"
#include "state/state.h"

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
    if (!packed) return sthi_no_memory(u->name, "expanding unit '%s'", u->name);
    sth_status rc = read_packed(u, from, stop, packed);
    if (rc == STH_OK) sthi_segment_decode(s, packed, from, begin, end, out);
    sthi_free(packed);
    return rc;
}

sth_status sthi_expand_on_host(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *out) {
    if (u->encoded.plain) memcpy(out, u->master + begin, bytes);
    if (u->encoded.plain) return STH_OK;
    for (uint32_t i = 0; i < u->segment_count; i++) {
        const sth_segment *s = &u->segments[i];
        uint64_t from = sthi_max_u64(begin, s->place_offset), stop = sthi_min_u64(begin + bytes, sthi_segment_end(s));
        if (from >= stop) continue;
        STHI_TRY(expand_part(u, s, from - s->place_offset, stop - s->place_offset, out + (from - begin)));
    }
    return STH_OK;
}
