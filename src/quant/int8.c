/* int8 by row. Pure. */
#include "quant/int8.h"

#include <math.h>
#include <string.h>

static float largest(const float *w, uint64_t n) {
    float max = 0;
    for (uint64_t k = 0; k < n; k++) max = fmaxf(max, fabsf(w[k]));
    return max;
}

void sthi_int8_encode_row(const float *w, uint64_t in, uint64_t padded, signed char *codes, float *out_scale) {
    float scale = fmaxf(largest(w, in) / 127, 1e-8f), inverse = 1 / scale;
    for (uint64_t k = 0; k < in; k++) codes[k] = (signed char)fminf(fmaxf(rintf(w[k] * inverse), -127), 127);
    memset(codes + in, 0, (size_t)(padded - in));
    *out_scale = scale;
}
