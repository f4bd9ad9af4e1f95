/* A row of up x down^T. */
#ifndef STHI_QUANT_RANK_ROW_H
#define STHI_QUANT_RANK_ROW_H
#include <stdint.h>

/* sum[0..in) += up[r] down[r][0..in) for r = 0, 1, ..., in float32, one after the other. up: BF16 [rank], at any
 * address.
 * down: [rank, in]. */
void sthi_rank_add(const void *up, const float *down, uint64_t rank, uint64_t in, float *sum);
/* The same from 0 on: a whole row. */
void sthi_rank_row(const void *up, const float *down, uint64_t rank, uint64_t in, float *sum);
#endif
