/* A value into a place, rounded to its dtype. */
#ifndef STHI_QUANT_STORE_H
#define STHI_QUANT_STORE_H
#include <string.h>

#include "base/half.h"
#include "stagehand/checkpoint.h"

static inline void sthi_store(sth_dtype dtype, float x, uint8_t *out) {
    if (dtype == STH_DTYPE_F32) {
        memcpy(out, &x, sizeof x);
        return;
    }
    uint16_t h = dtype == STH_DTYPE_BF16 ? sthi_to_bf16(x) : sthi_to_f16(x);
    memcpy(out, &h, sizeof h);
}
#endif
