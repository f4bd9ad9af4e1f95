/* A row of up x down^T. */
#ifndef STHI_QUANT_RANK_ROW_H
#define STHI_QUANT_RANK_ROW_H
#include <stdint.h>

/* sum[0..in) = the sum over r = 0, 1, ... of up[r] down[r][0..in), in float32. up: BF16 [rank], at any address. down:
 * [rank, in]. */
void sthi_rank_row(const void *up, const float *down, uint64_t rank, uint64_t in, float *sum);
#endif
