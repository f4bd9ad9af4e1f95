/* Element types by number and by their safetensors spelling. */
#ifndef STHI_STORE_DTYPE_H
#define STHI_STORE_DTYPE_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"

const char *sthi_dtype_name(sth_dtype dtype); /* "?" out of range */
uint32_t sthi_dtype_bits(sth_dtype dtype);    /* 0 out of range */
bool sthi_dtype_find(const char *name, sth_dtype *out);
#endif
