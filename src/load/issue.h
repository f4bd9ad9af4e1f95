/* Requests become places and copies. Lock held. */
#ifndef STHI_LOAD_ISSUE_H
#define STHI_LOAD_ISSUE_H
#include "state/state.h"

/* Issues what is possible; nothing up to the wanted unit waits for others. STH_NONE: nobody waits for any. */
void sthi_pump_for(sth_runtime *rt, uint32_t wanted);
static inline void sthi_pump(sth_runtime *rt) { sthi_pump_for(rt, STH_NONE); }
#endif
