/* Static policy: when units are evicted, and which. Lock held. */
#ifndef STHI_LOAD_WATERMARKS_H
#define STHI_LOAD_WATERMARKS_H
#include "state/state.h"

bool sthi_above_high(const sth_runtime *rt);
void sthi_watermark_evictions(sth_runtime *rt);
#endif
