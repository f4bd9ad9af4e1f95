/* Extents for a plan, and where in them its residents have their homes. Lock held. */
#ifndef STHI_RUNTIME_HOMES_H
#define STHI_RUNTIME_HOMES_H
#include "state/state.h"

/* Frees the extents that the plan does not keep, or closes those that leases are in. bundles: the plan's, which lie in
 * one piece each, or NULL. */
sth_status sthi_homes_clear(sth_runtime *rt, const sth_plan *plan, const sthi_bundles *bundles);
/* Behind that: allocates what the plan lacks and gives its residents their homes. */
sth_status sthi_homes_allocate(sth_runtime *rt, const sth_plan *plan, const sthi_bundles *bundles);
/* Whether the unit is on the device where residents lie: a plan in which it stays need not load it. */
bool sthi_lies_at_rest(const sth_runtime *rt, const sthi_unit *u);
#endif
