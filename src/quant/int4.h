/* int4 codes in groups, with the scale that loses least. */
#ifndef STHI_QUANT_INT4_H
#define STHI_QUANT_INT4_H
#include <stdint.h>

/* Quantises x[0..count) (count even, finite): two codes to a byte, the lower nibble first. Of the scales
 * max|x| f / 7 for f = 0.85, 0.88, 0.91, 0.94, 0.97, 1, each rounded to bfloat16 and 1 in the place of 0, the first
 * with the least sum of squared errors (in float32, in order). Returns the scale's bits. */
uint16_t sthi_int4_encode_group(const float *x, uint64_t count, unsigned char *codes);
#endif
