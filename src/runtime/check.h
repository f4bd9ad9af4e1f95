/* Every invariant that must hold between calls; used by tests. Lock not held. */
#ifndef STHI_RUNTIME_CHECK_H
#define STHI_RUNTIME_CHECK_H
#include "state/state.h"

bool sthi_runtime_check(sth_runtime *rt, const char **out_why);
#endif
