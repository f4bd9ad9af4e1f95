/* How much of the device is held, and how much units may take. Lock held. */
#ifndef STHI_LOAD_ROOM_H
#define STHI_LOAD_ROOM_H
#include "state/state.h"

uint64_t sthi_stages_bytes(const sth_runtime *rt); /* allocated or not */
uint64_t sthi_held_bytes(const sth_runtime *rt);   /* of the device, now, without `reserved` */
uint64_t sthi_units_within(const sth_runtime *rt, uint64_t bytes); /* what units may take of so much of the budget */
uint64_t sthi_budget_for_units(const sth_runtime *rt); /* of the budget, as far as others leave it */
#endif
