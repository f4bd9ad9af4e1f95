/* Ranges that were let go: which streams are behind whoever had them. Lock held. */
#ifndef STHI_LOAD_TRACES_H
#define STHI_LOAD_TRACES_H
#include "state/state.h"

/* The slot leaves; `by` is behind its copy and uses. */
void sthi_trace_leave(sth_runtime *rt, const sthi_slot *s, sth_stream by);
void sthi_forget_traces(sth_runtime *rt, uint32_t extent);   /* of an extent that is freed; STH_NONE: all */
/* Makes the stream wait for all that left traces in the range. */
sth_status sthi_order_behind_traces(sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes,
                                    sth_stream stream);
/* The stream need not wait for the range. */
bool sthi_traces_none(const sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes, sth_stream stream);
#endif
