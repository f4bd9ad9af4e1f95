/* Life of a runtime. Lock not held. */
#ifndef STHI_RUNTIME_RUNTIME_H
#define STHI_RUNTIME_RUNTIME_H
#include "state/state.h"

void sthi_runtime_options_init(sth_runtime_options *options);
sth_status sthi_runtime_create(sth_device *device, const sth_runtime_options *options, sth_runtime **out);
void sthi_runtime_unref(sth_runtime *rt);
sth_status sthi_runtime_not_here(const sth_runtime *rt); /* the error */
void sthi_runtime_destroy(sth_runtime *rt);
sth_status sthi_runtime_add_unit(sth_runtime *rt, const sth_unit_desc *desc, uint32_t *out);
sth_status sthi_measure_link(sth_runtime *rt);  /* once there is room to measure with */
void sthi_records_grow(sth_runtime *rt);   /* room for longer orders, where there is memory */
sth_status sthi_budget_error(const sth_runtime *rt, uint32_t unit);
/* The unit finds no place beside what is leased. enough: bytes for units in which it would. */
sth_status sthi_no_place_error(const sth_runtime *rt, uint32_t unit, uint64_t enough);
/* Budgets, with `reserved` and the stages; each is at least as large as the next. */
uint64_t sthi_smallest_budget(const sth_runtime *rt);     /* what users are told: steps go on as the last ones went */
uint64_t sthi_least_to_plan(const sth_runtime *rt);       /* there is a plan, whatever was leased at once before */
uint64_t sthi_least_to_load(const sth_runtime *rt); /* the largest unit has a place, be it used or not */
sth_status sthi_name_refusal(const sth_runtime *rt, sth_status rc); /* a plan's refusal, said with the unit's name */
sth_status sthi_runtime_seal(sth_runtime *rt);
sth_status sthi_runtime_synchronize(sth_runtime *rt);
sth_status sthi_runtime_set_budget(sth_runtime *rt, uint64_t budget);
static inline bool sthi_runtime_is_here(const sth_runtime *rt) { return rt && !sthi_is_child(rt->fork_depth); }
/* Of every public call but destroy and the release of leases: not NULL, and not a forked child's. */
static inline sth_status sthi_runtime_usable(const sth_runtime *rt) {
    return sthi_runtime_is_here(rt) ? STH_OK : sthi_runtime_not_here(rt);
}
#endif
