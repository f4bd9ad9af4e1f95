/* What an expansion reads and writes: the one rule for back ends, check and the replayer. Pure; no locks. */
#ifndef STHI_DEVICE_EXPAND_H
#define STHI_DEVICE_EXPAND_H
#include "stagehand/backend.h"

/* The packed parts. X(member of sth_expand, name for people) */
#define STHI_EXPAND_PARTS(X)    \
    X(codes, "the packed bytes") \
    X(scales, "the scales")      \
    X(zeros, "the zero points")  \
    X(up, "the up factor")       \
    X(down, "the down factor")   \
    X(smooth, "the smooth factors")

typedef struct sthi_expand_bytes { /* read from each; 0: it has no such part */
#define STHI_EXPAND_MEMBER(part, name) uint64_t part;
    STHI_EXPAND_PARTS(STHI_EXPAND_MEMBER)
#undef STHI_EXPAND_MEMBER
} sthi_expand_bytes;

/* By the sizes alone, no address is looked at. NULL, or what is wrong: "has a stride that ...". A part that may be
 * absent (zeros, smooth) has the bytes that it would have. */
const char *sthi_expand_wrong_sizes(const sth_expand *e, sthi_expand_bytes *out);

/* The same, and the addresses: there, and aligned as kernels need them; bytes are 0 for what is absent.
 * INVALID_ARGUMENT by `domain`. */
sth_status sthi_expand_check(const sth_expand *e, const char *domain, sthi_expand_bytes *out);
#endif
