/* How far away the next use of a unit is. Lock held. */
#ifndef STHI_LOAD_DISTANCE_H
#define STHI_LOAD_DISTANCE_H
#include "state/state.h"

/* Distance in uses from now until the unit is used next; a whole step if it is not in the order. */
uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit);
#endif
