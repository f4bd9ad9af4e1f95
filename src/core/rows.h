/* Which rows of tables lie in which slots of a pool. Pure: no I/O, no clock, no lock. docs/experts.md says why.
 *
 * A table has rows of one size; a pool has slots of that size, in one or more views of equal size. A call asks for
 * distinct rows of one table, which then hold leases until the call ends. What is missing gets slots: free ones, else
 * those whose rows have the lowest scores. All tables of a view share its slots. */
#ifndef STHI_CORE_ROWS_H
#define STHI_CORE_ROWS_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/rows.h"

#define STHI_NO_ROW UINT32_MAX

enum { STHI_ROWS_HALF_LIFE = 64 /* calls of its table after which a use counts half */ };

typedef struct sthi_rows_table {
    uint32_t rows, first;   /* how many; the index of the first among those of all tables */
    uint32_t next;          /* table that was asked behind it last time; STHI_NO_ROW: not known */
    uint32_t held;          /* rows in slots now */
    uint64_t calls;         /* its clock */
    uint64_t asked, hits;   /* rows, since it was added */
    uint64_t brought, ahead; /* rows that calls waited for; rows that came before they were asked for */
} sthi_rows_table;

typedef struct sthi_rows_slot {
    uint32_t table, row;    /* STHI_NO_ROW: free, or left by a row that is no more */
    uint32_t leases;
    uint64_t since;         /* number of the load that filled it */
} sthi_rows_slot;

typedef struct sthi_rows_choice { /* a slot that may be taken */
    double worth;
    uint64_t since;
    uint32_t slot;
} sthi_rows_choice;

typedef struct sthi_rows {
    sthi_rows_table *tables;
    uint32_t table_count, table_cap;
    double *scores;         /* [row_count], logarithms to base 2; see rows.c */
    uint32_t *where;        /* [row_count] slot, STHI_NO_ROW: none */
    uint32_t row_count;
    sthi_rows_slot *slots;  /* [slot_count] */
    uint32_t slot_count;
    uint32_t views;         /* 0: no slots */
    sthi_rows_choice *choices; /* [slot_count] scratch */
    uint64_t calls;         /* the highest clock of a table */
    uint64_t loads;
    uint32_t last;          /* table that was asked last */
} sthi_rows;

typedef struct sthi_rows_load { uint32_t row, slot; } sthi_rows_load;

void sthi_rows_init(sthi_rows *r);
void sthi_rows_fini(sthi_rows *r);
/* OUT_OF_HOST_MEMORY. Before slots are laid. */
sth_status sthi_rows_add(sthi_rows *r, uint32_t rows, uint32_t *out_table);
/* The pool has so many slots from now on, all free, in views of at most `view_most`; 0: none. Nothing is leased.
 * OUT_OF_HOST_MEMORY leaves none. */
sth_status sthi_rows_lay(sthi_rows *r, uint32_t slots, uint32_t view_most);
/* Slots that a table sees: [*out_first, *out_first + count). Returns the count. */
uint32_t sthi_rows_view(const sthi_rows *r, uint32_t table, uint32_t *out_first);

/* A call asks for distinct rows of a table, in ascending order, each used by uses[i] of `tokens`. Each gets a lease of
 * its slot (where[]). loads: [count] rows that are missing and their slots, both ascending. False: there are not so
 * many slots that nobody leases, and nothing has changed. */
bool sthi_rows_ask(sthi_rows *r, uint32_t table, const uint32_t *rows, const uint32_t *uses, uint32_t count,
                   uint32_t tokens, sthi_rows_load *loads, uint32_t *out_loads);
/* The call's lease of a slot ends. */
void sthi_rows_end(sthi_rows *r, uint32_t slot);
/* Rows of `table` that are in no slot, `most` at most, get slots that nobody leases. Returns how many; as above. */
uint32_t sthi_rows_ahead(sthi_rows *r, uint32_t table, uint32_t most, sthi_rows_load *loads);
/* A slot has no row any more: its load has failed. */
void sthi_rows_lose(sthi_rows *r, uint32_t slot);
/* No row of the table is in a slot. */
void sthi_rows_forget(sthi_rows *r, uint32_t table);
static inline uint32_t sthi_rows_slot_of(const sthi_rows *r, uint32_t table, uint32_t row) {
    return r->where[r->tables[table].first + row];
}
/* False with the reason where the state contradicts itself. */
bool sthi_rows_sound(const sthi_rows *r, const char **out_why);

/* A pool's bytes and slots, and rows that tokens use: stagehand/rows.h says what of. */
uint64_t sthi_rows_bytes(const sth_rows_budget *b, uint32_t slots);
uint32_t sthi_rows_slots(const sth_rows_budget *b, uint64_t bytes);
uint64_t sthi_rows_smallest(const sth_rows_budget *b, uint32_t slots);
double sthi_rows_expected(uint32_t rows, uint32_t each, uint32_t tokens);
#endif
