/* The best low-rank part of a matrix, nearly: what v3 takes out of a weight before it rounds the rest. */
#ifndef STHI_QUANT_LOWRANK_H
#define STHI_QUANT_LOWRANK_H
#include <stdbool.h>
#include <stdint.h>

#include "base/workers.h"

#define STHI_LOWRANK_EXTRA 16u      /* columns of the iteration beyond the rank */
#define STHI_LOWRANK_ITERATIONS 6u
#define STHI_LOWRANK_PRODUCTS (2 * STHI_LOWRANK_ITERATIONS + 2) /* passes over the matrix */

/* up [rows, rank] = U S and down [columns, rank] = V as bfloat16 bits, of the first `rank` singular values of
 * w [rows, columns], which is finite. `rank` + 16 is a multiple of 8 and at most both extents. The start is made of
 * `seed`; the same arguments give the same bits everywhere. `passed` (may be NULL) is called after each pass over the
 * matrix and stops the work by another status than OK.
 * Memory: 48 columns of float64 for each row and each column. */
sth_status sthi_lowrank(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns, uint32_t rank,
                        uint64_t seed, sth_status (*passed)(void *context), void *context, uint16_t *up,
                        uint16_t *down);
#endif
