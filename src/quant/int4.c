/* The int4 quantiser of v3. The scales that are tried lie side by side in the lanes of a vector. Pure. */
#include "quant/int4.h"

#include <math.h>

#include "base/half.h"
#include "quant/vectors.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

enum { SHARES = 6, LANES = 8 };
/* Added and taken away, it leaves a number of less than 2^22 rounded to the nearest even integer; larger ones are
 * clipped in either case. */
static const float ROUND = 12582912.0f;

static float largest(const float *x, uint64_t count) {
    float max = 0;
    for (uint64_t i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        max = size > max ? size : max;
    }
    return max;
}

static int code_of(float x, float s) {
    float q = x / s + ROUND;
    q -= ROUND;
    if (q < -8) q = -8;
    if (q > 7) q = 7;
    return (int)q;
}

/* errors[lane]: the sum of squares with the scale of that lane, in order. Four lanes. */
static void try_four(const float *x, uint64_t count, const float *scales, float *errors) {
    const sthi_f4 s = *(const sthi_f4 *)scales, none = {0}, high = none + 7, low = none - 8;
    sthi_f4 sum = none;
    for (uint64_t i = 0; i < count; i++) {
        sthi_f4 q = x[i] / s + ROUND;
        q -= ROUND;
        sthi_i4 over = q > high, under = q < low;
        q = (sthi_f4)(((sthi_i4)q & ~(over | under)) | ((sthi_i4)high & over) | ((sthi_i4)low & under));
        sthi_f4 error = q * s - x[i];
        sum += error * error;
    }
    *(sthi_f4 *)errors = sum;
}

static uint16_t choose_scale(const float *x, uint64_t count) {
    static const float shares[SHARES] = {0.85f, 0.88f, 0.91f, 0.94f, 0.97f, 1.0f};
    float max = largest(x, count), scales[LANES], errors[LANES], best = INFINITY;
    uint16_t bits[SHARES], chosen = 0x3f80;
    for (unsigned f = 0; f < LANES; f++) scales[f] = 1;
    for (unsigned f = 0; f < SHARES; f++) {
        bits[f] = sthi_to_bf16(max * shares[f] / 7);
        if (!bits[f]) bits[f] = 0x3f80;
        scales[f] = sthi_from_bf16(bits[f]);
    }
    for (unsigned f = 0; f < LANES; f += 4) try_four(x, count, scales + f, errors + f);
    for (unsigned f = 0; f < SHARES; f++) {
        if (errors[f] >= best) continue;
        best = errors[f];
        chosen = bits[f];
    }
    return chosen;
}

uint16_t sthi_int4_encode_group(const float *x, uint64_t count, unsigned char *codes) {
    uint16_t chosen = choose_scale(x, count);
    float s = sthi_from_bf16(chosen);
    for (uint64_t i = 0; i < count; i += 2)
        codes[i / 2] = (unsigned char)((code_of(x[i], s) & 15) | (code_of(x[i + 1], s) & 15) << 4);
    return chosen;
}
