/* Rows and slots: hits, slots for what is missing, scores.
 *
 * A row's score is the sum of its uses, each halved after HALF_LIFE calls of its table. Of a sum whose terms all halve
 * at one pace only the logarithm at time 0 is kept: log2(sum of w * 2^(t / HALF_LIFE)); its worth now is that less now
 * / HALF_LIFE, so nothing is to be updated as time goes by. A table's clock is its calls, and never further behind the
 * others' than one: a table that is called no more ages with them.
 *
 * Invariants (sthi_rows_sound): where[] and slots are inverse to each other; a slot lies in its table's view. */
#include "core/rows.h"

#include <math.h>
#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"

void sthi_rows_init(sthi_rows *r) { *r = (sthi_rows){.last = STHI_NO_ROW}; }

void sthi_rows_fini(sthi_rows *r) {
    sthi_free(r->tables);
    sthi_free(r->scores);
    sthi_free(r->where);
    sthi_free(r->slots);
    sthi_free(r->choices);
    sthi_rows_init(r);
}

sth_status sthi_rows_add(sthi_rows *r, uint32_t rows, uint32_t *out_table) {
    STHI_INVARIANT(rows && !r->views);
    if (r->table_count == r->table_cap) {
        uint32_t cap = r->table_cap ? 2 * r->table_cap : 16;
        sthi_rows_table *grown = sthi_realloc(r->tables, cap, sizeof *grown);
        if (!grown) return sthi_no_memory("rows", "a table of rows");
        r->tables = grown;
        r->table_cap = cap;
    }
    uint32_t all = r->row_count + rows;
    double *scores = sthi_realloc(r->scores, all, sizeof *scores);
    if (scores) r->scores = scores;
    uint32_t *where = sthi_realloc(r->where, all, sizeof *where);
    if (where) r->where = where;
    if (!scores || !where || all < rows) return sthi_no_memory("rows", "a table of %u rows", rows);
    for (uint32_t i = r->row_count; i < all; i++) {
        scores[i] = -INFINITY;
        where[i] = STHI_NO_ROW;
    }
    *out_table = r->table_count;
    r->tables[r->table_count++] = (sthi_rows_table){.rows = rows, .first = r->row_count, .next = STHI_NO_ROW};
    r->row_count = all;
    return STH_OK;
}

sth_status sthi_rows_lay(sthi_rows *r, uint32_t slots, uint32_t view_most) {
    for (uint32_t i = 0; i < r->row_count; i++) r->where[i] = STHI_NO_ROW;
    for (uint32_t t = 0; t < r->table_count; t++) r->tables[t].held = 0;
    sthi_free(r->slots);
    sthi_free(r->choices);
    r->slot_count = r->views = 0;
    r->slots = slots ? sthi_alloc(slots * sizeof *r->slots) : NULL;
    r->choices = slots ? sthi_alloc(slots * sizeof *r->choices) : NULL;
    if (slots && (!r->slots || !r->choices)) return sthi_no_memory("rows", "records of %u slots", slots);
    for (uint32_t i = 0; i < slots; i++) r->slots[i] = (sthi_rows_slot){.table = STHI_NO_ROW, .row = STHI_NO_ROW};
    r->slot_count = slots;
    r->views = slots ? (slots - 1) / view_most + 1 : 0;
    return STH_OK;
}

uint32_t sthi_rows_view(const sthi_rows *r, uint32_t table, uint32_t *out_first) {
    STHI_INVARIANT(r->views);
    uint32_t each = r->slot_count / r->views;
    *out_first = table % r->views * each;
    return each;
}

/* ---- what a row is worth */

/* Its calls, or, where others are further, one less than theirs: in a pass it comes behind them. */
static uint64_t clock_of(const sthi_rows *r, const sthi_rows_table *t) {
    return r->calls > t->calls + 1 ? r->calls - 1 : t->calls;
}

static double worth(const sthi_rows *r, const sthi_rows_slot *s) {
    if (s->row == STHI_NO_ROW) return -INFINITY;
    const sthi_rows_table *t = &r->tables[s->table];
    return r->scores[t->first + s->row] - (double)clock_of(r, t) / STHI_ROWS_HALF_LIFE;
}

static void used(sthi_rows *r, uint32_t table, uint32_t row, double share) {
    const sthi_rows_table *t = &r->tables[table];
    double *score = &r->scores[t->first + row];
    double now = log2(share) + (double)t->calls / STHI_ROWS_HALF_LIFE;
    double high = fmax(*score, now), low = fmin(*score, now);
    *score = high + log2(1 + exp2(low - high));
}

/* ---- slots that may be taken */

