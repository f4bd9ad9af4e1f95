/* Four ranks in one go over the row: the sums are those of one after the other. Pure. */
#include "quant/rank_row.h"

#include <string.h>

#include "base/half.h"
#include "quant/vectors.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

static float factor(const void *up, uint64_t r) {
    uint16_t h;
    memcpy(&h, (const char *)up + 2 * r, sizeof h);
    return sthi_from_bf16(h);
}

static void add_four(const float *u, const float *down, uint64_t in, float *sum) {
    const float *a = down, *b = a + in, *c = b + in, *d = c + in;
    uint64_t k = 0;
    for (; k + 8 <= in; k += 8) {
        sthi_f8 *to = (sthi_f8 *)(sum + k), s = *to;
        s += u[0] * *(const sthi_f8 *)(a + k);
        s += u[1] * *(const sthi_f8 *)(b + k);
        s += u[2] * *(const sthi_f8 *)(c + k);
        s += u[3] * *(const sthi_f8 *)(d + k);
        *to = s;
    }
    for (; k < in; k++) {
        float s = sum[k];
        s += u[0] * a[k];
        s += u[1] * b[k];
        s += u[2] * c[k];
        s += u[3] * d[k];
        sum[k] = s;
    }
}

void sthi_rank_add(const void *up, const float *down, uint64_t rank, uint64_t in, float *sum) {
    uint64_t r = 0;
    for (; r + 4 <= rank; r += 4) {
        const float u[4] = {factor(up, r), factor(up, r + 1), factor(up, r + 2), factor(up, r + 3)};
        add_four(u, down + r * in, in, sum);
    }
    for (; r < rank; r++) {
        float u = factor(up, r);
        for (uint64_t k = 0; k < in; k++) sum[k] += u * down[r * in + k];
    }
}

void sthi_rank_row(const void *up, const float *down, uint64_t rank, uint64_t in, float *sum) {
    memset(sum, 0, (size_t)in * sizeof *sum);
    sthi_rank_add(up, down, rank, in, sum);
}
