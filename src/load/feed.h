/* What to load next. Lock held. */
#ifndef STHI_LOAD_FEED_H
#define STHI_LOAD_FEED_H
#include "state/state.h"

/* Fills the queue. */
void sthi_feed(sth_runtime *rt);
#endif
