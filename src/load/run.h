/* Neighbours at the queue's head, by one copy. Lock held. */
#ifndef STHI_LOAD_RUN_H
#define STHI_LOAD_RUN_H
#include "state/state.h"

/* The queue's head, with what may go along; false: it goes alone. A bundle waits until there is room for all of it, as
 * its plan says, unless somebody waits for a unit that is not there yet. */
bool sthi_issue_with_others(sth_runtime *rt, const sthi_request *r, uint32_t wanted, sthi_issue *out);
#endif
