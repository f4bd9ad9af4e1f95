/* The int8 quantiser of v1 and v2. */
#ifndef STHI_QUANT_INT8_H
#define STHI_QUANT_INT8_H
#include <stdint.h>

/* Quantises the row w[0..in), padded with zeros to `padded`: scale = max(max|w| / 127, 1e-8), code = w times the
 * reciprocal of the scale, rounded to nearest even, within +-127. All in float32. w is finite. */
void sthi_int8_encode_row(const float *w, uint64_t in, uint64_t padded, signed char *codes, float *out_scale);
#endif
