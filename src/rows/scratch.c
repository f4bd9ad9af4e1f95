/* Scratch of a call. See scratch.h. No lock. */
#include "rows/scratch.h"

#include "base/error.h"
#include "base/memory.h"

sth_status sthi_rows_scratch_grow(sthi_rows_scratch *s, uint32_t rows) {
    if (rows <= s->largest) return STH_OK;
    uint32_t *asked = sthi_realloc(s->asked, rows, sizeof *asked);
    if (asked) s->asked = asked;
    uint32_t *times = sthi_realloc(s->times, rows, sizeof *times);
    if (times) s->times = times;
    sthi_rows_load *loads = sthi_realloc(s->loads, rows, sizeof *loads);
    if (loads) s->loads = loads;
    if (!asked || !times || !loads) return sthi_no_memory("rows", "a table of %u rows", rows);
    s->largest = rows;
    return STH_OK;
}

void sthi_rows_scratch_free(sthi_rows_scratch *s) {
    sthi_free(s->asked);
    sthi_free(s->times);
    sthi_free(s->loads);
    *s = (sthi_rows_scratch){0};
}
