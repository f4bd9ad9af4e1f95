/* The normalised Sylvester Hadamard transform. */
#ifndef STHI_QUANT_HADAMARD_H
#define STHI_QUANT_HADAMARD_H
#include <stdint.h>

/* Multiplies the row x[0..count) by H in blocks of `size` (a power of two that divides `count`), in place. The sums
 * are float64, of pairs at distance 1, then 2, then 4 ...; then each is divided by sqrt(size). H is its own inverse. */
void sthi_hadamard(double *x, uint64_t count, uint64_t size);
#endif