/* Whether a is taken before b: what is worth less; then what came last, free slots in order. */
static bool before(const sthi_rows_choice *a, const sthi_rows_choice *b) {
    if (a->worth != b->worth) return a->worth < b->worth;
    if (a->since != b->since) return a->since > b->since;
    return a->slot < b->slot;
}

static void sift(sthi_rows_choice *heap, uint32_t count, uint32_t i) {
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= count) return;
        if (child + 1 < count && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &heap[i])) return;
        sthi_rows_choice moved = heap[i];
        heap[i] = heap[child];
        heap[child] = moved;
        i = child;
    }
}

/* Slots of the table's view that nobody leases, as a heap. A free one comes before all others. */
static uint32_t choices(sthi_rows *r, uint32_t table) {
    uint32_t first, each = sthi_rows_view(r, table, &first), count = 0;
    for (uint32_t i = first; i < first + each; i++) {
        const sthi_rows_slot *s = &r->slots[i];
        if (s->leases) continue;
        bool free_one = s->row == STHI_NO_ROW;
        r->choices[count++] = (sthi_rows_choice){worth(r, s), free_one ? UINT64_MAX : s->since, i};
    }
    for (uint32_t i = count / 2; i-- > 0;) sift(r->choices, count, i);
    return count;
}

/* Takes the first one: it stands behind the heap then. */
static void take(sthi_rows *r, uint32_t *count) {
    sthi_rows_choice first = r->choices[0];
    r->choices[0] = r->choices[--*count];
    r->choices[*count] = first;
    sift(r->choices, *count, 0);
}

static int by_slot(const void *left, const void *right) {
    uint32_t a = ((const sthi_rows_choice *)left)->slot, b = ((const sthi_rows_choice *)right)->slot;
    return a < b ? -1 : a > b;
}

static void empty_slot(sthi_rows *r, uint32_t slot) {
    sthi_rows_slot *s = &r->slots[slot];
    if (s->row == STHI_NO_ROW) return;
    r->where[r->tables[s->table].first + s->row] = STHI_NO_ROW;
    r->tables[s->table].held--;
    s->table = s->row = STHI_NO_ROW;
}

/* The rows in `loads` get slots of the heap: both ascend, so that neighbors may be copied at once. */
static void place(sthi_rows *r, uint32_t table, sthi_rows_load *loads, uint32_t count, uint32_t there) {
    sthi_rows_table *t = &r->tables[table];
    for (uint32_t i = 0; i < count; i++) take(r, &there);
    const sthi_rows_choice *taken = &r->choices[there];
    qsort(&r->choices[there], count, sizeof *taken, by_slot);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = loads[i].slot = taken[i].slot, row = loads[i].row;
        empty_slot(r, slot);
        r->slots[slot] = (sthi_rows_slot){.table = table, .row = row, .since = ++r->loads};
        r->where[t->first + row] = slot;
    }
    t->held += count;
}

/* ---- calls */

/* Leases what is there, and lists what is missing. */
static uint32_t lease_hits(sthi_rows *r, uint32_t table, const uint32_t *rows, uint32_t count, sthi_rows_load *loads) {
    uint32_t missing = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = sthi_rows_slot_of(r, table, rows[i]);
        if (slot == STHI_NO_ROW) loads[missing++].row = rows[i];
        else r->slots[slot].leases++;
    }
    return missing;
}

static void note_order(sthi_rows *r, uint32_t table) {
    if (r->last != STHI_NO_ROW && r->last != table) r->tables[r->last].next = table;
    r->last = table;
}

bool sthi_rows_ask(sthi_rows *r, uint32_t table, const uint32_t *rows, const uint32_t *uses, uint32_t count,
                   uint32_t tokens, sthi_rows_load *loads, uint32_t *out_loads) {
    sthi_rows_table *t = &r->tables[table];
    uint32_t missing = lease_hits(r, table, rows, count, loads), there = missing ? choices(r, table) : 0;
    if (missing > there) {
        for (uint32_t i = 0; i < count; i++) {
            uint32_t slot = sthi_rows_slot_of(r, table, rows[i]);
            if (slot != STHI_NO_ROW) r->slots[slot].leases--;
        }
        return false;
    }
    if (missing) place(r, table, loads, missing, there);
    for (uint32_t i = 0; i < missing; i++) r->slots[loads[i].slot].leases++;
    note_order(r, table);
    t->calls = t->calls + 1 > r->calls ? t->calls + 1 : r->calls;
    r->calls = t->calls;
    for (uint32_t i = 0; i < count; i++) used(r, table, rows[i], (double)uses[i] / tokens);
    t->asked += count;
    t->hits += count - missing;
    t->brought += missing;
    *out_loads = missing;
    return true;
}

