/* The link's rate, measured. Lock held. */
#ifndef STHI_RUNTIME_MEASURE_H
#define STHI_RUNTIME_MEASURE_H
#include "state/state.h"

sth_status sthi_measure_link(sth_runtime *rt);  /* once there is room to measure with */
#endif
