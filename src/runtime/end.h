/* The end of a runtime: when its owner and its last lease have gone. Lock not held. */
#ifndef STHI_RUNTIME_END_H
#define STHI_RUNTIME_END_H
#include "state/state.h"

void sthi_runtime_unref(sth_runtime *rt);
#endif
