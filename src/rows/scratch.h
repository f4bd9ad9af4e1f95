/* Scratch for the distinct rows of a call. */
#ifndef STHI_ROWS_SCRATCH_H
#define STHI_ROWS_SCRATCH_H
#include "core/rows.h"

typedef struct sthi_rows_scratch { /* all zero: none */
    uint32_t largest;         /* rows of the largest table */
    uint32_t *asked, *times;  /* [largest] distinct rows; their uses */
    sthi_rows_load *loads;    /* [largest] */
} sthi_rows_scratch;

/* For a table of `rows` rows. OUT_OF_HOST_MEMORY: as large as it was. */
sth_status sthi_rows_scratch_grow(sthi_rows_scratch *scratch, uint32_t rows);
void sthi_rows_scratch_free(sthi_rows_scratch *scratch);
#endif
