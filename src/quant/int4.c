/* The int4 quantiser of v3. Pure. */
#include "quant/int4.h"

#include <math.h>

#include "base/half.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

static float code_of(float x, float s) { return fminf(fmaxf(rintf(x / s), -8), 7); }

static float error_of(const float *x, uint64_t count, float s) {
    float sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        float error = code_of(x[i], s) * s - x[i];
        sum += error * error;
    }
    return sum;
}

uint16_t sthi_int4_encode_group(const float *x, uint64_t count, unsigned char *codes) {
    static const float shares[] = {0.85f, 0.88f, 0.91f, 0.94f, 0.97f, 1.0f};
    float max = 0, best = INFINITY;
    uint16_t chosen = 0x3f80;
    for (uint64_t i = 0; i < count; i++) max = fmaxf(max, fabsf(x[i]));
    for (unsigned f = 0; f < sizeof shares / sizeof *shares; f++) {
        uint16_t bits = sthi_to_bf16(max * shares[f] / 7);
        if (!bits) bits = 0x3f80;
        float error = error_of(x, count, sthi_from_bf16(bits));
        if (error >= best) continue;
        best = error;
        chosen = bits;
    }
    float s = sthi_from_bf16(chosen);
    for (uint64_t i = 0; i < count; i += 2)
        codes[i / 2] = (unsigned char)(((int)code_of(x[i], s) & 15) | ((int)code_of(x[i + 1], s) & 15) << 4);
    return chosen;
}
