/* What to load next. Lock held. */
#ifndef STHI_LOAD_FEED_H
#define STHI_LOAD_FEED_H
#include "state/state.h"

bool sthi_may_prefetch(const sth_runtime *rt, uint32_t unit, uint64_t lap);
void sthi_feed(sth_runtime *rt);
#endif
