/* Sources: from a unit's file ranges, or its image in pageable memory, to the bytes of a slab. Opens each file that
 * units stream from once more for this runtime, in the way that suits it (store/access.h), and keeps the fetchers that
 * threads read with.
 *
 * The bytes of a chunk begin `shift` bytes into their slab: there the largest piece of the chunk has the remainder
 * that direct reads want, so that it needs no second copy. Slabs have room for that (staging.c).
 * Lock: rt->lock for the list of fetchers; it is not held while reading. */
#include "load/read/source.h"

#include <string.h>

#include "base/invariant.h"
#include "base/memory.h"
#include "load/names.h"
#include "load/read/unpack.h"
#include "state/state.h"

enum { BATCH = 64 };

sth_status sthi_sources_open(sth_runtime *rt) {
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        const sthi_unit *u = &rt->units[i];
        if (!u->checkpoint) continue;
        for (uint32_t k = 0; k < u->range_count; k++)
            if (u->ranges[k].file >= u->checkpoint->file_count)
                return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, u->name, "unit '%s': there is no file %u", u->name,
                                 u->ranges[k].file);
        STHI_TRY(sthi_opened_add(&rt->sources.opened, u->checkpoint, u->ranges, u->range_count));
    }
    return STH_OK;
}

/* The n-th of the files that are read. */
static sthi_access *nth_file(const sth_runtime *rt, uint32_t n) { return sthi_opened_nth(&rt->sources.opened, n); }

uint32_t sthi_sources_count(const sth_runtime *rt) {
    uint32_t n = 0;
    while (nth_file(rt, n)) n++;
    return n;
}

bool sthi_sources_describe(const sth_runtime *rt, uint32_t n, sth_file_way *out) {
    const sthi_access *a = nth_file(rt, n);
    if (a) sthi_access_describe(a, out);
    return a != NULL;
}

bool sthi_sources_use(const sth_runtime *rt, sth_read_way way) {
    const sthi_access *a;
    for (uint32_t n = 0; (a = nth_file(rt, n)); n++)
        if (atomic_load(&a->way) == (int)way) return true;
    return false;
}

uint32_t sthi_sources_align(const sth_runtime *rt) {
    uint32_t most = 0;
    const sthi_access *a;
    for (uint32_t n = 0; (a = nth_file(rt, n)); n++)
        if (a->direct_fd >= 0 && a->align > most) most = a->align;
    return most;
}

void sthi_sources_settle(sth_runtime *rt) {
    sthi_access *a;
    uint64_t bytes = 0, cached = 0;
    for (uint32_t n = 0; (a = nth_file(rt, n)); n++) {
        sthi_access_settle(a);
        bytes += a->settled_bytes;
        cached += a->settled_cached;
    }
    rt->current.file_bytes = (double)(bytes - rt->stats.file_bytes);
    rt->current.file_cached_bytes = (double)(cached - rt->stats.file_cached_bytes);
    rt->stats.file_bytes = bytes;
    rt->stats.file_cached_bytes = cached;
}

void sthi_sources_close(sth_runtime *rt) {
    sthi_opened_close(&rt->sources.opened);
    while (rt->sources.fetcher_count) sthi_fetcher_destroy(rt->sources.fetchers[--rt->sources.fetcher_count]);
}

sthi_fetcher *sthi_fetcher_take(sth_runtime *rt) {
    return rt->sources.fetcher_count ? rt->sources.fetchers[--rt->sources.fetcher_count] : sthi_fetcher_create();
}

void sthi_fetcher_give(sth_runtime *rt, sthi_fetcher *f) {
    sthi_sources *s = &rt->sources;
    if (s->fetcher_count < STHI_FETCHER_CAP && !rt->shut) s->fetchers[s->fetcher_count++] = f;
    else sthi_fetcher_destroy(f);
}

/* ---- one chunk */

/* The part of a range that lies in [begin, end) of the place. */
typedef struct part {
    uint64_t from, end, file_offset;
} part;

static bool part_of(const sth_file_range *r, uint64_t begin, uint64_t end, part *out) {
    out->from = sthi_max_u64(r->place_offset, begin);
    out->end = sthi_min_u64(r->place_offset + r->bytes, end);
    out->file_offset = r->file_offset + (out->from - r->place_offset);
    return out->from < out->end;
}

