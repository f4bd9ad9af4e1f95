/* The watermark of saved activations, which follows what passes take; sth_watermark in
 * include/stagehand/activation.h has the rules. Pure.
 *
 * Invariant: once a mark has followed it is between 1/8 of its budget and all of it. */
#ifndef STHI_CORE_WATERMARK_H
#define STHI_CORE_WATERMARK_H
#include "stagehand/activation.h"

void sthi_watermark_init(sth_watermark *mark, uint64_t high, uint64_t low, bool follows, uint64_t budget);
bool sthi_watermark_follow(sth_watermark *mark, uint64_t peak, bool moved);
bool sthi_watermark_limit(sth_watermark *mark, const sth_watermark *given, uint64_t most);
uint64_t sthi_watermark_low(const sth_watermark *mark);
#endif
