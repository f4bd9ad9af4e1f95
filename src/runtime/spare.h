/* Spare room: what a plan leaves of the budget, for units that are in no order. Lock held. */
#ifndef STHI_RUNTIME_SPARE_H
#define STHI_RUNTIME_SPARE_H
#include "state/state.h"

/* Whether the unit is in no order: it comes when somebody asks for it, and a plan knows nothing of it. */
static inline bool sthi_unplanned(const sthi_unit *u) { return !u->resident && u->first_use == STH_NONE; }

/* The unit, which is unplanned, is used now. */
void sthi_spare_used(sth_runtime *rt, uint32_t unit);
/* A place for the unit in spare room: free, or allocated now, or that of units that are used less. False: there is
 * none. */
bool sthi_spare_place(sth_runtime *rt, uint32_t unit, sthi_place *out);
/* What the plan leaves of the budget; how much of what there is fits into so much; frees the rest. */
uint64_t sthi_spare_room(const sth_runtime *rt, const sth_plan *plan);
uint64_t sthi_spare_fitting(const sth_runtime *rt, uint64_t room);
void sthi_spare_fit(sth_runtime *rt, uint64_t room);
#endif
