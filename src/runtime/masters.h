/* Copies that read images which the caller may write. Lock held. */
#ifndef STHI_RUNTIME_MASTERS_H
#define STHI_RUNTIME_MASTERS_H
#include "state/state.h"

sth_status sthi_masters_wait(sth_runtime *rt);               /* may drop the lock */
#endif
