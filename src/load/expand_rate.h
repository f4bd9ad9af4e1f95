/* The rate at which the device expands packed bytes. Lock held. */
#ifndef STHI_LOAD_EXPAND_RATE_H
#define STHI_LOAD_EXPAND_RATE_H
#include "state/state.h"

/* Round one expansion of `bytes` of a place on a stream: whether it is timed; then the other, behind it. */
bool sthi_expand_rate_begin(sth_runtime *rt, uint64_t bytes, sth_stream on);
void sthi_expand_rate_end(sth_runtime *rt, sth_stream on);
void sthi_expand_rate_read(sth_runtime *rt); /* between steps: never waits */
void sthi_expand_rate_close(sth_runtime *rt);
#endif
