/* What an expansion reads and writes: the one rule for back ends, check and the replayer. Pure; no locks. */
#ifndef STHI_DEVICE_EXPAND_H
#define STHI_DEVICE_EXPAND_H
#include "stagehand/backend.h"

typedef struct sthi_expand_bytes {
    uint64_t codes, scales, zeros; /* read from each */
} sthi_expand_bytes;

/* By the sizes alone, no address is looked at. NULL, or what is wrong: "has a stride that ...". */
const char *sthi_expand_wrong_sizes(const sth_expand *e, sthi_expand_bytes *out);

/* The same, and the addresses: there, and aligned as kernels need them. INVALID_ARGUMENT by `domain`. */
sth_status sthi_expand_check(const sth_expand *e, const char *domain, sthi_expand_bytes *out);
#endif
