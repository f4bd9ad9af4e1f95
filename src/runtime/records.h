/* Room for orders, traces and their times. Lock held. */
#ifndef STHI_RUNTIME_RECORDS_H
#define STHI_RUNTIME_RECORDS_H
#include "state/state.h"

sth_status sthi_records_open(sth_runtime *rt);
void sthi_records_grow(sth_runtime *rt);   /* room for longer orders, where there is memory */
#endif
