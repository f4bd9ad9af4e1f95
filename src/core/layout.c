/* Finds a layout: what lies somewhere stays, the largest of the rest goes first into the smallest hole that holds it.
 * Where the extents that are kept, with what fits into no hole, take more than the room, those that waste most for what
 * they hold are given up, and what lay in them is laid out anew: the holes of all extents together are never less than
 * what is missing. No locks. */
#include "core/layout.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "stagehand/plan.h"

typedef struct piece {
    uint32_t extent, unit;
    uint64_t offset, bytes;
} piece;

typedef struct finder {
    sthi_layout *l;
    piece *placed, *loose; /* [unit_count] units that lie somewhere, and those that do not */
    piece *holes;          /* [unit_count + extent_count] */
    piece *fits;           /* [unit_count] loose units in holes */
    uint64_t *wasted;      /* [extent_count] bytes of holes that nothing fills */
    uint32_t placed_count, loose_count, hole_count, fit_count;
    uint64_t kept, rest;   /* bytes of extents that stay, and of units that fit nowhere */
} finder;

static int by_place(const void *a, const void *b) {
    const piece *x = a, *y = b;
    if (x->extent != y->extent) return x->extent < y->extent ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* The largest first, and of equal ones the first. */
static int by_size(const void *a, const void *b) {
    const piece *x = a, *y = b;
    if (x->bytes != y->bytes) return x->bytes > y->bytes ? -1 : 1;
    return x->unit < y->unit ? -1 : x->unit > y->unit;
}

static void sort_units(finder *f) {
    f->placed_count = f->loose_count = 0;
    for (uint32_t i = 0; i < f->l->unit_count; i++) {
        const sthi_laid *u = &f->l->units[i];
        piece p = {.extent = u->extent, .unit = i, .offset = u->offset, .bytes = u->bytes};
        if (u->extent == STH_NONE) f->loose[f->loose_count++] = p;
        else f->placed[f->placed_count++] = p;
    }
    if (f->placed_count) qsort(f->placed, f->placed_count, sizeof *f->placed, by_place);
    if (f->loose_count) qsort(f->loose, f->loose_count, sizeof *f->loose, by_size);
}

static void add_hole(finder *f, uint32_t extent, uint64_t from, uint64_t to) {
    STHI_INVARIANT(from <= to);
    if (from < to) f->holes[f->hole_count++] = (piece){.extent = extent, .offset = from, .bytes = to - from};
}

/* Extents in which nothing stays go. */
static void list_holes(finder *f) {
    sthi_layout *l = f->l;
    uint32_t next = 0;
    f->hole_count = 0;
    f->kept = 0;
    for (uint32_t x = 0; x < l->extent_count; x++) {
        uint64_t at = 0;
        uint32_t first = next;
        for (; next < f->placed_count && f->placed[next].extent == x; next++) {
            add_hole(f, x, at, f->placed[next].offset);
            at = f->placed[next].offset + f->placed[next].bytes;
        }
        if (next == first) l->extents[x] = 0;
        else add_hole(f, x, at, l->extents[x]);
        f->kept += l->extents[x];
    }
}

static piece *smallest_hole(finder *f, uint64_t bytes) {
    piece *best = NULL;
    for (uint32_t h = 0; h < f->hole_count; h++)
        if (f->holes[h].bytes >= bytes && (!best || f->holes[h].bytes < best->bytes)) best = &f->holes[h];
    return best;
}

static void fill_holes(finder *f) {
    f->fit_count = 0;
    f->rest = 0;
    for (uint32_t i = 0; i < f->loose_count; i++) {
        piece *hole = smallest_hole(f, f->loose[i].bytes);
        if (!hole) {
            f->rest += f->loose[i].bytes;
            continue;
        }
        f->fits[f->fit_count++] = (piece){hole->extent, f->loose[i].unit, hole->offset, f->loose[i].bytes};
        hole->offset += f->loose[i].bytes;
        hole->bytes -= f->loose[i].bytes;
    }
    for (uint32_t x = 0; x < f->l->extent_count; x++) f->wasted[x] = 0;
    for (uint32_t h = 0; h < f->hole_count; h++) f->wasted[f->holes[h].extent] += f->holes[h].bytes;
}

/* The extent of which the largest share is wasted. */
static uint32_t worst_extent(const finder *f) {
    uint32_t worst = STH_NONE;
    double most = 0;
    for (uint32_t x = 0; x < f->l->extent_count; x++) {
        double share = f->l->extents[x] ? (double)f->wasted[x] / (double)f->l->extents[x] : 0;
        if (share > most) most = share, worst = x;
    }
    return worst;
}

static void give_up(finder *f, uint64_t missing) {
    while (missing) {
        uint32_t x = worst_extent(f);
        STHI_INVARIANT(x != STH_NONE);
        missing -= f->wasted[x] < missing ? f->wasted[x] : missing;
        f->l->extents[x] = f->wasted[x] = 0;
        for (uint32_t i = 0; i < f->placed_count; i++)
            if (f->placed[i].extent == x) f->l->units[f->placed[i].unit].extent = STH_NONE;
    }
}

/* Units that fit into no hole, in their order. */
static void add_extents(sthi_layout *l) {
    uint64_t at = 0;
    l->new_count = 0;
    for (uint32_t i = 0; i < l->unit_count; i++) {
        sthi_laid *u = &l->units[i];
        if (u->extent != STH_NONE) continue;
        if (!l->new_count || at + u->bytes > l->target) {
            l->extents[l->extent_count + l->new_count++] = 0;
            at = 0;
        }
        u->extent = l->extent_count + l->new_count - 1;
        u->offset = at;
        l->extents[u->extent] = at += u->bytes;
    }
}

static void find(finder *f) {
    for (;;) {
        sort_units(f);
        list_holes(f);
        fill_holes(f);
        if (f->kept + f->rest <= f->l->room) break;
        give_up(f, f->kept + f->rest - f->l->room);
    }
    for (uint32_t i = 0; i < f->fit_count; i++) {
        f->l->units[f->fits[i].unit].extent = f->fits[i].extent;
        f->l->units[f->fits[i].unit].offset = f->fits[i].offset;
    }
    add_extents(f->l);
}

static void fini(finder *f) {
    sthi_free(f->placed);
    sthi_free(f->loose);
    sthi_free(f->holes);
    sthi_free(f->fits);
    sthi_free(f->wasted);
}

sth_status sthi_layout_find(sthi_layout *l) {
    finder f = {.l = l};
    f.placed = sthi_zalloc(l->unit_count, sizeof *f.placed);
    f.loose = sthi_zalloc(l->unit_count, sizeof *f.loose);
    f.holes = sthi_zalloc((size_t)l->unit_count + l->extent_count, sizeof *f.holes);
    f.fits = sthi_zalloc(l->unit_count, sizeof *f.fits);
    f.wasted = sthi_zalloc(l->extent_count, sizeof *f.wasted);
    bool ok = f.placed && f.loose && f.holes && f.fits && f.wasted;
    if (ok) find(&f);
    fini(&f);
    return ok ? STH_OK : sthi_no_memory(NULL, "a layout of %u units; free host memory", l->unit_count);
}
