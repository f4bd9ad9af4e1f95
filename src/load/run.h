/* Neighbours at the queue's head, by one copy. Lock held. */
#ifndef STHI_LOAD_RUN_H
#define STHI_LOAD_RUN_H
#include "state/state.h"

bool sthi_issue_with_others(sth_runtime *rt, const sthi_request *r, uint32_t wanted, sthi_issue *out);
#endif
