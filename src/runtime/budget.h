/* The smallest budgets, and the errors that name them. Lock held. */
#ifndef STHI_RUNTIME_BUDGET_H
#define STHI_RUNTIME_BUDGET_H
#include "state/state.h"

uint32_t sthi_largest_unit(const sth_runtime *rt); /* of those that plans count */
/* The budget is too small for the unit. */
sth_status sthi_budget_error(const sth_runtime *rt, uint32_t unit);
/* The unit finds no place beside what is leased. enough: bytes for units in which it would. */
sth_status sthi_no_place_error(const sth_runtime *rt, uint32_t unit, uint64_t enough);
/* Budgets, with `reserved` and the stages; each is at least as large as the next. */
uint64_t sthi_smallest_budget(const sth_runtime *rt);     /* what users are told: steps go on as the last ones went */
uint64_t sthi_least_to_plan(const sth_runtime *rt);       /* there is a plan, whatever was leased at once before */
uint64_t sthi_least_to_load(const sth_runtime *rt);       /* the largest unit has a place, be it used or not */
sth_status sthi_name_refusal(const sth_runtime *rt, sth_status rc); /* a plan's refusal, said with the unit's name */
#endif
