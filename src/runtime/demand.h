/* Loads that somebody waits for. Lock held; dropped to read. */
#ifndef STHI_RUNTIME_DEMAND_H
#define STHI_RUNTIME_DEMAND_H
#include "state/state.h"

sth_status sthi_demand_load(sth_runtime *rt, uint32_t unit);
sth_status sthi_load_home(sth_runtime *rt, uint32_t unit);   /* a resident that is not there */
sth_status sthi_refresh(sth_runtime *rt, int32_t slot);      /* copies a stale slot again */
#endif
