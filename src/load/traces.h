/* Ranges that were let go: which streams are behind whoever had them. Lock held. */
#ifndef STHI_LOAD_TRACES_H
#define STHI_LOAD_TRACES_H
#include "state/state.h"

void sthi_trace_leave(sth_runtime *rt, const sthi_slot *s, sth_stream by);
void sthi_forget_traces(sth_runtime *rt, uint32_t extent);   /* of an extent that is freed; STH_NONE: all */
sth_status sthi_order_behind_traces(sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes,
                                      sth_stream stream);
bool sthi_traces_none(const sth_runtime *rt, uint32_t extent, uint64_t at, uint64_t bytes, sth_stream stream);
#endif