/* Where the chunk begins in the slab, which has `room` bytes from `slab` on. */
static uint32_t choose_shift(const sthi_unit *u, const sthi_access *files, uint64_t begin, uint64_t end,
                             const uint8_t *slab, uint64_t room) {
    uint64_t most = 0, shift = 0, align = 1;
    for (uint32_t i = 0; i < u->range_count; i++) {
        const sthi_access *a = &files[u->ranges[i].file];
        part p;
        if (!part_of(&u->ranges[i], begin, end, &p) || p.end - p.from <= most || !sthi_access_is_direct(a)) continue;
        most = p.end - p.from;
        align = a->align;
        shift = (p.file_offset - ((uint64_t)(uintptr_t)slab + (p.from - begin))) % align;
        /* The block that the piece begins in is in the slab as a whole. */
        if (p.from == begin && shift < p.file_offset % align) shift += align;
    }
    return shift + (end - begin) + align <= room ? (uint32_t)shift : 0;
}

/* What is next to [from, end) in the chunk is free up to the next block, or the slab ends there. */
static void mark_free(const sthi_unit *u, uint32_t i, uint64_t begin, uint64_t end, const part *p, uint64_t before,
                      uint64_t behind, sthi_piece *piece) {
    uint64_t align = piece->access->align;
    part other;
    bool left = i > 0 && part_of(&u->ranges[i - 1], begin, end, &other);
    uint64_t gap = left ? p->from - sthi_min_u64(other.end, p->from) : before + (p->from - begin);
    piece->free_before = gap >= align || (!left && gap >= p->file_offset % align);
    bool right = i + 1 < u->range_count && part_of(&u->ranges[i + 1], begin, end, &other);
    gap = right ? sthi_max_u64(other.from, p->end) - p->end : behind + (end - p->end);
    piece->free_behind = gap >= align;
}

/* Bytes of the image that come from no file. */
static void clear_gaps(const sthi_unit *u, uint64_t begin, uint64_t end, uint8_t *image) {
    uint64_t at = begin;
    for (uint32_t i = 0; i < u->range_count; i++) {
        part p;
        if (!part_of(&u->ranges[i], begin, end, &p)) continue;
        if (p.from > at) memset(image + (at - begin), 0, p.from - at);
        at = sthi_max_u64(at, p.end);
    }
    if (at < end) memset(image + (at - begin), 0, end - at);
}

static sth_status read_pieces(const sthi_unit *u, sthi_fetcher *f, const sthi_piece *pieces, const uint32_t *ranges,
                              uint32_t count) {
    uint32_t piece;
    uint64_t offset;
    if (!count || sthi_fetch(f, pieces, count, &piece, &offset) == STH_OK) return STH_OK;
    return sthi_name_failure(u, u->ranges[ranges[piece]].file, offset);
}

static sth_status read_file(sth_runtime *rt, const sthi_unit *u, sthi_fetcher *f, uint64_t begin, uint64_t bytes,
                            uint8_t *slab, uint32_t *out_shift) {
    sthi_access *files = sthi_opened_files(&rt->sources.opened, u->checkpoint);
    uint64_t end = begin + bytes, room = sthi_pool_slab_bytes(rt->slabs.pool);
    uint32_t shift = choose_shift(u, files, begin, end, slab, room), count = 0, ranges[BATCH];
    sthi_piece pieces[BATCH];
    uint8_t *image = slab + shift;
    STHI_INVARIANT(shift + bytes <= room);
    for (uint32_t i = 0; i < u->range_count; i++) {
        part p;
        if (!part_of(&u->ranges[i], begin, end, &p)) continue;
        sthi_piece *piece = &pieces[count];
        *piece = (sthi_piece){.access = &files[u->ranges[i].file], .offset = p.file_offset,
                              .bytes = p.end - p.from, .to = image + (p.from - begin)};
        mark_free(u, i, begin, end, &p, shift, room - shift - bytes, piece);
        ranges[count++] = i;
        if (count < BATCH) continue;
        STHI_TRY(read_pieces(u, f, pieces, ranges, count));
        count = 0;
    }
    STHI_TRY(read_pieces(u, f, pieces, ranges, count));
    clear_gaps(u, begin, end, image);
    *out_shift = shift;
    return STH_OK;
}

static void read_image(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *to) {
    uint64_t there = begin < u->host_bytes ? sthi_min_u64(bytes, u->host_bytes - begin) : 0;
    memcpy(to, u->host + begin, there);
    memset(to + there, 0, bytes - there);
}

sth_status sthi_read_source(sth_runtime *rt, uint32_t unit, sthi_fetcher *f, uint64_t begin, uint64_t bytes,
                            uint8_t *slab, uint32_t *out_shift) {
    const sthi_unit *u = &rt->units[unit];
    if (f) return read_file(rt, u, f, begin, bytes, slab, out_shift);
    *out_shift = 0;
    if (u->segments && !rt->expand.on) return sthi_expand_on_host(u, begin, bytes, slab);
    read_image(u, begin, bytes, slab);
    return STH_OK;
}
