/* Units that are still on the device when the plan loads them anew, elsewhere. As a rule they stay where they are, and
 * a copy is saved. Lock held. */
#ifndef STHI_LOAD_ASTRAY_H
#define STHI_LOAD_ASTRAY_H
#include "state/state.h"

/* Whether the slot of the planned request's unit lies where a later load is to lie before callers let go of the unit:
 * that load would find no place. */
bool sthi_in_the_way(const sth_runtime *rt, const sthi_slot *slot, const sthi_request *request);
#endif
