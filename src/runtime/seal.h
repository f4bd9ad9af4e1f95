/* The first plan. Lock not held. */
#ifndef STHI_RUNTIME_SEAL_H
#define STHI_RUNTIME_SEAL_H
#include "state/state.h"

sth_status sthi_runtime_seal(sth_runtime *rt);
#endif