void sthi_rows_end(sthi_rows *r, uint32_t slot) {
    STHI_INVARIANT(slot < r->slot_count && r->slots[slot].leases);
    r->slots[slot].leases--;
}

uint32_t sthi_rows_ahead(sthi_rows *r, uint32_t table, uint32_t most, sthi_rows_load *loads) {
    sthi_rows_table *t = &r->tables[table];
    uint32_t missing = 0;
    for (uint32_t row = 0; row < t->rows && missing < most; row++)
        if (sthi_rows_slot_of(r, table, row) == STHI_NO_ROW) loads[missing++].row = row;
    if (!missing) return 0;
    /* Rows of the table itself are about to be asked for, and are left where they are. */
    uint32_t there = choices(r, table), others = 0;
    for (uint32_t i = 0; i < there; i++)
        if (r->slots[r->choices[i].slot].table != table) r->choices[others++] = r->choices[i];
    for (uint32_t i = others / 2; i-- > 0;) sift(r->choices, others, i);
    if (missing > others) missing = others;
    place(r, table, loads, missing, others);
    t->ahead += missing;
    return missing;
}

void sthi_rows_lose(sthi_rows *r, uint32_t slot) { empty_slot(r, slot); }

void sthi_rows_forget(sthi_rows *r, uint32_t table) {
    for (uint32_t i = 0; i < r->slot_count; i++)
        if (r->slots[i].table == table) empty_slot(r, i);
}

bool sthi_rows_sound(const sthi_rows *r, const char **out_why) {
    uint32_t held = 0, in_slots = 0;
    for (uint32_t t = 0; t < r->table_count; t++) {
        uint32_t first = 0, each = r->views ? sthi_rows_view(r, t, &first) : 0, here = 0;
        for (uint32_t row = 0; row < r->tables[t].rows; row++) {
            uint32_t slot = sthi_rows_slot_of(r, t, row);
            if (slot == STHI_NO_ROW) continue;
            here++;
            *out_why = "a row is in a slot that has another";
            if (slot >= r->slot_count || r->slots[slot].table != t || r->slots[slot].row != row) return false;
            *out_why = "a row is outside of its table's view";
            if (slot < first || slot >= first + each) return false;
        }
        *out_why = "a table's count of rows in slots is wrong";
        if (here != r->tables[t].held) return false;
        held += here;
    }
    for (uint32_t i = 0; i < r->slot_count; i++) in_slots += r->slots[i].row != STHI_NO_ROW;
    *out_why = "a slot has a row that is elsewhere";
    return held == in_slots;
}

/* ---- what is the pool's */

static uint64_t row_bytes(const sth_rows_budget *b) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < b->part_count; i++) bytes = sthi_plus(bytes, b->part_bytes[i]);
    return bytes;
}

/* Bytes behind the slots of all parts, at most. */
static uint64_t padding(const sth_rows_budget *b) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < b->part_count; i++) bytes += b->part_bytes[i] % STHI_ALIGN ? STHI_ALIGN : 0;
    return bytes;
}

uint64_t sthi_rows_bytes(const sth_rows_budget *b, uint32_t slots) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < b->part_count; i++) {
        uint64_t part;
        bool fits = sthi_round_up(sthi_times(b->part_bytes[i], slots), STHI_ALIGN, &part);
        bytes = sthi_plus(bytes, fits ? part : UINT64_MAX);
    }
    return bytes;
}

/* Rows in what is left of `bytes` beside all else and so many bytes of units. */
static uint64_t rows_beside(const sth_rows_budget *b, uint64_t bytes, uint64_t units) {
    uint64_t beside = sthi_plus(sthi_plus(b->stays_bytes, padding(b)), units);
    return bytes > beside ? (bytes - beside) / row_bytes(b) : 0;
}

uint32_t sthi_rows_slots(const sth_rows_budget *b, uint64_t bytes) {
    uint64_t slots = sthi_max_u64(rows_beside(b, bytes, b->units_all), b->rows_largest);
    slots = sthi_min_u64(sthi_min_u64(slots, rows_beside(b, bytes, b->units_least)), b->rows);
    return (uint32_t)sthi_max_u64(slots, b->rows_token);
}

uint64_t sthi_rows_smallest(const sth_rows_budget *b, uint32_t slots) {
    uint64_t beside = sthi_plus(sthi_plus(b->stays_bytes, b->units_least), padding(b));
    return sthi_plus(beside, sthi_times(row_bytes(b), slots));
}

double sthi_rows_expected(uint32_t rows, uint32_t each, uint32_t tokens) {
    return rows * (1 - pow(1 - (double)each / rows, tokens));
}
